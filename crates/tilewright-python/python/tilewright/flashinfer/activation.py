"""Gated activations of a fused gate and up projection."""

import torch

from .. import operators
from ._compiled import is_compiling, operator
from ._refuse import check_output


@operator("gated_activation(str name, Tensor input, Tensor(a!) out)")
def _gated_activation(name, input, out):
    getattr(operators, name)(input, out=out)


def _gated(function, input, out):
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=input.dtype, device=input.device)
    else:
        check_output(function, "out", out, shape, input.dtype, input.device)
    # the operator has rows, the tensors any number of axes
    source = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    rows = out if out.dim() == 2 else out.view(-1, out.shape[-1])
    if is_compiling():
        _gated_activation(function, source, rows)
    else:
        getattr(operators, function)(source, out=rows)
    return out


def silu_and_mul(input, out=None, enable_pdl=None):
    """``silu(input[..., :d]) · input[..., d:]``"""
    return _gated("silu_and_mul", input, out)


def gelu_and_mul(input, out=None, enable_pdl=None):
    """``gelu(input[..., :d]) · input[..., d:]`` with the exact GELU."""
    return _gated("gelu_and_mul", input, out)


def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    """``gelu(input[..., :d]) · input[..., d:]`` with the tanh approximation."""
    return _gated("gelu_tanh_and_mul", input, out)
