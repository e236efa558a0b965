//! Products of bf16 matrices whose sums are f32: where the machine multiplies pairs of bf16, attention over bf16 tensors
//! does not widen them.
//!
//! ```text
//! A    row-major bf16                     [rows, depth]
//! B    pairs that are neighbours in depth [depth / 2, columns] of (bf16, bf16)
//! C    row-major f32                      [rows, columns]
//! ```
//!
//! Keys become B by a transpose of 32-bit words, values by interleaving two rows. Elements of 8 bits become bf16 on the way, which
//! holds each of them exactly; a word has four then, of which the first and the third make a pair, so queries are permuted alike. Rows come in strips of 32, so that what
//! is loaded of B serves many of them. Weights are rounded to bf16 on their way to the values, as on every GPU.

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(unreachable_code, unused_variables, reason = "there, no value of these types exists")
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
mod nowhere;
#[cfg(not(target_arch = "x86_64"))]
use nowhere as amx;
#[cfg(not(target_arch = "x86_64"))]
use nowhere as avx512;

use super::{EachColumn, Isa, Simd, tile::Matrix};
use crate::{
    Dtype, Problem,
    attention::{Inputs, Plan, Split},
    tensor::{Data, View},
};
use half::bf16;
use std::marker::PhantomData;

/// Rows of a strip.
pub(super) const STRIP: usize = 32;
/// Elements of a row of A that are taken at once; depths are multiples of it.
pub(super) const DEPTH: usize = 32;

/// The instructions that multiply bf16. A value is proof that the machine has them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dots {
    /// `vdpbf16ps`
    Avx512(avx512::Avx512Bf16),
    /// `tdpbf16ps`
    Amx(avx512::Avx512Bf16, amx::Amx),
}

impl Dots {
    /// Those of `isa`, if it and the machine have any.
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        let avx512 = avx512::Avx512Bf16::new()?;
        match isa {
            Isa::Avx512Bf16 => Some(Self::Avx512(avx512)),
            Isa::Amx => Some(Self::Amx(avx512, amx::Amx::new()?)),
            Isa::Portable | Isa::Avx2 | Isa::Avx512 => None,
        }
    }

    /// Those of `isa` where they can do a call: its tensors fit, no hook wants more of their elements, and it need not give the
    /// same bits for a row alone, which is not worth their while, and among others.
    pub(crate) fn of_call(isa: Isa, plan: &Plan, inputs: &Inputs<'_>) -> Option<Self> {
        let live = inputs.variant.live();
        let one_tensor = inputs.q.1.is_none() && inputs.k_pe.is_none();
        let untouched = !live.query && !live.key && !live.value;
        let fits = one_tensor && untouched && plan.split == Split::Balanced && fits(&plan.problem);
        if fits { Self::of(isa) } else { None }
    }

    /// Makes the calling thread ready to multiply, until what is returned is dropped.
    pub(crate) fn begin(self) -> Ready {
        Ready(match self {
            Self::Avx512(_) => None,
            Self::Amx(_, amx) => Some(amx.configure()),
        })
    }

    /// `c = a · b`, or `c += a · b` if `ADD`: [`STRIP`] rows where `rows` is above 16, otherwise 16.
    ///
    /// # Safety
    /// The thread is ready. With `rows` rounded up so, `a` is readable as `[rows, depth]`, `b` as `[depth / 2, columns]`
    /// pairs, `c` is writable as `[rows, columns]` and overlaps neither; `depth` is a multiple of [`DEPTH`], `columns` of 16.
    #[inline(always)]
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        (rows, columns, depth): (usize, usize, usize),
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Avx512(avx512) => avx512.multiply::<ADD>((rows, columns, depth), a, b, c),
                Self::Amx(_, amx) => amx.multiply::<ADD>((rows, columns, depth), a, b, c),
            }
        }
    }

    fn avx512(self) -> avx512::Avx512Bf16 {
        match self {
            Self::Avx512(avx512) | Self::Amx(avx512, _) => avx512,
        }
    }

    /// Values as B, `[32, width]` pairs of the rows at `offsets`; 0 beyond them up to a multiple of [`DEPTH`] rows,
    /// and 0 for rows that are not finite, whose bits are set in what is returned: what nobody sees weighs 0, and 0 times
    /// infinity would be NaN.
    ///
    /// # Safety
    /// `to` is writable in that shape and overlaps nothing else in use; `width` fits `data` (see [`fits`]).
    pub(super) unsafe fn pair_values(
        self,
        (data, offsets, width): (Data<'_>, &[usize], usize),
        to: Matrix<*mut f32>,
    ) -> u64 {
        // SAFETY: the caller's promise.
        unsafe {
            match data {
                Data::Bf16(data) => self.pair_rows((data, offsets, width), to),
                Data::E4m3(data) => self.pair_rows((data, offsets, width), to),
                Data::E5m2(data) => self.pair_rows((data, offsets, width), to),
                Data::I8(data) => self.pair_rows((data, offsets, width), to),
                Data::F32(_) | Data::F16(_) => unreachable!("`of_call` looked at the dtypes"),
            }
        }
    }

    /// # Safety
    /// As [`Dots::pair_values`].
    unsafe fn pair_rows<T: avx512::Paired>(
        self,
        (data, offsets, width): (&[T], &[usize], usize),
        to: Matrix<*mut f32>,
    ) -> u64 {
        let avx512 = self.avx512();
        let row = |at: usize| offsets.get(at).map(|&offset| &data[offset..offset + width]);
        let mut special = 0;
        for pair in 0..offsets.len().next_multiple_of(DEPTH) / 2 {
            let to = to.at.wrapping_add(pair * to.stride);
            let rows = (row(2 * pair), row(2 * pair + 1));
            // SAFETY: the caller's promise; both rows, where they are there, have `width` elements.
            unsafe {
                let finite = avx512.interleave(rows, width, to);
                if finite != (true, true) {
                    let rows = (rows.0.filter(|_| finite.0), rows.1.filter(|_| finite.1));
                    avx512.interleave(rows, width, to);
                    special |= (u64::from(!finite.0) | u64::from(!finite.1) << 1) << (2 * pair);
                }
            }
        }
        special
    }

    /// At most 16 keys as columns of B: `to[c][i]` is the `c`-th pair of the row at `offsets[i]`.
    ///
    /// # Safety
    /// `to` is writable as `[width / 2, 16]` and overlaps nothing else in use; `width` fits `data` (see [`fits`]).
    #[inline(always)]
    pub(super) unsafe fn pair_keys<S: Simd>(
        self,
        simd: S,
        (data, offsets, width): (Data<'_>, &[usize], usize),
        to: Matrix<*mut f32>,
    ) {
        let avx512 = self.avx512();
        // SAFETY: the caller's promise.
        unsafe {
            match data {
                Data::Bf16(data) => transpose(simd, (data, offsets, width), Words { simd, to }),
                Data::E4m3(data) => transpose(simd, (data, offsets, width), Bytes::new(avx512, to, data)),
                Data::E5m2(data) => transpose(simd, (data, offsets, width), Bytes::new(avx512, to, data)),
                Data::I8(data) => transpose(simd, (data, offsets, width), Bytes::new(avx512, to, data)),
                Data::F32(_) | Data::F16(_) => unreachable!("`of_call` looked at the dtypes"),
            }
        }
    }

    /// Rounds the first `width` weights of a row to the nearest bf16, and writes 0 from there to the next multiple of [`DEPTH`].
    ///
    /// # Safety
    /// `weights` is readable and `to` writable as `[64]`, and they do not overlap; `width` is a multiple of 16.
    pub(super) unsafe fn round_weights(self, weights: *const f32, width: usize, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { self.avx512().round(weights, width, to) };
    }
}

/// A thread that is ready to multiply.
#[derive(Debug)]
pub(crate) struct Ready(#[allow(dead_code, reason = "held until it is dropped")] Option<amx::Configured>);

/// Whether a problem's queries are bf16, its cache is what bf16 holds exactly, and its rows are whole registers of pairs.
fn fits(problem: &Problem) -> bool {
    let dim = problem.head_dim();
    let (qk, vo) = match problem.dtype_kv() {
        Dtype::Bf16 => (DEPTH, 16),
        Dtype::E4m3 | Dtype::E5m2 | Dtype::I8 => (2 * DEPTH, 32),
        Dtype::F32 | Dtype::F16 => return false,
    };
    problem.dtype_qo() == Dtype::Bf16 && dim.qk.is_multiple_of(qk) && dim.vo.is_multiple_of(vo)
}

/// What softmax weights are rounded to before they weigh values.
pub(crate) fn weights_dtype(isa: Isa, problem: &Problem) -> Dtype {
    let bf16 = fits(problem) && !problem.is_latent() && Dots::of(isa).is_some();
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// Copies a row of `q` in the order that keys of `kv` have as columns of B.
///
/// # Safety
/// `to` has room for a row and overlaps nothing else in use; `q` is bf16 (see [`Dots::of_call`]).
pub(super) unsafe fn copy_query(q: View<'_>, kv: Dtype, (token, head): (usize, usize), to: *mut bf16) {
    let Data::Bf16(elements) = q.data() else { unreachable!("`of_call` looked at the dtypes") };
    let (strides, width) = (q.strides(), q.shape()[2]);
    let offset = token * strides[0] + head * strides[1];
    let row = &elements[offset..offset + width];
    // SAFETY: the caller's promise.
    let to = unsafe { std::slice::from_raw_parts_mut(to, width) };
    to.copy_from_slice(row);
    if kv != Dtype::Bf16 {
        to.chunks_exact_mut(4).for_each(|word| word.swap(1, 2));
    }
}

/// Hands the columns of 32-bit words of at most 16 rows to `each`.
///
/// # Safety
/// `width` elements are whole blocks of 16 words, and `each` may be given all of their columns.
#[inline(always)]
unsafe fn transpose<S: Simd, T>(
    simd: S,
    (data, offsets, width): (&[T], &[usize], usize),
    each: impl EachColumn<S::V> + Copy + BeginningAt,
) {
    // lanes beyond the last row repeat it: their columns are never used
    let rows: [*const T; 16] = std::array::from_fn(|lane| {
        let offset = offsets[lane.min(offsets.len() - 1)];
        data[offset..offset + width].as_ptr()
    });
    let words = width * size_of::<T>() / size_of::<f32>();
    for first in (0..words).step_by(S::LANES) {
        let block = rows.map(|row| row.cast::<f32>().wrapping_add(first));
        // SAFETY: rows have `width` elements, of which `first` begins a whole block; `each` by the caller's promise.
        unsafe { simd.transpose(&block[..S::LANES], each.beginning_at(first)) };
    }
}

/// What takes the columns of a block takes those of the next, too.
trait BeginningAt {
    /// The same for words from `first` on.
    fn beginning_at(self, first: usize) -> Self;
}

/// Stores the columns of a transposed block as they are: each word is a pair.
#[derive(Clone, Copy)]
struct Words<S> {
    simd: S,
    to: Matrix<*mut f32>,
}

impl<S> BeginningAt for Words<S> {
    #[inline(always)]
    fn beginning_at(self, first: usize) -> Self {
        let at = self.to.at.wrapping_add(first * self.to.stride);
        Self { to: Matrix { at, ..self.to }, ..self }
    }
}

impl<S: Simd> EachColumn<S::V> for Words<S> {
    /// # Safety
    /// `to` is writable in row `c`.
    #[inline(always)]
    unsafe fn column(&self, c: usize, words: S::V) {
        // SAFETY: the caller's promise.
        unsafe { self.simd.store(self.to.at.wrapping_add(c * self.to.stride), words) };
    }
}

/// Stores the columns of a transposed block of 8-bit elements as two pairs each.
struct Bytes<T> {
    avx512: avx512::Avx512Bf16,
    to: Matrix<*mut f32>,
    elements: PhantomData<T>,
}

impl<T> Bytes<T> {
    #[inline(always)]
    fn new(avx512: avx512::Avx512Bf16, to: Matrix<*mut f32>, _: &[T]) -> Self {
        Self { avx512, to, elements: PhantomData }
    }
}

impl<T> Clone for Bytes<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Bytes<T> {}

impl<T> BeginningAt for Bytes<T> {
    #[inline(always)]
    fn beginning_at(self, first: usize) -> Self {
        let at = self.to.at.wrapping_add(2 * first * self.to.stride);
        Self { to: Matrix { at, ..self.to }, ..self }
    }
}

impl<V, T: avx512::Paired> EachColumn<V> for Bytes<T> {
    /// # Safety
    /// `V` is a register of 64 bytes, and `to` is writable in rows `2 c` and `2 c + 1`.
    #[inline(always)]
    unsafe fn column(&self, c: usize, words: V) {
        let at = self.to.at.wrapping_add(2 * c * self.to.stride);
        // SAFETY: the caller's promise.
        unsafe { self.avx512.split::<T>((&raw const words).cast(), at, self.to.stride) };
    }
}
