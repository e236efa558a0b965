//! Sampling: logits of the last layer to one token per request, or several with speculative decoding.
//!
//! Logits and probabilities are `[rows, vocab]`, one row per request, each with its own parameters and
//! random stream. Filters keep sets of the form {p >= threshold}, so ties stay together unless
//! [`TopKTies`] says otherwise.
//!
//! | | |
//! |---|---|
//! | [`sample`], [`sampling_from_probs`], [`distribution`] | temperature, top-k, top-p, min-p, draw |
//! | [`TensorSampling`], [`TensorDistribution`] | the same with parameters and tokens in tensors, without waiting for a device |
//! | [`apply_token_bitmask`], [`apply_penalties`], [`apply_logit_bias`] | in-place edits of logits |
//! | [`Pipeline`] | these stages in an order checked at compile time, fused where possible |
//! | [`chain_speculative_sampling`] | drafted tokens, accepted such that the target's distribution is preserved |
//! | [`logprobs`], [`top_k()`] | log-probabilities and the most probable tokens |

mod draw;
mod edit;
mod filter;
mod logprobs;
mod params;
mod penalties;
mod pipeline;
pub mod rng;
mod speculative;
mod tensor_chain;
mod tensor_params;
mod tensor_sampling;
mod top_k;
mod top_k_transform;

pub use draw::{
    Sampled, SamplingDistribution, Scores, TokenSampling, distribution, sample, sampling_from_probs,
};
pub use edit::{Bias, LogitsEdit, LogitsEditing, TokenBitmask, apply_logit_bias, apply_token_bitmask};
pub use filter::{Filter, ScoreFilter, softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs};
pub use logprobs::{Choice, LogprobQuery, Logprobs, TokenLogprob, logprobs};
pub use params::{FilterOrder, SamplingParams, TopKTies};
pub use penalties::{History, Penalties, apply_penalties};
pub use pipeline::{Pipeline, RowParam, flow};
pub use rng::Stream;
pub use speculative::{ChainCounts, ChainOutput, ChainVerification, Drafts, chain_speculative_sampling};
pub use tensor_chain::TensorChain;
pub use tensor_params::{TensorParam, TensorParams};
pub use tensor_sampling::{TensorDistribution, TensorSampling, TensorTopKMask};
pub use top_k::{TieBreak, TopK, TopKSelection, top_k};
pub use top_k_transform::{IndexMapping, PageMapping, TopKTransform};
