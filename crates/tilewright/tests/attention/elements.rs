//! Owned tensor elements of any dtype, made from and read back as f32.

use half::{bf16, f16};
use tilewright::{
    Dtype, E4m3, E5m2, Element, View, ViewMut,
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

/// The same expression for the elements of any dtype.
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

/// `value` rounded to `dtype`.
pub(crate) fn round(dtype: Dtype, value: f32) -> f32 {
    tilewright::with_dtype!(dtype, T => T::from_f32(value).to_f32())
}

/// Half the distance between neighbours of `dtype` at `value`: the most that rounding to it can change.
pub(crate) fn half_ulp(dtype: Dtype, value: f64) -> f64 {
    let (mantissa_bits, least_exponent) = match dtype {
        Dtype::F32 => (23, -126),
        Dtype::F16 => (10, -14),
        Dtype::Bf16 => (7, -126),
        Dtype::E4m3 => (3, -6),
        Dtype::E5m2 => (2, -14),
        Dtype::I8 => return 0.5,
    };
    let exponent = value.abs().max(f64::MIN_POSITIVE).log2().floor().max(f64::from(least_exponent));
    (exponent - f64::from(mantissa_bits) - 1.0).exp2()
}
