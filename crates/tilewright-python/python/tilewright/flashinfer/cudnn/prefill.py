"""Prefill over pages or ragged keys with the arguments of cuDNN, without ``plan``."""

import math

import torch

from ..._core import Error
from .._pages import requests_of
from .._refuse import check_choice, check_output, refuse, torch_dtype
from ..ragged import attend_ragged
from ..stateless import attend_pages
from .decode import check_maximum, lengths

_FUNCTION = "cudnn_batch_prefill_with_kv_cache"
_LOG_2 = math.log(2.0)


def cudnn_batch_prefill_with_kv_cache(
    q, k_cache, v_cache, scale, workspace_buffer, *, max_token_per_sequence, max_sequence_kv, actual_seq_lens_q=None,
    actual_seq_lens_kv=None, block_tables=None, causal, return_lse, q_scale=None, k_scale=None, v_scale=None,
    batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None, batch_offsets_stats=None,
    batch_offsets_units="elements", out=None, lse=None, is_cuda_graph_compatible=False, backend=None, o_data_type=None,
):
    """Attention of the rows of each request, causal bottom-right if ``causal``. ``q`` ``[num_rows, num_qo_heads, head_dim]``.

    With ``block_tables`` ``[batch_size, max_pages]``, caches are ``[num_pages, num_kv_heads, page_size, head_dim]`` of any
    strides, rows are packed, and lengths are planned where the queries are. Otherwise keys and values are ``[num_tokens,
    num_kv_heads, head_dim]``, and the batch is planned on the host, which waits for lengths and offsets on a GPU.

    ``batch_offsets_*`` ``[batch_size + 1]``: the start of each request in its tensor, in elements or, with
    ``batch_offsets_units="tokens"``, in rows; those of outputs are by default those of queries. Without offsets of queries all
    rows are packed; with them, keys without offsets begin every ``max_sequence_kv`` rows. Lengths ``batch_size`` may be omitted
    where offsets in tokens have them. Scales are numbers or tensors of one element.

    Returns ``(output, lse)``; ``lse`` is ``None`` without ``return_lse``, else natural ``[batch_size, max_token_per_sequence,
    num_qo_heads]`` with -inf after the rows of a request, or packed at ``batch_offsets_stats``. Rows of outputs that belong to
    no request are not written. ``backend`` and ``is_cuda_graph_compatible`` are hints without effect.
    """
    check_choice(_FUNCTION, "batch_offsets_units", batch_offsets_units, ("elements", "tokens"))
    check_choice(_FUNCTION, "backend", backend, (None, "cudnn", "cubin"))
    axes = 3 if block_tables is None else 4
    for name, x, expected in (("q", q, 3), ("k_cache", k_cache, axes), ("v_cache", v_cache, axes)):
        if x.dim() != expected:
            raise Error(f"flashinfer.{_FUNCTION}: {name} has shape {tuple(x.shape)}, expected {expected} axes")
    are_tokens = batch_offsets_units == "tokens"
    heads, kv_heads, dims = q.shape[1], k_cache.shape[1], (q.shape[2], v_cache.shape[-1])
    offsets = [_starts(*one, are_tokens) for one in (
        ("batch_offsets_q", batch_offsets_q, heads * dims[0]), ("batch_offsets_o", batch_offsets_o, heads * dims[1]),
        ("batch_offsets_k", batch_offsets_k, kv_heads * dims[0]), ("batch_offsets_v", batch_offsets_v, kv_heads * dims[1]),
        ("batch_offsets_stats", batch_offsets_stats, heads))]
    lens_q = _lengths("actual_seq_lens_q", actual_seq_lens_q, offsets[0] if are_tokens else None)
    lens_kv = _lengths("actual_seq_lens_kv", actual_seq_lens_kv, offsets[2] if are_tokens and axes == 3 else None)
    requests = len(lens_q)
    lengths(_FUNCTION, "actual_seq_lens_kv", lens_kv, requests)
    for name, starts in zip("qokv", offsets):
        if starts is not None and len(starts) != requests + 1:
            raise Error(f"flashinfer.{_FUNCTION}: batch_offsets_{name} has {len(starts)} offsets, expected batch_size + 1 = "
                        f"{requests + 1}")
    if lse is not None:
        check_output(_FUNCTION, "lse", lse, (requests, max_token_per_sequence, heads), torch.float32, q.device)
    dtype = out.dtype if out is not None else torch_dtype(o_data_type or q.dtype)
    if out is None:
        out = torch.empty(q.shape[0], heads, dims[1], dtype=dtype, device=q.device)
    check_output(_FUNCTION, "out", out, (q.shape[0], heads, dims[1]), torch_dtype(o_data_type or dtype), q.device)
    maxima = max_token_per_sequence, max_token_per_sequence if max_sequence_kv is None else max_sequence_kv
    options = {"scales": _scales(scale, q_scale, k_scale, v_scale), "causal": causal, "window_left": -1, "sinks": None}
    if block_tables is None:
        found, bounds = _ragged((q, k_cache, v_cache, workspace_buffer, out), (lens_q, lens_kv), offsets[:4], maxima, return_lse,
                                options)
    else:
        refuse(_FUNCTION, "None with block_tables", batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
        found, bounds = _paged((q, k_cache, v_cache, workspace_buffer, out), (lens_q, lens_kv), block_tables, offsets[:2], maxima,
                               return_lse, options)
    if not return_lse:
        return out, None
    if lse is None:
        lse = torch.empty(requests, max_token_per_sequence, heads, dtype=torch.float32, device=q.device)
    return out, _write_lse(lse, found, bounds.to(q.device), offsets[4])


def _starts(name, offsets, row, are_tokens):
    """The row at which each request begins; offsets on the host are checked."""
    if offsets is None:
        return None
    offsets = offsets.reshape(-1).long()
    if are_tokens:
        return offsets
    if not offsets.is_cuda and bool((offsets % row != 0).any()):
        raise Error(f"flashinfer.{_FUNCTION}: {name} = {offsets.tolist()[:8]}, expected multiples of {row} elements, or "
                    "batch_offsets_units = 'tokens'")
    return torch.div(offsets, row, rounding_mode="floor")


def _lengths(name, lens, starts):
    """Lengths ``[batch_size]``, or the differences of offsets in tokens."""
    if lens is None and starts is None:
        raise Error(f"flashinfer.{_FUNCTION}: {name} is None, expected it, or offsets in tokens of ragged tensors")
    return lens.reshape(-1) if lens is not None else starts.diff()


def _scales(scale, q_scale, k_scale, v_scale):
    """The factors of logits and of outputs."""
    for factor in (q_scale, k_scale):
        scale = scale if factor is None else scale * factor
    return scale, 1.0 if v_scale is None else v_scale


def _bounds(lens):
    """The bounds of packed requests."""
    return torch.nn.functional.pad(lens.long().cumsum(0), (1, 0))


def _paged(tensors, lens, block_tables, offsets, maxima, return_lse, options):
    """Attention over pages; returns the packed LSE or ``None``, and the bounds of rows."""
    q, keys, values, workspace, out = tensors
    bounds = _bounds(lens[0]) if offsets[0] is None else offsets[0]
    for name, one, most in (("actual_seq_lens_q", lens[0], "max_token_per_sequence"),
                            ("actual_seq_lens_kv", lens[1], "max_sequence_kv")):
        check_maximum(_FUNCTION, name, one, most, maxima[most == "max_sequence_kv"])
    for name, other in (("actual_seq_lens_q", _bounds(lens[0])), ("batch_offsets_o", offsets[1])):
        if other is not None and not (other.is_cuda or bounds.is_cuda) and not torch.equal(other, bounds):
            raise Error(f"flashinfer.{_FUNCTION}: {name} has the bounds {other.tolist()[:8]} with block_tables, expected those of "
                        f"batch_offsets_q, {bounds.tolist()[:8]}")
    bounds, lens_kv = (x.to(q.device, torch.int32, non_blocking=True) for x in (bounds, lens[1]))
    found = attend_pages(_FUNCTION, (q, (keys, values), workspace), (block_tables, lens_kv, (bounds, maxima[0])), kv_layout="HND",
                         outputs=(out, None, return_lse, None), **options)
    return (found[1] if return_lse else None), bounds


def _ragged(tensors, lens, offsets, maxima, return_lse, options):
    """Attention over ragged keys, planned on the host; returns the packed LSE or ``None``, and the bounds of packed rows."""
    q, keys, values, workspace, out = tensors
    arrays = [*lens, *offsets]
    if any(x is not None and x.is_cuda for x in arrays) and torch.cuda.is_current_stream_capturing():
        raise Error(f"flashinfer.{_FUNCTION}: lengths and offsets of ragged keys are on a GPU in a capture, expected them on the "
                    "host")
    lens_q, lens_kv, *offsets = (None if x is None else x.cpu().long() for x in arrays)
    for name, one, most in (("actual_seq_lens_q", lens_q, "max_token_per_sequence"),
                            ("actual_seq_lens_kv", lens_kv, "max_sequence_kv")):
        check_maximum(_FUNCTION, name, one, most, maxima[most == "max_sequence_kv"])
    bounds, kv_bounds = _bounds(lens_q), _bounds(lens_kv)
    of_q, of_o, of_k, of_v = offsets
    if of_k is None:
        of_k = kv_bounds if of_q is None else torch.arange(len(lens_kv)) * maxima[1]
    of_v = of_k if of_v is None else of_v
    of_q = bounds if of_q is None else of_q
    rows = [_rows(name, starts, one, len(x)) for name, starts, one, x in (
        ("q", of_q, lens_q, q), ("o", of_q if of_o is None else of_o, lens_q, out), ("k", of_k, lens_kv, keys),
        ("v", of_v, lens_kv, values))]
    q, keys, values = (_gather(x, at) for x, at in ((q, rows[0]), (keys, rows[2]), (values, rows[3])))
    to = out[rows[1]] if isinstance(rows[1], slice) else torch.empty(
        len(q), *out.shape[1:], dtype=out.dtype, device=out.device)
    found = attend_ragged(_FUNCTION, (q, keys, values, workspace), (("batch_offsets_q", bounds), ("batch_offsets_k", kv_bounds)),
                          len(lens_q), outputs=(to, None, return_lse, None), **options)
    if not isinstance(rows[1], slice):
        _bits(out).index_copy_(0, rows[1].to(out.device), _bits(to))
    return (found[1] if return_lse else None), bounds


def _rows(name, starts, lens, count):
    """The rows of all requests in a tensor of ``count``: a slice if they are packed, else their numbers."""
    starts = starts[: len(lens)]
    ends = starts + lens
    if len(lens) and not 0 <= int(starts.min()) <= int(ends.max()) <= count:
        raise Error(f"flashinfer.{_FUNCTION}: requests have rows {int(starts.min())} to {int(ends.max())} of {name}, which has "
                    f"{count}")
    bounds = _bounds(lens)
    # an empty request may begin anywhere
    if torch.equal(torch.where(lens > 0, starts, bounds[:-1]), bounds[:-1]):
        return slice(0, int(bounds[-1]))
    return torch.arange(int(bounds[-1])) + (starts - bounds[:-1]).repeat_interleave(lens)


def _gather(x, rows):
    """The rows of a tensor, copied unless they are packed."""
    return x[rows] if isinstance(rows, slice) else _bits(x).index_select(0, rows.to(x.device)).view(x.dtype)


def _bits(x):
    """Elements of 8 bits as integers, which torch can index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _write_lse(lse, packed, bounds, starts):
    """Writes packed base-2 LSEs as natural ones: request ``r`` from row ``starts[r]`` on, by default in the rows of its own, and
    -inf elsewhere."""
    requests, longest, heads = lse.shape
    request, each = requests_of(bounds, len(packed))
    known = request.clamp(0, max(requests - 1, 0))
    row = each - bounds[known]
    first = torch.arange(requests, device=lse.device) * longest if starts is None else starts.to(lse.device)
    to = first[known] + row
    # rows of no request go to a row that is not copied
    is_written = (request == known) & (row < longest) & (to < requests * longest)
    to = torch.where(is_written, to, requests * longest)
    natural = torch.full((requests * longest + 1, heads), -math.inf, dtype=torch.float32, device=lse.device)
    natural.index_copy_(0, to, packed * _LOG_2)
    lse.copy_(natural[:-1].view(lse.shape))
    return lse
