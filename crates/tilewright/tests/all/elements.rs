//! Owned tensor elements of any dtype, converted from and to f32.

use half::{bf16, f16};
use tilewright::{
    Dtype, E4m3, E5m2, Element, View, ViewMut,
    reference::quantization::decode,
    tensor::{Data, DataMut},
};

#[derive(Debug, Clone)]
pub(crate) enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    E4m3(Vec<E4m3>),
    E5m2(Vec<E5m2>),
    I8(Vec<i8>),
}

/// Evaluates one expression for the elements of any dtype.
macro_rules! each {
    ($elements:expr, $s:ident => $body:expr) => {
        match $elements {
            Elements::F32($s) => $body,
            Elements::F16($s) => $body,
            Elements::Bf16($s) => $body,
            Elements::E4m3($s) => $body,
            Elements::E5m2($s) => $body,
            Elements::I8($s) => $body,
        }
    };
}

fn rounded<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&value| T::from_f32(value)).collect()
}

impl Elements {
    /// Rounds `values` to `dtype`.
    pub(crate) fn new(dtype: Dtype, values: &[f32]) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(values.to_vec()),
            Dtype::F16 => Self::F16(rounded(values)),
            Dtype::Bf16 => Self::Bf16(rounded(values)),
            Dtype::E4m3 => Self::E4m3(rounded(values)),
            Dtype::E5m2 => Self::E5m2(rounded(values)),
            Dtype::I8 => Self::I8(rounded(values)),
        }
    }

    pub(crate) fn filled(dtype: Dtype, len: usize, value: f32) -> Self {
        Self::new(dtype, &vec![value; len])
    }

    /// Rounds `values` into the elements from `at` on.
    pub(crate) fn write(&mut self, at: usize, values: &[f32]) {
        fn into<T: Element>(to: &mut [T], values: &[f32]) {
            to.iter_mut().zip(values).for_each(|(to, &value)| *to = T::from_f32(value));
        }
        each!(self, s => into(&mut s[at..at + values.len()], values));
    }

    pub(crate) fn to_f32(&self) -> Vec<f32> {
        each!(self, s => s.iter().map(|v| v.to_f32()).collect())
    }

    pub(crate) fn data(&self) -> Data<'_> {
        each!(self, s => s.into())
    }

    fn data_mut(&mut self) -> DataMut<'_> {
        each!(self, s => s.into())
    }

    pub(crate) fn view(&self, shape: &[usize]) -> View<'_> {
        View::new(self.data(), shape).expect("the shape fits")
    }

    pub(crate) fn view_mut(&mut self, shape: &[usize]) -> ViewMut<'_> {
        ViewMut::new(self.data_mut(), shape).expect("the shape fits")
    }

    /// A view that begins at element `at`.
    pub(crate) fn strided(&self, at: usize, shape: &[usize], strides: &[usize]) -> View<'_> {
        each!(self, s => View::strided(&s[at..], shape, strides)).expect("the strides fit")
    }

    pub(crate) fn strided_mut(&mut self, at: usize, shape: &[usize], strides: &[usize]) -> ViewMut<'_> {
        each!(self, s => ViewMut::strided(&mut s[at..], shape, strides)).expect("the strides fit")
    }
}

pub(crate) use tilewright::reference::naive::round;

/// Half an ulp of `dtype` at the finite `value`: the maximum rounding error.
pub(crate) fn half_ulp(dtype: Dtype, value: f64) -> f64 {
    let (mantissa_bits, least_exponent) = match dtype {
        Dtype::F32 => (23, -126),
        Dtype::F16 => (10, -14),
        Dtype::Bf16 => (7, -126),
        Dtype::E4m3 => (3, -6),
        Dtype::E5m2 => (2, -14),
        Dtype::I8 => return 0.5,
    };
    // computed from the bits of an f64, because every compared value needs it
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i64 - 1023;
    let half = exponent.max(least_exponent) - mantissa_bits - 1;
    f64::from_bits(((half + 1023) as u64) << 52)
}

#[test]
fn half_ulp_is_half_the_distance_to_the_next_value() {
    let numbers: [(Dtype, u16, fn(u16) -> f64); 4] = [
        (Dtype::F16, 0x7bff, |bits| f16::from_bits(bits).to_f64()),
        (Dtype::Bf16, 0x7f7f, |bits| bf16::from_bits(bits).to_f64()),
        (Dtype::E4m3, 0x7e, |bits| decode(Dtype::E4m3, bits as u8)),
        (Dtype::E5m2, 0x7b, |bits| decode(Dtype::E5m2, bits as u8)),
    ];
    for (dtype, largest, number) in numbers {
        for (at, next) in (0..largest).map(|bits| (number(bits), number(bits + 1))) {
            assert_eq!(2.0 * half_ulp(dtype, at), next - at, "{dtype} at {at}");
            assert_eq!(half_ulp(dtype, -at), half_ulp(dtype, at), "{dtype} at -{at}");
        }
    }
}
