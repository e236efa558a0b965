//! What a request asks of its sampler, as twelve words in device memory.
//!
//! | word | |
//! |---|---|
//! | 0, 2, 3 | temperature, top_p, min_p: f32 |
//! | 1 | top_k; [`u32::MAX`] or from the vocabulary's size on: all |
//! | 4 | which ties of top-k stay: 0 all, 1 the first, 2 the last; with [`JOINT`] added, top-p judges all tokens |
//! | 6, 7 and 8, 9 | seed and offset, low words first |

use super::rng::Stream;
use tilewright::sampling::{FilterOrder, SamplingParams, TopKTies};
use tilewright_ptx::build::{Builder, Global, Value};

/// Words of a request.
pub const REQUEST_WORDS: usize = 12;

/// Added to word 4 where top-k and top-p both judge the whole distribution.
pub const JOINT: u32 = 4;

/// The words of a request.
pub fn request_words(params: &SamplingParams) -> [u32; REQUEST_WORDS] {
    let ties = match params.top_k_ties {
        TopKTies::Keep => 0,
        TopKTies::LowestIndex => 1,
        TopKTies::HighestIndex => 2,
    };
    let order = if params.order == FilterOrder::Joint { JOINT } else { 0 };
    let words = |wide: u64| [wide as u32, (wide >> 32) as u32];
    let ([seed, seed_high], [offset, offset_high]) = (words(params.seed), words(params.offset));
    let top_k = params.top_k.unwrap_or(u32::MAX);
    let [temperature, top_p, min_p] = [params.temperature, params.top_p, params.min_p].map(f32::to_bits);
    [temperature, top_k, top_p, min_p, ties | order, 0, seed, seed_high, offset, offset_high, 0, 0]
}

/// A request in registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct SamplingRequest<'k> {
    pub(super) temperature: Value<'k, f32>,
    pub(super) top_k: Value<'k, u32>,
    pub(super) top_p: Value<'k, f32>,
    pub(super) min_p: Value<'k, f32>,
    /// 0: all, 1: the first, 2: the last.
    pub(super) ties: Value<'k, u32>,
    pub(super) joint: Value<'k, bool>,
    pub(super) stream: Stream<'k>,
}

impl<'k> SamplingRequest<'k> {
    /// Number `row` of `requests`.
    #[track_caller]
    pub(super) fn load(requests: Global<'k, u32>, row: Value<'k, u32>) -> Self {
        let at = requests.at_wide(row.to_u64() * REQUEST_WORDS as u64);
        let [temperature, top_k, top_p, min_p] = at.load_vector::<4>();
        let [ties, _, seed, seed_high] = at.plus(4).load_vector::<4>();
        let [offset, offset_high] = at.plus(8).load_vector::<2>();
        Self {
            temperature: temperature.reinterpret(),
            top_k,
            top_p: top_p.reinterpret(),
            min_p: min_p.reinterpret(),
            ties: ties & (JOINT - 1),
            joint: (ties & JOINT).ne(0),
            stream: Stream { seed: [seed, seed_high], offset: [offset, offset_high] },
        }
    }

    /// The same with every filter off.
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
