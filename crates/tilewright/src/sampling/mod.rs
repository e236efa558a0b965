//! Sampling: from the logits of the last layer to one token per request.
//!
//! Logits and probabilities are `[rows, vocab]`, one row per request, each with its own parameters and its own
//! stream of random numbers. Filters keep sets of the form {p >= threshold}, so ties stay together.

mod draw;
mod filter;
mod params;
pub mod rng;

pub use draw::{Sampled, Scores, sample, sampling_from_probs};
pub use filter::{Filter, softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs};
pub use params::{FilterOrder, SamplingParams};
