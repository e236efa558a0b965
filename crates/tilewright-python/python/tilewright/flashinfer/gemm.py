"""Products with one weight per segment of rows."""

import torch

from .. import operators
from .._core import Error
from ._refuse import check_choice, check_output


class SegmentGEMMWrapper:
    """``y[s] = x[s] · weights[ids[s]]`` for segments of rows (LoRA, mixture of experts)."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        check_choice("SegmentGEMMWrapper", "backend", backend, ("auto", "sm80", "sm90"))
        self._float_workspace_buffer = float_workspace_buffer

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps another buffer, which is unused."""
        self._float_workspace_buffer = float_workspace_buffer

    def run(
        self, x, weights, batch_size, weight_column_major, out=None, seg_lens=None, seg_indptr=None, weight_indices=None
    ):
        """The products of ``batch_size`` segments: ``x`` ``[rows, d_in]``, ``weights`` ``[num_weights, d_in, d_out]``, or
        ``[num_weights, d_out, d_in]`` with ``weight_column_major``."""
        if (seg_lens is None) == (seg_indptr is None):
            raise ValueError("Either seg_lens or seg_indptr should be provided, and not both")
        if seg_indptr is None:
            seg_indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=seg_lens.device), seg_lens.long().cumsum(0)])
        if len(seg_indptr) != batch_size + 1:
            raise Error(f"flashinfer.SegmentGEMMWrapper.run: {len(seg_indptr)} bounds, expected batch_size + 1 = {batch_size + 1}")
        if not weight_column_major:
            weights = weights.transpose(1, 2).contiguous()
        if out is not None:
            check_output("SegmentGEMMWrapper.run", "out", out, (x.shape[0], weights.shape[1]), x.dtype, x.device)
        return operators.segment_gemm(x, weights, seg_indptr.int(), None if weight_indices is None else weight_indices.int(),
                                      out=out)

    forward = run
