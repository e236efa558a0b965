//! Operators of the KV cache on the GPU.

pub(super) mod append;
pub(super) mod append_slots;
pub(super) mod rope_append;

pub(super) use super::memory::copy_pages;
