//! bf16 matrix products with f32 accumulation (`vdpbf16ps` or AMX), so that attention does not widen bf16 tiles.
//!
//! ```text
//! A    row-major bf16                [rows, depth]
//! B    pairs of adjacent depth       [depth / 2, columns] of (bf16, bf16)
//! C    row-major f32                 [rows, columns]
//! ```
//!
//! 1. Keys become B by a transpose of 32-bit words, values by interleaving two rows.
//! 2. 8-bit elements are converted to bf16, exactly. The first and third byte of a word form a pair, then the second and
//!    fourth, so queries are permuted in the same way.
//! 3. Rows are processed in strips of 32, to reuse each load of B.
//! 4. Softmax weights are rounded to bf16 before P·V, as on GPUs.

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(unreachable_code, unused_variables, reason = "these types have no values on other architectures")
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod int4;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;
#[cfg(target_arch = "x86_64")]
mod vdpbf16;
#[cfg(not(target_arch = "x86_64"))]
use unsupported as amx;
#[cfg(not(target_arch = "x86_64"))]
use unsupported as vdpbf16;

use super::{ColumnSink, HookSet, Isa, Matrix, ProductShape, Simd, TileRef, TileSums};
use crate::{
    Data, Dtype, Plan, Problem, View,
    attention::{Inputs, Split},
};
use half::bf16;
use std::marker::PhantomData;

/// `sums += bf16(x) · weightᵀ` for at most [`TILE_ROWS`](super::panels::TILE_ROWS) rows and the features of a tile.
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only leaves of x86-64 multiply such tiles")
)]
pub(crate) struct Int4Tile<'a> {
    /// Rows of [`Bf16Mma::round_row`].
    pub(crate) x: &'a [bf16],
    /// Their stride.
    pub(crate) stride: usize,
    pub(crate) weight: TileRef<'a>,
    /// The tile that this thread multiplies next, for prefetching.
    pub(crate) following: TileRef<'a>,
    pub(crate) sums: &'a mut TileSums,
}

/// Rows per strip.
pub(super) const STRIP: usize = 32;
/// Depth of one step: depths are multiples of it.
pub(super) const DEPTH: usize = 32;

/// Rows of `width` elements at `offsets`.
#[derive(Clone, Copy)]
pub(super) struct DataRows<'a> {
    pub(super) data: Data<'a>,
    pub(super) offsets: &'a [usize],
    pub(super) width: usize,
}

/// The bf16 multiply instructions of the machine. A value proves that it has them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bf16Mma {
    /// `vdpbf16ps`
    Avx512(vdpbf16::Avx512Bf16),
    /// `tdpbf16ps`
    Amx(vdpbf16::Avx512Bf16, amx::Amx),
}

impl Bf16Mma {
    /// The instructions of `isa`, if it has any and the machine supports them.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        let avx512 = vdpbf16::Avx512Bf16::new()?;
        match isa {
            Isa::Avx512Bf16 => Some(Self::Avx512(avx512)),
            Isa::Amx => Some(Self::Amx(avx512, amx::Amx::new()?)),
            Isa::Portable | Isa::Avx2 | Isa::Avx512 => None,
        }
    }

    /// The instructions of `isa` for a call, if the problem is supported, no hook changes elements of tiles, and the call need
    /// not be batch invariant: items with few rows use f32 instead.
    pub(crate) fn for_call(isa: Isa, plan: &Plan, inputs: &Inputs<'_>, hooks: HookSet) -> Option<Self> {
        let one_tensor = inputs.q_pe.is_none() && inputs.k_pe.is_none();
        let untouched = !hooks.query && !hooks.key && !hooks.value;
        let fits = one_tensor && untouched && plan.split == Split::Balanced && is_supported(&plan.problem);
        if fits { Self::new(isa) } else { None }
    }

    /// Configures the calling thread for [`Bf16Mma::multiply`] until the guard is dropped.
    pub(crate) fn configure_thread(self) -> ThreadGuard {
        ThreadGuard(match self {
            Self::Avx512(_) => None,
            Self::Amx(_, amx) => Some(amx.configure()),
        })
    }

    /// `c = a · b`, or `c += a · b` if `ADD`. Processes [`STRIP`] rows if `rows > 16`, otherwise 16.
    ///
    /// # Safety
    /// The thread holds a [`ThreadGuard`]. With `rows` rounded up to 16 or [`STRIP`], `a` is readable as `[rows, depth]`, `b` as
    /// `[depth / 2, columns]` pairs; `c` is writable as `[rows, columns]` and overlaps neither. `depth` is a multiple of
    /// [`DEPTH`], `columns` of 16.
    #[inline(always)]
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        shape: ProductShape,
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: the caller holds a `ThreadGuard` and guarantees matrices of `shape`, its rows rounded up.
        unsafe {
            match self {
                Self::Avx512(avx512) => avx512.multiply::<ADD>(shape, a, b, c),
                Self::Amx(_, amx) => amx.multiply::<ADD>(shape, a, b, c),
            }
        }
    }

    fn avx512(self) -> vdpbf16::Avx512Bf16 {
        match self {
            Self::Avx512(avx512) | Self::Amx(avx512, _) => avx512,
        }
    }

    /// Writes values as B: `[32, width]` pairs of the rows, padded with 0 to a multiple of [`DEPTH`] rows. Returns the mask of
    /// non-finite rows, which are written as 0: masked keys have weight 0, and 0 · infinity would be NaN.
    ///
    /// # Safety
    /// `to` is writable in that shape, without other references; `width` is supported for `data` (see [`is_supported`]).
    pub(super) unsafe fn interleave_values(
        self,
        DataRows { data, offsets, width }: DataRows<'_>,
        to: Matrix<*mut f32>,
    ) -> u64 {
        // SAFETY: the caller guarantees `to` as `[32, width]` pairs and a supported `width`.
        unsafe {
            match data {
                Data::Bf16(data) => self.interleave_rows(data, offsets, width, to),
                Data::E4m3(data) => self.interleave_rows(data, offsets, width, to),
                Data::E5m2(data) => self.interleave_rows(data, offsets, width, to),
                Data::I8(data) => self.interleave_rows(data, offsets, width, to),
                Data::F32(_) | Data::F16(_) => unreachable!("`for_call` looked at the dtypes"),
            }
        }
    }

    /// # Safety
    /// Same as [`Bf16Mma::interleave_values`].
    unsafe fn interleave_rows<T: vdpbf16::Bf16Exact>(
        self,
        data: &[T],
        offsets: &[usize],
        width: usize,
        to: Matrix<*mut f32>,
    ) -> u64 {
        let avx512 = self.avx512();
        let row = |at: usize| offsets.get(at).map(|&offset| &data[offset..offset + width]);
        let mut nonfinite = 0;
        for pair in 0..offsets.len().next_multiple_of(DEPTH) / 2 {
            let to = to.ptr.wrapping_add(pair * to.stride);
            let rows = (row(2 * pair), row(2 * pair + 1));
            // SAFETY: `to` is row `pair` of the caller's `[32, width]` pairs; rows that exist have `width` elements.
            unsafe {
                let finite = avx512.interleave(rows, width, to);
                if finite != (true, true) {
                    let rows = (rows.0.filter(|_| finite.0), rows.1.filter(|_| finite.1));
                    avx512.interleave(rows, width, to);
                    nonfinite |= (u64::from(!finite.0) | u64::from(!finite.1) << 1) << (2 * pair);
                }
            }
        }
        nonfinite
    }

    /// Writes at most 16 keys as columns of B: `to[c][i]` is the `c`-th pair of row `i`.
    ///
    /// # Safety
    /// `to` is writable as `[width / 2, 16]`, without other references; `width` is supported for `data` (see [`is_supported`]).
    #[inline(always)]
    pub(super) unsafe fn transpose_keys<S: Simd>(
        self,
        simd: S,
        DataRows { data, offsets, width }: DataRows<'_>,
        to: Matrix<*mut f32>,
    ) {
        let avx512 = self.avx512();
        // SAFETY: the caller guarantees `to` as `[width / 2, 16]` and a supported `width`; with `self`, `S` has 16 lanes.
        unsafe {
            match data {
                Data::Bf16(data) => transpose(simd, data, offsets, width, WordColumns { simd, to }),
                Data::E4m3(data) => {
                    transpose(simd, data, offsets, width, ByteColumns::new(avx512, to, data));
                }
                Data::E5m2(data) => {
                    transpose(simd, data, offsets, width, ByteColumns::new(avx512, to, data));
                }
                Data::I8(data) => transpose(simd, data, offsets, width, ByteColumns::new(avx512, to, data)),
                Data::F32(_) | Data::F16(_) => unreachable!("`for_call` looked at the dtypes"),
            }
        }
    }

    /// Rounds `width` weights of a row to the nearest bf16 and pads with 0 to a multiple of [`DEPTH`].
    ///
    /// # Safety
    /// `weights` is readable and `to` writable as `[64]`, and they do not overlap; `width` is 16, 32, 48 or 64.
    pub(super) unsafe fn round_weights(self, weights: *const f32, width: usize, to: *mut bf16) {
        // SAFETY: the caller guarantees `[64]` weights and as many elements at `to`, without overlap.
        unsafe { self.avx512().round(weights, width, to) };
    }
}

/// Keeps the calling thread configured for [`Bf16Mma::multiply`].
#[derive(Debug)]
pub(crate) struct ThreadGuard(#[allow(dead_code, reason = "released on drop")] Option<amx::TileConfigGuard>);

/// Whether queries are bf16, bf16 represents the KV dtype exactly, and rows are whole registers of pairs.
fn is_supported(problem: &Problem) -> bool {
    let dim = problem.head_dim();
    let (qk, vo) = match problem.dtype_kv() {
        Dtype::Bf16 => (DEPTH, 16),
        Dtype::E4m3 | Dtype::E5m2 | Dtype::I8 => (2 * DEPTH, 32),
        Dtype::F32 | Dtype::F16 => return false,
    };
    problem.dtype_q() == Dtype::Bf16 && dim.qk.is_multiple_of(qk) && dim.vo.is_multiple_of(vo)
}

/// The dtype to which softmax weights are rounded before P·V.
pub(crate) fn weights_dtype(isa: Isa, problem: &Problem) -> Dtype {
    let bf16 = is_supported(problem) && !problem.is_latent() && Bf16Mma::new(isa).is_some();
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// Copies a row of `q`, permuted to the order of keys of dtype `kv` in B.
///
/// # Safety
/// `to` is writable for a row, without other references; `q` is bf16 (see [`Bf16Mma::for_call`]).
pub(super) unsafe fn copy_query(q: View<'_>, kv: Dtype, token: usize, head: usize, to: *mut bf16) {
    let Data::Bf16(elements) = q.data() else { unreachable!("`for_call` looked at the dtypes") };
    let (strides, width) = (q.strides(), q.shape()[2]);
    let offset = token * strides[0] + head * strides[1];
    let row = &elements[offset..offset + width];
    // SAFETY: the caller guarantees that `to` is writable for a row, without other references.
    let to = unsafe { std::slice::from_raw_parts_mut(to, width) };
    to.copy_from_slice(row);
    if kv != Dtype::Bf16 {
        to.chunks_exact_mut(4).for_each(|word| word.swap(1, 2));
    }
}

/// Transposes at most 16 rows of 32-bit words and passes the columns to `sink`.
///
/// # Safety
/// `width` elements are full blocks of 16 words, and `sink` accepts all of their columns.
#[inline(always)]
unsafe fn transpose<S: Simd, T>(
    simd: S,
    data: &[T],
    offsets: &[usize],
    width: usize,
    sink: impl ColumnSink<S::V> + Copy + WordOffset,
) {
    // lanes after the last row repeat it: their columns are not read
    let rows: [*const T; 16] = std::array::from_fn(|lane| {
        let offset = offsets[lane.min(offsets.len() - 1)];
        data[offset..offset + width].as_ptr()
    });
    let words = width * size_of::<T>() / size_of::<f32>();
    for first in (0..words).step_by(S::LANES) {
        let block = rows.map(|row| row.cast::<f32>().wrapping_add(first));
        // SAFETY: a full block from `first` on is within the `width` elements of a row; the caller's `sink` accepts it.
        unsafe { simd.transpose(&block[..S::LANES], sink.at_word(first)) };
    }
}

/// A column sink that can start at any word of a row.
trait WordOffset {
    /// The sink for words from `first` on.
    fn at_word(self, first: usize) -> Self;
}

/// Stores the columns of a transposed block of bf16 elements: each word is a pair.
#[derive(Clone, Copy)]
struct WordColumns<S> {
    simd: S,
    to: Matrix<*mut f32>,
}

impl<S> WordOffset for WordColumns<S> {
    #[inline(always)]
    fn at_word(self, first: usize) -> Self {
        let ptr = self.to.ptr.wrapping_add(first * self.to.stride);
        Self { to: Matrix { ptr, ..self.to }, ..self }
    }
}

impl<S: Simd> ColumnSink<S::V> for WordColumns<S> {
    /// # Safety
    /// `to` is writable in row `c`.
    #[inline(always)]
    unsafe fn store_column(&self, c: usize, words: S::V) {
        // SAFETY: the caller guarantees a writable register in row `c` of `to`.
        unsafe { self.simd.store(self.to.ptr.wrapping_add(c * self.to.stride), words) };
    }
}

/// Stores the columns of a transposed block of 8-bit elements, each as two columns of bf16 pairs.
struct ByteColumns<T> {
    avx512: vdpbf16::Avx512Bf16,
    to: Matrix<*mut f32>,
    elements: PhantomData<T>,
}

impl<T> ByteColumns<T> {
    #[inline(always)]
    fn new(avx512: vdpbf16::Avx512Bf16, to: Matrix<*mut f32>, _: &[T]) -> Self {
        Self { avx512, to, elements: PhantomData }
    }
}

impl<T> Clone for ByteColumns<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for ByteColumns<T> {}

impl<T> WordOffset for ByteColumns<T> {
    #[inline(always)]
    fn at_word(self, first: usize) -> Self {
        let ptr = self.to.ptr.wrapping_add(2 * first * self.to.stride);
        Self { to: Matrix { ptr, ..self.to }, ..self }
    }
}

impl<V, T: vdpbf16::Bf16Exact> ColumnSink<V> for ByteColumns<T> {
    /// # Safety
    /// `V` is a register of 64 bytes; `to` is writable in rows `2 c` and `2 c + 1`.
    #[inline(always)]
    unsafe fn store_column(&self, c: usize, words: V) {
        let ptr = self.to.ptr.wrapping_add(2 * c * self.to.stride);
        // SAFETY: the caller guarantees 64 bytes of `words`, and rows `2 c` and `2 c + 1` of `to`.
        unsafe { self.avx512.split::<T>((&raw const words).cast(), ptr, self.to.stride) };
    }
}
