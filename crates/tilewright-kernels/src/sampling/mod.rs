//! Sampling: rows of logits or probabilities become tokens, distributions, or the greatest with their places.
//!
//! A row has a CTA. What is summed are whole numbers, so that results depend neither on the order of threads nor on the device: the
//! same row and request give the same token everywhere.
//!
//! | | |
//! |---|---|
//! | [`sample()`], [`distribution()`] | temperature, top-k, top-p, min-p, and a token or all probabilities |
//! | [`top_k()`], [`top_k_mask`], [`logprobs()`] | the greatest, with their places; ranks |
//! | [`chain()`] | chains of drafted tokens |
//! | [`mask_tokens`], [`penalise`], [`add_bias`] | edits of logits in place |
//!
//! Inside: `number` e^x and whole numbers, `double` products of weights, `rng` Philox, `block` what threads find out together, `row` who
//! reads and `sink` who writes what, `survey` a row at first sight, `elements` the list of the greatest, `weights` filters,
//! `ranking` order.

mod candidates;
mod chain;
mod cta;
mod distribution;
mod edit;
mod logprobs;
mod mass;
mod product_scale;
mod ranking;
mod request;
mod rng;
mod row_reader;
mod row_stats;
mod row_writer;
mod sample;
mod top_k;
mod weights;

pub use chain::{CHAIN_OUTCOME_WORDS, chain};
pub use distribution::distribution;
pub use edit::{EDIT_THREADS, TOKENS_PER_MASK_THREAD, add_bias, mask_tokens, penalise};
pub use logprobs::{LOGPROBS_WORDS, logprobs};
pub use mass::{Number, mass_bits};
pub use request::{JOINT, REQUEST_WORDS, request_words};
pub use row_stats::{EMPTY, INVALID_VALUE, ROW_OUTCOME_WORDS, RowKind, VALID};
pub use sample::{SampleConfig, sample};
pub use top_k::{LAST_FIRST, SORTED, top_k, top_k_mask};

use tilewright_ptx::verify::Invalid;

/// Refuses CTAs of so many threads.
fn check_threads(kernel: &str, threads: u32) -> Result<(), Invalid> {
    if threads.is_power_of_two() && (64..=1024).contains(&threads) {
        return Ok(());
    }
    Err(Invalid::of(kernel, format!("threads = {threads}, expected a power of two in 64..=1024")))
}
