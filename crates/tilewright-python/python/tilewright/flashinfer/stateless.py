"""Stateless attention over block tables with lengths on the device, without ``plan``.

1. A plan per shape of the call and ``workspace_buffer`` is made by the first call, which allocates; make it before a capture.
2. Each call plans the current lengths with one launch, which a CUDA graph can record, and runs. Nothing waits for the GPU.
3. Partial states are in ``workspace_buffer``, so calls on two streams need two buffers, as in FlashInfer. The caller keeps the
   buffer alive while a recorded graph is replayed.
"""

import math

import torch

from .._core import Error
from .._tensors import dtype_name
from ..attention import BlockTable, Capacity, DeviceBatch
from ._drafts import draft_tables
from ._pages import split_cache
from ._planned import Settings, check_output_dtype, dtype_names, planned_device, sinks_of
from ._refuse import check_choice, check_layout, check_output, number, output_scale, refuse

#: Plans kept for calls of the same shape. Those of recorded graphs are kept for good.
_LIMIT = 1024
_plans: dict = {}
_recorded: dict = {}


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
    out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None, backend="auto",
    q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None,
    kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, bmm1_scale_log2=None,
    multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, bf16q_fp8kv_transform_mode=None,
):
    """Attention of the last rows of each request over a paged cache, causal unless ``mask`` says otherwise.

    ``query`` ``[num_tokens, num_qo_heads, head_dim]``: ``q_len_per_req`` rows per request, or ``cum_seq_lens_q`` bounds with at
    most ``max_q_len``. ``kv_cache``: keys and values ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND), a pair or one
    tensor with both along axis 1. ``block_tables`` ``[batch_size, max_pages]``, ``seq_lens`` ``[batch_size]``. ``bmm1_scale``
    is the factor of ``q · k``, ``bmm2_scale`` that of outputs, over the scale of outputs of e4m3: numbers, or tensors of one
    element, which stay on the GPU. Outputs have ``out_dtype``, by default that of ``out`` or of queries. Returns the output, or
    ``(output, lse)`` in base 2. ``mask``, uint16 ``[rows, ceil(q_len_per_req / 32) · 2]``: bit ``j`` of a row shows draft token
    ``j`` of its request, and all keys before the drafts are visible; it is not read if requests have one row. ``max_seq_len``,
    ``enable_pdl``, ``backend``, ``o_scale``, ``multi_ctas_kv_counter_buffer`` and ``bf16q_fp8kv_transform_mode`` are hints without
    effect.
    """
    function = "trtllm_batch_decode_with_kv_cache"
    check_choice(function, "backend", backend, ("auto", "xqa", "trtllm-gen"))
    refuse(function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
           skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, bmm1_scale_log2=bmm1_scale_log2,
           enable_block_sparse_attention=enable_block_sparse_attention)
    refuse(function, "True", uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else "False")
    output_scale(function, "o_scale", o_scale)
    if (max_q_len is None) != (cum_seq_lens_q is None):
        raise Error(f"flashinfer.{function}: max_q_len = {max_q_len}, expected it together with cum_seq_lens_q")
    rows = (cum_seq_lens_q, max_q_len) if cum_seq_lens_q is not None else (None, q_len_per_req)
    return attend_pages(function, (query, kv_cache, workspace_buffer), (block_tables, seq_lens, rows), kv_layout=kv_layout,
                        scales=(bmm1_scale, bmm2_scale), window_left=window_left, sinks=sinks, mask=mask,
                        outputs=(out, lse, return_lse, out_dtype))


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size,
    cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
    kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False, multi_ctas_kv_counter_buffer=None,
    use_fp16_softmax=None, uses_spcompress=None,
):
    """Attention of the last rows of each request over a paged cache: prefill, or append to a cached context.

    ``query`` ``[cum_seq_lens_q[-1], num_qo_heads, head_dim]``; ``cum_seq_lens_q`` ``[batch_size + 1]`` bounds of at most
    ``max_q_len`` rows. The cache, ``block_tables``, ``seq_lens``, the scales, outputs and hints are those of
    :func:`trtllm_batch_decode_with_kv_cache`. Rows are causal bottom-right, or see all keys of their request with
    ``causal=False``. ``max_kv_len`` and ``cum_seq_lens_kv`` repeat what ``seq_lens`` says and are not read.
    """
    function = "trtllm_batch_context_with_kv_cache"
    refuse(function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
           skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, use_fp16_softmax=use_fp16_softmax,
           uses_spcompress=uses_spcompress)
    refuse(function, "True", uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else "False")
    if not causal and window_left >= 0:
        refuse(function, "-1 with causal = False", window_left=window_left)
    for name, count in (("seq_lens", seq_lens.shape[0]), ("cum_seq_lens_q", cum_seq_lens_q.shape[0] - 1)):
        if count != batch_size:
            raise Error(f"flashinfer.{function}: {name} has {count} requests, expected batch_size = {batch_size}")
    return attend_pages(function, (query, kv_cache, workspace_buffer), (block_tables, seq_lens, (cum_seq_lens_q, max_q_len)),
                        kv_layout=kv_layout, scales=(bmm1_scale, bmm2_scale), window_left=window_left, sinks=sinks,
                        outputs=(out, lse, return_lse, out_dtype), causal=causal)


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
    out=None, sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None,
    q_cu_seq_lens=None,
):
    """:func:`trtllm_batch_decode_with_kv_cache` with ``NHD`` by default; ``q_cu_seq_lens`` are bounds of at most
    ``q_len_per_req`` rows, and rows of ``mask`` follow them."""
    function = "xqa_batch_decode_with_kv_cache"
    refuse(function, kv_cache_sf=kv_cache_sf)
    output_scale(function, "o_scale", o_scale)
    return attend_pages(function, (query, kv_cache, workspace_buffer),
                        (block_tables, seq_lens, (q_cu_seq_lens, q_len_per_req)), kv_layout=kv_layout,
                        scales=(bmm1_scale, bmm2_scale), window_left=window_left, sinks=sinks, mask=mask,
                        outputs=(out, None, False, None))


def attend_pages(function, tensors, lengths, *, kv_layout, scales, window_left, sinks, outputs, causal=True, mask=None,
                 soft_cap=None, pos_encoding_mode="NONE", chunk=0):
    """Attention over block tables. ``tensors``: queries, cache and workspace. ``lengths``: ``block_tables``, ``seq_lens``, and
    ``(bounds, maximum)`` of query rows, or ``(None, rows)`` per request. ``scales`` of logits and outputs. ``outputs``:
    ``out``, ``lse``, ``return_lse`` and ``out_dtype``. ``mask``: packed bits of draft tokens, as
    :func:`xqa_batch_decode_with_kv_cache` has them."""
    (query, kv_cache, workspace), (block_tables, seq_lens, (bounds, qo_len)) = tensors, lengths
    check_layout(function, kv_layout)
    keys, values = split_cache(function, kv_cache, kv_layout)
    head_axis, page_axis = (2, 1) if kv_layout == "NHD" else (1, 2)
    heads, page_size = keys.shape[head_axis], keys.shape[page_axis]
    requests, rows = seq_lens.shape[0], query.shape[0]
    if bounds is None and rows != requests * qo_len:
        raise Error(f"flashinfer.{function}: query has {rows} rows, expected batch_size * q_len_per_req = {requests * qo_len}")
    out, lse, return_lse, out_dtype = outputs
    dtypes = dtype_names(query.dtype, keys.dtype, out_dtype if out is None else out.dtype)
    check_output_dtype(function, dtypes, "out_dtype" if out is None else "out")
    if out_dtype is not None and dtype_name(out_dtype) != dtypes[0]:
        raise Error(f"flashinfer.{function}: out is {out.dtype}, expected out_dtype = {dtype_name(out_dtype)}")
    settings = Settings(heads=(query.shape[1], heads), dims=(query.shape[2], values.shape[3]), layout=kv_layout, causal=causal,
                        dtypes=dtypes, window_left=window_left, soft_cap=soft_cap, chunk=chunk,
                        pos_encoding_mode=pos_encoding_mode, sinks=sinks is not None)
    device = planned_device(query)
    batch = DeviceBatch(qo_len if bounds is None else bounds, BlockTable(block_tables, seq_lens, page_size))
    tables = sinks_of(sinks, query) or {}
    if mask is not None and qo_len > 1:  # a single row sees itself
        drafts, bound = draft_tables(function, mask, bounds, qo_len, seq_lens, rows)
        settings, tables = settings.replace(causal=False, drafts=drafts), {**tables, **bound}
    operator = settings.operator(device)
    key = settings.plan_key(), requests, rows, qo_len, page_size, bounds is None
    plan = plan_lengths(operator, batch, key, workspace, Capacity(requests, rows, 0, qo_len=qo_len))
    if out is not None:
        check_output(function, "out", out, (*query.shape[:2], values.shape[3]), out.dtype, query.device)
    factors = [_factor(function, name, scale, times, query.device) for name, scale, times in
               (("bmm1_scale", scales[0], math.sqrt(query.shape[2])), ("bmm2_scale", scales[1], 1.0))]
    return operator.run(plan, query, keys, values, out=out, lse=lse, return_lse=return_lse, k_scale=factors[0],
                        v_scale=factors[1], tables=tables)


class _Borrowed:
    """The memory of a tensor on a GPU, which it does not keep alive."""

    __slots__ = ("__cuda_array_interface__", "device", "id", "shape")

    def __init__(self, tensor):
        self.device, self.id, self.shape = self, tensor.get_device(), (tensor.nbytes,)
        self.__cuda_array_interface__ = {"data": (tensor.data_ptr(), False), "shape": self.shape, "typestr": "|u1", "version": 3}


def plan_lengths(operator, batch, key, workspace, capacity):
    """The plan of calls with this key, workspace and stream, with the current lengths. It borrows ``workspace``: the next call of
    the plan has the same address and size, and what runs leave there is not used."""
    device = operator.device
    key = (workspace.data_ptr(), workspace.nbytes, device.current_stream(), id(device), *key)
    plan = _recorded.get(key) or _plans.get(key)
    if plan is None:
        on_host = device.name == "cpu"
        memory = None if on_host else _Borrowed(workspace) if workspace.is_cuda else workspace
        plan = operator.plan(batch, capacity=None if on_host else capacity, workspace=memory)
        if len(_plans) >= _LIMIT:
            del _plans[next(iter(_plans))]
        _plans[key] = plan
    else:
        operator.replan(plan, batch)
    if workspace.is_cuda and torch.cuda.is_current_stream_capturing():
        _recorded[key] = plan
    return plan


def _factor(function, name, scale, times, device):
    """A scale as a number, or as a tensor of one element on the device of the queries."""
    if isinstance(scale, torch.Tensor) and scale.numel() == 1 and scale.device == device:
        return scale.detach().reshape(1).float() * times
    factor = number(function, name, scale) * times
    return None if abs(factor - 1.0) < 1e-6 else factor
