"""Packing of flags into bits, and quantization to 8 bits with a scale per group."""

import torch

from .. import operators
from .._core import Error
from ._compiled import is_compiling, operator
from ._refuse import check_choice, positive

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: The groups of the kernel; others are quantized by torch.
_GROUP_SIZES = (16, 32, 64, 128, 256)
_COMPUTABLE = (torch.float32, torch.float16, torch.bfloat16)


def packbits(x, bitorder="big"):
    """Packs flags ``[n]``, bool or numbers, into ``[ceil(n / 8)]`` bytes."""
    return operators.packbits(x.bool(), bitorder)


def segment_packbits(x, indptr, bitorder="big"):
    """Packs each segment ``x[indptr[s]:indptr[s + 1]]`` into bytes of its own. Returns the bytes and their bounds."""
    return operators.segment_packbits(x.bool(), indptr, bitorder)


def per_token_group_quant_8bit(
    x, group_size, eps=1e-10, dst_dtype=None, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False,
    backend="cutile",
):
    """Quantizes each ``group_size`` elements of a row of ``x`` with a scale of their own. Returns ``x`` in ``dst_dtype``,
    float8_e4m3fn by default, float8_e5m2 or int8, and scales float32 ``[..., groups]``: the largest magnitude of the group, at
    least ``eps``, over the largest number of the dtype. One launch for 8-bit floats with groups of 16, 32, 64, 128 or 256
    elements; others are quantized by several launches of torch.

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
    rows, columns = x.numel() // max(x.shape[-1], 1), x.shape[-1] // group_size
    if column_major_scales:
        columns_of = torch.empty(columns, -(-rows // 4) * 4 if scale_tma_aligned else rows, dtype=torch.float32, device=x.device)
        scales = columns_of[:, :rows].t()
    else:
        scales = torch.empty(*x.shape[:-1], columns, dtype=torch.float32, device=x.device)
    if dtype not in _FLOAT8 or group_size not in _GROUP_SIZES or x.dtype not in _COMPUTABLE:
        return _quantized_by_torch(x, group_size, eps, dtype, scale_ue8m0, scales)
    quantized = torch.empty(x.shape, dtype=dtype, device=x.device)
    as_rows = (x.view(rows, x.shape[-1]), quantized.view(rows, x.shape[-1]), scales.view(rows, columns))
    quantize_rows(*as_rows, group_size, eps, scale_ue8m0)
    return quantized, scales


@operator("quantize_groups(Tensor x, Tensor(a!) out, Tensor(b!) scales, int group_size, float eps, bool power_of_two)")
def _quantize_rows(x, out, scales, group_size, eps, power_of_two):
    operators.quantize_groups(x, group_size, eps=eps, power_of_two=power_of_two, out=out, scales=scales)


def quantize_rows(x, out, scales, group_size, eps, power_of_two=False):
    """Quantizes ``x`` ``[rows, width]`` to ``out`` and ``scales``, whose further rows become those of zeros, with one launch."""
    if is_compiling():
        _quantize_rows(x, out, scales, group_size, eps, power_of_two)
    else:
        operators.quantize_groups(x, group_size, eps=eps, power_of_two=power_of_two, out=out, scales=scales)


def _quantized_by_torch(x, group_size, eps, dtype, power_of_two, scales):
    """``x`` in ``dtype`` and ``scales``, through torch."""
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    groups = x.float().unflatten(-1, (-1, group_size))
    # by a tensor: on GPUs torch multiplies by the reciprocal of a number
    exact = groups.abs().amax(-1).clamp_(min=eps) / torch.full((), limits.max, dtype=torch.float32, device=x.device)
    if power_of_two:
        mantissa, exponent = torch.frexp(exact)  # in [0.5, 1)
        exact = torch.ldexp(torch.ones_like(exact), exponent - (mantissa == 0.5).int())
    quantized = (groups / exact.unsqueeze(-1)).clamp_(limits.min, limits.max)
    quantized = (quantized.add_(0.5).floor_() if dtype == torch.int8 else quantized).to(dtype).view(x.shape)
    return quantized, scales.copy_(exact)
