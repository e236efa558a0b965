//! The two 8-bit floating-point types of KV caches: sign, exponent and mantissa bits as in their names.
//!
//! | | exponent, mantissa | maximum | minimum above 0 | infinity | NaN |
//! |---|---|---|---|---|---|
//! | [`E4m3`] | 4, 3, bias 7 | 448 | 2^-9 | none | `0x7f`, `0xff` |
//! | [`E5m2`] | 5, 2, bias 15 | 57344 | 2^-16 | `0x7c`, `0xfc` | `0x7d..=0x7f`, `0xfd..=0xff` |
//!
//! Source: Micikevicius et al., "FP8 formats for deep learning" (2022), and the OCP 8-bit floating point
//! specification; [`E4m3`] is PyTorch's `float8_e4m3fn`.
//!
//! Conversion from f32 rounds to nearest even and **saturates**: out-of-range values, infinity included, become the
//! largest value of their sign, as with CUDA's `__NV_SATFINITE`. (PyTorch's `.to()` returns NaN or infinity
//! instead.) NaN stays NaN.

use std::{cmp::Ordering, fmt};

macro_rules! float8 {
    ($(#[$documentation:meta])* $T:ident, bias $bias:literal, mantissa $mantissa:literal, max $max:literal) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $T(pub(crate) u8);

        impl $T {
            /// The largest finite value.
            pub const MAX: Self = Self($max);

            /// The value with these bits.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits of the value.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest value, ties to even; saturates at [`Self::MAX`]; NaN stays NaN.
            #[inline(always)]
            pub fn from_f32(value: f32) -> Self {
                Self(round(value, $bias, $mantissa, $max))
            }

            /// Whether it is one of the NaN patterns.
            pub fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }

            /// Reinterprets bytes as values of this type, without a copy.
            pub fn slice_from_bits(bits: &[u8]) -> &[Self] {
                bytemuck::cast_slice(bits)
            }

            /// Reinterprets mutable bytes as values of this type, without a copy.
            pub fn slice_from_bits_mut(bits: &mut [u8]) -> &mut [Self] {
                bytemuck::cast_slice_mut(bits)
            }
        }

        impl From<$T> for f32 {
            fn from(value: $T) -> Self {
                value.to_f32()
            }
        }

        /// Compares as floats: NaN equals nothing, -0 equals 0.
        impl PartialEq for $T {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $T {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $T {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $T {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}

float8!(
    /// 4 exponent and 3 mantissa bits, without infinity (OCP e4m3, "e4m3fn").
    E4m3, bias 7, mantissa 3, max 0x7e
);
float8!(
    /// 5 exponent and 2 mantissa bits: the upper half of an f16, with its infinities and NaN.
    E5m2, bias 15, mantissa 2, max 0x7b
);

impl E4m3 {
    /// The exact value.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        let (sign, magnitude) = ((self.0 & 0x80) as u32, (self.0 & 0x7f) as u32);
        let value = match magnitude {
            0x7f => f32::NAN,
            // subnormals are multiples of 2^-9, which f32 represents as normal numbers
            0..8 => magnitude as f32 * (1.0 / 512.0),
            _ => f32::from_bits((magnitude << 20) + ((127 - 7) << 23)),
        };
        f32::from_bits(value.to_bits() | sign << 24)
    }
}

impl E5m2 {
    /// The exact value.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        half::f16::from_bits(u16::from(self.0) << 8).to_f32()
    }
}

/// Rounds `value` to nearest even in an 8-bit format and saturates at `max`.
#[inline(always)]
fn round(value: f32, bias: u32, mantissa: u32, max: u32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    if value.is_nan() {
        return sign | 0x7f;
    }
    let bits = value.abs().to_bits();
    let least_normal = (128 - bias) << 23;
    let magnitude = if bits < least_normal {
        // At 2^23 · quantum the f32 spacing is one quantum (the subnormal spacing), so the addition rounds.
        let base = f32::from_bits((127 + 24 - bias - mantissa) << 23);
        (value.abs() + base).to_bits() & 0xff
    } else {
        let dropped = 23 - mantissa;
        let to_even = ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1);
        ((bits + to_even) >> dropped) - ((127 - bias) << mantissa)
    };
    sign | magnitude.min(max) as u8
}
