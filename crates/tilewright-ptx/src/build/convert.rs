//! Conversions between types.

use super::{Builder, IntoOperand, Value, arith::methods};
use crate::isa::{Bf16x2, E4m3x2, F16x2, PureOp};
use half::{bf16, f16};

methods! {
    /// The nearest f16.
    f32: to_f16 F32ToF16 -> f16;
    /// The nearest bf16.
    f32: to_bf16 F32ToBf16 -> bf16;
    /// Exact.
    f16: to_f32 F16ToF32 -> f32;
    /// The nearest integer, ties to even; saturated, 0 for NaN.
    f32: to_i32 F32ToI32 -> i32;
    /// Truncated towards 0; saturated, 0 for NaN.
    f32: trunc_to_i32 F32TruncI32 -> i32;
    /// The nearest of -128..=127, 0 for NaN.
    f32: to_i8 F32ToI8 -> i32;
    /// The nearest f32.
    u32: to_f32 U32ToF32 -> f32;
    /// The nearest f32.
    i32: to_f32 I32ToF32 -> f32;
    /// Exact.
    f32: to_f64 F32ToF64 -> f64;
    /// Exact.
    u32: to_f64 U32ToF64 -> f64;
    /// Zero-extended.
    u32: to_u64 U32ToU64 -> u64;
    /// Sign-extended.
    i32: to_i64 I32ToI64 -> i64;
    /// The low half.
    u64: low Low32 -> u32;
    /// The high half.
    u64: high High32 -> u32;
    /// The low half.
    u32: low Low16 -> u16;
    /// The high half.
    u32: high High16 -> u16;
    /// Zero-extended.
    u16: to_u32 U16ToU32 -> u32;
    /// Exact.
    E4m3x2: to_f16x2 E4m3x2ToF16x2 -> F16x2;
}

impl<'k> Value<'k, bf16> {
    /// Exact. A bf16 is the upper half of an f32, so older GPUs need no conversion instruction.
    #[track_caller]
    pub fn to_f32(self) -> Value<'k, f32> {
        let zero = self.k.constant(0_u16);
        self.k.compute::<u32>(PureOp::Pack16, &[zero.operand, self.operand]).reinterpret()
    }
}

macro_rules! pairs {
    ($($pair:ty, $element:ty: $pack:ident $pack_doc:literal $op:ident;)*) => {$(
        impl Builder {
            #[doc = $pack_doc]
            #[track_caller]
            pub fn $pack(&self, low: impl IntoOperand<f32>, high: impl IntoOperand<f32>) -> Value<'_, $pair> {
                // the instruction's first operand is the upper half
                self.compute(PureOp::$op, &[high.into_operand(), low.into_operand()])
            }
        }
    )*};
}
pairs! {
    F16x2, f16: f16x2 "The nearest f16 of two numbers." F32ToF16x2;
    Bf16x2, bf16: bf16x2 "The nearest bf16 of two numbers." F32ToBf16x2;
    E4m3x2, E4m3x2: e4m3x2 "The nearest e4m3 of two numbers; those out of range become the largest." F32ToE4m3x2;
}

impl<'k> Value<'k, Bf16x2> {
    /// Both, the low half first.
    #[track_caller]
    pub fn to_f32(self) -> [Value<'k, f32>; 2] {
        let word = self.reinterpret::<u32>();
        [(word << 16).reinterpret(), (word & 0xffff_0000).reinterpret()]
    }
}

impl<'k> Value<'k, F16x2> {
    /// Both, the low half first.
    #[track_caller]
    pub fn to_f32(self) -> [Value<'k, f32>; 2] {
        let word = self.reinterpret::<u32>();
        [word.low().reinterpret::<f16>().to_f32(), word.high().reinterpret::<f16>().to_f32()]
    }
}

impl Builder {
    /// Packs two halves of a word.
    #[track_caller]
    pub fn pack16(&self, low: impl IntoOperand<u16>, high: impl IntoOperand<u16>) -> Value<'_, u32> {
        self.compute(PureOp::Pack16, &[low.into_operand(), high.into_operand()])
    }

    /// Packs two words into 64 bits.
    #[track_caller]
    pub fn pack32(&self, low: impl IntoOperand<u32>, high: impl IntoOperand<u32>) -> Value<'_, u64> {
        self.compute(PureOp::Pack32, &[low.into_operand(), high.into_operand()])
    }
}
