//! Samplers: one CTA per row of logits or probabilities, or a cluster.
//!
//! Results depend neither on the order of threads nor on the device: sums are fixed-point (order-independent), `e^x`
//! uses IEEE additions and multiplications only, and random numbers are counter-based (Philox). The same row and
//! request give the same token everywhere.
//!
//! | | |
//! |---|---|
//! | [`sample()`], [`distribution()`] | temperature, top-k, top-p, min-p; a token, or all probabilities |
//! | [`top_k()`], [`top_k_mask`], [`top_k_transform`], [`logprobs()`] | largest elements with their indices; ranks |
//! | [`chain()`] | verification of chains of drafted tokens |
//! | [`mask_tokens`], [`penalise`], [`add_bias`] | in-place edits of logits |
//!
//! The CTAs of a cluster share a row of [`sample()`] where rows alone would leave SMs idle ([`RowCtas`]).
//!
//! The algorithm of a row:
//!
//! 1. `row_stats`: first pass, maximum, validity and a lower bound of the candidates. For top-p of all elements and a large
//!    top-k, it also counts a histogram (`row_histogram`), which estimates where the filter ends.
//! 2. `list_limits`, `candidates`: second pass, fixed-point weights (`weight_rule`); the largest elements go to a list in shared memory, or
//!    those around the estimate. If the total mass is not used, only the vectors with candidates are read again.
//! 3. `weights`: filters become thresholds on the weights, found in the list if it suffices, otherwise in the row (`row_filters`).
//! 4. The token is the first index whose running sum exceeds the random number; `ranking` orders elements exactly.
//!    [`sample()`] applies the filters and draws from a short list in one function (`short_list`), with fewer barriers.
//!
//! Thresholds of short lists come from counting: each thread adds the masses above its entry. Longer lists and rows use
//! radix select.
//!
//! Modules below: `weight_buckets` (histograms of weights), `mass` (fixed point, `e^x`), `product_scale` (f64 products of weights),
//! `cta`, `cta_select` and `cta_rank` (collectives), `row_reader` and `row_writer`, `rng`.

mod candidates;
mod chain;
mod cta;
mod cta_rank;
mod cta_select;
mod cta_sum;
mod distribution;
mod edit;
mod kernel;
mod list_limits;
mod logprobs;
mod mass;
mod ranking;
mod request;
mod rng;
mod row_filters;
mod row_histogram;
mod row_reader;
mod row_stats;
mod sample;
mod short_list;
mod top_k;
mod weight_rule;
mod weights;

pub use chain::{CHAIN_OUTCOME_WORDS, chain};
pub use distribution::distribution;
pub use edit::{EDIT_THREADS, TOKENS_PER_MASK_THREAD, add_bias, mask_tokens, penalise};
pub use kernel::{SamplingKernel, large_kernel_threads};
pub use logprobs::{LOGPROBS_WORDS, logprobs};
pub use mass::{Number, mass_bits};
pub use request::{ParamSource, RequestSources, request_flags, request_words};
pub(crate) use row_stats::NO_ROW;
pub use row_stats::{EMPTY, INVALID_VALUE, ROW_OUTCOME_WORDS, RowKind, VALID};
pub use sample::{RowCtas, SampleConfig, SampleParams, cta_threads, sample};
pub use top_k::{LAST_FIRST, SORTED, top_k, top_k_mask, top_k_transform};

use candidates::{CandidateList, Candidates, LIST_CAPACITY, ListedElement, NARROW_BITS, ValueFn};
use cta::{CtaCollectives, MAX_CTAS, MAX_RANKED, MAX_ROW_THREADS};
use cta_sum::CtaSum;
use list_limits::{ListLimits, RowMasses};
use mass::{ExpAccuracy, MassFn, MassScale, ProductScale, ScaledExp};
use ranking::Ranking;
use request::{LoadedRequest, RequestParams, SamplingRequest};
use row_filters::KeptMasses;
use row_histogram::{RowHistogram, ThresholdRange, WeightBuckets};
use row_reader::{RowPart, RowReader, RowWriter};
use row_stats::RowStats;
use tilewright_ptx::Invalid;
use weight_rule::WeightRule;
use weights::{KeptSet, Weights};

/// Checks the number of threads per CTA.
fn check_threads(kernel: &str, threads: u32) -> Result<(), Invalid> {
    if threads.is_power_of_two() && (64..=1024).contains(&threads) {
        return Ok(());
    }
    Err(Invalid::of(kernel, format!("threads = {threads}, expected a power of two in 64..=1024")))
}
