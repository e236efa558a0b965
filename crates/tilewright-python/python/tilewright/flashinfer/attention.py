"""Wrappers of mixed batches: ``BatchAttention``, and prefill with attention sinks."""

import torch

from .._core import Error
from ..attention import Batch
from ._pages import host_array, last_page_lens, page_table, run_cache
from ._planned import PlannedAttention, Settings, dtype_names, planned_device
from ._refuse import check_backend, check_layout, refuse
from .prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchAttention:
    """Prefill and decode requests in one batch over a paged cache, scheduled together."""

    def __init__(self, kv_layout="NHD", device="cuda"):
        check_layout("BatchAttention", kv_layout)
        self._kv_layout = kv_layout
        self.device = torch.device(device)
        self._planned = self._settings = None

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
        causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        use_profiler=False,
    ):
        """Plans a batch: ``kv_indptr`` bounds of pages, ``kv_len_arr`` tokens of each request."""
        refuse("BatchAttention.plan", use_profiler=use_profiler)
        last = last_page_lens("BatchAttention.plan", kv_indptr, kv_len_arr, page_size)
        self._settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim_qk, head_dim_vo), dtypes=dtype_names(q_data_type, kv_data_type),
            layout=self._kv_layout, causal=causal, soft_cap=logits_soft_cap, sm_scale=sm_scale,
        )
        self._batch = Batch.paged(host_array(qo_indptr), page_table(kv_indptr, kv_indices, last, page_size))
        self._planned = None

    def run(
        self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0, profiler_buffer=None,
        kv_cache_sf=None,
    ):
        """The output and the LSE (base 2) of the planned batch. A ``logits_soft_cap`` above 0 replaces that of the plan."""
        refuse("BatchAttention.run", profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        if self._planned is None:
            self._planned = PlannedAttention(planned_device(q))
            self._planned.plan(self._settings, self._batch)
        settings = self._settings
        if logits_soft_cap and logits_soft_cap != settings.soft_cap:
            settings = settings.replace(soft_cap=logits_soft_cap)
        kv = run_cache(kv_cache, self._kv_layout)
        return self._planned.run(settings, q, kv, out, lse=lse, return_lse=True, scales=(None, k_scale, v_scale))


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill and decode with one more logit per query head: ``run(q, cache, sink, sm_scale)``. The encoding is that of the
    constructor; its dtypes, dimensions and window have no effect, because those of ``plan`` count."""

    _name = "BatchAttentionWithAttentionSinkWrapper"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        head_dim_qk=128, head_dim_vo=128, window_left=-1,
    ):
        check_backend(self._name, backend)
        refuse(self._name, use_fp16_qk_reduction=use_fp16_qk_reduction)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )
        self._sink_encoding = pos_encoding_mode
        self._has_sinks = True

    def run(self, q, paged_kv_cache, *args, **options):
        """The output of the planned batch. ``args``: the sinks ``[num_qo_heads]`` and the scale of the logits."""
        self._pos_encoding_mode = self._sink_encoding
        return super().run(q, paged_kv_cache, *args, **options)
