"""Attention states and cascades: merges of outputs by their LSE, and attention over shared prefixes."""

import torch

from .. import attention
from .._core import Error
from ..attention import Batch, Capacity, Level
from ._pages import host_array, page_table, run_cache
from ._planned import PlannedAttention, Settings, dtype_names, planned_device
from ._refuse import check_layout, refuse
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


def merge_state(v_a, s_a, v_b, s_b):
    """Merges two states: ``v`` ``[rows, heads, dim]``, ``s`` ``[rows, heads]`` float32 in base 2. Returns ``(v, s)``."""
    v, s = v_a.clone(), s_a.to(torch.float32, copy=True)
    attention.merge_state(v, s, v_b, s_b.float())
    return v, s


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges a second state into the first, in place. Rows whose ``mask`` is 0 stay."""
    attention.merge_state(v, s, v_other, s_other, mask=None if mask is None else mask.bool())


def merge_states(v, s):
    """Merges all states of each row: ``v`` ``[rows, num_states, heads, dim]``, ``s`` ``[rows, num_states, heads]``."""
    return attention.merge_states(v, s.float())


class MultiLevelCascadeAttentionWrapper:
    """Attention over shared prefixes: level 0 is shared by the largest groups, the last level is each request's own keys. All
    levels are pages of one cache, and one plan schedules them together."""

    def __init__(
        self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None,
    ):
        check_layout("MultiLevelCascadeAttentionWrapper", kv_layout)
        if num_levels < 1:
            raise Error(f"flashinfer.MultiLevelCascadeAttentionWrapper: num_levels = {num_levels}, expected at least 1")
        self._num_levels = num_levels
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._float_workspace_buffer = float_workspace_buffer
        self._buffers = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        if use_cuda_graph and any(buffers is None for buffers in self._buffers):
            raise ValueError("a CUDA graph needs the buffers of all levels")
        self._attention = None
        self._settings = None

    @property
    def is_cuda_graph_enabled(self):
        """Whether plans are rewritten in place."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffers):
        """Keeps another buffer; plans own their memory."""
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim, page_size, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,
        window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):
        """Plans a batch. ``causal`` is that of the last level; rows see all keys of the levels before it. Pages of those levels
        are full. ALiBi, RoPE and windows use positions that count through all levels."""
        function = "MultiLevelCascadeAttentionWrapper.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction)
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for values in arrays:
            if len(values) != self._num_levels:
                raise Error(f"flashinfer.{function}: {len(values)} arrays, expected one per level = {self._num_levels}")
        levels = []
        for qo_indptr, indptr, indices, last in list(zip(*arrays, strict=True))[:-1]:
            levels.append(Level(host_array(qo_indptr), page_table(indptr, indices, last, page_size)))
        own = page_table(paged_kv_indptr_arr[-1], paged_kv_indices_arr[-1], paged_kv_last_page_len[-1], page_size)
        bounds = host_array(qo_indptr_arr[-1])
        self._settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim, head_dim), dtypes=dtype_names(q_data_type, kv_data_type),
            layout=self._kv_layout, causal=causal, window_left=window_left, soft_cap=logits_soft_cap, sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        if self._attention is None or not self._use_cuda_graph:
            capacity = None
            if self._use_cuda_graph:
                pages = sum(len(buffer) for buffer in self._buffers[2])
                capacity = Capacity(len(bounds) - 1, int(bounds[-1]), pages, levels=self._num_levels - 1)
            self._attention = PlannedAttention(planned_device(self._float_workspace_buffer), capacity)
        self._attention.plan(self._settings, Batch.paged(bounds, own, levels=levels))

    begin_forward = plan

    def run(self, q, paged_kv_cache):
        """Attention of the planned batch: ``q`` ``[num_rows, num_qo_heads, head_dim]``."""
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        kv = run_cache(paged_kv_cache, self._kv_layout)
        return self._attention.run(self._settings, q, kv, None)

    forward = run


class _SharedPrefixWrapper:
    """One prefix shared by all requests, in tensors of its own, and each request's own pages."""

    def __init__(self, inner, kv_layout):
        self._inner = inner
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps other buffers; plans own their memory."""
        self._inner.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _merge(self, q, k_shared, v_shared, own, **options):
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True, **options)
        v, s = shared
        attention.merge_state(v, s, *own)
        return v

    def end_forward(self):
        """Does nothing, as in FlashInfer."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode with one prefix ``[kv_len, num_kv_heads, head_dim]`` shared by all requests."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        super().__init__(BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout)

    def begin_forward(
        self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        data_type="float16",
    ):
        """Plans the requests' own pages."""
        self._inner.plan(unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
                         page_size, q_data_type=data_type, kv_data_type=data_type)

    def forward(self, q, k_shared, v_shared, unique_kv_cache):
        """Attention over the prefix and the own pages: ``q`` ``[batch_size, num_qo_heads, head_dim]``."""
        own = self._inner.run(q, unique_kv_cache, return_lse=True)
        return self._merge(q, k_shared, v_shared, own, causal=False)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill with one prefix ``[kv_len, num_kv_heads, head_dim]`` shared by all requests."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        super().__init__(BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout)
        self._arrays = self._planned = None

    def begin_forward(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
        page_size,
    ):
        """Plans the requests' own pages; their dtype is that of the first run."""
        self._arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                        head_dim, page_size)
        self._planned = None

    def forward(
        self, q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, sm_scale=None,
        rope_scale=None, rope_theta=None,
    ):
        """Attention over the prefix and the own pages; ``causal`` is that of the own pages. ``rope_scale`` and ``rope_theta``
        have no effect without RoPE, as in FlashInfer."""
        refuse("BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward", use_fp16_qk_reduction=use_fp16_qk_reduction)
        if self._arrays is None:
            raise Error("flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward: begin_forward() has not been called")
        if self._planned != (q.dtype, k_shared.dtype, causal, sm_scale):
            self._planned = (q.dtype, k_shared.dtype, causal, sm_scale)
            self._inner.plan(*self._arrays, causal=causal, sm_scale=sm_scale, q_data_type=q.dtype, kv_data_type=k_shared.dtype)
        own = self._inner.run(q, unique_kv_cache, return_lse=True)
        return self._merge(q, k_shared, v_shared, own, causal=False, sm_scale=sm_scale)
