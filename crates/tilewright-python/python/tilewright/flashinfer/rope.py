"""Rotary embeddings, in place and out of place."""

import torch

from .. import operators
from .._core import Error
from ..operators import CosSinCache, Rope
from ._compiled import is_compiling, operator
from ._pages import host_array, is_on_gpu, requests_of
from ._refuse import check_choice
from .page import append_paged_kv_cache, append_paged_mla_kv_cache


def _rope(q, rotary_dim, interleave, rope_theta, scaling):
    return q.shape[-1] if rotary_dim is None else rotary_dim, rope_theta, interleave, scaling


def _linear(rope_scale):
    return None if rope_scale == 1 else ("linear", [float(rope_scale)])


def _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len):
    return "llama31", [float(rope_scale), float(low_freq_factor), float(high_freq_factor), float(old_context_len)]


def _positions(function, tokens, indptr, offsets):
    """The position of each token of a ragged batch; bounds on a GPU or in compiled code are not checked."""
    if len(indptr) != len(offsets) + 1:
        raise Error(f"flashinfer.{function}: indptr has {len(indptr)} bounds of {len(offsets)} offsets, "
                    "expected num_requests + 1")
    if indptr.is_cuda or offsets.is_cuda or is_compiling():
        device = indptr.device if indptr.is_cuda else offsets.device
        indptr, offsets = (x.to(device, non_blocking=True) for x in (indptr, offsets))
    else:
        bounds = host_array(indptr)
        if bounds[0] != 0 or bounds[-1] != tokens or (bounds[1:] < bounds[:-1]).any():
            raise Error(f"flashinfer.{function}: indptr is {bounds.tolist()}, expected bounds from 0 to {tokens} that never "
                        "decrease")
    requests, each = requests_of(indptr, tokens)
    requests = requests.clamp(0, max(len(offsets) - 1, 0))
    return each if len(offsets) == 0 else offsets[requests] - indptr[requests] + each


@operator("apply_rope(Tensor? from_q, Tensor? from_k, Tensor(a!) q, Tensor(b!) k, Tensor positions, int rotary_dim, float theta, "
          "bool interleaved, str? scaling, float[] numbers)")
def _apply_rope(from_q, from_k, q, k, positions, rotary_dim, theta, interleaved, scaling, numbers):
    scaling = None if scaling is None else (scaling, numbers)
    _rotate(from_q, from_k, q, k, positions, Rope(rotary_dim, theta, interleaved=interleaved, scaling=scaling))


@operator("apply_rope_table(Tensor? from_q, Tensor? from_k, Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor table, "
          "bool is_neox)")
def _apply_rope_table(from_q, from_k, q, k, positions, table, is_neox):
    _rotate(from_q, from_k, q, k, positions, _table(table, is_neox, q))


def _rotate(from_q, from_k, q, k, positions, rope):
    """Rotates in place, or from ``from_q`` and ``from_k``."""
    if from_q is None:
        operators.apply_rope(q, k, positions, rope)
    else:
        operators.apply_rope(from_q, from_k, positions, rope, out=(q, k))


def _apply(q, k, positions, rope, in_place):
    """Rotates tensors of 3 axes. ``rope``: the arguments of a :class:`Rope`, or a table and whether it is that of neox."""
    source = (None, None) if in_place else (q, k)
    to = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
    is_table = isinstance(rope[0], torch.Tensor)
    if is_compiling():
        if is_table:
            _apply_rope_table(*source, *to, positions, *rope)
        else:
            rotary_dim, theta, interleaved, scaling = rope
            name, numbers = (None, []) if scaling is None else scaling
            _apply_rope(*source, *to, positions, rotary_dim, theta, interleaved, name, numbers)
    else:
        rope = _table(*rope, q) if is_table else Rope(*rope[:2], interleaved=rope[2], scaling=rope[3])
        _rotate(*source, *to, positions, rope)
    return None if in_place else to


def apply_rope_inplace(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """Rotates ``q`` ``[nnz, num_qo_heads, head_dim]`` and ``k`` of a ragged batch whose request ``r`` starts at ``offsets[r]``."""
    positions = _positions("apply_rope_inplace", q.shape[0], indptr, offsets)
    _apply(q, k, positions, _rope(q, rotary_dim, interleave, rope_theta, _linear(rope_scale)), True)


def apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """Rotates ``q`` and ``k`` by the position of each token, ``[nnz]``."""
    _apply(q, k, pos_ids, _rope(q, rotary_dim, interleave, rope_theta, _linear(rope_scale)), True)


def apply_llama31_rope_inplace(
    q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1,
    high_freq_factor=4, old_context_len=8192,
):
    """:func:`apply_rope_inplace` with the frequencies of Llama 3.1."""
    positions = _positions("apply_llama31_rope_inplace", q.shape[0], indptr, offsets)
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, positions, _rope(q, rotary_dim, interleave, rope_theta, scaling), True)


def apply_llama31_rope_pos_ids_inplace(
    q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
    old_context_len=8192,
):
    """:func:`apply_rope_pos_ids_inplace` with the frequencies of Llama 3.1."""
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, pos_ids, _rope(q, rotary_dim, interleave, rope_theta, scaling), True)


def apply_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """:func:`apply_rope_inplace` into new tensors, which it returns."""
    positions = _positions("apply_rope", q.shape[0], indptr, offsets)
    return _apply(q, k, positions, _rope(q, rotary_dim, interleave, rope_theta, _linear(rope_scale)), False)


def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """:func:`apply_rope_pos_ids_inplace` into new tensors, which it returns."""
    return _apply(q, k, pos_ids, _rope(q, rotary_dim, interleave, rope_theta, _linear(rope_scale)), False)


def apply_llama31_rope(
    q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1,
    high_freq_factor=4, old_context_len=8192,
):
    """:func:`apply_llama31_rope_inplace` into new tensors, which it returns."""
    positions = _positions("apply_llama31_rope", q.shape[0], indptr, offsets)
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, positions, _rope(q, rotary_dim, interleave, rope_theta, scaling), False)


def apply_llama31_rope_pos_ids(
    q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4,
    old_context_len=8192,
):
    """:func:`apply_llama31_rope_pos_ids_inplace` into new tensors, which it returns."""
    scaling = _llama31(rope_scale, low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, pos_ids, _rope(q, rotary_dim, interleave, rope_theta, scaling), False)


def _table(cos_sin_cache, is_neox, q):
    """The table in the memory of ``q``; a copy of one that is elsewhere or has gaps."""
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    return CosSinCache(cos_sin_cache.detach().to(q.device).contiguous(), interleaved=not is_neox)


def _heads(x, head_size):
    return x.view(x.shape[0], -1, head_size)


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """Rotates ``query`` ``[nnz, num_qo_heads · head_size]`` and ``key`` by a table float32 ``[max_positions, rotary_dim]``,
    cosines first."""
    _apply(_heads(query, head_size), _heads(key, head_size), positions, (cos_sin_cache, is_neox), True)


def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """:func:`apply_rope_with_cos_sin_cache_inplace` into new tensors, which it returns."""
    q, k = _apply(_heads(query, head_size), _heads(key, head_size), positions, (cos_sin_cache, is_neox), False)
    return q.view(query.shape), k.view(key.shape)


def _quantize(q_rope, k_rope, q_nope, k_nope, table, pos_ids, is_neox, scales, q_rope_out, k_rope_out, q_nope_out, k_nope_out):
    outputs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    # parts of one tensor on the host share its memory: they are written through tensors of their own
    dense = [out if out.is_cuda or out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype) for out in outputs]
    q, k, q_rest, k_rest = (_with_heads(x) for x in (q_rope, k_rope, q_nope, k_nope))
    split = q_rest.shape[-1] > 0 or k_rest.shape[-1] > 0
    to = [_with_heads(out) for out in dense]
    operators.apply_rope_quantized(q, k, pos_ids, _table(table, is_neox, q_rope), to if split else to[:2],
                                   scales=[1 / scale for scale in scales], rest=(q_rest, k_rest) if split else None)
    for out, written in zip(outputs, dense):
        if out is not written:
            out.copy_(written)


_rope_quantize = operator(
    "rope_quantize(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope, Tensor table, Tensor pos_ids, bool is_neox, "
    "float[] scales, Tensor(a!) q_rope_out, Tensor(b!) k_rope_out, Tensor(c!) q_nope_out, Tensor(d!) k_nope_out)"
)(_quantize)


def _with_heads(x):
    return x.unsqueeze(1) if x.dim() == 2 else x


def _or_empty(rest, x):
    return x[..., :0] if rest is None else rest


def _quantized_dtype(dtype, *outputs):
    """The dtype that the caller passed, of its outputs, or e4m3."""
    return dtype or next((out.dtype for out in outputs if out is not None), torch.float8_e4m3fn)


def _or_new(out, x, dtype):
    return torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out


def rope_quantize_fp8(
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0,
    quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False, backend="cuda",
):
    """Rotates ``q_rope`` ``[nnz, num_qo_heads, rope_dim]`` and ``k_rope``, multiplies them and the elements that are not rotated
    by ``quant_scale_q`` and ``quant_scale_kv``, numbers or tensors of one element, and rounds them to 8 bits. Keys have three axes, or two for one latent head.
    Returns the four outputs."""
    check_choice("rope_quantize_fp8", "backend", backend, ("cuda", "cutile"))
    outputs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    dtype = _quantized_dtype(quantize_dtype, *outputs)
    sources = q_rope, k_rope, _or_empty(q_nope, q_rope), _or_empty(k_nope, k_rope)
    outputs = tuple(_or_new(out, x, dtype) for out, x in zip(outputs, sources))
    sources, scales = _scaled(sources, (quant_scale_q, quant_scale_kv))
    quantize = _rope_quantize if is_compiling() else _quantize
    quantize(*sources, cos_sin_cache, pos_ids, is_neox, scales, *outputs)
    return outputs


def _scaled(sources, scales):
    """Sources of a rotation, queries and keys in turn, with scales as numbers. Scales in tensors on a GPU are not read: they multiply
    all sources in float32, with a launch each, and 1 is left."""
    if not any(map(is_on_gpu, scales)):
        return sources, [float(scale) for scale in scales]
    factors = [scale.detach().reshape(1).float() if is_on_gpu(scale) else float(scale) for scale in scales]
    return tuple(x.float() * factors[i % 2] for i, x in enumerate(sources)), [1.0, 1.0]


def mla_rope_quantize_fp8(
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0,
    quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False,
):
    """:func:`rope_quantize_fp8` with keys ``[nnz, rope_dim]`` and ``[nnz, no_rope_dim]`` of one latent head."""
    return rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q,
                             quant_scale_kv, q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl)


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, kv_indptr, batch_indices, positions,
    is_neox=True, quantize_dtype=None, quant_scale_q=1.0, quant_scale_kv=1.0, page_size=16, kv_layout="NHD", q_rope_out=None,
    q_nope_out=None, enable_pdl=False,
):
    """:func:`rope_quantize_fp8`, then appends keys and ``v`` to the pages of their positions: to ``(k_cache, v_cache)``, or for one
    latent head, without ``v``, to ``(ckv_cache, kpe_cache)``. Returns ``q_rope_out`` and ``q_nope_out``."""
    name, latent = "rope_quantize_fp8_append_paged_kv_cache", k_rope.dim() == 2
    if latent != (v is None):
        raise Error(f"flashinfer.{name}: v is {'a tensor beside one latent head' if latent else 'None'}, expected "
                    f"{'None' if latent else 'a tensor'}")
    dtype = _quantized_dtype(quantize_dtype, q_rope_out, q_nope_out)
    for one in paged_kv_cache:
        if one.dtype != dtype:
            raise Error(f"flashinfer.{name}: paged_kv_cache is {one.dtype}, expected {dtype}")
    k_nope, rotated = _or_empty(k_nope, k_rope), k_rope.shape[-1]
    k = torch.empty((*k_rope.shape[:-1], rotated + k_nope.shape[-1]), dtype=dtype, device=k_rope.device)
    kpe, ckv = k[..., :rotated], k[..., rotated:]
    q_rope_out, _, q_nope_out, _ = rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, dtype, quant_scale_q, quant_scale_kv, q_rope_out, kpe,
        q_nope_out, ckv)
    last_page_len = torch.full_like(kv_indptr[1:], page_size)
    table = kv_indices, kv_indptr, last_page_len
    if latent:
        append_paged_mla_kv_cache(ckv, kpe, batch_indices, positions, *paged_kv_cache, *table)
    else:
        (_, v), (_, v_scale) = _scaled((k_rope, v), (1.0, quant_scale_kv))
        append_paged_kv_cache(k, v, batch_indices, positions, tuple(paged_kv_cache), *table, kv_layout, v_scale=1 / v_scale)
    return q_rope_out, q_nope_out
