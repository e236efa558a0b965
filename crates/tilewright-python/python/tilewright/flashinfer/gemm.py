"""Dense products through torch, and products with one weight per segment of rows."""

import functools

import torch

from .. import operators
from .._core import Error
from ._refuse import check_choice, check_output, one_number, served
from .quantization import quantize_rows

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The elements of a row that share a scale.
_BLOCK = 128
#: The lower bound of a block's largest magnitude: scales of blocks of zeros must not be 0.
_SMALLEST_MAXIMUM = 1e-30


def _output(function, out, shape, dtype, like):
    """The output of a product, of 16 bits or float32."""
    check_choice(function, "out_dtype", dtype, (torch.bfloat16, torch.float16, torch.float32))
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_output(function, "out", out, shape, dtype, like.device)
    return out


def _check_operands(function, a, b, axes, dtypes):
    """Rejects operands of other axes, sizes and dtypes."""
    for name, x in (("a", a), ("b", b)):
        if x.dim() != axes or x.dtype not in dtypes:
            raise Error(f"flashinfer.{function}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected {axes} axes of "
                        f"{' or '.join(map(str, dtypes))}")
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise Error(f"flashinfer.{function}: b has shape {tuple(b.shape)}, expected {(*a.shape[:-2], a.shape[-1], 'n')}")


def _in_float32(a, b):
    """The product of matrices of 16 bits in float32."""
    if a.is_cuda and "dtype" in torch.ops.aten.bmm.overloads():
        return torch.bmm(a, b, out_dtype=torch.float32) if a.dim() == 3 else torch.mm(a, b, out_dtype=torch.float32)
    return torch.matmul(a.float(), b.float())


@served("auto", "cudnn", "cublaslt", "tinygemm", "cutile")
def mm_bf16(a, b, bias=None, pdl=False, out=None, out_dtype=torch.bfloat16, backend="cudnn"):
    """``a · b + bias``: ``a`` ``[m, k]``, ``b`` ``[k, n]``, ``bias`` ``[n]`` of bfloat16, in ``out_dtype``: bfloat16, float16
    or float32. ``backend`` and ``pdl`` are hints without effect."""
    check_choice("mm_bf16", "backend", backend, mm_bf16._backends)
    _check_operands("mm_bf16", a, b, 2, (torch.bfloat16,))
    out = _output("mm_bf16", out, (a.shape[0], b.shape[1]), out_dtype, a)
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    product = _in_float32(a, b)
    return out.copy_(product if bias is None else product.add_(bias))


@served("auto", "cudnn", "cutile")
def bmm_bf16(A, B, out=None, out_dtype=torch.bfloat16, backend="cudnn"):
    """``A · B``: ``A`` ``[b, m, k]``, ``B`` ``[b, k, n]`` of bfloat16, in ``out_dtype``: bfloat16, float16 or float32.
    ``backend`` is a hint without effect."""
    check_choice("bmm_bf16", "backend", backend, bmm_bf16._backends)
    _check_operands("bmm_bf16", A, B, 3, (torch.bfloat16,))
    out = _output("bmm_bf16", out, (*A.shape[:2], B.shape[2]), out_dtype, A)
    return torch.bmm(A, B, out=out) if out.dtype == A.dtype else out.copy_(_in_float32(A, B))


@served("auto", "cudnn", "cublas")
def bmm_fp8(A, B, A_scale, B_scale, dtype, out=None, backend="cublas"):
    """``A · B · A_scale · B_scale`` in ``dtype``, bfloat16 or float16: ``A`` ``[b, m, k]``, ``B`` ``[b, k, n]`` of
    float8_e4m3fn or float8_e5m2; scales of one element. One product on a GPU uses ``torch._scaled_mm`` where it has the shape;
    others are converted to bfloat16, exactly. ``backend`` is a hint without effect."""
    check_choice("bmm_fp8", "backend", backend, bmm_fp8._backends)
    check_choice("bmm_fp8", "dtype", dtype, (torch.bfloat16, torch.float16))
    _check_operands("bmm_fp8", A, B, 3, (_E4M3, _E5M2))
    out = _output("bmm_fp8", out, (*A.shape[:2], B.shape[2]), dtype, A)
    scales = [one_number("bmm_fp8", name, scale, A) for name, scale in (("A_scale", A_scale), ("B_scale", B_scale))]
    if A.is_cuda and A.shape[0] == 1 and _has_scaled_product(A[0], B[0]):
        torch._scaled_mm(A[0], B[0], *scales, out_dtype=dtype, out=out[0])
        return out
    return out.copy_(_in_float32(A.to(torch.bfloat16), B.to(torch.bfloat16)).mul_(scales[0] * scales[1]))


def _has_scaled_product(a, b) -> bool:
    """Whether ``torch._scaled_mm`` takes the operands: one of e4m3 at least, rows of A and columns of B of multiples of 16
    bytes."""
    return (_E4M3 in (a.dtype, b.dtype) and a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == 0
            and b.shape[1] % 16 == 0)


def fp8_blockscale_gemm_sm90(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None):
    """``input · weightᵀ`` of ``input`` ``[m, k]`` and ``weight`` ``[n, k]``, in ``out_dtype``: bfloat16, which is the default, or
    float16. ``k`` is a multiple of 128, ``n`` of 64. Both are bfloat16 or float8_e4m3fn, but not ``input`` alone of 8 bits.

    Operands of 8 bits have scales float32: ``weight_scale`` ``[n, k / 128]`` or ``[ceil(n / 128), k / 128]``, and ``input_scale``
    ``[k / 128, m]`` or its transpose: adjacent elements belong to adjacent rows. Sums are in float32.

    A weight of 8 bits with scales ``[ceil(n / 128), k / 128]`` is multiplied in 8 bits by ``torch.nn.functional.scaled_mm``, if
    torch has this function, is built for CUDA 12.9 or later, and the GPU is a Hopper. Then ``input`` of bfloat16 is quantized to
    float8_e4m3fn by one launch, with one scale per row and 128 columns, the largest magnitude over 448, as in FlashInfer. In all other cases
    operands of bfloat16 are not quantized. Each call then multiplies operands of 8 bits by their scales and rounds to bfloat16.
    """
    function = "fp8_blockscale_gemm_sm90"
    _check_blocks(function, input, weight)
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    check_choice(function, "out_dtype", dtype, (torch.bfloat16, torch.float16))
    if out is not None:
        check_output(function, "out", out, (input.shape[0], weight.shape[0]), dtype, input.device)
    for name, x, scale in (("input", input, input_scale), ("weight", weight, weight_scale)):
        _check_scale(function, name, x, scale)
    input_rows = None if input_scale is None else _input_rows(function, input, input_scale)
    if input.numel() > 0 and _has_square_blocks(weight, weight_scale) and _has_blockwise_scaled_mm(input.device):
        return _blockwise_scaled_mm(input, input_rows, weight, weight_scale, dtype, out)
    a = input if input_rows is None else _dequantized(input, input_rows)
    b = weight if weight_scale is None else _dequantized(weight, _weight_rows(function, weight, weight_scale))
    if dtype == torch.bfloat16:
        return torch.mm(a, b.t(), out=out)
    product = _in_float32(a, b.t())
    return product.to(dtype) if out is None else out.copy_(product)


@functools.cache
def _has_blockwise_scaled_mm(device) -> bool:
    """Whether torch multiplies operands with scales per block on the device. It requires Hopper and CUDA 12.9."""
    if device.type != "cuda" or not hasattr(torch.nn.functional, "scaled_mm") or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _has_square_blocks(b, scale) -> bool:
    """Whether the weight has 8 bits and one scale per block of 128 rows and 128 columns."""
    return b.dtype == _E4M3 and b.shape[0] > 0 and scale.shape == (-(-b.shape[0] // _BLOCK), b.shape[1] // _BLOCK)


def _blockwise_scaled_mm(a, a_rows, b, b_scale, dtype, out):
    """``a · bᵀ`` of the arguments of :func:`_blockwise_operands` without a copy of ``b``, in ``out`` unless it is None."""
    functional = torch.nn.functional
    row_blocks, square_blocks = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    rows, columns, row_scales, column_scales = _blockwise_operands(a, a_rows, b, b_scale)
    if out is not None and out.is_contiguous() and len(out) == len(rows) and _has_scaled_mm_out():
        # scaled_mm has no argument for the output
        kinds = [row_blocks.value], [], [column_scales], [square_blocks.value], []
        return _scaled_mm_out(rows, columns, [row_scales], *kinds, None, dtype, out=out)
    product = functional.scaled_mm(rows, columns, row_scales, row_blocks, column_scales, square_blocks, output_dtype=dtype)
    product = product[: a.shape[0]]
    return product if out is None else out.copy_(product)


@functools.cache
def _has_scaled_mm_out() -> bool:
    """Whether torch has the product with an output that ``scaled_mm`` calls without one."""
    return hasattr(torch.ops.aten, "_scaled_mm_v2") and "out" in torch.ops.aten._scaled_mm_v2.overloads()


def _scaled_mm_out(*operands, out):
    return torch.ops.aten._scaled_mm_v2.out(*operands, out=out)


def _blockwise_operands(a, a_rows, b, b_scale):
    """The operands of ``torch.nn.functional.scaled_mm``. ``a`` has scales ``a_rows`` ``[m, k / 128]``; without them it is bfloat16
    and quantized here with one launch. ``b`` has scales ``[ceil(n / 128), k / 128]``.

    cuBLAS requires these layouts, with addresses that are multiples of 16 bytes:

    1. ``a`` ``[rows, k]`` of 8 bits: ``rows`` is ``m`` rounded up to a multiple of 4. Rows after ``m`` are zero.
    2. ``b`` ``[k, n]`` with contiguous columns.
    3. Scales of ``a`` ``[rows, k / 128]`` with strides ``(1, rows)``.
    4. Scales of ``b`` ``[blocks, ceil(n / 128)]`` with strides ``(1, blocks)``: ``blocks`` is ``k / 128`` rounded up to a multiple
       of 4.
    """
    m, rows = a.shape[0], -(-a.shape[0] // 4) * 4
    if a_rows is None:
        quantized = torch.empty(rows, a.shape[1], dtype=_E4M3, device=a.device)
        a_scale = torch.empty(a.shape[1] // _BLOCK, rows, dtype=torch.float32, device=a.device).t()
        quantize_rows(a if a.stride(1) == 1 else a.contiguous(), quantized, a_scale, _BLOCK, _SMALLEST_MAXIMUM)
        a = quantized
    else:
        a = _packed(a if rows == m else _padded_rows(a, rows))
        columns = a_rows.t()
        a_scale = _packed(columns if rows == m else torch.nn.functional.pad(columns, (0, rows - m), value=1.0)).t()
    missing = -b_scale.shape[1] % 4
    b_scale = _packed(b_scale if missing == 0 else torch.nn.functional.pad(b_scale, (0, missing), value=1.0)).t()
    return a, _packed(b).t(), a_scale, b_scale


def _padded_rows(x, rows):
    """``x`` with zero rows appended."""
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]].copy_(x)
    return padded


def _packed(x):
    """The matrix with contiguous rows from a multiple of 16 bytes, copied if necessary."""
    if not x.is_contiguous() or x.data_ptr() % 16 != 0:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(x.shape)  # a contiguous tensor has any stride along an axis of one element


def _check_blocks(function, a, b):
    """Rejects operands of other axes, sizes and dtypes than those of blocks of 128."""
    for name, x, axes in (("input", a, "m, k"), ("weight", b, "n, k")):
        if x.dim() != 2 or x.dtype not in (_E4M3, torch.bfloat16):
            raise Error(f"flashinfer.{function}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected FP8 ({_E4M3}) or BF16 "
                        f"({torch.bfloat16}) of shape [{axes}]")
    if a.dtype == _E4M3 and b.dtype != _E4M3:
        raise Error(f"flashinfer.{function}: FP8 input with BF16 weight is not supported, expected weight of {_E4M3}")
    if a.shape[1] % _BLOCK != 0:
        raise Error(f"flashinfer.{function}: input has k = {a.shape[1]}, expected k divisible by block size {_BLOCK}")
    if b.shape[1] != a.shape[1] or b.shape[0] % 64 != 0 or b.device != a.device:
        raise Error(f"flashinfer.{function}: weight has shape {tuple(b.shape)} on {b.device}, expected [n, {a.shape[1]}] on "
                    f"{a.device} with n divisible by 64")


def _check_scale(function, name, x, scale):
    """Rejects a scale of an operand of bfloat16, and none or one of another dtype or device for one of 8 bits."""
    if x.dtype != _E4M3:
        if scale is not None:
            raise Error(f"flashinfer.{function}: {name}_scale should not be provided for BF16 {name}, it has shape "
                        f"{tuple(scale.shape)}, expected None")
    elif scale is None:
        raise Error(f"flashinfer.{function}: {name}_scale is required when {name} is FP8, it is None, expected a tensor")
    elif scale.dtype != torch.float32 or scale.device != x.device:
        raise Error(f"flashinfer.{function}: {name}_scale is {scale.dtype} on {scale.device}, expected torch.float32 on {x.device}")


def _input_rows(function, a, scale):
    """The scales ``[m, k / 128]``. FlashInfer reads ``[k / 128, m]`` of any tensor, so that ``[m, k / 128]`` in rows has another
    meaning there."""
    rows, blocks = a.shape[0], a.shape[1] // _BLOCK
    if scale.shape == (rows, blocks) and (rows == 1 or blocks == 1 or scale.stride(0) == 1):
        return scale
    if scale.shape == (blocks, rows):
        return scale.t()
    raise Error(f"flashinfer.{function}: input_scale has shape {tuple(scale.shape)} and strides {scale.stride()}, expected "
                f"({blocks}, {rows}), or ({rows}, {blocks}) with adjacent rows")


def _weight_rows(function, b, scale):
    """The scales ``[n, k / 128]``."""
    rows, blocks = b.shape[0], b.shape[1] // _BLOCK
    if scale.shape == (rows, blocks):
        return scale
    if scale.shape == (-(-rows // _BLOCK), blocks):
        return scale.repeat_interleave(_BLOCK, 0)[:rows]
    raise Error(f"flashinfer.{function}: weight_scale has shape {tuple(scale.shape)}, expected ({rows}, {blocks}) or "
                f"({-(-rows // _BLOCK)}, {blocks})")


def _dequantized(x, scales):
    """``x`` times the scale of each block of a row, rounded once to bfloat16."""
    blocks = x.to(torch.bfloat16).unflatten(1, (-1, _BLOCK))
    return blocks.mul_(scales.unsqueeze(2)).flatten(1)


def tinygemm_bf16(input, weight, out, bias=None, use_pdl=False):
    """Writes ``input · weightᵀ + bias`` to ``out`` ``[rows, out_features]``: ``input`` ``[rows, in_features]``, ``weight``
    ``[out_features, in_features]``, ``bias`` ``[out_features]``, all bfloat16. ``use_pdl`` is a hint without effect."""
    mm_bf16(input, weight.t(), bias, out=out, backend="tinygemm")


def grouped_mm_bf16(a, b, m_indptr, out=None, out_dtype=torch.bfloat16, *, backend="cudnn", tactic=-1):
    """``a[e] · b[e]ᵀ`` for the rows ``m_indptr[e]..m_indptr[e + 1]`` of each expert: ``a`` ``[rows, k]``, ``b`` ``[experts, n,
    k]`` of bfloat16 or float16, in ``out_dtype``: also float32. Bounds on a GPU are copied to the host, which waits. ``tactic``
    is a hint without effect."""
    check_choice("grouped_mm_bf16", "backend", backend, ("cudnn",))
    if len(m_indptr) != b.shape[0] + 1:
        raise Error(f"flashinfer.grouped_mm_bf16: m_indptr has {len(m_indptr)} bounds, expected experts + 1 = {b.shape[0] + 1}")
    out = _output("grouped_mm_bf16", out, (a.shape[0], b.shape[1]), out_dtype if out is None else out.dtype, a)
    if out.dtype == a.dtype:
        return operators.segment_gemm(a, b, m_indptr.int(), out=out)
    return out.copy_(operators.segment_gemm(a, b, m_indptr.int()))


def grouped_mm_fp8(a, b, m_indptr, alpha=None, out=None, out_dtype=torch.bfloat16, *, backend="cudnn", tactic=-1):
    """``alpha · a[e] · b[e]ᵀ`` for the rows ``m_indptr[e]..m_indptr[e + 1]`` of each expert: ``a`` ``[rows, k]``, ``b``
    ``[experts, n, k]`` of float8_e4m3fn or float8_e5m2, ``alpha`` of one element. Operands are converted to bfloat16, exactly,
    and multiplied with sums in float32. Bounds on a GPU are copied to the host, which waits. ``tactic`` is a hint without
    effect."""
    function = "grouped_mm_fp8"
    check_choice(function, "backend", backend, ("cudnn",))
    for name, x, axes in (("a", a, 2), ("b", b, 3)):
        if x.dim() != axes or x.dtype not in (_E4M3, _E5M2) or x.shape[-1] != a.shape[-1]:
            raise Error(f"flashinfer.{function}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected {axes} axes of {_E4M3} or "
                        f"{_E5M2} with k = {a.shape[-1]}")
    bounds = m_indptr.tolist()
    if m_indptr.dtype != torch.int32 or len(bounds) != b.shape[0] + 1 or bounds[0] != 0 or bounds != sorted(bounds) or (
            bounds[-1] != a.shape[0]):
        raise Error(f"flashinfer.{function}: m_indptr is {m_indptr.dtype} {bounds[:8]}, expected int32 [experts + 1] from 0 to "
                    f"{a.shape[0]}, ascending")
    out = _output(function, out, (a.shape[0], b.shape[1]), out_dtype if out is None else out.dtype, a)
    factor = one_number(function, "alpha", 1.0 if alpha is None else alpha, a)
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        product = _in_float32(a[begin:end].to(torch.bfloat16), b[expert].to(torch.bfloat16).t())
        out[begin:end].copy_(product.mul_(factor))
    return out


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
        ids = None if weight_indices is None else weight_indices.int()
        return operators.segment_gemm(x, weights, seg_indptr.int(), ids, out=out)

    forward = run
