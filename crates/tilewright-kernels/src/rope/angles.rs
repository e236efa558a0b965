//! Cosines and sines of positions, loaded from a table or computed.
//!
//! Angles are 64-bit integers in units of 2^-64 turns. The product with a position wraps modulo one turn and is exact
//! for every position; the only error is that of the f64 frequency.

use crate::tile::{Elements, chunk::BYTES};
use tilewright::Dtype;
use tilewright_ptx::{Access, Global, Value};

/// Angle per position of a pair with `frequency` radians per position, in turns times 2^64, modulo one turn.
pub fn turns(frequency: f64) -> u64 {
    let turns = frequency / std::f64::consts::TAU;
    // exact: a fraction of at most 53 bits times a power of two
    ((turns - turns.floor()) * 2f64.powi(64)) as u64
}

/// Loads `len` table entries.
#[track_caller]
pub(super) fn load(from: Elements<'_>, len: u32) -> Vec<Value<'_, f32>> {
    let width = len.min(BYTES / Dtype::F32.size() as u32);
    (0..len)
        .step_by(width as usize)
        .flat_map(|at| from.plus(at).load(width, Access::ReadOnly).numbers())
        .collect()
}

/// Computes cosines and sines of `len` pairs from `first` on.
#[track_caller]
pub(super) fn compute<'k>(
    turns: Value<'k, u64>,
    first: Value<'k, u32>,
    len: u32,
    position: Value<'k, u32>,
) -> Vec<[Value<'k, f32>; 2]> {
    let turns = Global::<u64>::new(turns).at(first);
    let of = |i: usize| cos_sin(turns.plus(i).load_with(Access::ReadOnly) * position.to_u64());
    (0..len as usize).map(of).collect()
}

/// Cosine and sine of an angle in turns times 2^64, each to 2^-23: Taylor series on [-45°, 45°], with quadrant
/// reduction.
#[track_caller]
fn cos_sin(angle: Value<'_, u64>) -> [Value<'_, f32>; 2] {
    // coefficients of powers of r², highest first, for |r| ≤ π / 4
    const SIN: [f32; 4] = [2.755_731_9e-6, -1.984_127e-4, 8.333_334e-3, -1.666_666_7e-1];
    const COS: [f32; 5] = [-2.755_732e-7, 2.480_158_8e-5, -1.388_888_9e-3, 4.166_666_8e-2, -0.5];
    let angle = angle.high();
    let quarter = (angle + (1 << 29)) >> 30;
    let rest = (angle - (quarter << 30)).reinterpret::<i32>();
    let r = rest.to_f32() * (std::f64::consts::TAU / 2f64.powi(32)) as f32;
    let square = r * r;
    let series = |factors: &[f32]| {
        let first = r.builder().constant(factors[0]);
        factors[1..].iter().fold(first, |sum, &factor| sum.mul_add(square, factor))
    };
    let sin = (r * square).mul_add(series(&SIN), r);
    let cos = square.mul_add(series(&COS), 1.0);
    let odd = (quarter & 1).eq(1);
    let (cos, sin) = (odd.select(sin, cos), odd.select(cos, sin));
    let cos = ((quarter + 1) & 2).ne(0).select(-cos, cos);
    let sin = (quarter & 2).ne(0).select(-sin, sin);
    [cos, sin]
}
