"""Packing of flags into bits, and quantization to 8 bits with a scale per group."""

import torch

from .. import operators
from .._core import Error
from ._refuse import check_choice, positive


def packbits(x, bitorder="big"):
    """Packs flags ``[n]`` into ``[ceil(n / 8)]`` bytes."""
    return operators.packbits(x, bitorder)


def segment_packbits(x, indptr, bitorder="big"):
    """Packs each segment ``x[indptr[s]:indptr[s + 1]]`` into bytes of its own. Returns the bytes and their bounds."""
    return operators.segment_packbits(x, indptr, bitorder)


def per_token_group_quant_8bit(
    x, group_size, eps=1e-10, dst_dtype=None, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False,
    backend="cutile",
):
    """Quantizes each ``group_size`` elements of a row of ``x`` with a scale of their own, through torch. Returns ``x`` in
    ``dst_dtype``, float8_e4m3fn by default, float8_e5m2 or int8, and scales float32 ``[..., groups]``: the largest magnitude of
    the group, at least ``eps``, over the largest number of the dtype.

    With ``column_major_scales``, of ``x`` ``[rows, hidden]``, the rows of scales are adjacent; with ``scale_tma_aligned`` as
    well, columns begin every multiple of 16 bytes; with ``scale_ue8m0`` as well, scales are rounded up to powers of two.
    ``backend`` is a hint without effect.
    """
    function = "per_token_group_quant_8bit"
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    check_choice(function, "backend", backend, ("cutile",))
    check_choice(function, "dst_dtype", dtype, (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
    positive(function, "eps", eps)
    if group_size < 1 or x.dim() == 0 or x.shape[-1] % group_size != 0 or not x.is_contiguous():
        raise Error(f"flashinfer.{function}: x has shape {tuple(x.shape)} and strides {x.stride()}, expected contiguous rows of "
                    f"groups of group_size = {group_size}")
    for name, value in (("scale_tma_aligned", scale_tma_aligned), ("scale_ue8m0", scale_ue8m0)):
        if value and not column_major_scales:
            raise Error(f"flashinfer.{function}: {name} = True without column_major_scales, expected both")
    if column_major_scales and x.dim() != 2:
        raise ValueError(f"flashinfer.{function}: x has shape {tuple(x.shape)} with column_major_scales, expected two axes")
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    groups = x.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1).clamp_(min=eps) / limits.max
    if scale_ue8m0:
        mantissa, exponent = torch.frexp(scales)  # in [0.5, 1)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    quantized = (groups / scales.unsqueeze(-1)).clamp_(limits.min, limits.max)
    quantized = (quantized.add_(0.5).floor_() if dtype == torch.int8 else quantized).to(dtype).view(x.shape)
    if not column_major_scales:
        return quantized, scales
    rows, columns = scales.shape
    padded = torch.empty(columns, -(-rows // 4) * 4 if scale_tma_aligned else rows, dtype=torch.float32, device=x.device)
    return quantized, padded[:, :rows].t().copy_(scales)
