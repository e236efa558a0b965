//! Attention.

pub mod prefill_sm90;
