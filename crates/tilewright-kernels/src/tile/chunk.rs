//! Neighbours in memory of any dtype, loaded and stored at once and computed with in f32.
//!
//! A [`Chunk`] has `width` elements: as many as are 16 bytes of the widest dtype of a kernel where addresses are aligned, one
//! where they are not. So a kernel is written once, and the host chooses its width ([`width`]). A chunk is kept as words until its
//! numbers are asked for: half the registers, for elements of 16 bits, while loads are under way.

use super::number::{narrow, widen};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    isa::memory::Access,
};

/// Bytes that a thread loads or stores at once, at most.
pub const BYTES: u32 = 16;

/// The most elements of all of `dtypes` that fit into one load or store: 4 beside f32, 8 beside 16-bit dtypes, 16 otherwise.
pub fn max_width(dtypes: &[Dtype]) -> u32 {
    dtypes.iter().map(|dtype| BYTES / dtype.size() as u32).min().unwrap_or(1)
}

/// The width for elements of `dtypes`: [`most`] where all of `elements`, which are lengths and strides in elements, and addresses
/// divided by their dtype's size, are multiples of it; otherwise 1.
pub fn width(dtypes: &[Dtype], elements: impl IntoIterator<Item = u64>) -> u32 {
    let max_width = max_width(dtypes);
    if elements.into_iter().all(|elements| elements.is_multiple_of(u64::from(max_width))) {
        max_width
    } else {
        1
    }
}

/// An address of elements of a dtype.
#[derive(Debug, Clone, Copy)]
pub struct Elements<'k> {
    base: Value<'k, u64>,
    dtype: Dtype,
    /// Bytes beyond it.
    offset: usize,
}

impl<'k> Elements<'k> {
    /// Those that a parameter points to.
    #[track_caller]
    pub fn param(k: &'k Builder, name: &str, dtype: Dtype) -> Self {
        Self::new(k.param(name), dtype)
    }

    /// Those at an address.
    pub fn new(base: Value<'k, u64>, dtype: Dtype) -> Self {
        Self { base, dtype, offset: 0 }
    }

    /// Element `index`.
    #[must_use]
    #[track_caller]
    pub fn at_wide(self, index: Value<'k, u64>) -> Self {
        Self { base: index.mul_add(self.dtype.size() as u64, self.base), ..self }
    }

    /// Element `index`.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: Value<'k, u32>) -> Self {
        let base = match self.dtype.size() {
            1 => self.base + index.to_u64(),
            2 => Global::<u16>::new(self.base).at(index).address(),
            _ => Global::<u32>::new(self.base).at(index).address(),
        };
        Self { base, ..self }
    }

    /// Element `index`, known while recording: an offset in instructions.
    #[must_use]
    pub fn plus(self, index: u32) -> Self {
        Self { offset: self.offset + index as usize * self.dtype.size(), ..self }
    }

    /// Its address.
    #[track_caller]
    pub fn address(self) -> Value<'k, u64> {
        self.base + self.offset as u64
    }

    /// What they are.
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// `width` of them; the address is aligned to all their bytes.
    #[track_caller]
    pub fn load(self, width: u32, access: Access) -> Chunk<'k> {
        let bytes = width * self.dtype.size() as u32;
        let words = match bytes {
            1 => vec![self.pointer::<u16>().load_u8()],
            2 => vec![self.pointer::<u16>().load_with(access).to_u32()],
            4 => vec![self.pointer::<u32>().load_with(access)],
            8 => self.pointer::<u32>().load_vector_with::<2>(access).to_vec(),
            _ => self.pointer::<u32>().load_vector_with::<4>(access).to_vec(),
        };
        Chunk { words, dtype: self.dtype, width }
    }

    /// The same where `condition` holds, otherwise zeros, and nothing is read.
    #[track_caller]
    pub fn load_when(self, condition: Value<'k, bool>, width: u32, access: Access) -> Chunk<'k> {
        if condition.known() == Some(true) {
            return self.load(width, access);
        }
        let k = condition.builder();
        let words = (width * self.dtype.size() as u32).div_ceil(4);
        let words: Vec<_> = (0..words).map(|_| k.var::<u32>("word", 0)).collect();
        k.when(condition, || {
            let loaded = self.load(width, access).words;
            words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
        });
        let words = words.into_iter().map(|word| word.get()).collect();
        Chunk { words, dtype: self.dtype, width }
    }

    /// The element, as a number.
    #[track_caller]
    pub fn number(self, access: Access) -> Value<'k, f32> {
        self.load(1, access).numbers()[0]
    }

    fn pointer<T: tilewright_ptx::isa::types::Scalar>(self) -> Global<'k, T> {
        let size = T::CLASS.bytes();
        let (whole, rest) = (self.offset / size, self.offset % size);
        let base = if rest == 0 { self.base } else { self.base + rest as u64 };
        Global::new(base).plus(whole)
    }
}

/// Neighbours of a dtype, in registers.
#[derive(Debug, Clone)]
pub struct Chunk<'k> {
    words: Vec<Value<'k, u32>>,
    dtype: Dtype,
    width: u32,
}

impl<'k> Chunk<'k> {
    /// The nearest of `dtype` to numbers; see [`tilewright::Element`] for what is out of range.
    #[track_caller]
    pub fn of(dtype: Dtype, numbers: &[Value<'k, f32>]) -> Self {
        let words = numbers.chunks(4 / dtype.size()).map(|part| narrow(dtype, part)).collect();
        Self { words, dtype, width: numbers.len() as u32 }
    }

    /// Its numbers, in the order of memory, exactly.
    #[track_caller]
    pub fn numbers(&self) -> Vec<Value<'k, f32>> {
        let of_word = (4 / self.dtype.size()).min(self.width as usize);
        self.words.iter().flat_map(|&word| widen(self.dtype, word, of_word)).collect()
    }

    /// The same numbers in `dtype`.
    #[must_use]
    #[track_caller]
    pub fn to(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype { self.clone() } else { Self::of(dtype, &self.numbers()) }
    }

    /// The nearest of `dtype` to its numbers, each divided by `by`.
    #[must_use]
    #[track_caller]
    pub fn divided(&self, dtype: Dtype, by: Value<'k, f32>) -> Self {
        let quotients: Vec<_> = self.numbers().into_iter().map(|number| number / by).collect();
        Self::of(dtype, &quotients)
    }

    /// This one where `condition` holds, otherwise `other`, of the same dtype and width.
    #[must_use]
    #[track_caller]
    pub fn or_else(&self, condition: Value<'k, bool>, other: &Self) -> Self {
        let both = self.words.iter().zip(&other.words);
        Self { words: both.map(|(&a, &b)| condition.select(a, b)).collect(), ..*self }
    }

    /// Stores it where elements are of its dtype; the address is aligned to all its bytes.
    #[track_caller]
    pub fn store(&self, to: Elements<'k>) {
        debug_assert!(to.dtype == self.dtype, "a chunk of {} is stored as {}", self.dtype, to.dtype);
        match (self.width * self.dtype.size() as u32, self.words.as_slice()) {
            (1, &[word]) => to.pointer::<u16>().store_u8(word),
            (2, &[word]) => to.pointer::<u16>().store(word.low()),
            (_, &[word]) => to.pointer::<u32>().store(word),
            (_, &[a, b]) => to.pointer::<u32>().store_vector([a, b]),
            (_, words) => to.pointer::<u32>().store_vector([words[0], words[1], words[2], words[3]]),
        }
    }
}

/// `x` rounded to `dtype` and back.
#[track_caller]
pub fn rounded<'k>(dtype: Dtype, x: Value<'k, f32>) -> Value<'k, f32> {
    widen(dtype, narrow(dtype, &[x]), 1)[0]
}
