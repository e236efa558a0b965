//! Attention.

pub mod merge;
pub mod prefill_sm90;
