"""RMSNorm and its fusions."""

import torch

from .. import operators
from ._compiled import is_compiling, operator
from ._refuse import check_output


@operator("rmsnorm(Tensor input, Tensor weight, float eps, bool gemma, Tensor(a!) out)")
def _rmsnorm(input, weight, eps, gemma, out):
    operators.rmsnorm(input, weight, eps, gemma=gemma, out=out)


@operator("fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool gemma)")
def _fused_add_rmsnorm(input, residual, weight, eps, gemma):
    operators.fused_add_rmsnorm(input, residual, weight, eps, gemma=gemma)


def _normed(function, input, weight, eps, out, gemma):
    if out is None:
        out = torch.empty_like(input)
    else:
        check_output(function, "out", out, input.shape, input.dtype, input.device)
    if is_compiling():
        _rmsnorm(input, weight, eps, gemma, out)
    else:
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
    if is_compiling():
        _fused_add_rmsnorm(input, residual, weight, eps, False)
    else:
        operators.fused_add_rmsnorm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """:func:`fused_add_rmsnorm` with the factor ``1 + weight``."""
    if is_compiling():
        _fused_add_rmsnorm(input, residual, weight, eps, True)
    else:
        operators.fused_add_rmsnorm(input, residual, weight, eps, gemma=True)
