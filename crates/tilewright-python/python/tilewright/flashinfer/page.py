"""Appends to paged caches, and the positions of new tokens."""

import torch

from .. import cache
from .._core import Error, batch_indices_positions
from ._pages import host_array, page_table, split_cache
from ._refuse import check_layout


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):
    """Writes new keys and values ``[nnz, num_kv_heads, head_dim]`` to the pages of their positions."""
    check_layout("append_paged_kv_cache", kv_layout)
    k_cache, v_cache = split_cache("append_paged_kv_cache", paged_kv_cache, kv_layout)
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    table = page_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
    cache.append_paged_kv_cache(append_key, append_value, batch_indices, positions, k_cache, v_cache, table, layout=kv_layout)


def append_paged_mla_kv_cache(
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
):
    """Writes new latent rows ``[nnz, dim]`` to caches ``[num_pages, page_size, dim]``."""
    for name, value in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        if value is None:
            raise Error(f"flashinfer.append_paged_mla_kv_cache: {name} = None, expected both caches")
    table = page_table(kv_indptr, kv_indices, kv_last_page_len, ckv_cache.shape[1])
    cache.append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, table)


def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """The request and the position of each of ``nnz`` new tokens, int32 ``[nnz]``; entries after the last token are -1 and 0."""
    requests, places = batch_indices_positions(host_array(append_indptr), host_array(seq_lens))
    if len(requests) > nnz:
        raise Error(f"flashinfer.get_batch_indices_positions: nnz = {nnz}, append_indptr ends at {len(requests)}")
    padding = nnz - len(requests)
    return (_into(batch_indices, requests + [-1] * padding, append_indptr),
            _into(positions, places + [0] * padding, append_indptr))


def _into(out, values, like):
    values = torch.tensor(values, dtype=torch.int32, device=like.device)
    return values if out is None else out.copy_(values)


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """The number of cached tokens of each request, on the device of the arguments, without waiting for it."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, torch.zeros_like(pages))
