"""``trtllm_fmha_v2_prefill``: stateless prefill of packed, contiguous, separate or paged keys and values."""

import math

import torch

from .._core import Error
from .ragged import attend_ragged
from .stateless import attend_pages
from ._refuse import check_choice, number, positive, refuse

_LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
#: The base-2 logarithm of e.
_LOG2_E = 1.4426950408889634


def trtllm_fmha_v2_prefill(
    qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q,
    cum_seq_lens_kv, block_tables=None, out=None, out_dtype=None, sinks=None, pos_encoding_mode=None,
    logits_soft_cap_scale=None, mask_mode="causal", window_left=-1, chunked_attention_size=0, save_softmax_stats=False,
    skip_softmax_threshold_scale_factor=0,
):
    """Attention of the last rows of each request, with bounds of rows in ``cum_seq_lens_q`` ``[batch_size + 1]``.

    ``input_layout`` and ``qkv``:

    - ``PACKED_QKV``: ``[num_tokens, 3, num_heads, head_dim]``;
    - ``CONTIGUOUS_Q_KV``: queries ``[num_rows, num_qo_heads, head_dim]`` and ``[num_tokens, 2, num_kv_heads, head_dim]``;
    - ``SEPARATE_Q_K_V``: queries, keys and values, of three axes each;
    - ``Q_PAGED_KV_NHD``, ``Q_PAGED_KV_HND``: queries, and the cache ``[num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD)
      with ``block_tables`` ``[batch_size, max_pages]``, or a pair of caches in one allocation with ``[batch_size, 2, max_pages]``,
      whose second entries are those of the first plus the distance of the caches in pages.

    ``mask_mode`` is ``causal``, ``sliding_window`` (``window_left`` keys before that of the row), ``chunked`` (keys of the row's
    chunk of ``chunked_attention_size``) or ``padding`` (all keys). ``pos_encoding_mode`` may be ``alibi``, and
    ``logits_soft_cap_scale`` is the soft cap of logits. ``bmm1_scale`` is the factor of ``q · k``, ``bmm2_scale`` that of outputs.
    Outputs have ``out_dtype``, by default that of ``out`` or of queries. Returns the output, or with ``save_softmax_stats`` also
    ``[num_rows, num_qo_heads, 2]``: the natural LSE in the units of FlashInfer's maximum, and 1 as the sum.

    Batches of paged layouts are planned on the GPU without waiting; those of other layouts on the host, which waits for the bounds
    on a GPU unless they are those of the last call. ``max_kv_len`` repeats what the bounds say. All weights are computed:
    ``skip_softmax_threshold_scale_factor``, which permits to skip small ones, has no effect.
    """
    function = "trtllm_fmha_v2_prefill"
    check_choice(function, "input_layout", input_layout, _LAYOUTS)
    mode = (mask_mode or "causal").lower()
    check_choice(function, "mask_mode", mode, ("causal", "sliding_window", "chunked", "padding"))
    encoding = (pos_encoding_mode or "none").upper()
    check_choice(function, "pos_encoding_mode", encoding, ("NONE", "ALIBI"))
    window = -1 if window_left is None else window_left
    chunk = chunked_attention_size or 0
    for name, value, is_used, owner in (("window_left", window, window >= 0, "sliding_window"),
                                        ("chunked_attention_size", chunk, chunk > 0, "chunked")):
        if is_used != (mode == owner):
            raise Error(f"flashinfer.{function}: {name} = {value} with mask_mode = {mask_mode}, expected it with {owner!r} alone")
    for name, scale in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if not isinstance(scale, torch.Tensor):
            positive(function, name, scale)
    q, k, v = _tensors(function, qkv, input_layout)
    settings = {"window_left": window, "chunk": chunk, "causal": mode != "padding", "soft_cap": logits_soft_cap_scale,
                "pos_encoding_mode": encoding, "sinks": sinks}
    outputs = (out, None, save_softmax_stats, out_dtype)
    if input_layout.startswith("Q_PAGED"):
        layout = input_layout[-3:]
        tables = _tables(function, block_tables, k, v)
        found = attend_pages(function, (q, (k, v), workspace_buffer), (tables, seq_lens, (cum_seq_lens_q, max_q_len)),
                             kv_layout=layout, scales=(bmm1_scale, bmm2_scale), outputs=outputs, **settings)
    else:
        refuse(function, "None without pages", block_tables=block_tables)
        bounds = (("cum_seq_lens_q", cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv))
        found = attend_ragged(function, (q, k, v, workspace_buffer), bounds, batch_size, scales=(bmm1_scale, bmm2_scale),
                              outputs=outputs, **settings)
    if not save_softmax_stats:
        return found
    o, lse = found
    # FlashInfer's maximum is that of logits without the scale that is not in sm_scale = 1 / sqrt(head_dim), or capped, times it
    sm_scale = 1.0 / math.sqrt(q.shape[2])
    factor = sm_scale if logits_soft_cap_scale else sm_scale / number(function, "bmm1_scale", bmm1_scale)
    return o, torch.stack([lse * (factor / _LOG2_E), torch.ones_like(lse)], dim=-1)


def _tensors(function, qkv, layout):
    """Queries, keys and values."""
    parts = (qkv,) if isinstance(qkv, torch.Tensor) else tuple(qkv)
    shapes = [tuple(part.shape) if isinstance(part, torch.Tensor) else None for part in parts]

    def unless(is_right, expected):
        if not is_right:
            raise Error(f"flashinfer.{function}: qkv has shapes {shapes} with {layout}, expected {expected}")

    if layout == "PACKED_QKV":
        unless(len(parts) == 1 and len(shapes[0]) == 4 and shapes[0][1] == 3, "one tensor [num_tokens, 3, num_heads, head_dim]")
        return parts[0].unbind(1)
    if layout == "SEPARATE_Q_K_V":
        unless(len(parts) == 3 and all(shape and len(shape) == 3 for shape in shapes), "three tensors of three axes")
        return parts
    if layout == "CONTIGUOUS_Q_KV":
        unless(len(parts) == 2 and all(shapes) and len(shapes[0]) == 3 and len(shapes[1]) == 4 and shapes[1][1] == 2,
               "queries of three axes and keys and values [num_tokens, 2, num_kv_heads, head_dim]")
        return parts[0], *parts[1].unbind(1)
    is_pair = len(parts) == 2 and isinstance(parts[1], (tuple, list)) and len(parts[1]) == 2
    is_cache = len(parts) == 2 and shapes[1] is not None and len(shapes[1]) == 5 and shapes[1][1] == 2
    unless(shapes[0] and len(shapes[0]) == 3 and (is_pair or is_cache),
           "queries of three axes and a cache of five, or a pair of caches of four")
    return parts[0], *(parts[1] if is_pair else parts[1].unbind(1))


def _tables(function, tables, k, v):
    """Block tables of pages of keys and values. Those of a pair of caches are checked, which waits for a GPU."""
    if tables is None:
        raise Error(f"flashinfer.{function}: block_tables is None, expected a table with a paged layout")
    if tables.dim() == 2:
        return tables
    page = k.stride(0) * k.element_size()
    distance, rest = divmod(v.data_ptr() - k.data_ptr(), page)
    of_keys, of_values = tables.unbind(1)
    if tables.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse(function, "[batch_size, max_pages] in a capture", block_tables=tuple(tables.shape))
    if rest or not bool((of_values - of_keys == distance).all()):
        raise Error(f"flashinfer.{function}: block_tables have other distances of keys and values than their caches, "
                    f"{distance} pages")
    return of_keys.contiguous()


def fmha_v2_prefill_deepseek(*_args, **_kwargs):
    """FlashInfer has kernels for SM120 only."""
    refuse("fmha_v2_prefill_deepseek", "trtllm_ragged_attention_deepseek", device="SM90")


def fmha_v2_prefill_sm120(*_args, **_kwargs):
    """FlashInfer has kernels for SM120 only."""
    refuse("fmha_v2_prefill_sm120", "trtllm_fmha_v2_prefill", device="SM90")
