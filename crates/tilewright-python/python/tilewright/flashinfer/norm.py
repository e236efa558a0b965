"""RMSNorm, its fusions, and layer norm."""

import torch
from torch.nn import functional

from .. import operators
from .._core import Error
from ._compiled import is_compiling, operator
from ._refuse import check_choice, check_output, one_number, refuse
from .diffusion_ops import (  # noqa: F401
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
    fused_qk_rmsnorm_rope,
)


@operator("rmsnorm(Tensor input, Tensor weight, float eps, bool gemma, Tensor(a!) out)")
def _rmsnorm(input, weight, eps, gemma, out):
    operators.rmsnorm(input, weight, eps, gemma=gemma, out=out)


@operator("fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool gemma)")
def _fused_add_rmsnorm(input, residual, weight, eps, gemma):
    operators.fused_add_rmsnorm(input, residual, weight, eps, gemma=gemma)


@operator("rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor weight, Tensor scale, float eps)")
def _rmsnorm_quant(out, input, weight, scale, eps):
    operators.rmsnorm(input, weight, eps, scale=scale, out=out)


@operator("fused_add_rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, Tensor scale, float eps)")
def _fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps):
    operators.fused_add_rmsnorm(input, residual, weight, eps, scale=scale, out=out)


@operator("layer_norm(Tensor input, Tensor weight, Tensor bias, Tensor? scale, float eps, Tensor(a!) out)")
def _layer_norm(input, weight, bias, scale, eps, out):
    operators.layer_norm(input, weight, bias, eps, scale=scale, out=out)


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


def rmsnorm_quant(out, input, weight, scale, eps=1e-6, enable_pdl=None):
    """:func:`rmsnorm` divided by ``scale``, a number or a tensor of one, in the 8 bits of ``out``."""
    scale = one_number("rmsnorm_quant", "scale", scale, input)
    if is_compiling():
        _rmsnorm_quant(out, input, weight, scale, eps)
    else:
        operators.rmsnorm(input, weight, eps, scale=scale, out=out)


def fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps=1e-6, enable_pdl=None):
    """``residual += input``, then ``out = rmsnorm(residual) / scale`` in 8 bits. ``input`` is only read."""
    scale = one_number("fused_add_rmsnorm_quant", "scale", scale, input)
    if is_compiling():
        _fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps)
    else:
        operators.fused_add_rmsnorm(input, residual, weight, eps, scale=scale, out=out)


def _layer_normed(input, gemma, beta, scale, eps, out):
    if is_compiling():
        _layer_norm(input, gemma, beta, scale, eps, out)
    else:
        operators.layer_norm(input, gemma, beta, eps, scale=scale, out=out)


def layernorm(input, gemma, beta, eps=1e-6):
    """``(input - mean) · rsqrt(var + eps) · gemma + beta`` over the last axis."""
    out = torch.empty_like(input)
    _layer_normed(input, gemma, beta, None, eps, out)
    return out


def layernorm_quant(out, input, gemma, beta, scale, eps=1e-6):
    """:func:`layernorm` divided by ``scale`` in the 8 bits of ``out``."""
    _layer_normed(input, gemma, beta, one_number("layernorm_quant", "scale", scale, input), eps, out)


def fused_rmsnorm_silu(input, weight, eps=1e-6, out=None, block_scale=None):
    """``silu(rmsnorm(input))`` of ``input`` ``[rows, hidden]`` and ``weight`` ``[hidden]`` of bfloat16, through torch, in float32 and
    rounded once: to bfloat16, or with ``out`` of float8_e4m3fn to 8 bits, saturated. ``block_scale`` is for 4 bits."""
    function = "fused_rmsnorm_silu"
    refuse(function, block_scale=block_scale)
    if input.dtype != torch.bfloat16 or input.dim() != 2:
        raise Error(f"flashinfer.{function}: input is {input.dtype} of shape {tuple(input.shape)}, expected bfloat16 [rows, hidden]")
    if weight.dtype != torch.bfloat16 or weight.shape != input.shape[1:]:
        raise Error(f"flashinfer.{function}: weight is {weight.dtype} of shape {tuple(weight.shape)}, expected bfloat16 "
                    f"[{input.shape[1]}]")
    out = torch.empty_like(input) if out is None else out
    check_choice(function, "out.dtype", out.dtype, (torch.bfloat16, torch.float8_e4m3fn))
    check_output(function, "out", out, input.shape, out.dtype, input.device)
    x = functional.silu(functional.rms_norm(input.float(), input.shape[1:], weight.float(), eps), inplace=True)
    return out.copy_(x if out.dtype == torch.bfloat16 else x.clamp_(-448.0, 448.0))
