//! Brings rows of Q, K and V from wherever they are, in whatever dtype, into dense f32 rows.

use super::{Simd, tile::Matrix};
use crate::{Element, tensor::Data};

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

/// Asks for the cache lines of `width` elements from `data[offset]` on; outside the data nothing happens.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(simd: S, data: Data<'_>, offset: usize, width: usize) {
    const LINE: usize = 64;
    let (at, size) = match data {
        Data::F32(s) => (s.as_ptr().cast::<u8>(), 4),
        Data::F16(s) => (s.as_ptr().cast(), 2),
        Data::Bf16(s) => (s.as_ptr().cast(), 2),
    };
    for byte in (0..width * size).step_by(LINE) {
        simd.prefetch(at.wrapping_add(offset * size + byte));
    }
}

/// Transposes `rows × columns` from `from` to `to`, both rounded up to whole registers.
///
/// # Safety
/// `from` is readable as `[rows, columns]`, `to` writable as `[columns, rows]`, both rounded up; no overlap.
#[inline(always)]
pub(crate) unsafe fn transpose<S: Simd>(
    simd: S,
    (rows, columns): (usize, usize),
    from: Matrix<*const f32>,
    to: Matrix<*mut f32>,
) {
    for row in (0..rows).step_by(S::LANES) {
        for column in (0..columns).step_by(S::LANES) {
            // SAFETY: the caller's promise for the block at (row, column).
            unsafe {
                let from_block = from.at.add(row * from.stride + column);
                let to_block = to.at.add(column * to.stride + row);
                simd.transpose(from_block, from.stride, to_block, to.stride);
            }
        }
    }
}
