//! Operators of the KV cache on the CPU.

pub(super) mod append;
