//! Sampling parameters of a request, as twelve words in device memory.
//!
//! | word | |
//! |---|---|
//! | 0, 2, 3 | temperature, top_p, min_p: f32 |
//! | 1 | top_k; [`u32::MAX`] or any value from the vocabulary size on: off |
//! | 4 | ties of top-k: 0 keeps all, 1 the first, 2 the last; plus [`JOINT`] if top-p applies to all tokens |
//! | 6, 7 and 8, 9 | seed and offset, low words first |

use super::rng::Stream;
use tilewright::sampling::{FilterOrder, SamplingParams, TopKTies};
use tilewright_ptx::build::{Builder, Global, Value};

/// Words per request.
pub const REQUEST_WORDS: usize = 12;

/// Flag of word 4: top-k and top-p both apply to the full distribution.
pub const JOINT: u32 = 4;

/// Encodes a request.
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

impl<'k> SamplingRequest<'k> {
    /// Loads request `row`.
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
