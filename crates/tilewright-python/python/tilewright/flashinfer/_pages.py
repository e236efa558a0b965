"""FlashInfer's page tables and caches in the forms of this package."""

import numpy
import torch

from .._core import Error
from .._tensors import on_host
from ..attention import PageTable


def host_array(x) -> numpy.ndarray:
    """An index tensor on the host; copying one from a GPU waits for it."""
    return on_host(x).numpy() if isinstance(x, torch.Tensor) else numpy.asarray(x)


def is_on_gpu(x) -> bool:
    """Whether an array is in the memory of a GPU."""
    return getattr(x, "is_cuda", False)


def requests_of(indptr, tokens: int):
    """The request of each of the tokens, with the tokens: the number of requests for tokens after the last bound. It does not
    wait for a GPU."""
    each = torch.arange(tokens, dtype=indptr.dtype, device=indptr.device)
    return torch.searchsorted(indptr, each, right=True) - 1, each


def page_table(indptr, indices, last_page_len, page_size: int) -> PageTable:
    """A table from the arrays of ``plan``, which engines pad: bounds that do not start at 0, more indices than the bounds
    name, and a length of the last page of requests without pages. Page indices on a GPU stay there."""
    indptr, last = on_host(indptr), on_host(last_page_len)
    bounds = host_array(indptr)
    if len(bounds) == 0:
        raise Error("flashinfer.plan: indptr is empty, expected [batch_size + 1]")
    begin, end = int(bounds[0]), int(bounds[-1])
    if begin != 0:
        indptr = bounds - begin
    if begin != 0 or end != len(indices):
        if not 0 <= begin <= end <= len(indices):
            raise Error(f"flashinfer.plan: indptr names the pages {begin}..{end}, indices has {len(indices)}")
        indices = indices[begin:end]
    empty = bounds[1:] == bounds[:-1]
    if len(empty) == len(last) and numpy.count_nonzero(empty):
        last = numpy.where(empty, 0, host_array(last))
    return PageTable(indptr, indices, last, page_size)


def last_page_lens(function: str, kv_indptr, kv_lens, page_size: int) -> numpy.ndarray:
    """The tokens of the last page of each request, whose pages must be those of its tokens; 0 without pages."""
    lens, bounds = host_array(kv_lens), host_array(kv_indptr)
    if len(lens) != len(bounds) - 1 or (-(-lens // page_size) != bounds[1:] - bounds[:-1]).any():
        raise Error(f"flashinfer.{function}: lengths {lens.tolist()} do not fit the pages of kv_indptr = {bounds.tolist()}")
    return numpy.where(lens > 0, (lens - 1) % page_size + 1, 0)


def split_cache(function: str, cache, layout: str):
    """K and V of a paged cache: a pair, or one tensor with K and V along axis 1. Caches without a page axis have pages of one
    token."""
    if isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise Error(f"flashinfer.{function}: paged_kv_cache has {len(cache)} tensors, expected (k_cache, v_cache)")
        k, v = cache
    elif isinstance(cache, torch.Tensor):
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise Error(f"flashinfer.{function}: paged_kv_cache has shape {tuple(cache.shape)}, expected [num_pages, 2, ...]")
        k, v = cache.unbind(1)
    else:
        raise KeyError(f"flashinfer.{function}: paged_kv_cache is {type(cache).__name__}, expected a tensor or a pair")
    if k.dim() != 3 and v.dim() != 3:
        return k, v
    axis = 1 if layout == "NHD" else 2
    return tuple(x if x.dim() != 3 else x.unsqueeze(axis) for x in (k, v))


def run_cache(cache, layout: str):
    """The cache of a run: K and V, or ``(cache, None)`` if it is one tensor of pages, which the operator splits."""
    if isinstance(cache, torch.Tensor) and cache.ndim == 5:
        return cache, None
    return split_cache("run", cache, layout)
