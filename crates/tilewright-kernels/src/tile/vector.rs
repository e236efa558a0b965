//! 16 bytes of elements, which lie in memory as bf16, f16 or f32 and are computed with in f32.
//!
//! A vector is kept as four words until its numbers are asked for: half the registers, for elements of 16 bits, while loads are
//! under way.

use half::{bf16, f16};
use std::marker::PhantomData;
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

/// Elements that are loaded and stored 16 bytes at a time.
pub trait Packed: Stored {
    /// Elements of a vector.
    const PER_VECTOR: u32;
    /// The numbers of four words, in the order of memory.
    fn unpack<'k>(words: [Value<'k, u32>; 4]) -> Vec<Value<'k, f32>>;
    /// Four words of [`Packed::PER_VECTOR`] numbers, each rounded to the nearest.
    fn pack<'k>(k: &'k Builder, numbers: &[Value<'k, f32>]) -> [Value<'k, u32>; 4];
}

impl<T: Float> Packed for T {
    const PER_VECTOR: u32 = 8;
    #[track_caller]
    fn unpack<'k>(words: [Value<'k, u32>; 4]) -> Vec<Value<'k, f32>> {
        words.map(|word| T::widen(word)).concat()
    }
    #[track_caller]
    fn pack<'k>(k: &'k Builder, numbers: &[Value<'k, f32>]) -> [Value<'k, u32>; 4] {
        std::array::from_fn(|i| T::narrow(k, numbers[2 * i], numbers[2 * i + 1]))
    }
}

impl Packed for f32 {
    const PER_VECTOR: u32 = 4;
    fn unpack<'k>(words: [Value<'k, u32>; 4]) -> Vec<Value<'k, f32>> {
        words.map(|word| word.reinterpret()).to_vec()
    }
    fn pack<'k>(_: &'k Builder, numbers: &[Value<'k, f32>]) -> [Value<'k, u32>; 4] {
        std::array::from_fn(|i| numbers[i].reinterpret())
    }
}

/// 16 bytes of neighbours; addresses are aligned to 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Vector<'k, T> {
    words: [Value<'k, u32>; 4],
    ty: PhantomData<T>,
}

impl<'k, T: Packed> Vector<'k, T> {
    /// Those at an address.
    #[track_caller]
    pub fn load(from: Global<'k, T>, access: Access) -> Self {
        Self { words: from.cast::<u32>().load_vector_with(access), ty: PhantomData }
    }

    /// Those at an address where `condition` holds, otherwise zeros, and nothing is read.
    #[track_caller]
    pub fn load_when(
        k: &'k Builder,
        condition: Value<'k, bool>,
        from: Global<'k, T>,
        access: Access,
    ) -> Self {
        if condition.known() == Some(true) {
            return Self::load(from, access);
        }
        let words: [_; 4] = std::array::from_fn(|_| k.var::<u32>("word", 0));
        k.when(condition, || {
            let loaded = Self::load(from, access);
            words.iter().zip(loaded.words).for_each(|(word, loaded)| word.set(loaded));
        });
        Self { words: words.map(|word| word.get()), ty: PhantomData }
    }

    /// The nearest of [`Packed::PER_VECTOR`] numbers.
    #[track_caller]
    pub fn of(k: &'k Builder, numbers: &[Value<'k, f32>]) -> Self {
        Self { words: T::pack(k, numbers), ty: PhantomData }
    }

    /// Its numbers, in the order of memory.
    #[track_caller]
    pub fn numbers(self) -> Vec<Value<'k, f32>> {
        T::unpack(self.words)
    }

    /// This one where `condition` holds, otherwise `other`.
    #[must_use]
    #[track_caller]
    pub fn or_else(self, condition: Value<'k, bool>, other: Self) -> Self {
        let words = std::array::from_fn(|i| condition.select(self.words[i], other.words[i]));
        Self { words, ty: PhantomData }
    }

    /// Stores it.
    #[track_caller]
    pub fn store(self, to: Global<'k, T>) {
        to.cast::<u32>().store_vector::<4>(self.words);
    }
}
