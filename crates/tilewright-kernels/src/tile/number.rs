//! Conversion between f32 and words of any dtype: exact widening, and rounding as [`tilewright::Element`] defines.
//!
//! 8-bit floats are converted with integer and f16 operations, identically on all architectures: those before `sm_89`
//! have no conversion instructions. Formats: [`tilewright::E4m3`] and [`tilewright::E5m2`]. [`Float`] converts both 16-bit
//! elements of a word together.

use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::{Builder, Stored, Value};

/// Widens the first `count` elements of a word, lowest bits first.
#[track_caller]
pub(crate) fn widen(dtype: Dtype, word: Value<'_, u32>, count: usize) -> Vec<Value<'_, f32>> {
    let each_byte = |number: fn(Value<'_, u32>) -> Value<'_, f32>| {
        (0..count as u32).map(|i| number(word.bits(8 * i, 8))).collect()
    };
    match (dtype, count) {
        (Dtype::F32, _) => vec![word.reinterpret()],
        (Dtype::F16, 1) => vec![word.low().reinterpret::<f16>().to_f32()],
        (Dtype::Bf16, 1) => vec![(word << 16).reinterpret()],
        (Dtype::F16, _) => f16::widen(word).to_vec(),
        (Dtype::Bf16, _) => bf16::widen(word).to_vec(),
        (Dtype::E4m3, _) => each_byte(e4m3),
        (Dtype::E5m2, _) => each_byte(e5m2),
        (Dtype::I8, _) => each_byte(int8),
    }
}

/// Rounds numbers to nearest and packs them, the first in the lowest bits, zero-padded.
#[track_caller]
pub(crate) fn narrow<'k>(dtype: Dtype, numbers: &[Value<'k, f32>]) -> Value<'k, u32> {
    let k = numbers[0].builder();
    let of = |i: usize| numbers.get(i).copied().unwrap_or_else(|| k.constant(0.0));
    match (dtype, numbers.len()) {
        (Dtype::F32, _) => of(0).reinterpret(),
        (Dtype::F16, 1) => of(0).to_f16().reinterpret::<u16>().to_u32(),
        (Dtype::Bf16, 1) => of(0).to_bf16().reinterpret::<u16>().to_u32(),
        (Dtype::F16, _) => f16::narrow(k, of(0), of(1)),
        (Dtype::Bf16, _) => bf16::narrow(k, of(0), of(1)),
        (Dtype::E4m3, _) => bytes(numbers, |x| to_float8(x, E4M3)),
        (Dtype::E5m2, _) => bytes(numbers, |x| to_float8(x, E5M2)),
        (Dtype::I8, _) => bytes(numbers, |x| x.to_i8().reinterpret::<u32>() & 0xff),
    }
}

#[track_caller]
fn bytes<'k>(numbers: &[Value<'k, f32>], byte: impl Fn(Value<'k, f32>) -> Value<'k, u32>) -> Value<'k, u32> {
    let shifted = |(at, &x): (usize, &Value<'k, f32>)| byte(x) << (8 * at as u32);
    let all: Vec<_> = numbers.iter().enumerate().map(shifted).collect();
    all[1..].iter().fold(all[0], |word, &byte| word | byte)
}

/// 8-bit float format: exponent bias, mantissa bits, largest finite bit pattern.
#[derive(Clone, Copy)]
struct Float8 {
    bias: u32,
    mantissa: u32,
    max: u32,
}

const E4M3: Float8 = Float8 { bias: 7, mantissa: 3, max: 0x7e };
const E5M2: Float8 = Float8 { bias: 15, mantissa: 2, max: 0x7b };

/// Bits are moved to the f32 fields; a multiplication by a power of two corrects the exponent bias, for subnormals
/// too.
#[track_caller]
fn e4m3(bits: Value<'_, u32>) -> Value<'_, f32> {
    let magnitude = bits & 0x7f;
    let value = (magnitude << 20).reinterpret::<f32>() * f32::from_bits((127 + 120) << 23);
    let value = value.unless(magnitude.eq(0x7f), f32::NAN);
    (value.reinterpret::<u32>() | ((bits & 0x80) << 24)).reinterpret()
}

/// e5m2 is the upper half of an f16.
#[track_caller]
fn e5m2(bits: Value<'_, u32>) -> Value<'_, f32> {
    (bits << 8).low().reinterpret::<f16>().to_f32()
}

#[track_caller]
fn int8(bits: Value<'_, u32>) -> Value<'_, f32> {
    ((bits << 24).reinterpret::<i32>() >> 24).to_f32()
}

/// Rounds to nearest even, saturating; NaN stays NaN.
#[track_caller]
fn to_float8(x: Value<'_, f32>, format: Float8) -> Value<'_, u32> {
    let Float8 { bias, mantissa, max } = format;
    let (all, dropped) = (x.reinterpret::<u32>(), 23 - mantissa);
    let sign = (all >> 24) & 0x80;
    let bits = all & 0x7fff_ffff;
    // near 2^23 · quantum one f32 ulp is the subnormal quantum: the addition rounds
    let base = f32::from_bits((127 + 24 - bias - mantissa) << 23);
    let subnormal = (bits.reinterpret::<f32>() + base).reinterpret::<u32>() & 0xff;
    let to_even = ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1);
    let normal = ((bits + to_even) >> dropped) - ((127 - bias) << mantissa);
    let magnitude = bits.lt((128 - bias) << 23).select(subnormal, normal).min(max);
    magnitude.unless(x.is_nan(), 0x7f) | sign
}

/// 16-bit elements that kernels compute with in f32.
pub(crate) trait Float: Stored {
    /// Widens both halves of a word, the low one first.
    #[track_caller]
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2];
    /// Rounds two numbers to nearest and packs them.
    #[track_caller]
    fn narrow<'k>(k: &'k Builder, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32>;
}

impl Float for bf16 {
    #[track_caller]
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2] {
        word.reinterpret::<tilewright_ptx::isa::types::Bf16x2>().to_f32()
    }
    #[track_caller]
    fn narrow<'k>(k: &'k Builder, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32> {
        k.bf16x2(low, high).reinterpret()
    }
}

impl Float for f16 {
    #[track_caller]
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2] {
        word.reinterpret::<tilewright_ptx::isa::types::F16x2>().to_f32()
    }
    #[track_caller]
    fn narrow<'k>(k: &'k Builder, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32> {
        k.f16x2(low, high).reinterpret()
    }
}
