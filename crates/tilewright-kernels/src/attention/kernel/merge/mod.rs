//! Merge of attention states: by the last CTA to arrive, and as operators.

pub(crate) mod arrival;
mod states;

pub use states::{MergeConfig, MergeInputs, MergeParams, StateTensor, merge};
