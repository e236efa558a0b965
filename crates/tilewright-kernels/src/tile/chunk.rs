//! Vectorized loads and stores: adjacent elements of any dtype, computed with in f32.
//!
//! A [`Chunk`] has `width` elements: 16 bytes of the widest dtype of a kernel if addresses are aligned, otherwise one
//! element. The host chooses the width ([`width`]), so one kernel source covers both. A chunk keeps its raw words
//! until values are used: 16-bit elements in flight take half the registers.

use super::number::{narrow, widen};
use tilewright::Dtype;
use tilewright_ptx::{Access, Builder, Global, Value, Var};

/// Maximum bytes per load or store.
pub(crate) const BYTES: u32 = 16;

/// Maximum width for all of `dtypes`: 4 with f32, 8 with 16-bit dtypes, otherwise 16.
pub(crate) fn max_width(dtypes: &[Dtype]) -> u32 {
    dtypes.iter().map(|dtype| BYTES / dtype.size() as u32).min().unwrap_or(1)
}

/// Width for `dtypes`: [`max_width`] if all of `elements` are multiples of it, otherwise 1. Pass lengths and strides
/// in elements, and addresses divided by the size of their dtype.
pub(crate) fn width(dtypes: &[Dtype], elements: impl IntoIterator<Item = u64>) -> u32 {
    let widest = max_width(dtypes);
    if elements.into_iter().all(|elements| elements.is_multiple_of(u64::from(widest))) { widest } else { 1 }
}

/// Address of elements of a dtype.
#[derive(Debug, Clone, Copy)]
pub struct Elements<'k> {
    base: Value<'k, u64>,
    dtype: Dtype,
    /// Constant byte offset, folded into instructions.
    offset: usize,
}

impl<'k> Elements<'k> {
    /// Elements at a pointer parameter.
    #[track_caller]
    pub fn param(k: &'k Builder, name: &str, dtype: Dtype) -> Self {
        Self::new(k.param(name), dtype)
    }

    /// Elements at an address.
    pub fn new(base: Value<'k, u64>, dtype: Dtype) -> Self {
        Self { base, dtype, offset: 0 }
    }

    /// Element at `index`.
    #[must_use]
    #[track_caller]
    pub fn at_wide(self, index: Value<'k, u64>) -> Self {
        Self { base: index.mul_add(self.dtype.size() as u64, self.base), ..self }
    }

    /// Element at `index`.
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

    /// Element at a constant index: an immediate offset.
    #[must_use]
    pub fn plus(self, index: u32) -> Self {
        Self { offset: self.offset + index as usize * self.dtype.size(), ..self }
    }

    /// Its address.
    #[track_caller]
    pub fn address(self) -> Value<'k, u64> {
        self.base + self.offset as u64
    }

    /// Dtype of the elements.
    pub(crate) fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Loads `width` elements; the address must be aligned to their total size.
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

    /// Loads if `condition` holds; otherwise returns zeros without a memory access.
    #[track_caller]
    pub(crate) fn load_when(self, condition: Value<'k, bool>, width: u32, access: Access) -> Chunk<'k> {
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

    /// Loads one element, widened to f32.
    #[track_caller]
    pub(crate) fn number(self, access: Access) -> Value<'k, f32> {
        self.load(1, access).numbers()[0]
    }

    fn pointer<T: tilewright_ptx::isa::types::Scalar>(self) -> Global<'k, T> {
        let size = T::CLASS.bytes();
        let (whole, rest) = (self.offset / size, self.offset % size);
        let base = if rest == 0 { self.base } else { self.base + rest as u64 };
        Global::new(base).plus(whole)
    }
}

/// A [`Chunk`] in variables.
#[derive(Debug, Clone)]
pub struct HeldChunk<'k> {
    words: Vec<Var<'k, u32>>,
    dtype: Dtype,
    width: u32,
}

impl<'k> HeldChunk<'k> {
    /// The chunk.
    #[track_caller]
    pub fn get(&self) -> Chunk<'k> {
        let words = self.words.iter().map(|word| word.get()).collect();
        Chunk { words, dtype: self.dtype, width: self.width }
    }

    /// Replaces it with a chunk of the same dtype and width.
    #[track_caller]
    pub fn set(&self, chunk: &Chunk<'k>) {
        self.words.iter().zip(&chunk.words).for_each(|(word, &new)| word.set(new));
    }
}

/// Adjacent elements of a dtype, in registers.
#[derive(Debug, Clone)]
pub struct Chunk<'k> {
    words: Vec<Value<'k, u32>>,
    dtype: Dtype,
    width: u32,
}

impl<'k> Chunk<'k> {
    /// The same in variables.
    #[track_caller]
    pub fn hold(&self) -> HeldChunk<'k> {
        let of = |&word: &Value<'k, u32>| word.builder().var("word", word);
        HeldChunk { words: self.words.iter().map(of).collect(), dtype: self.dtype, width: self.width }
    }

    /// Rounds numbers to `dtype`; see [`tilewright::Element`] for out-of-range values.
    #[track_caller]
    pub fn of(dtype: Dtype, numbers: &[Value<'k, f32>]) -> Self {
        let words = numbers.chunks(4 / dtype.size()).map(|part| narrow(dtype, part)).collect();
        Self { words, dtype, width: numbers.len() as u32 }
    }

    /// Values widened to f32 exactly, in memory order.
    #[track_caller]
    pub fn numbers(&self) -> Vec<Value<'k, f32>> {
        let of_word = (4 / self.dtype.size()).min(self.width as usize);
        self.words.iter().flat_map(|&word| widen(self.dtype, word, of_word)).collect()
    }

    /// Converts to `dtype`.
    #[must_use]
    #[track_caller]
    pub(crate) fn to(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype { self.clone() } else { Self::of(dtype, &self.numbers()) }
    }

    /// Divides each value by `by` and rounds to `dtype`.
    #[must_use]
    #[track_caller]
    pub(crate) fn divided(&self, dtype: Dtype, by: Value<'k, f32>) -> Self {
        let quotients: Vec<_> = self.numbers().into_iter().map(|number| number / by).collect();
        Self::of(dtype, &quotients)
    }

    /// Selects `self` if `condition` holds, otherwise `other` of the same dtype and width.
    #[must_use]
    #[track_caller]
    pub(crate) fn or_else(&self, condition: Value<'k, bool>, other: &Self) -> Self {
        let both = self.words.iter().zip(&other.words);
        Self { words: both.map(|(&a, &b)| condition.select(a, b)).collect(), ..*self }
    }

    /// Stores the chunk to elements of its dtype; the address must be aligned to its total size.
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
