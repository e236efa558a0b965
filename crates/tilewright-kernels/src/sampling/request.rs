//! Sampling parameters of requests, in device memory or as launch arguments.
//!
//! Each parameter has a source of its own ([`ParamSource`]): an array with one value per token, or one value for all. The records
//! of [`request_words`] are arrays with a stride of [`REQUEST_WORDS`].
//!
//! | word of a record | |
//! |---|---|
//! | 0, 2, 3 | temperature, top_p, min_p: f32 |
//! | 1 | top_k; [`u32::MAX`] or any value from the vocabulary size on: off |
//! | 4 | ties of top-k: 0 keeps all, 1 the first, 2 the last; plus [`JOINT`] if top-p applies to all tokens |
//! | 6, 7 and 8, 9 | seed and offset, low words first |
//!
//! The host cannot check values in device memory, so kernels give every value a meaning ([`LoadedRequest::decode`]).

use super::{candidates::LIST_CAPACITY, cta::CtaCollectives, rng::Stream, row_stats::RowStats};
use tilewright::sampling::{FilterOrder, SamplingParams, TopKTies};
use tilewright_ptx::{Arg, Builder, Global, Stored, Value};

pub(crate) const REQUEST_WORDS: usize = 12;

/// The first sources have values of 32 bits; the others, seed and offset, of 64.
const NARROW_SOURCES: usize = 5;

/// Flag of word 4: top-k and top-p both apply to the full distribution.
pub(crate) const JOINT: u32 = 4;

/// Encodes word 4 of a request.
pub fn request_flags(ties: TopKTies, order: FilterOrder) -> u32 {
    let ties = match ties {
        TopKTies::Keep => 0,
        TopKTies::LowestIndex => 1,
        TopKTies::HighestIndex => 2,
    };
    ties | if order == FilterOrder::Joint { JOINT } else { 0 }
}

/// Encodes a request.
pub fn request_words(params: &SamplingParams) -> [u32; REQUEST_WORDS] {
    let words = |wide: u64| [wide as u32, (wide >> 32) as u32];
    let ([seed, seed_high], [offset, offset_high]) = (words(params.seed), words(params.offset));
    let (top_k, flags) = (params.top_k.unwrap_or(u32::MAX), request_flags(params.top_k_ties, params.order));
    let [temperature, top_p, min_p] = [params.temperature, params.top_p, params.min_p].map(f32::to_bits);
    [temperature, top_k, top_p, min_p, flags, 0, seed, seed_high, offset, offset_high, 0, 0]
}

/// A sampling request in registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct SamplingRequest<'k> {
    pub(super) temperature: Value<'k, f32>,
    pub(super) top_k: Value<'k, u32>,
    pub(super) top_p: Value<'k, f32>,
    pub(super) min_p: Value<'k, f32>,
    /// Kept ties of top-k: 0 all, 1 the first, 2 the last.
    pub(super) ties: Value<'k, u32>,
    pub(super) joint: Value<'k, bool>,
    pub(super) stream: Stream<'k>,
}

/// The source of one parameter of all tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamSource {
    /// The address of the first token's value; 0: all tokens have `value`.
    pub address: u64,
    /// The distance of two tokens' values in bytes; 0: all tokens have the value at `address`.
    pub stride: u32,
    /// The bits of the value of all tokens.
    pub value: u64,
}

impl ParamSource {
    /// The same value for all tokens.
    pub fn constant(value: u64) -> Self {
        Self { address: 0, stride: 0, value }
    }

    /// Values in device memory.
    pub fn array(address: u64, stride: u32) -> Self {
        Self { address, stride, value: 0 }
    }
}

/// The sources of all parameters: f32, and u32 for `top_k` and `flags`, u64 for `seed` and `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestSources {
    /// Divisor of logits.
    pub temperature: ParamSource,
    /// Number of kept tokens.
    pub top_k: ParamSource,
    /// Kept share of the mass.
    pub top_p: ParamSource,
    /// Least kept probability, as a fraction of the largest.
    pub min_p: ParamSource,
    /// Word 4 of a record.
    pub flags: ParamSource,
    /// Seed of the random stream.
    pub seed: ParamSource,
    /// Position in the random stream.
    pub offset: ParamSource,
    /// Token `i` draws at `offset + i · offset_step`.
    pub offset_step: u32,
}

impl RequestSources {
    /// Records of [`request_words`] at an address that is a multiple of 8.
    pub fn records(address: u64) -> Self {
        let word = |word: u64| ParamSource::array(address + 4 * word, 4 * REQUEST_WORDS as u32);
        Self {
            temperature: word(0),
            top_k: word(1),
            top_p: word(2),
            min_p: word(3),
            flags: word(4),
            seed: word(6),
            offset: word(8),
            offset_step: 0,
        }
    }

    fn sources(&self) -> [ParamSource; 7] {
        let Self { temperature, top_k, top_p, min_p, flags, seed, offset, .. } = *self;
        [temperature, top_k, top_p, min_p, flags, seed, offset]
    }

    /// A bit for each source that is in memory.
    pub(super) fn arrays(&self) -> u32 {
        (0..).zip(self.sources()).map(|(bit, of)| u32::from(of.address != 0) << bit).sum()
    }

    /// The last launch arguments of a kernel that reads requests.
    pub fn args(&self) -> Vec<Arg> {
        let mut args = vec![Arg::U32(self.arrays())];
        self.push_after_arrays(&mut args);
        args
    }

    /// Appends the same without the first one.
    pub(super) fn push_after_arrays(&self, args: &mut Vec<Arg>) {
        for (i, of) in self.sources().into_iter().enumerate() {
            let value = if i < NARROW_SOURCES { Arg::U32(of.value as u32) } else { Arg::U64(of.value) };
            args.extend([Arg::U64(of.address), Arg::U32(of.stride), value]);
        }
        args.push(Arg::U32(self.offset_step));
    }
}

/// A [`ParamSource`] as kernel parameters.
#[derive(Debug, Clone, Copy)]
struct SourceRegs<'k, T> {
    /// Whether the values are in memory.
    is_array: Value<'k, bool>,
    values: Global<'k, T>,
    stride: Value<'k, u32>,
    constant: Value<'k, T>,
}

impl<'k, T: Stored> SourceRegs<'k, T> {
    #[track_caller]
    fn new(k: &'k Builder, name: &str, is_array: Value<'k, bool>) -> Self {
        Self {
            is_array,
            values: k.global(name),
            stride: k.param(&format!("{name}_stride")),
            constant: k.param(&format!("{name}_value")),
        }
    }

    /// Loads the value of a token, if it is in memory. Loads of several sources are in flight together.
    #[track_caller]
    fn load(&self, name: &str, token: Value<'k, u32>) -> Value<'k, T> {
        let k = token.builder();
        let value = k.var(name, self.constant);
        k.when(self.is_array, || {
            let at = self.values.address() + token.to_u64() * self.stride.to_u64();
            value.set(Global::<T>::new(at).load());
        });
        value.get()
    }
}

/// The [`RequestSources`] as kernel parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestParams<'k> {
    temperature: SourceRegs<'k, f32>,
    top_k: SourceRegs<'k, u32>,
    top_p: SourceRegs<'k, f32>,
    min_p: SourceRegs<'k, f32>,
    flags: SourceRegs<'k, u32>,
    seed: SourceRegs<'k, u64>,
    offset: SourceRegs<'k, u64>,
    offset_step: Value<'k, u32>,
}

impl<'k> RequestParams<'k> {
    /// Declares the parameters of [`RequestSources::args`].
    #[track_caller]
    pub(super) fn new(k: &'k Builder) -> Self {
        Self::after(k, k.param("arrays"))
    }

    /// The same without the first parameter, which is `arrays`.
    #[track_caller]
    pub(super) fn after(k: &'k Builder, arrays: Value<'k, u32>) -> Self {
        let is_array = |bit: u32| (arrays & (1 << bit)).ne(0);
        Self {
            temperature: SourceRegs::new(k, "temperature", is_array(0)),
            top_k: SourceRegs::new(k, "top_k", is_array(1)),
            top_p: SourceRegs::new(k, "top_p", is_array(2)),
            min_p: SourceRegs::new(k, "min_p", is_array(3)),
            flags: SourceRegs::new(k, "flags", is_array(4)),
            seed: SourceRegs::new(k, "seed", is_array(5)),
            offset: SourceRegs::new(k, "offset", is_array(6)),
            offset_step: k.param("offset_step"),
        }
    }

    /// Loads the parameters of a token. All loads are in flight together until [`LoadedRequest::decode`].
    #[track_caller]
    pub(super) fn load(&self, token: Value<'k, u32>) -> LoadedRequest<'k> {
        // the first access to each 64 bytes of launch arguments takes long; assemblers move it before earlier loads otherwise
        token.builder().sync_warp();
        LoadedRequest {
            temperature: self.temperature.load("temperature", token),
            top_k: self.top_k.load("top_k", token),
            top_p: self.top_p.load("top_p", token),
            min_p: self.min_p.load("min_p", token),
            flags: self.flags.load("flags", token),
            seed: self.seed.load("seed", token),
            offset: self.offset.load("offset", token),
            ahead: token.to_u64() * self.offset_step.to_u64(),
        }
    }
}

/// Parameters as they were loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadedRequest<'k> {
    temperature: Value<'k, f32>,
    top_k: Value<'k, u32>,
    top_p: Value<'k, f32>,
    min_p: Value<'k, f32>,
    flags: Value<'k, u32>,
    seed: Value<'k, u64>,
    offset: Value<'k, u64>,
    /// Added to the offset.
    ahead: Value<'k, u64>,
}

impl<'k> LoadedRequest<'k> {
    /// The request, with values out of range replaced: a temperature that is not above 0 is greedy; top-k 0 is off, as is any value
    /// from the vocabulary size on, negative i32 included; top-p is at least the least normal number and at most 1; min-p is in
    /// [0, 1]. NaN is greedy as a temperature, and off as top-p and min-p.
    #[track_caller]
    pub(super) fn decode(self) -> SamplingRequest<'k> {
        let offset = self.offset + self.ahead;
        SamplingRequest {
            temperature: self.temperature.gt(0.0).select(self.temperature.min(f32::MAX), 0.0),
            top_k: self.top_k.eq(0).select(u32::MAX, self.top_k),
            top_p: self.top_p.min(1.0).max(f32::MIN_POSITIVE),
            min_p: self.min_p.max(0.0).min(1.0),
            ties: self.flags & (JOINT - 1),
            joint: (self.flags & JOINT).ne(0),
            stream: Stream {
                seed: [self.seed.low(), self.seed.high()],
                offset: [offset.low(), offset.high()],
            },
        }
    }
}

impl<'k> SamplingRequest<'k> {
    /// Whether the histogram of a row is used: for top-p of all elements without top-k, and for a top-k that the maxima of
    /// threads do not bound, but a list may hold.
    #[track_caller]
    pub(super) fn is_histogram_used(
        &self,
        cta: &CtaCollectives<'k>,
        vocab: Value<'k, u32>,
    ) -> Value<'k, bool> {
        let is_top_k = self.top_k.lt(vocab);
        let (_, is_bounded) = RowStats::list_size(cta, self.top_k);
        let is_long = vocab.gt(LIST_CAPACITY);
        is_long & (is_top_k & !is_bounded & self.top_k.lt(LIST_CAPACITY) | !is_top_k & self.top_p.lt(1.0))
    }

    /// Disables every filter if `off` holds.
    #[track_caller]
    pub(super) fn without_filters(self, k: &'k Builder, off: Value<'k, bool>) -> Self {
        Self {
            top_k: off.select(k.constant(u32::MAX), self.top_k),
            top_p: off.select(1.0, self.top_p),
            min_p: off.select(0.0, self.min_p),
            ..self
        }
    }
}

const _: () = assert!(REQUEST_WORDS.is_multiple_of(2), "seeds and offsets are loaded as words of 64 bits");
