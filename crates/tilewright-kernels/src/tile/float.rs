//! 16-bit elements: a word holds two, widened exactly and rounded together.

use half::{bf16, f16};
use tilewright_ptx::{Builder, Stored, Value};

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
