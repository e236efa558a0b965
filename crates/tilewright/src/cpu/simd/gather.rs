//! Gathers rows of Q, K and V of any dtype into dense f32 matrices, row-major or transposed.

use super::{ColumnSink, Simd, Task, tile::Matrix};
use crate::{Data, E4m3, E5m2, Element, tensor::each_data};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Widens `width` elements from `data[offset]` on to f32 and writes them to `to`.
///
/// # Safety
/// `to` is writable for `width` elements, without other references.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd>(simd: S, data: Data<'_>, offset: usize, to: *mut f32, width: usize) {
    // Slicing checks the bounds once per row.
    // SAFETY: slices check the `width` elements of the source; the caller guarantees as many writable at `to`.
    unsafe {
        match data {
            Data::F32(s) => to.copy_from_nonoverlapping(s[offset..offset + width].as_ptr(), width),
            other => each_data!(other, Data, s => widen_with(simd, &s[offset..offset + width], to)),
        }
    }
}

/// # Safety
/// `to` is writable for `from.len()` elements.
#[inline(always)]
unsafe fn widen_with<S: Simd, T: PackedElement>(simd: S, from: &[T], to: *mut f32) {
    let whole = from.len() / S::LANES * S::LANES;
    for at in (0..whole).step_by(S::LANES) {
        // SAFETY: `at + LANES <= from.len()`.
        unsafe { simd.store(to.add(at), T::load(simd, from.as_ptr().add(at))) };
    }
    for (at, value) in from.iter().enumerate().skip(whole) {
        // SAFETY: `at < from.len()`.
        unsafe { *to.add(at) = value.to_f32() };
    }
}

/// [`widen`] of the rows at `offsets` to rows of a matrix, or [`transpose_rows`], compiled as a separate function (see
/// [`Simd::vectorize`]).
pub(super) struct GatherTask<'a, const TRANSPOSED: bool> {
    data: Data<'a>,
    offsets: &'a [usize],
    width: usize,
    to: Matrix<*mut f32>,
}

/// [`widen`] of rows.
pub(super) type WidenTask<'a> = GatherTask<'a, false>;
/// [`transpose_rows`].
pub(super) type TransposeTask<'a> = GatherTask<'a, true>;

impl<'a, const TRANSPOSED: bool> GatherTask<'a, TRANSPOSED> {
    /// # Safety
    /// `to` is writable as `[offsets.len(), width]` without other references, or as in [`transpose_rows`].
    pub(super) unsafe fn new(
        data: Data<'a>,
        offsets: &'a [usize],
        width: usize,
        to: Matrix<*mut f32>,
    ) -> Self {
        Self { data, offsets, width, to }
    }
}

impl<const TRANSPOSED: bool> Task for GatherTask<'_, TRANSPOSED> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { data, offsets, width, to } = self;
        if TRANSPOSED {
            // SAFETY: the contract of `new`.
            return unsafe { transpose_rows(simd, data, offsets, width, to) };
        }
        for (row, &offset) in offsets.iter().enumerate() {
            // SAFETY: the contract of `new`.
            unsafe { widen(simd, data, offset, to.ptr.add(row * to.stride), width) };
        }
    }
}

/// Prefetches `width` elements from `data[offset]` on. The range may exceed the data.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(simd: S, data: Data<'_>, offset: usize, width: usize) {
    let (at, size) = (data.bytes().as_ptr(), each_data!(data, Data, s => element_size(s)));
    simd.prefetch_all(at.wrapping_add(offset * size), width * size);
}

const fn element_size<T>(_: &[T]) -> usize {
    size_of::<T>()
}

/// Writes the rows of `width` elements at `offsets` as columns of a dense f32 matrix: `to[c][i] = data[offsets[i] + c]`.
///
/// # Safety
/// `to` is writable as `[width, offsets.len()]`, the latter rounded up to whole registers, without other references.
#[inline(always)]
pub(crate) unsafe fn transpose_rows<S: Simd>(
    simd: S,
    data: Data<'_>,
    offsets: &[usize],
    width: usize,
    to: Matrix<*mut f32>,
) {
    // SAFETY: the caller guarantees `to` as `[width, offsets.len()]`, rounded up to whole registers.
    unsafe {
        each_data!(data, Data, s => transpose_blocks(simd, s, offsets, width, to));
    }
}

/// Elements that are transposed as 32-bit words and unpacked afterwards.
trait PackedElement: Element {
    /// Elements per word.
    const PER_LANE: usize;

    /// # Safety
    /// One register is readable.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V;

    /// Widens the `PER_LANE` elements of each lane into columns that are `stride` elements apart.
    ///
    /// # Safety
    /// One register is writable at each of the `PER_LANE` columns.
    unsafe fn store<S: Simd>(simd: S, words: S::V, to: *mut f32, stride: usize);
}

macro_rules! packed {
    ($($T:ty, $load:ident, $per_lane:literal, $simd:ident, $words:ident => $columns:expr);+ $(;)?) => {$(
        impl PackedElement for $T {
            const PER_LANE: usize = $per_lane;
            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
                // SAFETY: the caller guarantees a readable register at `from`.
                unsafe { simd.$load(from) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>($simd: S, $words: S::V, to: *mut f32, stride: usize) {
                let columns: [S::V; $per_lane] = $columns;
                for (c, column) in columns.into_iter().enumerate() {
                    // SAFETY: the caller guarantees a writable register at each of the `PER_LANE` columns.
                    unsafe { $simd.store(to.wrapping_add(c * stride), column) };
                }
            }
        }
    )+};
}
packed!(
    f32, load, 1, simd, words => [words];
    f16, load_f16, 2, simd, words => simd.split_f16(words).into();
    bf16, load_bf16, 2, simd, words => simd.split_bf16(words).into();
    E4m3, load_e4m3, 4, simd, words => simd.split_e4m3(words);
    E5m2, load_e5m2, 4, simd, words => simd.split_e5m2(words);
    i8, load_i8, 4, simd, words => simd.split_i8(words);
);

/// Stores the columns of a transposed block as f32.
struct ColumnWriter<S, T> {
    simd: S,
    to: Matrix<*mut f32>,
    elements: PhantomData<T>,
}

impl<S: Simd, T: PackedElement> ColumnSink<S::V> for ColumnWriter<S, T> {
    /// # Safety
    /// `to` is writable at the columns of word `c`.
    #[inline(always)]
    unsafe fn store_column(&self, c: usize, words: S::V) {
        let at = self.to.ptr.wrapping_add(c * T::PER_LANE * self.to.stride);
        // SAFETY: the caller guarantees a writable register at each column of word `c`.
        unsafe { T::store(self.simd, words, at, self.to.stride) };
    }
}

/// Transposes full blocks of words, and the remaining columns element by element.
///
/// # Safety
/// Same as [`transpose_rows`].
#[inline(always)]
unsafe fn transpose_blocks<S: Simd, T: PackedElement>(
    simd: S,
    data: &[T],
    offsets: &[usize],
    width: usize,
    to: Matrix<*mut f32>,
) {
    let per_block = T::PER_LANE * S::LANES;
    let whole = width / per_block * per_block;
    let mut rows = [data.as_ptr().cast::<f32>(); 16];
    for (first, group) in offsets.chunks(S::LANES).enumerate() {
        let first = first * S::LANES;
        for (lane, row) in rows[..S::LANES].iter_mut().enumerate() {
            // lanes after the last row repeat it: their columns are not read
            let offset = group[lane.min(group.len() - 1)];
            *row = data[offset..offset + width].as_ptr().cast();
        }
        for column in (0..whole).step_by(per_block) {
            let to = Matrix { ptr: to.ptr.wrapping_add(column * to.stride + first), ..to };
            let block = rows.map(|row| row.wrapping_byte_add(column * size_of::<T>()));
            // SAFETY: the block is within the `width` elements of each row, and its columns within the caller's `to`.
            unsafe {
                simd.transpose(&block[..S::LANES], ColumnWriter::<S, T> { simd, to, elements: PhantomData });
            }
        }
        for (lane, &offset) in group.iter().enumerate() {
            for column in whole..width {
                // SAFETY: `column < width`, and `first + lane` is a row.
                unsafe { *to.ptr.add(column * to.stride + first + lane) = data[offset + column].to_f32() };
            }
        }
    }
}
