//! Slices of elements of any dtype, and dispatch on the dtype.

use crate::{E4m3, E5m2};
use half::{bf16, f16};

/// Runs an expression on the slice of a [`Data`] or [`DataMut`].
macro_rules! each_data {
    ($self:expr, $Enum:ident, $slice:ident => $body:expr) => {
        match $self {
            $Enum::F32($slice) => $body,
            $Enum::F16($slice) => $body,
            $Enum::Bf16($slice) => $body,
            $Enum::E4m3($slice) => $body,
            $Enum::E5m2($slice) => $body,
            $Enum::I8($slice) => $body,
        }
    };
}

pub(crate) use each_data;

/// A borrowed slice of one of the dtypes.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// f32
    F32(&'a [f32]),
    /// f16
    F16(&'a [f16]),
    /// bf16
    Bf16(&'a [bf16]),
    /// e4m3
    E4m3(&'a [E4m3]),
    /// e5m2
    E5m2(&'a [E5m2]),
    /// int8
    I8(&'a [i8]),
}

impl<'a> Data<'a> {
    /// The elements as bytes, in native byte order.
    pub fn bytes(self) -> &'a [u8] {
        each_data!(self, Self, s => bytemuck::cast_slice(s))
    }

    /// All but the first `count` elements; empty when there are fewer.
    pub(crate) fn skip(self, count: usize) -> Self {
        each_data!(self, Self, s => s.get(count..).unwrap_or_default().into())
    }

    /// The first `count` elements; all when there are fewer.
    pub(super) fn take(self, count: usize) -> Self {
        each_data!(self, Self, s => (&s[..count.min(s.len())]).into())
    }
}

/// A mutably borrowed slice of one of the dtypes.
#[derive(Debug)]
pub enum DataMut<'a> {
    /// f32
    F32(&'a mut [f32]),
    /// f16
    F16(&'a mut [f16]),
    /// bf16
    Bf16(&'a mut [bf16]),
    /// e4m3
    E4m3(&'a mut [E4m3]),
    /// e5m2
    E5m2(&'a mut [E5m2]),
    /// int8
    I8(&'a mut [i8]),
}

impl<'a> DataMut<'a> {
    /// The elements as bytes, in native byte order.
    pub fn into_bytes(self) -> &'a mut [u8] {
        each_data!(self, Self, s => bytemuck::cast_slice_mut(s))
    }

    /// All but the first `count` elements; empty when there are fewer.
    pub(super) fn skip(self, count: usize) -> Self {
        each_data!(self, Self, s => s.get_mut(count..).unwrap_or_default().into())
    }

    /// The first `count` elements, which must exist.
    pub(super) fn take(self, count: usize) -> Self {
        each_data!(self, Self, s => (&mut s[..count]).into())
    }
}

/// Runs an expression with `T` naming the element type of a `Dtype` that [`check_computable`] accepts. Half the forms of
/// [`with_dtype`], and a quarter for two tensors.
macro_rules! with_computable {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            dtype => {
                assert_eq!(dtype, $crate::Dtype::F32, "the operator has checked the dtype");
                type $T = f32;
                $body
            }
        }
    };
}
pub(crate) use with_computable;

/// Runs an expression with `T` naming the element type of a `Dtype`.
#[macro_export]
macro_rules! with_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::Dtype::E4m3 => {
                type $T = $crate::E4m3;
                $body
            }
            $crate::Dtype::E5m2 => {
                type $T = $crate::E5m2;
                $body
            }
            $crate::Dtype::I8 => {
                type $T = i8;
                $body
            }
        }
    };
}

macro_rules! views_of {
    ($($T:ty, $Variant:ident);+) => {$(
        impl<'a> From<&'a [$T]> for Data<'a> {
            fn from(slice: &'a [$T]) -> Self { Self::$Variant(slice) }
        }
        impl<'a> From<&'a Vec<$T>> for Data<'a> {
            fn from(vec: &'a Vec<$T>) -> Self { Self::$Variant(vec) }
        }
        impl<'a> From<&'a mut [$T]> for DataMut<'a> {
            fn from(slice: &'a mut [$T]) -> Self { Self::$Variant(slice) }
        }
        impl<'a> From<&'a mut Vec<$T>> for DataMut<'a> {
            fn from(vec: &'a mut Vec<$T>) -> Self { Self::$Variant(vec) }
        }
    )+};
}

views_of!(f32, F32; f16, F16; bf16, Bf16; E4m3, E4m3; E5m2, E5m2; i8, I8);
