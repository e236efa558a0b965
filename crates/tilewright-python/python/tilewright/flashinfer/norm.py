"""RMSNorm and its fusions."""

import torch

from .. import operators
from ._refuse import check_output


def _normed(function, input, weight, eps, out, gemma):
    if out is None:
        out = torch.empty_like(input)
    else:
        check_output(function, "out", out, input.shape, input.dtype, input.device)
    operators.rmsnorm(input, weight, eps, gemma=gemma, out=out)
    return out


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """``input · rsqrt(mean(input²) + eps) · weight`` over the last axis of a tensor of 2 or 3 axes."""
    return _normed("rmsnorm", input, weight, eps, out, False)


def gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """:func:`rmsnorm` with the factor ``1 + weight``."""
    return _normed("gemma_rmsnorm", input, weight, eps, out, True)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """``residual += input``, then ``input = rmsnorm(residual)``, in place."""
    operators.fused_add_rmsnorm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """:func:`fused_add_rmsnorm` with the factor ``1 + weight``."""
    operators.fused_add_rmsnorm(input, residual, weight, eps, gemma=True)
