"""Appends to paged KV caches, and the positions of new tokens."""

from . import _core
from ._device import queue_of
from ._tensors import device_indices, from_list, on_host, shape_of
from .attention import PageTable


def append_paged_kv_cache(
    k, v, batch_indices, positions, k_cache, v_cache, table: PageTable, *, layout: str = "NHD", k_scale=None, v_scale=None
) -> None:
    """Writes new keys and values to their pages, rounded to the cache's dtype.

    ``k``, ``v`` ``[num_tokens, num_kv_heads, head_dim]``; ``batch_indices``, ``positions`` ``[num_tokens]``: the request (-1
    skips the token) and the position of each token; ``table`` is that after the append. ``k_cache``, ``v_cache`` ``[num_pages,
    page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND). A scale divides the
    values before they are rounded.

    If one of the arrays is on a GPU, the kernel reads all of them there: the call does not wait, and a graph can record it. Such
    values are not checked: a token is skipped if its request is out of range, no page of its request has its position, or the
    cache lacks its page. ``last_page_len`` is not read then.
    """
    _append(k, v, k_cache, v_cache, _places(batch_indices, positions, table), layout, k_scale, v_scale)


def append_to_slots(k, v, slot_mapping, k_cache, v_cache, *, layout: str = "NHD", k_scale=None, v_scale=None) -> None:
    """:func:`append_paged_kv_cache` by a slot mapping: token ``t`` goes to slot ``slot_mapping[t] % page_size`` of page
    ``slot_mapping[t] // page_size``; -1 skips it. int64 or int32 ``[num_tokens]``; on a GPU the call does not wait, and every
    number without a slot skips its token."""
    page_size = shape_of(k_cache)[1 if layout == "NHD" else 2]
    _append(k, v, k_cache, v_cache, _mapping(slot_mapping, page_size), layout, k_scale, v_scale)


def _append(k, v, k_cache, v_cache, slots, layout, k_scale, v_scale):
    _core.append_paged(queue_of(k_cache), {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots, "layout": layout, "k_scale": k_scale,
        "v_scale": v_scale,
    })


def append_paged_mla_kv_cache(ckv, kpe, batch_indices, positions, ckv_cache, kpe_cache, table: PageTable) -> None:
    """Writes new latent rows: ``ckv``, ``kpe`` ``[num_tokens, dim]`` to caches ``[num_pages, page_size, dim]``. Arrays on a GPU
    have the meaning of :func:`append_paged_kv_cache`."""
    _core.append_paged_mla(queue_of(ckv_cache), {
        "ckv": ckv, "kpe": kpe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache,
        "slots": _places(batch_indices, positions, table),
    })


def append_mla_to_slots(ckv, kpe, slot_mapping, ckv_cache, kpe_cache) -> None:
    """:func:`append_paged_mla_kv_cache` by the slot mapping of :func:`append_to_slots`."""
    _core.append_paged_mla(queue_of(ckv_cache), {
        "ckv": ckv, "kpe": kpe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache,
        "slots": _mapping(slot_mapping, shape_of(ckv_cache)[1]),
    })


def _places(batch_indices, positions, table):
    return {
        "batch_indices": device_indices(batch_indices), "positions": device_indices(positions),
        "indptr": device_indices(table.indptr), "indices": device_indices(table.indices), "last_page_len": table.last_page_len,
        "slot_mapping": None, "page_size": table.page_size,
    }


def _mapping(slot_mapping, page_size):
    return {
        "batch_indices": None, "positions": None, "indptr": None, "indices": None, "last_page_len": None,
        "slot_mapping": device_indices(slot_mapping, "int64"), "page_size": page_size,
    }


def get_batch_indices_positions(append_indptr, seq_lens):
    """The request and the position of each new token, int32 ``[append_indptr[-1]]``. ``seq_lens`` ``[num_requests]`` includes
    the new tokens."""
    requests, positions = _core.batch_indices_positions(on_host(append_indptr), on_host(seq_lens))
    return from_list(requests, "int32", append_indptr), from_list(positions, "int32", append_indptr)


def get_seq_lens(table: PageTable):
    """The number of cached tokens of each request, int32 ``[num_requests]``."""
    return from_list(_core.seq_lens(table._arrays()), "int32", table.indptr)
