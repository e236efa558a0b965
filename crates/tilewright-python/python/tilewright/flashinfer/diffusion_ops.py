"""Operators of diffusion transformers."""

import functools

import torch
from torch.nn import functional

from .. import operators
from .._core import Error
from ..operators import CosSinCache
from ._refuse import check_output, output_scale, refuse

__all__ = ["fused_dit_gate_residual_layernorm_gamma_beta", "fused_dit_gate_residual_layernorm_scale_shift",
           "fused_dit_residual_layernorm_scale_shift", "fused_qk_rmsnorm_rope"]
_FUNCTION = "fused_qk_rmsnorm_rope"


def fused_qk_rmsnorm_rope(
    qkv, q_weight, k_weight, *, ppf, pph, ppw, num_frame_channels, num_height_channels, num_width_channels, num_heads_q,
    num_heads_k, num_heads_v, head_dim, eps=1e-6, base=10000.0, interleave=True, factor=1.0, low=0.0, high=0.0,
    attention_factor=1.0, is_qk_norm=True, output_fp8=False, output_quant_scale=1.0, v_quant_scale=1.0, q_out=None, k_out=None,
    v_out=None,
):
    """RMSNorm of queries and of keys over all their heads, RoPE by the place of a patch, and a copy of values.

    ``qkv`` of bfloat16, ``[batch, seq_len, (num_heads_q + num_heads_k + num_heads_v) · head_dim]`` or ``[num_tokens, ...]``,
    ``seq_len = ppf · pph · ppw``. Channels of a head are ``num_frame_channels``, then those of height and width: each part
    rotates by its coordinate, with the frequencies ``base ** (-2i / channels)``. ``interleave`` pairs channels ``2i, 2i + 1``,
    else ``i, i + head_dim / 2``. YaRN: ``factor``, the ramp from ``low`` to ``high``, and ``attention_factor``.

    Returns queries, keys and values ``[..., num_heads, head_dim]`` of bfloat16, or with ``output_fp8`` of float8_e4m3fn, times
    ``output_quant_scale`` (values ``v_quant_scale``), rounded and saturated. Norms are rounded to bfloat16 before the rotation:
    they are two launches, the rotation one, and the copy one.
    """
    channels, patches = (num_frame_channels, num_height_channels, num_width_channels), (ppf, pph, ppw)
    heads = (num_heads_q, num_heads_k, num_heads_v)
    _check(qkv, (q_weight, k_weight), channels, patches, heads, head_dim)
    if factor == 1.0 and attention_factor != 1.0:
        raise Error(f"flashinfer.{_FUNCTION}: attention_factor = {attention_factor} with factor = 1.0, expected 1.0")
    scales = [output_scale(_FUNCTION, *one) for one in (("output_quant_scale", output_quant_scale), ("v_quant_scale", v_quant_scale))]
    dtype = torch.float8_e4m3fn if output_fp8 else torch.bfloat16
    results = []
    for name, out, count in (("q_out", q_out, num_heads_q), ("k_out", k_out, num_heads_k), ("v_out", v_out, num_heads_v)):
        shape = (*qkv.shape[:-1], count, head_dim)
        out = torch.empty(shape, dtype=dtype, device=qkv.device) if out is None else out
        check_output(_FUNCTION, name, out, shape, dtype, qkv.device)
        if not out.is_contiguous():
            raise Error(f"flashinfer.{_FUNCTION}: {name} has strides {out.stride()}, expected a contiguous tensor")
        results.append(out)
    outputs = [out.view(-1, *out.shape[-2:]) for out in results]
    flat = qkv.detach().view(-1, qkv.shape[-1])
    q, k, v = flat.split([count * head_dim for count in heads], dim=1)
    if is_qk_norm:
        wide = [torch.empty_like(out, dtype=torch.bfloat16) if output_fp8 else out for out in outputs[:2]]
        for x, weight, to in ((q, q_weight, wide[0]), (k, k_weight, wide[1])):
            operators.rmsnorm(x, weight.detach().reshape(-1), eps, out=to.view(len(flat), -1))
        q, k = wide
    else:
        q, k = (x.unflatten(1, (-1, head_dim)) for x in (q, k))
    v = v.unflatten(1, (-1, head_dim))
    places = _tables(channels, patches, float(base), (float(factor), float(low), float(high), float(attention_factor)), qkv.device)
    table = CosSinCache(places, interleaved=interleave)
    positions = torch.arange(len(flat), dtype=torch.int32, device=qkv.device) % len(places)
    if output_fp8:
        factor = scales[0]
        if isinstance(factor, torch.Tensor):  # on a GPU, and not read
            (q, k), factor = (x.float() * factor for x in (q, k)), 1.0
        operators.apply_rope_quantized(q, k, positions, table, tuple(outputs[:2]), scales=(1.0 / factor,) * 2)
        outputs[2].copy_((v.float() * scales[1]).clamp_(-448.0, 448.0))
    else:
        operators.apply_rope(q, k, positions, table, out=tuple(outputs[:2]))
        outputs[2].copy_(v)
    return tuple(results)


def _check(qkv, weights, channels, patches, heads, head_dim):
    """Rejects shapes and dtypes that do not fit together."""
    def unless(is_right, found, expected):
        if not is_right:
            raise Error(f"flashinfer.{_FUNCTION}: {found}, expected {expected}")

    shape = f"qkv is {qkv.dtype} of shape {tuple(qkv.shape)}"
    unless(qkv.dtype == torch.bfloat16 and qkv.dim() in (2, 3) and qkv.is_contiguous(), shape, "contiguous bfloat16 of 2 or 3 axes")
    unless(head_dim in (64, 128, 256), f"head_dim = {head_dim}", "64, 128 or 256")
    unless(qkv.shape[-1] == sum(heads) * head_dim, shape, f"rows of {sum(heads)} heads of {head_dim}")
    unless(all(n > 0 and n % 2 == 0 for n in channels) and sum(channels) == head_dim,
           f"channels of frame, height and width = {channels}", f"even numbers with the sum head_dim = {head_dim}")
    unless(min(patches) > 0, f"ppf, pph, ppw = {patches}", "counts above 0")
    length = patches[0] * patches[1] * patches[2]
    is_whole = qkv.shape[1] == length if qkv.dim() == 3 else qkv.shape[0] % length == 0
    unless(is_whole, shape, f"sequences of ppf * pph * ppw = {length} tokens")
    for name, weight, count in (("q_weight", weights[0], heads[0]), ("k_weight", weights[1], heads[1])):
        unless(weight.dtype == torch.bfloat16 and weight.numel() == count * head_dim,
               f"{name} is {weight.dtype} of shape {tuple(weight.shape)}", f"bfloat16 [{count * head_dim}]")


@functools.lru_cache(maxsize=16)
def _tables(channels, patches, base, scaling, device):
    """Cosines and sines ``[seq_len, head_dim]`` of all places."""
    angles = []
    for axis, count in enumerate(channels):
        place = torch.arange(patches[axis], dtype=torch.float64)
        shape = [1, 1, 1, count // 2]
        shape[axis] = patches[axis]
        angles.append(torch.outer(place, _frequencies(count, base, *scaling[:3])).view(shape).expand(*patches, -1))
    angles = torch.cat(angles, dim=-1).reshape(-1, sum(channels) // 2)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * scaling[3]).float().to(device)


def _frequencies(channels, base, factor, low, high):
    """The frequencies of one coordinate; with YaRN, a ramp from the original ones to those divided by ``factor``."""
    index = torch.arange(channels // 2, dtype=torch.float64)
    frequency = base ** (-2.0 * index / channels)
    if factor == 1.0:
        return frequency
    high = high + 0.001 if abs(low - high) <= 1e-6 else high
    share = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return frequency / factor * share + frequency * (1.0 - share)


def fused_dit_gate_residual_layernorm_gamma_beta(
    input, residual, gate, gamma, beta, *, gate_bias=None, epsilon=1e-6, use_nvfp4=False, use_mxfp8=False,
    global_scaling_factor=None, input_global_scaling_factor=None, residual_out=None, norm_out=None, sf_out=None,
):
    """``x = residual + input · (gate + gate_bias)``, and the layer norm of ``x`` with ``gamma`` and ``beta``, through torch.

    ``input``, ``residual`` and ``gate`` of bfloat16 ``[batch, rows, hidden]``, with any strides; ``gamma``, ``beta`` and biases of
    float32 ``[hidden]``. ``input_global_scaling_factor``, one element, is a factor of ``input``. Returns ``x`` and its norm, each
    rounded once to bfloat16. Outputs of 4 and 8 bits are refused, with ``global_scaling_factor`` and ``sf_out``.
    """
    function = "fused_dit_gate_residual_layernorm_gamma_beta"
    refuse(function, use_nvfp4=use_nvfp4, use_mxfp8=use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    x = _residual(function, (input, input_global_scaling_factor), residual, (gate, gate_bias))
    gamma, beta = (_weight(function, name, weight, input) for name, weight in (("gamma", gamma), ("beta", beta)))
    norm = functional.layer_norm(x, x.shape[-1:], gamma, beta, epsilon)
    return _rounded(function, "residual_out", residual_out, x), _rounded(function, "norm_out", norm_out, norm)


def fused_dit_gate_residual_layernorm_scale_shift(
    input, residual, gate, scale, shift, *, gate_bias=None, scale_bias=None, shift_bias=None, epsilon=1e-6, use_nvfp4=False,
    use_mxfp8=False, global_scaling_factor=None, input_global_scaling_factor=None, residual_out=None, norm_out=None, sf_out=None,
):
    """:func:`fused_dit_gate_residual_layernorm_gamma_beta` with the factor ``1 + scale + scale_bias`` and the summand ``shift +
    shift_bias`` of each row; ``scale`` and ``shift`` have the shape of ``input``."""
    function = "fused_dit_gate_residual_layernorm_scale_shift"
    refuse(function, use_nvfp4=use_nvfp4, use_mxfp8=use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    x = _residual(function, (input, input_global_scaling_factor), residual, (gate, gate_bias))
    norm = _shifted(function, x, (scale, scale_bias), (shift, shift_bias), epsilon)
    return _rounded(function, "residual_out", residual_out, x), _rounded(function, "norm_out", norm_out, norm)


def fused_dit_residual_layernorm_scale_shift(
    input, scale, shift, *, residual=None, scale_bias=None, shift_bias=None, epsilon=1e-6, use_nvfp4=False, use_mxfp8=False,
    global_scaling_factor=None, input_global_scaling_factor=None, residual_out=None, norm_out=None, sf_out=None,
):
    """:func:`fused_dit_gate_residual_layernorm_scale_shift` of ``residual + input``, or of ``input`` without ``residual``."""
    function = "fused_dit_residual_layernorm_scale_shift"
    refuse(function, use_nvfp4=use_nvfp4, use_mxfp8=use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    x = _residual(function, (input, input_global_scaling_factor), residual, (None, None))
    norm = _shifted(function, x, (scale, scale_bias), (shift, shift_bias), epsilon)
    return _rounded(function, "residual_out", residual_out, x), _rounded(function, "norm_out", norm_out, norm)


def _residual(function, scaled, residual, gate):
    """``residual + input · factor · (gate + bias)`` in float32."""
    x, factor = scaled
    if x.dtype != torch.bfloat16 or x.dim() != 3:
        raise Error(f"flashinfer.{function}: input is {x.dtype} of shape {tuple(x.shape)}, expected bfloat16 [batch, rows, hidden]")
    if factor is not None and (factor.dtype != torch.float32 or factor.numel() != 1):
        raise Error(f"flashinfer.{function}: input_global_scaling_factor is {factor.dtype} of shape {tuple(factor.shape)}, expected "
                    "float32 [1]")
    total = x.float() if factor is None else x.float().mul_(factor)
    if gate[0] is not None:
        total.mul_(_rows(function, "gate", *gate, x))
    return total if residual is None else total.add_(_rows(function, "residual", residual, None, x))


def _shifted(function, x, scale, shift, epsilon):
    """The layer norm of ``x`` times ``1 + scale``, plus ``shift``; each is a tensor and a bias."""
    norm, scale = functional.layer_norm(x, x.shape[-1:], eps=epsilon), _rows(function, "scale", *scale, x)
    return torch.addcmul(_rows(function, "shift", *shift, x), norm, scale.add_(1.0))


def _rows(function, name, x, bias, like):
    """``x + bias`` in float32, in the shape of ``like``."""
    if x.dtype != torch.bfloat16 or x.shape not in (like.shape, (like.shape[0] * like.shape[1], like.shape[2])):
        raise Error(f"flashinfer.{function}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected bfloat16 {tuple(like.shape)}")
    rows = x.reshape(like.shape).float()
    return rows if bias is None else rows.add_(_weight(function, f"{name}_bias", bias, like))


def _weight(function, name, x, like):
    """A vector of float32 with an element per column of ``like``."""
    if x.dtype != torch.float32 or x.shape not in ((like.shape[-1],), (1, like.shape[-1])):
        raise Error(f"flashinfer.{function}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected float32 [{like.shape[-1]}]")
    return x.reshape(-1)


def _rounded(function, name, out, x):
    """``x`` in bfloat16, in ``out`` if it is passed."""
    if out is None:
        return x.to(torch.bfloat16)
    check_output(function, name, out, x.shape, torch.bfloat16, x.device)
    return out.copy_(x)
