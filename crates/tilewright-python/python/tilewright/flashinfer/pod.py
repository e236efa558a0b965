"""POD: one prefill request and a batch of decodes, called together."""

from .._core import Error
from ._planned import dtype_names
from ._refuse import refuse
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """A prefill over tensors of its own, then a decode over a paged cache: two runs, of which only the second is planned."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, jit_args=None,
    ):
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer, jit_args=jit_args,
        )
        self._kv_layout = kv_layout

    @property
    def is_cuda_graph_enabled(self):
        """Whether plans are rewritten in place."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps other buffers, which are unused."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True,
    ):
        """Plans the decodes."""
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode=pos_encoding_mode,
            window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, data_type=data_type, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking,
        )

    begin_forward = plan

    def run(
        self, q_p, k_p, v_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False,
        kv_layout_p="NHD", pos_encoding_mode_p="NONE", sm_scale_p=None, window_left_p=-1, rope_scale_p=None, rope_theta_p=None,
        return_lse_p=False, custom_mask_d=None, packed_custom_mask_d=None, causal_d=False, kv_layout_d="NHD",
        pos_encoding_mode_d="NONE", sm_scale_d=None, window_left_d=-1, rope_scale_d=None, rope_theta_d=None, q_scale=None,
        k_scale=None, v_scale=None, return_lse_d=False, use_fp16_qk_reduction=False, enable_pdl=None, *args,
    ):
        """The prefill's and the decodes' results, with their LSE if requested. The decodes have the settings of ``plan``: others
        among the arguments ending in ``_d`` are refused, unless they are the defaults. They have one row each, so ``causal_d`` has no
        effect. Scales are those of the decodes."""
        function, decode = "PODWithPagedKVCacheWrapper.run", self._decode
        if decode._settings is None:
            raise Error(f"flashinfer.{function}: plan() has not been called")
        refuse(function, args=args or None, custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d,
               use_fp16_qk_reduction=use_fp16_qk_reduction)
        for name, value, default, planned in (
            ("kv_layout_d", kv_layout_d, "NHD", self._kv_layout), ("sm_scale_d", sm_scale_d, None, decode._sm_scale),
            ("pos_encoding_mode_d", pos_encoding_mode_d, "NONE", decode._pos_encoding_mode),
            ("window_left_d", window_left_d, -1, decode._window_left), ("rope_scale_d", rope_scale_d, None, decode._rope_scale),
            ("rope_theta_d", rope_theta_d, None, decode._rope_theta),
        ):
            if value != default and value != planned:
                refuse(function, f"that of plan, {planned!r}", **{name: value})
        prefill = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p, window_left=window_left_p,
            rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p,
        )
        return prefill, decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d)

    def end_forward(self):
        """Does nothing, as in FlashInfer."""


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills and a batch of decodes over paged caches."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._arguments = None

    @property
    def is_cuda_graph_enabled(self):
        """False: recorded graphs need one wrapper per batch."""
        return False

    def plan(
        self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d,
        num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1, q_data_type="float16",
        kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
    ):
        """Plans both batches; the prefills are replanned if a run is causal or masked. Rows of decodes see all keys."""
        q_data_type = data_type if q_data_type is None else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        _, kv_name, q_name = dtype_names(q_data_type, kv_data_type)
        options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "q_data_type": q_name,
                   "kv_data_type": kv_name, "sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta}
        self._arguments = ((qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *shape), options)
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *shape, **options)

    begin_forward = plan

    def run(
        self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False,
        q_scale=None, k_scale=None, v_scale=None, return_lse=False, use_fp16_qk_reduction=False, enable_pdl=None,
    ):
        """The results of the prefills and of the decodes, with their LSE if requested. Scales are those of the decodes."""
        refuse("BatchPODWithPagedKVCacheWrapper.run", use_fp16_qk_reduction=use_fp16_qk_reduction)
        if self._arguments is None:
            raise Error("flashinfer.BatchPODWithPagedKVCacheWrapper.run: plan() has not been called")
        arrays, options = self._arguments
        self._prefill.plan(*arrays, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p, **options)
        decode = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
        return self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse), decode

    def end_forward(self):
        """Does nothing, as in FlashInfer."""
