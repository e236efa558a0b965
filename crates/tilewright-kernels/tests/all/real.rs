//! Element types of tests: rounding and noise.

use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::Stored;

/// Elements that kernels compute with in f32.
pub(crate) trait Real: Stored {
    /// Dtype of the elements.
    const DTYPE: Dtype;
    /// Half an ulp, relative.
    const ROUNDING: f64;
    /// Half an ulp near 0.
    const LEAST: f64;
    /// Rounds to nearest.
    fn of(value: f64) -> Self;
    /// Widens exactly.
    fn wide(self) -> f64;
}

macro_rules! reals {
    ($($ty:ty: $dtype:ident $bits:literal $least:literal $of:expr, $wide:expr;)*) => {$(
        impl Real for $ty {
            const DTYPE: Dtype = Dtype::$dtype;
            const ROUNDING: f64 = 1.0 / (1_u64 << $bits) as f64;
            const LEAST: f64 = $least;
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
        }
    )*};
}
reals! {
    bf16: Bf16 8 1e-37 bf16::from_f64, bf16::to_f64;
    f16: F16 11 3e-8 f16::from_f64, f16::to_f64;
    f32: F32 24 1e-37 (|value| value as f32), f64::from;
}

/// Uniform in -1..1, from a linear congruential generator.
pub(crate) fn noise<T: Real>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::of((state >> 40) as f64 / f64::from(1 << 23) - 1.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Widens all values exactly.
pub(crate) fn wide<T: Real>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.wide()).collect()
}

/// Panics unless `found` is `expected`, rounded once after an f32 error of `error · size`.
pub(crate) fn assert_near<T: Real>(what: &str, found: T, expected: f64, (error, size): (f64, f64)) {
    let found = found.wide();
    let tolerance = expected.abs() * T::ROUNDING * 1.001 + error * size.abs() + T::LEAST;
    let same = found == expected || (found.is_nan() && expected.is_nan());
    assert!(
        same || (found - expected).abs() <= tolerance,
        "{what}: {found}, not {expected} within {tolerance}"
    );
}
