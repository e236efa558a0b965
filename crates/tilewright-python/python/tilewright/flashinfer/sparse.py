"""Block-sparse attention of one request."""

import numpy
import torch

from .._core import Error
from ..attention import Batch
from ._pages import host_array, page_table
from ._planned import E5M2, FP8, PlannedAttention, Settings, check_output_dtype, dtype_names, planned_device
from ._refuse import check_backend, refuse
from .prefill import packed_bytes


class _SparseWrapper:
    """Buffers, settings and runs of both wrappers."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        check_backend(type(self).__name__, backend)
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._attention = self._settings = None
        #: Whether block rows are planned as requests of their own, over pages of a block column.
        self._has_requests = False

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps another buffer; plans own their memory."""
        self._float_workspace_buffer = float_workspace_buffer

    def _schedule(self, settings, batch, has_requests):
        self._settings, self._has_requests = settings, has_requests
        self._attention = PlannedAttention(planned_device(self._float_workspace_buffer))
        self._attention.plan(settings, batch)

    def _run(self, q, k, v, out, lse, return_lse, scales=(None, None, None)):
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        return self._attention.run(self._settings, q, (k, v), out, lse=lse, return_lse=return_lse, scales=scales)

    def _override(self, pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta):
        """Replaces settings of the plan, for later runs too."""
        function = f"{type(self).__name__}.forward"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction)
        if self._settings is None:
            raise Error(f"flashinfer.{function}: plan() has not been called")
        self._settings = self._settings.replace(
            pos_encoding_mode=pos_encoding_mode, soft_cap=logits_soft_cap or 0.0, sm_scale=sm_scale, rope_scale=rope_scale or 1.0,
            rope_theta=rope_theta or 1e4,
        )

    def end_forward(self):
        """Does nothing, as in FlashInfer."""


class BlockSparseAttentionWrapper(_SparseWrapper):
    """Blocks of ``(R, C)`` rows and keys (BSR). With ``causal``, ``packed_mask`` or an incomplete last block row, each block row is a
    request whose keys are those of its blocks."""

    def plan(
        self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type="float16", non_blocking=True, block_mask=None,
    ):
        """Plans ``M`` rows over ``N`` keys. ``mask``: bool ``[nnz, R, C]`` inside blocks. ``packed_mask`` replaces it: little-endian
        bits of ``[rows, keys of its blocks]`` per block row, each from a new byte. Without masks, ``causal`` aligns the last row of a
        block row with the last key of its last block. ``o_data_type`` must be ``q_data_type`` or its default; for queries of 8 bits
        float16, bfloat16 or float8_e4m3fn."""
        function = "BlockSparseAttentionWrapper.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction, block_mask=block_mask)
        dtypes = dtype_names(q_data_type, kv_data_type)
        if dtypes[0] in (FP8, E5M2):
            dtypes = dtype_names(q_data_type, kv_data_type, o_data_type)
            check_output_dtype(function, dtypes)
        elif dtype_names(o_data_type, None)[0] not in (dtypes[0], "float16"):
            refuse(function, f"q_data_type = {dtypes[0]}", o_data_type=o_data_type)
        if len(indptr) - 1 != -(-M // R):
            raise Error(f"flashinfer.{function}: indptr has {len(indptr)} bounds, expected M / R + 1 = {-(-M // R) + 1}")
        settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim, head_dim), dtypes=dtypes, layout="NHD",
            causal=causal and mask is None and packed_mask is None, soft_cap=logits_soft_cap, sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        self._columns = C
        has_requests = packed_mask is not None or (mask is None and (causal or M % R != 0))
        if has_requests:
            bounds = (R * torch.arange(len(indptr))).clamp(max=M)
            table = page_table(indptr, indices, torch.full((len(indptr) - 1,), C), C)
            batch = Batch.paged(bounds, table, mask=None if packed_mask is None else packed_bytes(packed_mask))
        else:
            batch = Batch.block_sparse(host_array(indptr), host_array(indices), (R, C), N, None if mask is None else mask.bool())
        self._schedule(settings, batch, has_requests)

    begin_forward = plan

    def run(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None
    ):
        """Attention of the planned blocks: ``q`` ``[M, num_qo_heads, head_dim]``, ``k``, ``v`` ``[N, num_kv_heads,
        head_dim]``; scales are numbers or tensors of one per head."""
        return self._run(q, *self._pages(k, v), out, lse, return_lse, scales=(scale_q, scale_k, scale_v))

    def _pages(self, *tensors):
        """Keys and values, as pages if block rows are requests."""
        return (x.unflatten(0, (-1, self._columns)) for x in tensors) if self._has_requests else tensors

    def forward(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own, which replace those of the plan."""
        self._override(pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(_SparseWrapper):
    """Blocks of variable size per KV head. Tensors are ``[heads, tokens, head_dim]``. With ``causal``, each block row of a KV head is
    a request whose keys are those of its blocks; ALiBi then has the slopes of ``num_qo_heads / num_kv_heads`` heads, as in
    FlashInfer."""

    def plan(
        self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None,
    ):
        """Plans the blocks of ``block_mask_map`` bool ``[num_kv_heads, block_rows, block_columns]``. ``causal`` aligns the last row of a
        block row with the last key of its last block."""
        function = "VariableBlockSparseAttentionWrapper.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction)
        heads = (num_qo_heads // num_kv_heads, 1) if causal else (num_qo_heads, num_kv_heads)
        settings = Settings(
            heads=heads, dims=(head_dim, head_dim), dtypes=dtype_names(q_data_type, kv_data_type), layout="HND", causal=causal,
            soft_cap=logits_soft_cap, sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        blocks = host_array(block_mask_map.bool()), host_array(block_row_sz), host_array(block_col_sz)
        if causal:
            if num_qo_heads % num_kv_heads != 0:
                raise Error(f"flashinfer.{function}: num_qo_heads = {num_qo_heads}, expected a multiple of num_kv_heads = {num_kv_heads}")
            batch = _requests_of_heads(function, num_kv_heads, *blocks)
        else:
            batch = Batch.variable_block_sparse(*blocks)
        self._schedule(settings, batch, causal)

    begin_forward = plan

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None):
        """Attention of the planned blocks: ``q`` ``[num_qo_heads, qo_len, head_dim]``, ``k``, ``v`` ``[num_kv_heads, kv_len,
        head_dim]``; the output is as ``q``, the LSE ``[num_qo_heads, qo_len]``."""
        # one set of rows, or one per KV head
        sets = k.shape[0] if self._has_requests else 1
        if self._has_requests:
            k, v = (x.reshape(-1, 1, 1, x.shape[2]) for x in (k, v))
        grouped = q.unflatten(0, (sets, -1)).transpose(1, 2).flatten(0, 1)
        rows = torch.empty((*grouped.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
        result = self._run(grouped, k, v, rows, None, return_lse)
        o, states = (x if x is None else x.unflatten(0, (sets, -1)).transpose(1, 2).flatten(0, 1)
                     for x in (result if return_lse else (result, None)))
        o = o.contiguous() if out is None else out.copy_(o)
        if not return_lse:
            return o
        return o, states.contiguous() if lse is None else lse.copy_(states)

    def forward(
        self, q, k, v, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own, which replace those of the plan."""
        self._override(pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v)


def _requests_of_heads(function, num_kv_heads, blocks, row_sizes, column_sizes):
    """The block rows of all KV heads as requests over pages of one token."""
    expected = num_kv_heads, row_sizes.shape[-1], column_sizes.shape[-1]
    if blocks.shape != expected or row_sizes.shape != expected[:2] or column_sizes.shape != (num_kv_heads, expected[2]):
        raise Error(f"flashinfer.{function}: block_mask_map, block_row_sz and block_col_sz have shapes {blocks.shape}, "
                    f"{row_sizes.shape} and {column_sizes.shape}, expected {expected}, {expected[:2]} and {expected[::2]}")
    for name, sizes in (("block_row_sz", row_sizes), ("block_col_sz", column_sizes)):
        if (sizes < 0).any() or len(set(sizes.sum(1).tolist())) > 1:
            raise Error(f"flashinfer.{function}: {name} = {sizes.tolist()}, expected sizes of at least 0 with equal sums")
    first, keys = 0, []
    for head, sizes in enumerate(column_sizes):
        keys += [first + numpy.flatnonzero(numpy.repeat(row, sizes)) for row in blocks[head]]
        first += int(sizes.sum())
    indptr = numpy.cumsum([0, *map(len, keys)], dtype=numpy.int32)
    indices = numpy.concatenate(keys).astype(numpy.int32)
    bounds = numpy.concatenate([[0], row_sizes.reshape(-1).cumsum()])
    return Batch.paged(bounds, page_table(indptr, indices, numpy.ones(len(keys), dtype=numpy.int32), 1))
