//! Brings rows of Q, K and V from wherever they are, in whatever dtype, into dense f32 rows.

use super::{EachColumn, Simd, Task, tile::Matrix};
use crate::{E4m3, E5m2, Element, tensor::Data};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Copies `width` elements from `data[offset]` on, widened to f32, to `to`.
///
/// # Safety
/// `to` points to `width` writable elements that overlap nothing else in use.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd>(simd: S, data: Data<'_>, offset: usize, to: *mut f32, width: usize) {
    // Indexing checks the bounds once per row; past it, all offsets are below `width`.
    // SAFETY: `from` holds `width` elements, and `to` does by the caller's promise.
    unsafe {
        match data {
            Data::F32(s) => {
                let from = &s[offset..offset + width];
                to.copy_from_nonoverlapping(from.as_ptr(), width);
            }
            Data::F16(s) => {
                let from = &s[offset..offset + width];
                widen_with(simd, from, to, |at| simd.load_f16(at));
            }
            Data::Bf16(s) => {
                let from = &s[offset..offset + width];
                widen_with(simd, from, to, |at| simd.load_bf16(at));
            }
            Data::E4m3(s) => {
                let from = &s[offset..offset + width];
                widen_with(simd, from, to, |at| simd.load_e4m3(at));
            }
            Data::E5m2(s) => {
                let from = &s[offset..offset + width];
                widen_with(simd, from, to, |at| simd.load_e5m2(at));
            }
            Data::I8(s) => {
                let from = &s[offset..offset + width];
                widen_with(simd, from, to, |at| simd.load_i8(at));
            }
        }
    }
}

/// # Safety
/// `to` points to as many writable elements as `from` has; `load` reads one register's worth.
#[inline(always)]
unsafe fn widen_with<S: Simd, T: Element>(
    simd: S,
    from: &[T],
    to: *mut f32,
    load: impl Fn(*const T) -> S::V,
) {
    let whole = from.len() / S::LANES * S::LANES;
    for at in (0..whole).step_by(S::LANES) {
        // SAFETY: `at + LANES <= from.len()`.
        unsafe { simd.store(to.add(at), load(from.as_ptr().add(at))) };
    }
    for (at, value) in from.iter().enumerate().skip(whole) {
        // SAFETY: `at < from.len()`.
        unsafe { *to.add(at) = value.to_f32() };
    }
}

/// [`widen`] of rows that begin at `offsets`, as a function of its own: see [`Simd::vectorize`].
pub(super) struct Widen<'a> {
    data: Data<'a>,
    offsets: &'a [usize],
    width: usize,
    to: Matrix<*mut f32>,
}

impl<'a> Widen<'a> {
    /// # Safety
    /// `to` is writable as `[offsets.len(), width]` and overlaps nothing else in use.
    pub(super) unsafe fn new(
        data: Data<'a>,
        offsets: &'a [usize],
        width: usize,
        to: Matrix<*mut f32>,
    ) -> Self {
        Self { data, offsets, width, to }
    }
}

impl Task for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (row, &offset) in self.offsets.iter().enumerate() {
            // SAFETY: promised to `new`.
            unsafe { widen(simd, self.data, offset, self.to.at.add(row * self.to.stride), self.width) };
        }
    }
}

/// [`transpose_rows`] as a function of its own: see [`Simd::vectorize`].
pub(super) struct Transpose<'a> {
    data: Data<'a>,
    offsets: &'a [usize],
    width: usize,
    to: Matrix<*mut f32>,
}

impl<'a> Transpose<'a> {
    /// # Safety
    /// As [`transpose_rows`].
    pub(super) unsafe fn new(
        data: Data<'a>,
        offsets: &'a [usize],
        width: usize,
        to: Matrix<*mut f32>,
    ) -> Self {
        Self { data, offsets, width, to }
    }
}

impl Task for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: promised to `new`.
        unsafe { transpose_rows(simd, self.data, self.offsets, self.width, self.to) };
    }
}

/// Asks for the cache lines of `width` elements from `data[offset]` on; outside the data nothing happens.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(simd: S, data: Data<'_>, offset: usize, width: usize) {
    let (at, size) = match data {
        Data::F32(s) => (s.as_ptr().cast::<u8>(), 4),
        Data::F16(s) => (s.as_ptr().cast(), 2),
        Data::Bf16(s) => (s.as_ptr().cast(), 2),
        Data::E4m3(s) => (s.as_ptr().cast(), 1),
        Data::E5m2(s) => (s.as_ptr().cast(), 1),
        Data::I8(s) => (s.as_ptr().cast(), 1),
    };
    simd.prefetch_all(at.wrapping_add(offset * size), width * size);
}

/// Rows that begin at `offsets` in `data` (at most 128, each `width` elements), as columns of a dense f32 matrix:
/// `to[c][i] = data[offsets[i] + c]`.
///
/// # Safety
/// `to` is writable as `[width, offsets.len()]`, the latter rounded up to whole registers, and overlaps nothing else
/// in use.
#[inline(always)]
pub(crate) unsafe fn transpose_rows<S: Simd>(
    simd: S,
    data: Data<'_>,
    offsets: &[usize],
    width: usize,
    to: Matrix<*mut f32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match data {
            Data::F32(s) => blocks(simd, (s, offsets, width), to),
            Data::F16(s) => blocks(simd, (s, offsets, width), to),
            Data::Bf16(s) => blocks(simd, (s, offsets, width), to),
            Data::E4m3(s) => blocks(simd, (s, offsets, width), to),
            Data::E5m2(s) => blocks(simd, (s, offsets, width), to),
            Data::I8(s) => blocks(simd, (s, offsets, width), to),
        }
    }
}

/// Elements that are transposed as parts of 32-bit words, and taken apart afterwards.
trait Packed: Element {
    /// Elements of a word.
    const PER_LANE: usize;

    /// Widens the elements of each lane into as many columns, `stride` elements apart.
    ///
    /// # Safety
    /// `to` points to a register's worth of writable elements at each of the `PER_LANE` places.
    unsafe fn store<S: Simd>(simd: S, words: S::V, to: *mut f32, stride: usize);
}

macro_rules! packed {
    ($($T:ty, $per_lane:literal, $simd:ident, $words:ident => $columns:expr);+ $(;)?) => {$(
        impl Packed for $T {
            const PER_LANE: usize = $per_lane;
            #[inline(always)]
            unsafe fn store<S: Simd>($simd: S, $words: S::V, to: *mut f32, stride: usize) {
                let columns: [S::V; $per_lane] = $columns;
                for (c, column) in columns.into_iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { $simd.store(to.wrapping_add(c * stride), column) };
                }
            }
        }
    )+};
}
packed!(
    f32, 1, simd, words => [words];
    f16, 2, simd, words => simd.split_f16(words).into();
    bf16, 2, simd, words => simd.split_bf16(words).into();
    E4m3, 4, simd, words => simd.split_e4m3(words);
    E5m2, 4, simd, words => simd.split_e5m2(words);
    i8, 4, simd, words => simd.split_i8(words);
);

/// Where the columns of a block go, for [`Simd::transpose`].
struct Columns<S, T> {
    simd: S,
    to: Matrix<*mut f32>,
    elements: PhantomData<T>,
}

impl<S: Simd, T: Packed> EachColumn<S::V> for Columns<S, T> {
    /// # Safety
    /// `to` is writable in the columns of word `c`.
    #[inline(always)]
    unsafe fn column(&self, c: usize, words: S::V) {
        let at = self.to.at.wrapping_add(c * T::PER_LANE * self.to.stride);
        // SAFETY: the caller's promise.
        unsafe { T::store(self.simd, words, at, self.to.stride) };
    }
}

/// Transposes whole blocks of words, and what is left at the right edge element by element.
///
/// # Safety
/// As [`transpose_rows`].
#[inline(always)]
unsafe fn blocks<S: Simd, T: Packed>(
    simd: S,
    (data, offsets, width): (&[T], &[usize], usize),
    to: Matrix<*mut f32>,
) {
    let per_block = T::PER_LANE * S::LANES;
    let whole = width / per_block * per_block;
    let mut rows = [data.as_ptr().cast::<f32>(); 16];
    for (first, group) in offsets.chunks(S::LANES).enumerate() {
        let first = first * S::LANES;
        for (lane, row) in rows[..S::LANES].iter_mut().enumerate() {
            // lanes beyond the last row repeat it: their columns are never used
            let offset = group[lane.min(group.len() - 1)];
            *row = data[offset..offset + width].as_ptr().cast();
        }
        for column in (0..whole).step_by(per_block) {
            let to = Matrix { at: to.at.wrapping_add(column * to.stride + first), ..to };
            let block = rows.map(|row| row.wrapping_byte_add(column * size_of::<T>()));
            // SAFETY: each row has `width` elements, of which a block is inside `whole`; `to` by the caller's promise.
            unsafe {
                simd.transpose(&block[..S::LANES], Columns::<S, T> { simd, to, elements: PhantomData });
            }
        }
        for (lane, &offset) in group.iter().enumerate() {
            for column in whole..width {
                // SAFETY: `column < width`, and `first + lane` is a row.
                unsafe { *to.at.add(column * to.stride + first + lane) = data[offset + column].to_f32() };
            }
        }
    }
}
