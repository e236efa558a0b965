//! 16 bytes of 16-bit elements, computed with in f32.

use half::{bf16, f16};
use tilewright_ptx::{
    build::{Builder, Global, Stored, Value},
    isa::memory::Access,
};

/// Elements of 16 bits that kernels compute with in f32.
pub trait Float: Stored {
    /// Its name in names of kernels.
    const NAME: &'static str;
    /// Both halves of a word, the low one first.
    fn widen<'k>(word: Value<'k, u32>) -> [Value<'k, f32>; 2];
    /// A word of two numbers, each rounded to the nearest.
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

/// Eight neighbours of a row, in f32.
#[derive(Debug, Clone, Copy)]
pub struct Vector<'k>(pub [Value<'k, f32>; Vector::LEN]);

impl<'k> Vector<'k> {
    /// Elements of a vector.
    pub const LEN: usize = 8;

    /// Those at an address, which is aligned to 16 bytes.
    #[track_caller]
    pub fn load<T: Float>(from: Global<'k, T>, access: Access) -> Self {
        let words: [Value<'k, u32>; 4] = from.cast::<u32>().load_vector_with(access);
        let pairs = words.map(T::widen);
        Self(std::array::from_fn(|i| pairs[i / 2][i % 2]))
    }

    /// Rounds and stores them at an address, which is aligned to 16 bytes.
    #[track_caller]
    pub fn store<T: Float>(self, k: &'k Builder, to: Global<'k, T>) {
        let words = std::array::from_fn(|i| T::narrow(k, self.0[2 * i], self.0[2 * i + 1]));
        to.cast::<u32>().store_vector::<4>(words);
    }

    /// `f` of each.
    #[must_use]
    pub fn map(self, f: impl Fn(Value<'k, f32>) -> Value<'k, f32>) -> Self {
        Self(self.0.map(f))
    }

    /// `f` of each and its counterpart.
    #[must_use]
    pub fn zip(self, other: Self, f: impl Fn(Value<'k, f32>, Value<'k, f32>) -> Value<'k, f32>) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}
