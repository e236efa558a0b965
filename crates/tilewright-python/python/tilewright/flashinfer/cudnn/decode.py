"""Decode over pages with the arguments of cuDNN, without ``plan``."""

import torch

from ..._core import Error
from .._refuse import refuse
from ..stateless import attend_pages


def cudnn_batch_decode_with_kv_cache(
    q, k_cache, v_cache, scale, workspace_buffer, *, max_sequence_kv, actual_seq_lens_kv=None, block_tables=None,
    is_cuda_graph_compatible=False, batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None, batch_offsets_v=None,
    out=None,
):
    """One query row per request, ``q`` ``[batch_size, num_qo_heads, head_dim]``, over caches ``[num_pages, num_kv_heads,
    page_size, head_dim]`` of any strides. ``block_tables`` ``[batch_size, max_pages]``; ``actual_seq_lens_kv`` has ``batch_size``
    lengths, all ``max_sequence_kv`` by default. Lengths are planned where the queries are, and nothing waits for a GPU.

    ``batch_offsets_q`` and ``batch_offsets_o`` repeat that rows are packed, and are checked on the host. ``max_sequence_kv``
    bounds lengths on the host. ``is_cuda_graph_compatible`` is a hint without effect.
    """
    function = "cudnn_batch_decode_with_kv_cache"
    refuse(function, batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    if q.dim() != 3:
        raise Error(f"flashinfer.{function}: q has shape {tuple(q.shape)}, expected [batch_size, num_qo_heads, head_dim]")
    requests = q.shape[0]
    if block_tables is None:
        raise Error(f"flashinfer.{function}: block_tables is None, expected [batch_size, max_pages]")
    for name, offsets, row in (("batch_offsets_q", batch_offsets_q, q.shape[1] * q.shape[2]),
                               ("batch_offsets_o", batch_offsets_o, q.shape[1] * v_cache.shape[-1])):
        if offsets is not None and not offsets.is_cuda:
            starts = offsets.reshape(-1)[:requests].tolist()
            if starts != [at * row for at in range(requests)]:
                raise Error(f"flashinfer.{function}: {name} begins {starts[:4]}, expected multiples of {row} elements")
    if actual_seq_lens_kv is None:
        lens = torch.full((requests,), max_sequence_kv, dtype=torch.int32, device=q.device)
    else:
        lens = lengths(function, "actual_seq_lens_kv", actual_seq_lens_kv, requests)
        check_maximum(function, "actual_seq_lens_kv", lens, "max_sequence_kv", max_sequence_kv)
        lens = lens.to(q.device, torch.int32, non_blocking=True)
    return attend_pages(function, (q, (k_cache, v_cache), workspace_buffer), (block_tables, lens, (None, 1)), kv_layout="HND",
                        scales=(scale, 1.0), window_left=-1, sinks=None, outputs=(out, None, False, None))


def lengths(function, name, lens, requests):
    """Lengths ``[batch_size]`` from those of any number of axes."""
    if lens.numel() != requests:
        raise Error(f"flashinfer.{function}: {name} has shape {tuple(lens.shape)}, expected {requests} lengths")
    return lens.reshape(-1)


def check_maximum(function, name, lens, maximum_name, maximum):
    """Rejects lengths on the host that are negative or exceed the maximum."""
    if not lens.is_cuda and len(lens) and not 0 <= int(lens.min()) <= int(lens.max()) <= maximum:
        raise Error(f"flashinfer.{function}: {name} has lengths {int(lens.min())} to {int(lens.max())}, expected 0 to "
                    f"{maximum_name} = {maximum}")
