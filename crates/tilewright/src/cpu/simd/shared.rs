//! Output memory that threads write in disjoint parts.

use super::Simd;
use crate::{E4m3, E5m2, Element, ViewMut, tensor::DataMut};
use half::{bf16, f16};
use std::marker::PhantomData;

/// A mutable slice from which threads take disjoint parts.
pub(crate) struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: all access goes through `part` and `pointer`, whose callers guarantee that parts do not overlap.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), memory: PhantomData }
    }

    /// Pointer to elements `start..start + len`.
    ///
    /// # Safety
    /// Accesses through the pointer stay within these elements and do not overlap any other use.
    pub(crate) unsafe fn pointer(&self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside the output");
        // SAFETY: in bounds as checked above.
        unsafe { self.ptr.add(start) }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No other part in use contains any of these elements.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees disjoint parts")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside the output");
        // SAFETY: in bounds as checked above; the caller guarantees that no other part overlaps.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}

/// An output tensor `[rows, heads, dim]` of any dtype, written per row and head.
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

    /// Prefetches the first `width` elements of `head` of `row`.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd>(&self, simd: S, row: usize, head: usize, width: usize) {
        let (at, size) = match &self.data {
            SharedData::F32(s) => (s.ptr.cast::<u8>(), 4),
            SharedData::F16(s) => (s.ptr.cast(), 2),
            SharedData::Bf16(s) => (s.ptr.cast(), 2),
            SharedData::E4m3(s) => (s.ptr.cast(), 1),
            SharedData::E5m2(s) => (s.ptr.cast(), 1),
            SharedData::I8(s) => (s.ptr.cast(), 1),
        };
        let start = (row * self.row + head * self.head) * size;
        simd.prefetch_all(at.wrapping_add(start), width * size);
    }

    /// Rounds `values` to the dtype and writes them to `head` of `row`.
    ///
    /// # Safety
    /// No other thread accesses this row and head.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, row: usize, head: usize, values: &[f32]) {
        let start = row * self.row + head * self.head;
        // SAFETY: rows and heads of a `ViewMut` do not overlap; the caller guarantees sole access to this pair.
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
