//! Merge of attention states over disjoint key ranges.
//!
//! ```text
//! m = max m_i     w_i = 2^(m_i - m)     s = Σ w_i · s_i     o = Σ w_i · o_i / s     lse = m + log2 s
//! ```
//!
//! A state is the maximum base-2 logit `m_i`, the sum `s_i` of weights relative to it, and the accumulator `o_i`, which is not
//! normalized; no keys give -inf, 0 and anything. A single state gives the bits of an item that is not split. A public state is
//! normalized and has an LSE: `m_i = lse_i` and `s_i = 1`.
//!
//! 1. `arrival`: work items count up the merges that depend on them.
//! 2. `partial_states`: the CTA that completes a merge reduces its f32 partial states in plan order.
//! 3. `pair`: a body that keeps a state in registers merges two without storing both.
//! 4. `states`: the merge operators, whose states have any strides and the dtype of outputs.

pub(crate) mod arrival;
pub(crate) mod pair;
pub(crate) mod partial_states;
mod states;

pub use arrival::max_fused_states;
pub(crate) use states::{MergeConfig, MergeKind};
pub use states::{MergeInputs, MergeParams, StateTensor, merge};
