//! Element types, and the one trait through which the CPU reads and writes them.

use crate::tensor::{Data, DataMut};
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
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// A Rust type that is a [`Dtype`]: converts to f32 exactly and from f32 by rounding to nearest even.
///
/// Sealed by [`Data`]: a new element type is added there and here.
pub trait Element: Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The matching [`Dtype`].
    const DTYPE: Dtype;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest representable value, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The elements of a view, if they are of this type.
    fn slice(data: Data<'_>) -> Option<&[Self]>;
    /// The elements of a view, if they are of this type.
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
element!(f32, F32, f32::from, f32::from);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(bf16, Bf16, bf16::to_f32, bf16::from_f32);
