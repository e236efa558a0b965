"""The operators around attention: norms, gated activations, quantization, RoPE, linear layers and packed bits."""

from . import _core
from ._core import Error
from ._device import queue_of
from ._tensors import device_indices, dtype_name, empty, from_bytes, from_list, on_host, same_memory, shape_of


def _norm(x, weight, eps, out, *, residual=None, bias=None, gemma=False, scale=None):
    if scale is not None and not hasattr(scale, "shape"):
        scale = from_list([scale], "float32", x)
    if out is None:
        if scale is not None:
            raise Error("norm: out = None with a scale, expected a tensor of 8 bits")
        out = empty(shape_of(x), dtype_name(x.dtype), x)
    _core.norm(queue_of(x), (x, residual, weight, bias, eps, gemma, scale, out))
    return out


def rmsnorm(x, weight, eps: float = 1e-6, *, gemma: bool = False, scale=None, out=None):
    """``x · rsqrt(mean(x²) + eps) · weight`` over the last axis; ``gemma`` multiplies by ``1 + weight``.

    ``x`` ``[rows, hidden]`` or ``[tokens, heads, head_dim]``; ``weight`` of the last axis. ``out`` may be ``x``. With ``scale``, a
    number or a tensor float32 ``[1]``, ``out`` of 8 bits receives the norm divided by it, rounded and saturated.
    """
    return _norm(x, weight, eps, out, gemma=gemma, scale=scale)


def fused_add_rmsnorm(x, residual, weight, eps: float = 1e-6, *, gemma: bool = False, scale=None, out=None) -> None:
    """Adds ``x`` to ``residual`` and overwrites ``x``, or ``out``, by the norm of the sum; shapes and scale as in :func:`rmsnorm`."""
    _norm(x, weight, eps, x if out is None else out, residual=residual, gemma=gemma, scale=scale)


def layer_norm(x, weight, bias, eps: float = 1e-5, *, scale=None, out=None):
    """``(x - mean(x)) · rsqrt(var(x) + eps) · weight + bias`` over the last axis; shapes and scale as in :func:`rmsnorm`."""
    return _norm(x, weight, eps, out, bias=bias, scale=scale)


def _gated(activation: str, x, out):
    shape = shape_of(x)
    if out is None:
        out = empty((*shape[:-1], shape[-1] // 2), dtype_name(x.dtype), x)
    _core.gated_activation(queue_of(x), activation, x, out)
    return out


def silu_and_mul(x, *, out=None):
    """``silu(x[:, :d]) · x[:, d:]``; ``x`` ``[rows, 2·d]``."""
    return _gated("silu", x, out)


def gelu_and_mul(x, *, out=None):
    """``gelu(x[:, :d]) · x[:, d:]`` with the exact GELU."""
    return _gated("gelu", x, out)


def gelu_tanh_and_mul(x, *, out=None):
    """``gelu(x[:, :d]) · x[:, d:]`` with the tanh approximation."""
    return _gated("gelu_tanh", x, out)


def quantize_groups(x, group_size: int = 128, *, eps: float = 1e-10, power_of_two: bool = False, dtype: str = "float8_e4m3fn",
                    out=None, scales=None):
    """Quantizes each ``group_size`` adjacent elements of a row to 8 bits with a scale of their own: ``max(max |x|, eps)`` over the
    largest number of ``dtype``, float8_e4m3fn or float8_e5m2. Quotients are rounded to nearest even and saturated.

    ``x`` ``[rows, width]`` of float32, float16 or bfloat16; ``group_size`` 16, 32, 64, 128 or 256. ``power_of_two`` rounds scales up
    to powers of two. Returns ``out`` ``[rows, width]`` and ``scales`` float32 ``[rows, width / group_size]``. Passed ones may have more
    rows than ``x``, which become those of zeros; ``scales`` may have any strides. NumPy has ``dtype`` if ml_dtypes is installed.
    """
    shape = shape_of(x)
    if out is None:
        out = empty(shape, dtype_name(dtype), x)
    if scales is None:
        scales = empty((*shape_of(out)[:-1], shape[-1] // max(group_size, 1)), "float32", x)
    _core.quantize_groups(queue_of(x), (x, group_size, eps, power_of_two, out, scales))
    return out, scales


class Rope:
    """A rotary embedding of the first ``rotary_dim`` elements of each head. ``interleaved`` pairs elements ``2i, 2i + 1``, else
    ``i, i + rotary_dim / 2``. ``scaling`` is ``None``, ``("linear", [factor])`` or ``("llama31", [factor, low_freq_factor,
    high_freq_factor, original_context])``."""

    __slots__ = ("_fields",)

    def __init__(self, rotary_dim: int, theta: float = 10000.0, *, interleaved: bool = False, scaling=None):
        self._fields = {"rotary_dim": rotary_dim, "theta": theta, "interleaved": interleaved, "scaling": scaling}


class CosSinCache:
    """A contiguous table float32 ``[max_positions, rotary_dim]`` in the memory of the queries: cosines in the first half of each row,
    sines in the second. It is not copied: each rotation reads its present values."""

    __slots__ = ("_table",)

    def __init__(self, table, *, interleaved: bool = False):
        self._table = table, interleaved


def apply_rope(q, k, positions, rope: "Rope | CosSinCache", *, out: "tuple | None" = None):
    """Rotates ``q`` ``[tokens, heads, head_dim]`` and ``k`` by their positions ``[tokens]``, in place or into ``out = (q, k)``.
    Returns the rotated pair. Positions on a GPU are read there."""
    to_q, to_k = (q, k) if out is None else out
    in_place = same_memory(q, to_q) and same_memory(k, to_k)
    _core.apply_rope(queue_of(q), {
        "from_q": None if in_place else q, "from_k": None if in_place else k, "q": to_q, "k": to_k,
        "positions": device_indices(positions),
        "rope": rope._fields if isinstance(rope, Rope) else None,
        "table": rope._table if isinstance(rope, CosSinCache) else None,
    })
    return to_q, to_k


def apply_rope_quantized(q, k, positions, rope: "Rope | CosSinCache", out: tuple, *, scales=(1.0, 1.0), rest=None) -> None:
    """Writes the rotated ``q`` and ``k``, divided by their ``scales``, rounded and saturated, to ``out = (q, k)`` of 8 bits.

    ``rest = (q, k)``: elements beyond the ``rotary_dim`` in tensors of their own ``[tokens, heads, rest_dim]``, which are not
    rotated; ``out`` then has four tensors."""
    _core.apply_rope_quantized(queue_of(q), {
        "from": (q, k, *(rest or ())), "to": out, "scales": [float(scale) for scale in scales],
        "positions": device_indices(positions),
        "rope": rope._fields if isinstance(rope, Rope) else None,
        "table": rope._table if isinstance(rope, CosSinCache) else None,
    })


def linear(x, weight, bias=None, *, out=None):
    """``x · weightᵀ + bias``: ``x`` ``[rows, in_features]``, ``weight`` ``[out_features, in_features]``."""
    if out is None:
        out = empty((*shape_of(x)[:1], *shape_of(weight)[:1]), dtype_name(x.dtype), x)
    _core.linear_layer(queue_of(x), {"x": x, "weight": weight, "bias": bias, "out": out})
    return out


def segment_gemm(x, weights, indptr, ids=None, *, out=None):
    """``x · weights[ids[s]]ᵀ`` for rows ``indptr[s]..indptr[s + 1]``: ``weights`` ``[num_weights, out_features,
    in_features]``; ``ids`` by default the segment numbers."""
    if out is None:
        out = empty((*shape_of(x)[:1], *shape_of(weights)[1:2]), dtype_name(x.dtype), x)
    _core.segment_gemm(queue_of(x), {"x": x, "weights": weights, "indptr": on_host(indptr), "ids": on_host(ids), "out": out})
    return out


def segment_packbits(flags, indptr, bitorder: str = "big"):
    """Packs each segment ``flags[indptr[s]:indptr[s + 1]]`` into bytes of its own. Returns uint8 bytes and their bounds, int32
    ``[num_segments + 1]``."""
    packed, bounds = _core.segment_packbits(on_host(flags), on_host(indptr), bitorder)
    return from_bytes(packed, "uint8", flags), from_list(bounds, "int32", indptr)


def packbits(flags, bitorder: str = "big"):
    """Packs flags ``[n]`` into ``[ceil(n / 8)]`` bytes."""
    return segment_packbits(flags, [0, len(flags)], bitorder)[0]
