//! Output memory that several threads fill, each its own part.

use super::Simd;
use crate::{E4m3, E5m2, Element, ViewMut, tensor::DataMut};
use half::{bf16, f16};
use std::marker::PhantomData;

/// A mutable slice that threads take disjoint parts of.
pub(crate) struct Shared<'a, T> {
    at: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is `part`, whose caller promises that parts do not overlap.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { at: slice.as_mut_ptr(), len: slice.len(), memory: PhantomData }
    }

    /// The first of elements `start..start + len`, for a callee that reads and writes through a pointer.
    ///
    /// # Safety
    /// What is accessed through the pointer is inside these elements and in no other use.
    pub(crate) unsafe fn pointer(&self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside the output");
        // SAFETY: in bounds as just checked.
        unsafe { self.at.add(start) }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No other part with one of these elements is in use.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside the output");
        // SAFETY: in bounds as just checked, and not in use elsewhere by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
}

/// An output tensor `[rows, heads, dim]` of any dtype, filled row by row and head by head.
pub(crate) struct SharedRows<'a> {
    data: SharedData<'a>,
    row: usize,
    head: usize,
}

enum SharedData<'a> {
    F32(Shared<'a, f32>),
    F16(Shared<'a, f16>),
    Bf16(Shared<'a, bf16>),
    E4m3(Shared<'a, E4m3>),
    E5m2(Shared<'a, E5m2>),
    I8(Shared<'a, i8>),
}

impl<'a> SharedRows<'a> {
    /// `view` has rank 3 and a last axis of stride 1.
    pub(crate) fn new(view: ViewMut<'a>) -> Self {
        let (row, head) = (view.strides()[0], view.strides()[1]);
        let data = match view.into_data() {
            DataMut::F32(s) => SharedData::F32(Shared::new(s)),
            DataMut::F16(s) => SharedData::F16(Shared::new(s)),
            DataMut::Bf16(s) => SharedData::Bf16(Shared::new(s)),
            DataMut::E4m3(s) => SharedData::E4m3(Shared::new(s)),
            DataMut::E5m2(s) => SharedData::E5m2(Shared::new(s)),
            DataMut::I8(s) => SharedData::I8(Shared::new(s)),
        };
        Self { data, row, head }
    }

    /// Asks for the `width` elements of `head` of `row`.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd>(&self, simd: S, (row, head): (usize, usize), width: usize) {
        let (at, size) = match &self.data {
            SharedData::F32(s) => (s.at.cast::<u8>(), 4),
            SharedData::F16(s) => (s.at.cast(), 2),
            SharedData::Bf16(s) => (s.at.cast(), 2),
            SharedData::E4m3(s) => (s.at.cast(), 1),
            SharedData::E5m2(s) => (s.at.cast(), 1),
            SharedData::I8(s) => (s.at.cast(), 1),
        };
        let start = (row * self.row + head * self.head) * size;
        simd.prefetch_all(at.wrapping_add(start), width * size);
    }

    /// Rounds `values` into `head` of `row`.
    ///
    /// # Safety
    /// No other thread stores to this row and head.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, row: usize, head: usize, values: &[f32]) {
        let start = row * self.row + head * self.head;
        // SAFETY: rows and heads of a `ViewMut` do not overlap, and this pair is the caller's alone.
        unsafe {
            match &self.data {
                SharedData::F32(s) => s.part(start, values.len()).copy_from_slice(values),
                SharedData::F16(s) => round_into(s.part(start, values.len()), values),
                SharedData::Bf16(s) => round_into(s.part(start, values.len()), values),
                SharedData::E4m3(s) => round_into(s.part(start, values.len()), values),
                SharedData::E5m2(s) => round_into(s.part(start, values.len()), values),
                SharedData::I8(s) => round_into(s.part(start, values.len()), values),
            }
        }
    }
}

#[inline(always)]
fn round_into<T: Element>(to: &mut [T], values: &[f32]) {
    for (to, &value) in to.iter_mut().zip(values) {
        *to = T::from_f32(value);
    }
}
