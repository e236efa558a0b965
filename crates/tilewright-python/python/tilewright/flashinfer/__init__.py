"""FlashInfer's names over torch tensors, with the meanings of release 0.6.18.

    import tilewright.flashinfer as flashinfer

or ``tilewright.flashinfer.install()`` before an engine imports ``flashinfer``. docs/from-flashinfer.md lists the differences.
An argument that has no meaning here raises ``tilewright.Unsupported`` with its name.
"""

from . import (
    activation,
    attention,
    autotuner,
    cascade,
    concat_ops,
    cudnn,
    decode,
    diffusion_ops,
    gemm,
    grouped_mm,
    jit,
    logits_processor,
    mla,
    norm,
    page,
    pod,
    prefill,
    properties,
    quantization,
    ragged,
    rope,
    sampling,
    sparse,
    stateless,
    topk,
)
from . import properties as utils
from ._install import VERSION as __version__
from ._install import __git_commit__, __git_version__, install, uninstall
from .activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from .autotuner import autotune
from .cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    cudnn_batch_decode_with_kv_cache,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .diffusion_ops import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
    fused_qk_rmsnorm_rope,
)
from .gemm import SegmentGEMMWrapper, bmm_bf16, bmm_fp8, grouped_mm_bf16, grouped_mm_fp8, mm_bf16
from .mla import BatchMLAPagedAttentionWrapper
from .norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    fused_rmsnorm_silu,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    rmsnorm,
    rmsnorm_quant,
)
from .page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    trtllm_fmha_v2_prefill,
    single_prefill_with_kv_cache_return_lse,
)
from .properties import next_positive_power_of_2
from .quantization import packbits, segment_packbits
from .rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from .stateless import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from .topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform, top_k_varlen
from .xqa import xqa, xqa_mla

__all__ = sorted(name for name in globals() if not name.startswith("_"))


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(f"tilewright.flashinfer has no {name}: docs/from-flashinfer.md lists the names of FlashInfer that are not "
                         "served, with reasons")
