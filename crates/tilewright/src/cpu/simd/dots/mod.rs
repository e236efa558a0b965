//! Products of bf16 matrices whose sums are f32: where the machine multiplies pairs of bf16, attention over bf16 tensors
//! does not widen them.
//!
//! ```text
//! A    row-major bf16                     [rows, depth]
//! B    pairs that are neighbours in depth [depth / 2, columns] of (bf16, bf16)
//! C    row-major f32                      [rows, columns]
//! ```
//!
//! Keys become B by a transpose of 32-bit words, values by interleaving two rows. Rows come in strips of 32, so that what
//! is loaded of B serves many of them. Weights are rounded to bf16 on their way to the values, as on every GPU.

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

use super::{EachColumn, Isa, Simd, hooks::Live, place::KV_TOKENS, tile::Matrix};
use crate::{
    Dtype, Problem,
    attention::Inputs,
    tensor::{Data, View},
};
use half::bf16;

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

    /// Those of `isa` where they can do a whole call: all tensors bf16, and no hook that wants more of their elements.
    pub(crate) fn of_call(isa: Isa, problem: &Problem, inputs: &Inputs<'_>, live: &Live) -> Option<Self> {
        let one_tensor = inputs.q.1.is_none() && inputs.k_pe.is_none();
        let untouched = !live.query && !live.key && !live.value;
        if one_tensor && untouched && fits(problem) { Self::of(isa) } else { None }
    }

    /// Makes the calling thread ready to multiply, until what is returned is dropped.
    pub(crate) fn begin(self) -> Ready {
        Ready(match self {
            Self::Avx512(_) => None,
            Self::Amx(_, amx) => Some(amx.configure()),
        })
    }

    /// `c = a · b`: [`STRIP`] rows where `rows` is above 16, otherwise 16.
    ///
    /// # Safety
    /// The thread is ready. With `rows` rounded up so, `a` is readable as `[rows, depth]`, `b` as `[depth / 2, columns]`
    /// pairs, `c` is writable as `[rows, columns]` and overlaps neither; `depth` is a multiple of [`DEPTH`], `columns` of 16.
    #[inline(always)]
    pub(super) unsafe fn multiply(
        self,
        (rows, columns, depth): (usize, usize, usize),
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Avx512(avx512) => avx512.multiply((rows, columns, depth), a, b, c),
                Self::Amx(_, amx) => amx.multiply((rows, columns, depth), a, b, c),
            }
        }
    }

    fn avx512(self) -> avx512::Avx512Bf16 {
        match self {
            Self::Avx512(avx512) | Self::Amx(avx512, _) => avx512,
        }
    }

    /// Values as B, `[KV_TOKENS / 2, width]` pairs of the rows at `offsets`; 0 beyond them up to a multiple of [`DEPTH`] rows,
    /// and 0 for rows that are not finite, whose bits are set in what is returned: what nobody sees weighs 0, and 0 times
    /// infinity would be NaN.
    ///
    /// # Safety
    /// `to` is writable in that shape and overlaps nothing else in use; `width` is a multiple of 16.
    pub(super) unsafe fn pair_values(
        self,
        (data, offsets, width): (&[bf16], &[usize], usize),
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

    /// Rounds the first `width` weights of each row to the nearest bf16, and writes 0 from there to the next multiple of
    /// [`DEPTH`].
    ///
    /// # Safety
    /// `weights` is readable and `to` writable as `[rows, KV_TOKENS]`, and they do not overlap; `width` is a multiple of 16.
    pub(super) unsafe fn round_weights(
        self,
        (rows, width): (usize, usize),
        weights: *const f32,
        to: *mut bf16,
    ) {
        for r in 0..rows {
            let (weights, to) = (weights.wrapping_add(r * KV_TOKENS), to.wrapping_add(r * KV_TOKENS));
            // SAFETY: the caller's promise.
            unsafe { self.avx512().round(weights, width, to) };
        }
    }
}

/// A thread that is ready to multiply.
#[derive(Debug)]
pub(crate) struct Ready(#[expect(dead_code, reason = "held until it is dropped")] Option<amx::Configured>);

/// Whether a problem's tensors are bf16 and its rows whole registers of pairs.
fn fits(problem: &Problem) -> bool {
    let (dim, dtypes) = (problem.head_dim(), (problem.dtype_qo(), problem.dtype_kv()));
    dtypes == (Dtype::Bf16, Dtype::Bf16) && dim.qk.is_multiple_of(DEPTH) && dim.vo.is_multiple_of(16)
}

/// What softmax weights are rounded to before they weigh values.
pub(crate) fn weights_dtype(isa: Isa, problem: &Problem) -> Dtype {
    let bf16 = fits(problem) && !problem.is_latent() && Dots::of(isa).is_some();
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// The elements of a bf16 tensor.
///
/// # Panics
/// When it is of another dtype: [`Dots::of_call`] has looked.
pub(super) fn elements(data: Data<'_>) -> &[bf16] {
    match data {
        Data::Bf16(elements) => elements,
        _ => unreachable!("all tensors of the call are bf16"),
    }
}

/// Copies a row of `q` as it is.
///
/// # Safety
/// `to` has room for a row and overlaps nothing else in use.
pub(super) unsafe fn copy_query(q: View<'_>, (token, head): (usize, usize), to: *mut bf16) {
    let (strides, width) = (q.strides(), q.shape()[2]);
    let offset = token * strides[0] + head * strides[1];
    let row = &elements(q.data())[offset..offset + width];
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(row.as_ptr(), width) };
}

/// At most 16 keys as columns of B: `to[c][i]` is the pair of elements `2 c` and `2 c + 1` of the row at `offsets[i]`.
///
/// # Safety
/// `to` is writable as `[width / 2, 16]` and overlaps nothing else in use; `width` is a multiple of [`DEPTH`].
#[inline(always)]
pub(super) unsafe fn pair_keys<S: Simd>(
    simd: S,
    (data, offsets, width): (&[bf16], &[usize], usize),
    to: Matrix<*mut f32>,
) {
    // lanes beyond the last row repeat it: their columns are never used
    let rows: [*const bf16; 16] = std::array::from_fn(|lane| {
        let offset = offsets[lane.min(offsets.len() - 1)];
        data[offset..offset + width].as_ptr()
    });
    for column in (0..width).step_by(2 * S::LANES) {
        let block = rows.map(|row| row.wrapping_add(column).cast::<f32>());
        let to = Matrix { at: to.at.wrapping_add(column / 2 * to.stride), ..to };
        // SAFETY: rows have `width` elements, of which `column` begins a whole block; `to` by the caller's promise.
        unsafe { simd.transpose(&block[..S::LANES], Words { simd, to }) };
    }
}

/// Stores the columns of a transposed block as they are.
struct Words<S> {
    simd: S,
    to: Matrix<*mut f32>,
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
