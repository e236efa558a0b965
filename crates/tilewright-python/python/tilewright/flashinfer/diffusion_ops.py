"""Operators of diffusion transformers."""

import functools

import torch

from .. import operators
from .._core import Error
from ..operators import CosSinCache
from ._refuse import check_output, positive

__all__ = ["fused_qk_rmsnorm_rope"]
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
    scales = [positive(_FUNCTION, *one) for one in (("output_quant_scale", output_quant_scale), ("v_quant_scale", v_quant_scale))]
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
        operators.apply_rope_quantized(q, k, positions, table, tuple(outputs[:2]), scales=(1.0 / scales[0],) * 2)
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
