//! Element types, and the trait that converts them to and from f32.

use crate::{Data, DataMut, E4m3, E5m2};
use half::{bf16, f16};
use std::fmt;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// 8-bit float with 4 exponent and 3 mantissa bits; see [`E4m3`]. For KV caches only.
    E4m3,
    /// 8-bit float with 5 exponent and 2 mantissa bits; see [`E5m2`]. For KV caches only.
    E5m2,
    /// Integers in -128..=127. For KV caches only.
    I8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::I8 => 1,
        }
    }

    /// The largest finite value whose negative is representable too. A KV scale is the amplitude of the data divided by it.
    pub const fn max(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::F16 => 65504.0,
            Self::Bf16 => f32::from_bits(0x7f7f_0000),
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
            Self::I8 => 127.0,
        }
    }

    /// Whether the type is restricted to KV caches: no operator reads or writes activations or weights of this type.
    pub const fn is_cache_only(self) -> bool {
        self.size() == 1
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::I8 => "int8",
        })
    }
}

/// A Rust type that is a [`Dtype`]: converts to f32 exactly and from f32 by rounding to nearest even.
///
/// Out of range, the 16-bit types round to infinity and the 8-bit types saturate: larger values, infinity included, become
/// the largest value of that sign. NaN stays NaN, except that `i8` converts it to 0.
///
/// Sealed by [`Data`]: a new element type needs a variant there and an impl here.
pub trait Element: Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The matching [`Dtype`].
    const DTYPE: Dtype;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest representable value, ties to even; see the trait for out-of-range values.
    fn from_f32(value: f32) -> Self;
    /// The elements of a view of this type; `None` for another type.
    fn slice(data: Data<'_>) -> Option<&[Self]>;
    /// The elements of a view of this type; `None` for another type.
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($T:ty, $Variant:ident, $to_f32:path, $from_f32:path) => {
        impl Element for $T {
            const DTYPE: Dtype = Dtype::$Variant;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $from_f32(value)
            }
            fn slice(data: Data<'_>) -> Option<&[Self]> {
                if let Data::$Variant(slice) = data { Some(slice) } else { None }
            }
            fn slice_mut(data: DataMut<'_>) -> Option<&mut [Self]> {
                if let DataMut::$Variant(slice) = data { Some(slice) } else { None }
            }
        }
    };
}

/// Equals `bf16::from_f32` (round to nearest even), without its branches, so that loops over it vectorize.
#[inline(always)]
fn bf16_from_f32(value: f32) -> bf16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { nearest } as u16)
}

/// Saturates; NaN becomes 0.
#[inline(always)]
fn i8_from_f32(value: f32) -> i8 {
    value.round_ties_even() as i8
}

element!(f32, F32, f32::from, f32::from);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(bf16, Bf16, bf16::to_f32, bf16_from_f32);
element!(E4m3, E4m3, E4m3::to_f32, E4m3::from_f32);
element!(E5m2, E5m2, E5m2::to_f32, E5m2::from_f32);
element!(i8, I8, f32::from, i8_from_f32);
