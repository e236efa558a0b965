"""Appends to paged KV caches, and the positions of new tokens."""

from . import _core
from ._device import queue_of
from ._tensors import from_list, on_host
from .attention import PageTable


def append_paged_kv_cache(
    k, v, batch_indices, positions, k_cache, v_cache, table: PageTable, *, layout: str = "NHD", k_scale=None, v_scale=None
) -> None:
    """Writes new keys and values to their pages, rounded to the cache's dtype.

    ``k``, ``v`` ``[num_tokens, num_kv_heads, head_dim]``; ``batch_indices``, ``positions`` ``[num_tokens]``: the request (-1
    skips the token) and the position of each token; ``table`` is that after the append. ``k_cache``, ``v_cache`` ``[num_pages,
    page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND). A scale divides the
    values before they are rounded.
    """
    _core.append_paged(queue_of(k_cache), {
        "k": k, "v": v, "batch_indices": on_host(batch_indices), "positions": on_host(positions),
        "k_cache": k_cache, "v_cache": v_cache, "table": table._arrays(), "layout": layout,
        "k_scale": k_scale, "v_scale": v_scale,
    })


def append_paged_mla_kv_cache(ckv, kpe, batch_indices, positions, ckv_cache, kpe_cache, table: PageTable) -> None:
    """Writes new latent rows: ``ckv``, ``kpe`` ``[num_tokens, dim]`` to caches ``[num_pages, page_size, dim]``."""
    _core.append_paged_mla(queue_of(ckv_cache), {
        "ckv": ckv, "kpe": kpe, "batch_indices": on_host(batch_indices), "positions": on_host(positions),
        "ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "table": table._arrays(),
    })


def get_batch_indices_positions(append_indptr, seq_lens):
    """The request and the position of each new token, int32 ``[append_indptr[-1]]``. ``seq_lens`` ``[num_requests]`` includes
    the new tokens."""
    requests, positions = _core.batch_indices_positions(on_host(append_indptr), on_host(seq_lens))
    return from_list(requests, "int32", append_indptr), from_list(positions, "int32", append_indptr)


def get_seq_lens(table: PageTable):
    """The number of cached tokens of each request, int32 ``[num_requests]``."""
    return from_list(_core.seq_lens(table._arrays()), "int32", table.indptr)
