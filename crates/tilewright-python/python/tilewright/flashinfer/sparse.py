"""Block-sparse attention of one request."""

import torch

from .._core import Error
from ..attention import Batch
from ._pages import host_array
from ._planned import E5M2, FP8, PlannedAttention, Settings, check_output_dtype, dtype_names, planned_device
from ._refuse import check_backend, refuse


class _SparseWrapper:
    """Buffers, settings and runs of both wrappers."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        check_backend(type(self).__name__, backend)
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._attention = self._settings = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps another buffer; plans own their memory."""
        self._float_workspace_buffer = float_workspace_buffer

    def _schedule(self, settings, batch):
        self._settings = settings
        self._attention = PlannedAttention(planned_device(self._float_workspace_buffer))
        self._attention.plan(settings, batch)

    def _run(self, q, k, v, out, lse, return_lse, changes=None, scales=(None, None, None)):
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        settings = self._settings.replace(**changes) if changes else self._settings
        return self._attention.run(settings, q, (k, v), out, lse=lse, return_lse=return_lse, scales=scales)

    def end_forward(self):
        """Does nothing, as in FlashInfer."""


def _changes(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta):
    return {"pos_encoding_mode": pos_encoding_mode, "soft_cap": logits_soft_cap or 0.0, "sm_scale": sm_scale,
            "rope_scale": rope_scale or 1.0, "rope_theta": rope_theta or 1e4}


class BlockSparseAttentionWrapper(_SparseWrapper):
    """Blocks of ``(R, C)`` rows and keys (BSR)."""

    def plan(
        self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type="float16", non_blocking=True, block_mask=None,
    ):
        """Plans ``M`` rows over ``N`` keys. ``mask``: bool ``[nnz, R, C]`` inside blocks. ``o_data_type`` must be
        ``q_data_type`` or its default; for queries of 8 bits float16, bfloat16 or float8_e4m3fn."""
        function = "BlockSparseAttentionWrapper.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction, packed_mask=packed_mask, block_mask=block_mask,
               causal=causal)
        dtypes = dtype_names(q_data_type, kv_data_type)
        if dtypes[0] in (FP8, E5M2):
            dtypes = dtype_names(q_data_type, kv_data_type, o_data_type)
            check_output_dtype(function, dtypes)
        elif dtype_names(o_data_type, None)[0] not in (dtypes[0], "float16"):
            refuse(function, f"q_data_type = {dtypes[0]}", o_data_type=o_data_type)
        if len(indptr) - 1 != -(-M // R):
            raise Error(f"flashinfer.{function}: indptr has {len(indptr)} bounds, expected M / R + 1 = {-(-M // R) + 1}")
        settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim, head_dim), dtypes=dtypes, layout="NHD", causal=False,
            soft_cap=logits_soft_cap, sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        self._schedule(settings, Batch.block_sparse(host_array(indptr), host_array(indices), (R, C), N, mask))

    begin_forward = plan

    def run(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None
    ):
        """Attention of the planned blocks: ``q`` ``[M, num_qo_heads, head_dim]``, ``k``, ``v`` ``[N, num_kv_heads,
        head_dim]``; scales are numbers or tensors of one per head."""
        return self._run(q, k, v, out, lse, return_lse, scales=(scale_q, scale_k, scale_v))

    def forward(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own."""
        refuse("BlockSparseAttentionWrapper.forward", use_fp16_qk_reduction=use_fp16_qk_reduction)
        return self._run(q, k, v, None, None, False,
                         _changes(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta),
                         (scale_q, scale_k, scale_v))


class VariableBlockSparseAttentionWrapper(_SparseWrapper):
    """Blocks of variable size per KV head. Tensors are ``[heads, tokens, head_dim]``."""

    def plan(
        self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None,
    ):
        """Plans the blocks of ``block_mask_map`` bool ``[num_kv_heads, block_rows, block_columns]``."""
        refuse("VariableBlockSparseAttentionWrapper.plan", use_fp16_qk_reduction=use_fp16_qk_reduction, causal=causal)
        settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim, head_dim), dtypes=dtype_names(q_data_type, kv_data_type),
            layout="HND", causal=False, soft_cap=logits_soft_cap, sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )
        batch = Batch.variable_block_sparse(host_array(block_mask_map.bool()), host_array(block_row_sz), host_array(block_col_sz))
        self._schedule(settings, batch)

    begin_forward = plan

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None):
        """Attention of the planned blocks: ``q`` ``[num_qo_heads, qo_len, head_dim]``, ``k``, ``v`` ``[num_kv_heads, kv_len,
        head_dim]``; the output is as ``q``, the LSE ``[num_qo_heads, qo_len]``."""
        rows = torch.empty((q.shape[1], q.shape[0], v.shape[2]), dtype=q.dtype, device=q.device)
        result = self._run(q.transpose(0, 1), k, v, rows, None, return_lse)
        o, states = result if return_lse else (result, None)
        o = o.transpose(0, 1).contiguous() if out is None else out.copy_(o.transpose(0, 1))
        if not return_lse:
            return o
        return o, states.t().contiguous() if lse is None else lse.copy_(states.t())

    def forward(
        self, q, k, v, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own."""
        refuse("VariableBlockSparseAttentionWrapper.forward", use_fp16_qk_reduction=use_fp16_qk_reduction)
        if self._settings is None:
            raise Error("flashinfer.VariableBlockSparseAttentionWrapper.forward: plan() has not been called")
        changes = _changes(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        planned, self._settings = self._settings, self._settings.replace(**changes)
        try:
            return self.run(q, k, v)
        finally:
            self._settings = planned
