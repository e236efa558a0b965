//! Functions of the TVM-FFI ABI, exported by the library for callers of any language: `__tvm_ffi_<name>`.
//!
//! | function | arguments |
//! |---|---|
//! | `rmsnorm` | `output, input, weight, eps, enable_pdl` |
//! | `append_paged_kv_cache` | `k, v, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len, layout` |
//! | `sampling_from_logits` | `logits, output, indices, deterministic, seed_arr, seed, offset_arr, offset` |
//! | `top_k_top_p_sampling_from_probs` | `probs, output, valid, indices, top_k_arr, top_k, top_p_arr, top_p, deterministic, seed_arr, seed, offset_arr, offset` |
//! | `paged_decode_plan` | `q, k_cache, kv_indptr, kv_indices, kv_last_page_len, layout, sm_scale`; returns a plan, an integer |
//! | `paged_decode_run` | `plan, q, k_cache, v_cache, output, lse` |
//! | `paged_decode_free` | `plan` |
//!
//! Names and orders of the first four are those of FlashInfer's modules, so that they replace these. `layout` is 0 for NHD and 1 for
//! HND. Tensors are on the host, for the CPU backend, or on one GPU, whose stream is that of `TVMFFIEnvGetStream`. A result is `None`
//! unless one is named. Errors are raised as Python's `ValueError`, `NotImplementedError` and `RuntimeError`.

mod abi;
mod operators;
