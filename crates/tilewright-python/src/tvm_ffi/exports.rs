//! The exported symbols `__tvm_ffi_<name>`, with the names of the parameters.

use super::{
    abi::{AnyValue, Call, execute},
    operators, plans, sampling,
};
use std::ffi::{c_int, c_void};

/// Exports functions of modules with the names of their parameters.
macro_rules! export {
    ($($symbol:ident = $module:ident::$function:ident($($name:ident),+);)+) => {
        $(
            #[allow(unsafe_code, reason = "a symbol of the library")]
            // SAFETY: the prefix `__tvm_ffi_` is that of functions of this type.
            #[unsafe(no_mangle)]
            extern "C" fn $symbol(_: *mut c_void, values: *const AnyValue, count: i32, result: *mut AnyValue) -> c_int {
                let (function, names) = (stringify!($function), &[$(stringify!($name)),+]);
                execute($module::$function, Call { function, names, values, count, result })
            }
        )+
    };
}

export! {
    __tvm_ffi_rmsnorm = operators::rmsnorm(output, input, weight, eps, enable_pdl);
    __tvm_ffi_gemma_rmsnorm = operators::gemma_rmsnorm(output, input, weight, eps, enable_pdl);
    __tvm_ffi_fused_add_rmsnorm = operators::fused_add_rmsnorm(
        input, residual, weight, eps, enable_pdl
    );
    __tvm_ffi_gemma_fused_add_rmsnorm = operators::gemma_fused_add_rmsnorm(
        input, residual, weight, eps, enable_pdl
    );
    __tvm_ffi_layernorm = operators::layernorm(output, input, gamma, beta, eps);
    __tvm_ffi_silu_and_mul = operators::silu_and_mul(out, input, enable_pdl);
    __tvm_ffi_gelu_and_mul = operators::gelu_and_mul(out, input, enable_pdl);
    __tvm_ffi_gelu_tanh_and_mul = operators::gelu_tanh_and_mul(out, input, enable_pdl);
    __tvm_ffi_apply_rope_pos_ids = operators::apply_rope_pos_ids(
        q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
    );
    __tvm_ffi_apply_llama31_rope_pos_ids = operators::apply_llama31_rope_pos_ids(
        q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_length
    );
    __tvm_ffi_apply_rope_pos_ids_cos_sin_cache =
        operators::apply_rope_pos_ids_cos_sin_cache(
            q, k, q_rope, k_rope, cos_sin_cache, pos_ids, interleave
        );
    __tvm_ffi_merge_state = operators::merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged);
    __tvm_ffi_merge_state_in_place = operators::merge_state_in_place(v, s, v_other, s_other, mask);
    __tvm_ffi_merge_states = operators::merge_states(v, s, v_merged, s_merged);
    __tvm_ffi_packbits = operators::packbits(x, bitorder, y);
    __tvm_ffi_segment_packbits = operators::segment_packbits(
        x, input_indptr, output_indptr, bitorder, y
    );
    __tvm_ffi_append_paged_kv_cache = operators::append_paged_kv_cache(
        k, v, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len, layout
    );
    __tvm_ffi_append_paged_mla_kv_cache = operators::append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
    );
    __tvm_ffi_softmax = sampling::softmax(
        workspace_buffer, logits, output, temperature_arr, temperature, enable_pdl
    );
    __tvm_ffi_sampling_from_logits = sampling::sampling_from_logits(
        logits, output, indices, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_sampling_from_probs = sampling::sampling_from_probs(
        probs, output, valid, indices, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_top_k_sampling_from_probs = sampling::top_k_sampling_from_probs(
        probs, output, valid, indices, top_k_arr, top_k, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_top_p_sampling_from_probs = sampling::top_p_sampling_from_probs(
        probs, output, valid, indices, top_p_arr, top_p, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_min_p_sampling_from_probs = sampling::min_p_sampling_from_probs(
        probs, output, valid, indices, min_p_arr, min_p, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_top_k_top_p_sampling_from_probs =
        sampling::top_k_top_p_sampling_from_probs(
            probs, output, valid, indices, top_k_arr, top_k, top_p_arr, top_p, deterministic, seed_arr, seed, offset_arr,
            offset
        );
    __tvm_ffi_top_k_renorm_probs = sampling::top_k_renorm_probs(
        probs, renorm_probs, top_k_arr, top_k, row_states_buffer
    );
    __tvm_ffi_top_p_renorm_probs = sampling::top_p_renorm_probs(
        probs, renorm_probs, top_p_arr, top_p, is_deterministic, workspace
    );
    __tvm_ffi_top_k_mask_logits = sampling::top_k_mask_logits(
        logits, mask_logits, top_k_arr, top_k, row_states_buffer
    );
    __tvm_ffi_chain_speculative_sampling = sampling::chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, output_token_ids, output_accepted_token_num,
        output_emitted_draft_token_num, deterministic, seed_arr, seed, offset_arr, offset
    );
    __tvm_ffi_paged_decode_plan = plans::paged_decode_plan(
        q, k_cache, kv_indptr, kv_indices, kv_last_page_len, layout, sm_scale
    );
    __tvm_ffi_paged_decode_run = plans::paged_decode_run(plan, q, k_cache, v_cache, output, lse);
    __tvm_ffi_paged_decode_free = plans::paged_decode_free(plan);
    __tvm_ffi_paged_prefill_plan = plans::paged_prefill_plan(
        q, k_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, layout, causal, window_left, logits_soft_cap, sm_scale
    );
    __tvm_ffi_paged_prefill_run = plans::paged_prefill_run(plan, q, k_cache, v_cache, output, lse);
    __tvm_ffi_paged_prefill_free = plans::paged_prefill_free(plan);
    __tvm_ffi_ragged_prefill_plan = plans::ragged_prefill_plan(
        q, k, v, qo_indptr, kv_indptr, causal, window_left, logits_soft_cap, sm_scale
    );
    __tvm_ffi_ragged_prefill_run = plans::ragged_prefill_run(plan, q, k, v, output, lse);
    __tvm_ffi_ragged_prefill_free = plans::ragged_prefill_free(plan);
    __tvm_ffi_mla_plan = plans::mla_plan(
        q_nope, q_pe, ckv_cache, qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal, sm_scale
    );
    __tvm_ffi_mla_run = plans::mla_run(plan, q_nope, q_pe, ckv_cache, kpe_cache, output, lse);
    __tvm_ffi_mla_free = plans::mla_free(plan);
}
