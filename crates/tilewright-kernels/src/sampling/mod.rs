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

mod block;
mod chain;
mod distribution;
mod double;
mod edit;
mod elements;
mod logprobs;
mod number;
mod ranking;
mod request;
mod rng;
mod row;
mod sample;
mod sink;
mod survey;
mod top_k;
mod weights;

pub use chain::{OUTCOME_WORDS, chain};
pub use distribution::distribution;
pub use edit::{EDIT_THREADS, MASKED, add_bias, mask_tokens, penalise};
pub use logprobs::{ANSWER_WORDS, logprobs};
pub use number::{Number, mass_bits};
pub use request::{JOINT, REQUEST_WORDS, request_words};
pub use sample::{Sample, sample};
pub use survey::{BAD_NUMBER, GOOD, Kind, NOTHING, VERDICT_WORDS};
pub use top_k::{LAST_FIRST, SORTED, top_k, top_k_mask};

use tilewright_ptx::verify::Invalid;

/// Refuses CTAs of so many threads.
fn check_threads(kernel: &str, threads: u32) -> Result<(), Invalid> {
    if threads.is_power_of_two() && (64..=1024).contains(&threads) {
        return Ok(());
    }
    Err(Invalid::of(kernel, format!("threads = {threads}, expected a power of two in 64..=1024")))
}
