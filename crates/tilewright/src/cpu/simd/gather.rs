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
    // SAFETY: the caller's promise; `pairs` reads two elements at once.
    unsafe {
        match data {
            Data::F32(s) => blocks(simd, (s, offsets, width), 1, to, |at, value| simd.store(at, value)),
            Data::F16(s) => blocks(simd, (s, offsets, width), 2, to, |at, pairs| {
                let (lower, upper) = simd.split_f16(pairs);
                simd.store(at, lower);
                simd.store(at.wrapping_add(to.stride), upper);
            }),
            Data::Bf16(s) => blocks(simd, (s, offsets, width), 2, to, |at, pairs| {
                let (lower, upper) = simd.split_bf16(pairs);
                simd.store(at, lower);
                simd.store(at.wrapping_add(to.stride), upper);
            }),
        }
    }
}

/// Transposes whole blocks with `store`, which gets `per_lane` neighbouring elements in each lane, and what is left
/// at the right edge one by one.
///
/// # Safety
/// As [`transpose_rows`]; `store` writes `per_lane` registers, `to.stride` apart.
#[inline(always)]
unsafe fn blocks<S: Simd, T: Element>(
    simd: S,
    (data, offsets, width): (&[T], &[usize], usize),
    per_lane: usize,
    to: Matrix<*mut f32>,
    store: impl Fn(*mut f32, S::V),
) {
    let whole = width / (per_lane * S::LANES) * (per_lane * S::LANES);
    let mut rows = [data.as_ptr().cast::<f32>(); 16];
    for (first, group) in offsets.chunks(S::LANES).enumerate() {
        let first = first * S::LANES;
        for (lane, row) in rows[..S::LANES].iter_mut().enumerate() {
            // lanes beyond the last row repeat it: their columns are never used
            let offset = group[lane.min(group.len() - 1)];
            *row = data[offset..offset + width].as_ptr().cast();
        }
        for column in (0..whole).step_by(per_lane * S::LANES) {
            let at = to.at.wrapping_add(column * to.stride + first);
            let block = rows.map(|row| row.wrapping_byte_add(column * size_of::<T>()));
            // SAFETY: each row has `width` elements, of which a block is inside `whole`; `to` by the caller's promise.
            unsafe {
                simd.transpose(&block[..S::LANES], |c, value| {
                    store(at.wrapping_add(c * per_lane * to.stride), value);
                });
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
