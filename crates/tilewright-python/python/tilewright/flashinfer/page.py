"""Appends to paged caches, and the positions of new tokens. Arrays on a GPU stay there: no call waits for it."""

import torch

from .. import cache
from .._core import Error, batch_indices_positions
from ..attention import PageTable
from ._compiled import is_compiling, operator
from ._pages import host_array, page_table, requests_of, split_cache
from ._refuse import check_layout


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD", *, v_scale=None,
):
    """Writes new keys and values ``[nnz, num_kv_heads, head_dim]`` to the pages of their positions. ``v_scale`` divides values.

    If one of the arrays is on a GPU, the kernel reads all of them there, and skips a token without a page in the cache."""
    check_layout("append_paged_kv_cache", kv_layout)
    if is_compiling():
        k_cache, v_cache = paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else (paged_kv_cache, None)
        _append(append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len,
                kv_layout, v_scale)
        return
    k_cache, v_cache = split_cache("append_paged_kv_cache", paged_kv_cache, kv_layout)
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    table = _table(batch_indices, positions, kv_indptr, kv_indices, kv_last_page_len, page_size)
    cache.append_paged_kv_cache(append_key, append_value, batch_indices, positions, k_cache, v_cache, table, layout=kv_layout,
                                v_scale=v_scale)


@operator("append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, "
          "Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len, str kv_layout, "
          "float? v_scale)")
def _append(append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len,
            kv_layout, v_scale):
    cache = k_cache if v_cache is None else (k_cache, v_cache)
    append_paged_kv_cache(append_key, append_value, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len,
                          kv_layout, v_scale=v_scale)


def append_paged_mla_kv_cache(
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
):
    """Writes new latent rows ``[nnz, dim]`` to caches ``[num_pages, page_size, dim]``."""
    for name, value in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        if value is None:
            raise Error(f"flashinfer.append_paged_mla_kv_cache: {name} = None, expected both caches")
    if is_compiling():
        _append_mla(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
                    kv_last_page_len)
        return
    table = _table(batch_indices, positions, kv_indptr, kv_indices, kv_last_page_len, ckv_cache.shape[1])
    cache.append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, table)


@operator("append_paged_mla_kv_cache(Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions, "
          "Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len)")
def _append_mla(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
                kv_last_page_len):
    append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
                              kv_last_page_len)


def _table(batch_indices, positions, indptr, indices, last_page_len, page_size):
    if any(getattr(x, "is_cuda", False) for x in (batch_indices, positions, indptr, indices)):
        return PageTable(indptr, indices, last_page_len, page_size)
    return page_table(indptr, indices, last_page_len, page_size)


def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """The request and the position of each of ``nnz`` new tokens, int32 ``[nnz]``; entries after the last token are -1 and 0.

    Arrays on a GPU or in compiled code are not checked: more tokens than ``nnz`` are cut off."""
    if is_compiling() or any(getattr(x, "is_cuda", False) for x in (append_indptr, seq_lens)):
        requests, places = _on_device(append_indptr, seq_lens, nnz)
    else:
        requests, places = _on_host(append_indptr, seq_lens, nnz)
    return (requests if batch_indices is None else batch_indices.copy_(requests, non_blocking=True),
            places if positions is None else positions.copy_(places, non_blocking=True))


def _on_host(append_indptr, seq_lens, nnz):
    requests, places = batch_indices_positions(host_array(append_indptr), host_array(seq_lens))
    if len(requests) > nnz:
        raise Error(f"flashinfer.get_batch_indices_positions: nnz = {nnz}, append_indptr ends at {len(requests)}")
    padded = torch.full((nnz,), -1, dtype=torch.int32), torch.zeros(nnz, dtype=torch.int32)
    for out, known in zip(padded, (requests, places)):
        out[: len(known)] = torch.tensor(known, dtype=torch.int32)
    return padded


def _on_device(append_indptr, seq_lens, nnz):
    """:func:`_on_host` with operators of torch that do not wait."""
    device = seq_lens.device if append_indptr.device.type == "cpu" else append_indptr.device
    append_indptr, seq_lens = (x.to(device, non_blocking=True) for x in (append_indptr, seq_lens))
    num_requests = seq_lens.shape[0]
    if num_requests == 0:
        return torch.full((nnz,), -1, dtype=torch.int32, device=device), torch.zeros(nnz, dtype=torch.int32, device=device)
    requests, tokens = requests_of(append_indptr, nnz)
    exists = requests < num_requests
    known = requests.clamp(max=num_requests - 1)
    places = seq_lens[known] - append_indptr[known + 1] + tokens
    return torch.where(exists, requests, -1).int(), torch.where(exists, places, 0).int()


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """The number of cached tokens of each request, on the device of the arguments, without waiting for it."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, torch.zeros_like(pages))
