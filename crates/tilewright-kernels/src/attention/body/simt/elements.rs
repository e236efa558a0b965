//! Scalar loads and stores of any dtype, converted to and from f32.

use crate::tile::number::narrow;
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::{Builder, Global, Value};

/// The address of element `index` from `address` on.
#[track_caller]
pub(super) fn address_of<'k>(dtype: Dtype, address: Value<'k, u64>, index: Value<'k, u64>) -> Value<'k, u64> {
    address + (index << dtype.size().trailing_zeros())
}

/// Loads the element at an aligned address, exactly.
#[track_caller]
pub(super) fn load(dtype: Dtype, at: Value<'_, u64>) -> Value<'_, f32> {
    match dtype {
        Dtype::F32 => Global::<f32>::new(at).load(),
        Dtype::F16 => Global::<f16>::new(at).load().to_f32(),
        Dtype::Bf16 => Global::<bf16>::new(at).load().to_f32(),
        Dtype::E4m3 => from_e4m3(Global::<u16>::new(at).load_u8()),
        // e5m2 is the upper byte of f16
        Dtype::E5m2 => (Global::<u16>::new(at).load_u8() << 8).low().reinterpret::<f16>().to_f32(),
        Dtype::I8 => ((Global::<u16>::new(at).load_u8() << 24).reinterpret::<i32>() >> 24).to_f32(),
    }
}

/// Moves exponent and mantissa to their f32 bits, and multiplies by the difference of the biases, which is exact for subnormal
/// numbers too.
#[track_caller]
fn from_e4m3(byte: Value<'_, u32>) -> Value<'_, f32> {
    let k = byte.builder();
    let magnitude = byte & 0x7f;
    let number = (magnitude << 20).reinterpret::<f32>() * f32::from_bits(247 << 23);
    let number = magnitude.eq(0x7f).select(k.constant(f32::NAN), number);
    (number.reinterpret::<u32>() | ((byte & 0x80) << 24)).reinterpret()
}

/// Rounds to nearest and stores; `dtype` is an output dtype. Numbers out of the range of e4m3 become its largest.
#[track_caller]
pub(super) fn store<'k>(k: &'k Builder, dtype: Dtype, at: Value<'k, u64>, value: Value<'k, f32>) {
    let _line = k.at_line(std::panic::Location::caller());
    match dtype {
        Dtype::F16 => Global::<f16>::new(at).store(value.to_f16()),
        Dtype::Bf16 => Global::<bf16>::new(at).store(value.to_bf16()),
        Dtype::E4m3 => Global::<u16>::new(at).store_u8(narrow(dtype, &[value])),
        _ => Global::<f32>::new(at).store(value),
    }
}
