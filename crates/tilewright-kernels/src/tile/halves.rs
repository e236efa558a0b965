//! Exact widening of 8-bit elements to 16 bits, two at a time: every e4m3, e5m2 and int8 value is an f16 and a bf16.
//!
//! Each byte is placed in the upper half of a 16-bit lane, so that the sign is in place. The exponent is shifted to
//! its field; a multiplication by a power of two corrects its bias, for subnormals too.

use super::number::Float;
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::{
    Value,
    isa::types::{Bf16x2, E4m3x2, F16x2},
};

/// The order in which four elements become two pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pairs {
    /// Elements 0 and 1, then 2 and 3.
    Adjacent,
    /// Elements 0 and 2, then 1 and 3: those of two rows that a transposed `ldmatrix` put into one word.
    Alternate,
}

/// [`halves`] of the elements in the order of `pairs`, as f16.
#[track_caller]
pub(crate) fn f16_pairs<'k>(
    from: Dtype,
    arch: u32,
    word: Value<'k, u32>,
    pairs: Pairs,
) -> [Value<'k, u32>; 2] {
    let word = if pairs == Pairs::Alternate { word.permute_bytes(0, 0x3120) } else { word };
    halves(from, Dtype::F16, arch, word)
}

/// Widens the four elements of `word`, lowest bits first, to two words of `to`.
///
/// `from` is [`Dtype::E4m3`], [`Dtype::E5m2`] or [`Dtype::I8`]. `to` is [`Dtype::F16`]; any other means bf16. `arch` is the compute capability, 90 for 9.0.
#[track_caller]
pub fn halves<'k>(from: Dtype, to: Dtype, arch: u32, word: Value<'k, u32>) -> [Value<'k, u32>; 2] {
    let k = word.builder();
    match (from, to) {
        (Dtype::E5m2, Dtype::F16) => upper(word, 0),
        (Dtype::E5m2, _) => upper(word, 0).map(to_bf16),
        (Dtype::E4m3, _) if arch >= 89 => [word.low(), word.high()].map(|pair| {
            let pair = pair.reinterpret::<E4m3x2>().to_f16x2().reinterpret();
            if to == Dtype::F16 { pair } else { to_bf16(pair) }
        }),
        (Dtype::E4m3, Dtype::F16) => upper(word, 0).map(|bytes| {
            // 2^8: the biases are 7 and 15
            let shifted =
                shift_exponent(bytes, ExponentShift { shift: 1, carry: 0x0080, bit: 0x4000, nan_factor: 1 });
            (shifted.reinterpret::<F16x2>() * k.constant(0x5c00_5c00_u32).reinterpret()).reinterpret()
        }),
        (Dtype::E4m3, _) => upper(word, 0).map(|bytes| {
            // 2^120: the biases are 7 and 127. A bf16 `mul` without `add` needs a newer GPU; adding -0 preserves
            // every value.
            let shifted =
                shift_exponent(bytes, ExponentShift { shift: 4, carry: 0x0010, bit: 0x0800, nan_factor: 15 });
            let [factor, zero] = [0x7b80_7b80, 0x8000_8000].map(|of| k.constant::<u32>(of).reinterpret());
            shifted.reinterpret::<Bf16x2>().mul_add(factor, zero).reinterpret()
        }),
        (_, Dtype::F16) => lower(word ^ 0x8080_8080, 0x6464_6464).map(|bytes| {
            // 1024 + 128 + x, with a unit in the last place of 1
            (bytes.reinterpret::<F16x2>() + k.constant(0xe480_e480_u32).reinterpret()).reinterpret()
        }),
        (_, _) => lower(word, 0x4343_4343).map(|bytes| {
            // 128 + the lower seven bits, minus 128, or minus 256 if the sign is set
            let (less, all) = (bytes & 0xff80_ff80, bytes & 0xff7f_ff7f);
            let minus_one = k.constant(0xbf80_bf80_u32).reinterpret::<Bf16x2>();
            less.reinterpret::<Bf16x2>().mul_add(minus_one, all.reinterpret::<Bf16x2>()).reinterpret()
        }),
    }
}

/// Widens the chunk of 16 bytes of each place by `halves`, and stores both chunks that it becomes. As many loads are in flight: each
/// would stall before its stores.
pub(crate) fn widen_chunks<'k, P>(
    places: &[P],
    in_flight: usize,
    load: impl Fn(&P) -> [Value<'k, u32>; 4],
    halves: impl Fn(Value<'k, u32>) -> [Value<'k, u32>; 2],
    store: impl Fn(&P, [[Value<'k, u32>; 4]; 2]),
) {
    let mut loaded: Vec<[Value<'k, u32>; 4]> = Vec::new();
    for at in 0..places.len() + in_flight {
        if let Some(done) = at.checked_sub(in_flight) {
            let [[a, b], [c, d], [e, f], [g, h]] = loaded[done].map(&halves);
            store(&places[done], [[a, b, c, d], [e, f, g, h]]);
        }
        loaded.extend(places.get(at).map(&load));
    }
}

/// Converts two f16 to two bf16.
#[track_caller]
fn to_bf16(pair: Value<'_, u32>) -> Value<'_, u32> {
    let [low, high] = f16::widen(pair);
    bf16::narrow(pair.builder(), low, high)
}

/// Places each byte in the upper half of 16 bits, above the bytes of `other`.
#[track_caller]
fn upper(word: Value<'_, u32>, other: u32) -> [Value<'_, u32>; 2] {
    [0x1404, 0x3424].map(|bytes: u32| word.permute_bytes(other, bytes))
}

/// Places each byte in the lower half of 16 bits, below the bytes of `other`.
#[track_caller]
fn lower(word: Value<'_, u32>, other: u32) -> [Value<'_, u32>; 2] {
    [0x4140, 0x4342].map(|bytes: u32| word.permute_bytes(other, bytes))
}

/// Relocation of an exponent field.
struct ExponentShift {
    /// Right shift.
    shift: u32,
    /// Added to a magnitude, this carries into `bit` only for NaN.
    carry: u32,
    bit: u32,
    /// Multiple of `bit` that completes an all-ones exponent.
    nan_factor: u32,
}

/// Shifts exponents and mantissas of e4m3 bytes right; NaN stays NaN.
#[track_caller]
fn shift_exponent(bytes: Value<'_, u32>, spec: ExponentShift) -> Value<'_, u32> {
    let both = |half: u32| half | half << 16;
    let magnitude = (bytes & 0x7fff_7fff) >> spec.shift;
    let nan = (magnitude + both(spec.carry)) & both(spec.bit);
    nan.mul_add(spec.nan_factor, magnitude) | (bytes & 0x8000_8000)
}
