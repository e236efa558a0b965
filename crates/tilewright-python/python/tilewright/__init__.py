"""Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.

    import numpy as np, tilewright as tw
    attention = tw.Attention(tw.Problem(num_qo_heads=8, num_kv_heads=2, head_dim=64))
    plan = attention.plan(tw.Batch.ragged(qo_indptr=[0, 3], kv_indptr=[0, 5]))
    q, k = (np.random.rand(*shape).astype(np.float32) for shape in ((3, 8, 64), (5, 2, 64)))
    print(attention.run(plan, q, k, k).shape, plan.explain())

Tensors are NumPy arrays, torch tensors, or objects with ``__dlpack__`` or ``__cuda_array_interface__``. Outputs are
allocated in the library of the first argument, unless ``out`` is passed. Neither NumPy nor torch is imported before a
tensor of it is seen.
"""

from . import sampling, variants
from ._core import DeviceError, Error, Unsupported, __version__
from ._device import Device, host_device, set_host_device
from .attention import (
    Attention,
    Batch,
    BlockTable,
    Capacity,
    DeviceBatch,
    Level,
    PageTable,
    Plan,
    Problem,
    merge_state,
    merge_states,
)
from .cache import (
    append_mla_to_slots,
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    append_to_slots,
    get_batch_indices_positions,
    get_seq_lens,
)
from .operators import (
    CosSinCache,
    Rope,
    apply_rope,
    apply_rope_quantized,
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    layer_norm,
    linear,
    packbits,
    quantize_groups,
    rmsnorm,
    segment_gemm,
    segment_packbits,
    silu_and_mul,
)
from .variants import Variant, variant

__all__ = [
    "Attention",
    "Batch",
    "BlockTable",
    "Capacity",
    "CosSinCache",
    "Device",
    "DeviceBatch",
    "DeviceError",
    "Error",
    "Level",
    "PageTable",
    "Plan",
    "Problem",
    "Rope",
    "Unsupported",
    "Variant",
    "__version__",
    "append_mla_to_slots",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "append_to_slots",
    "apply_rope",
    "apply_rope_quantized",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_batch_indices_positions",
    "get_seq_lens",
    "host_device",
    "layer_norm",
    "linear",
    "merge_state",
    "merge_states",
    "packbits",
    "quantize_groups",
    "rmsnorm",
    "sampling",
    "segment_gemm",
    "segment_packbits",
    "set_host_device",
    "silu_and_mul",
    "variant",
    "variants",
]
