//! Merge of attention states over disjoint key ranges.
//!
//! ```text
//! m = max m_i     w_i = 2^(m_i - m) · s_i     o = Σ w_i · o_i / Σ w_i     lse = m + log2 Σ w_i
//! ```
//!
//! A state is an output, the maximum base-2 logit `m_i` and the sum `s_i` of weights relative to it; that of no keys is 0, -inf
//! and 0. A public state has an LSE: `m_i = lse_i` and `s_i = 1`.
//!
//! 1. `arrival`: work items count up the merges that depend on them.
//! 2. `partial_states`: the CTA that completes a merge reduces its f32 partial states in plan order.
//! 3. `states`: the merge operators, whose states have any strides and the dtype of outputs.

pub(crate) mod arrival;
pub(crate) mod partial_states;
mod states;

pub use states::{MergeConfig, MergeInputs, MergeParams, StateTensor, merge};
