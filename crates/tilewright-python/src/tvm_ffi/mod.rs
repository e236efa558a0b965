//! Functions of the TVM-FFI ABI, exported by the library for callers of any language: `__tvm_ffi_<name>`.
//!
//! `abi.rs` lists the functions with their arguments. Names and orders are those of FlashInfer's modules, so that they replace
//! these, except for attention: a plan takes the arrays of a batch and returns a plan, an integer; a run takes the plan and the
//! tensors; a release ends it.
//!
//! | argument | meaning |
//! |---|---|
//! | `layout` | 0 for NHD, 1 for HND |
//! | `window_left` | -1 for no window |
//! | `logits_soft_cap` | 0 for none |
//! | `lse`, `mask`, `valid`, `indices`, `*_arr`, workspaces | a tensor or `None` |
//! | `deterministic`, `enable_pdl`, workspaces | no effect |
//!
//! Tensors are on the host, for the CPU backend, or on one GPU, whose stream is that of `TVMFFIEnvGetStream`. Tables of cosines, chains
//! of drafts and flags to pack are on the host. A result is `None` unless one is named. Errors are raised as Python's `TypeError`,
//! `ValueError`, `NotImplementedError` and `RuntimeError`.

mod abi;
mod operators;
mod plans;
mod sampling;
