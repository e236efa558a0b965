//! Elements of 16 bits: two of them are a word, widened exactly and rounded together.

use half::{bf16, f16};
use tilewright_ptx::build::{Builder, Stored, Value};

/// Elements of 16 bits that kernels compute with in f32.
pub trait Float: Stored {
    /// Its name in names of kernels.
    const NAME: &'static str;
    /// Both halves of a word, the low one first.
    #[track_caller]
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2];
    /// A word of two numbers, each rounded to the nearest.
    #[track_caller]
    fn narrow<'k>(k: &'k Builder, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32>;
}

impl Float for bf16 {
    const NAME: &'static str = "bf16";
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
    const NAME: &'static str = "f16";
    #[track_caller]
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2] {
        word.reinterpret::<tilewright_ptx::isa::types::F16x2>().to_f32()
    }
    #[track_caller]
    fn narrow<'k>(k: &'k Builder, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32> {
        k.f16x2(low, high).reinterpret()
    }
}
