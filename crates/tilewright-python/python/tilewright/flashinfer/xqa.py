"""XQA decode: attention of one row or a few draft tokens per request, into a tensor of the caller."""

import torch

from .._core import Error
from ._refuse import output_scale, refuse
from .mla import attend_latent
from .stateless import attend_pages


def xqa(
    q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size, sinks=None,
    q_scale=1.0, kv_scale=1.0, sliding_win_size=0, kv_layout="NHD", sm_count=None, enable_pdl=None, rcp_out_scale=1.0,
    q_seq_len=1, mask=None, *, q_cu_seq_lens=None, k_sf_cache=None, v_sf_cache=None,
):
    """Writes attention to ``output``, which has the shape of ``q``.

    ``q`` ``[batch_size, 1, num_qo_heads, head_dim]``, with drafts ``[batch_size, 1, q_seq_len, num_qo_heads, head_dim]``, or
    with bounds ``q_cu_seq_lens`` ``[num_tokens, num_qo_heads, head_dim]``. Caches ``[num_pages, page_size, num_kv_heads,
    head_dim]`` (NHD) of the dtype of ``q`` or float8_e4m3fn; ``page_table`` ``[batch_size, max_pages]``; ``seq_lens``
    ``[batch_size, 1]``; ``sinks`` ``[num_kv_heads, group]``. Logits have the factor ``q_scale · kv_scale / sqrt(head_dim)``,
    outputs ``kv_scale · rcp_out_scale``; scales are numbers or tensors of one element. ``sliding_win_size`` counts a row's own
    key, 0 is no window. ``mask`` is that of :func:`~tilewright.flashinfer.xqa_batch_decode_with_kv_cache`. ``semaphores``,
    ``sm_count`` and ``enable_pdl`` are hints without effect.
    """
    refuse("xqa", k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    output_scale("xqa", "rcp_out_scale", rcp_out_scale)
    axes = 3 if q_cu_seq_lens is not None else 4 + (q_seq_len > 1)
    if q.dim() != axes or (axes > 3 and q.shape[1] != 1) or (axes > 4 and q.shape[2] != q_seq_len):
        expected = {3: "[num_tokens", 4: "[batch_size, 1", 5: f"[batch_size, 1, {q_seq_len}"}[axes]
        raise Error(f"flashinfer.xqa: q has shape {tuple(q.shape)}, expected {expected}, num_qo_heads, head_dim]")
    found = k_cache.shape[2 if kv_layout == "NHD" else 1], k_cache.shape[1 if kv_layout == "NHD" else 2]
    if found != (num_kv_heads, page_size):
        raise Error(f"flashinfer.xqa: k_cache has shape {tuple(k_cache.shape)}, expected num_kv_heads = {num_kv_heads} and "
                    f"page_size = {page_size} in {kv_layout}")
    if output.shape != q.shape or not output.is_contiguous():
        raise Error(f"flashinfer.xqa: output has shape {tuple(output.shape)} and strides {output.stride()}, expected "
                    f"{tuple(q.shape)}, contiguous")
    lens = seq_lens.reshape(-1)
    scales = q_scale * kv_scale * q.shape[-1] ** -0.5, kv_scale * rcp_out_scale
    attend_pages(
        "xqa", (q.reshape(-1, *q.shape[-2:]), (k_cache, v_cache), workspace_buffer),
        (page_table, lens.view(torch.int32) if lens.dtype == torch.uint32 else lens, (q_cu_seq_lens, q_seq_len)),
        kv_layout=kv_layout, scales=scales, window_left=sliding_win_size - 1 if sliding_win_size > 0 else -1,
        sinks=None if sinks is None else sinks.reshape(-1), mask=mask,
        outputs=(output.view(-1, *q.shape[-2:]), None, False, None),
    )


def xqa_mla(
    q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, page_size, q_scale=1.0, kv_scale=1.0,
    sm_count=None, enable_pdl=None,
):
    """Writes latent attention to ``output`` ``[batch_size, 1, num_heads, head_dim_ckv]``.

    ``q`` ``[batch_size, 1, num_heads, head_dim_ckv + 64]``, bfloat16 or float8_e4m3fn; ``k_cache`` of ``num_pages · page_size``
    rows of that width; ``v_cache`` is its first part, and is not read. Logits have the factor ``q_scale · kv_scale``, outputs
    ``kv_scale``. ``semaphores``, ``sm_count`` and ``enable_pdl`` are hints without effect.
    """
    if q.dim() != 4 or q.shape[1] != 1:
        raise Error(f"flashinfer.xqa_mla: q has shape {tuple(q.shape)}, expected [batch_size, 1, num_heads, head_dim]")
    lens = seq_lens.reshape(-1)
    attend_latent(
        "xqa_mla", (q.squeeze(1), k_cache.reshape(-1, page_size, q.shape[3]), workspace_buffer),
        (page_table, lens.view(torch.int32) if lens.dtype == torch.uint32 else lens, (None, 1)), output.shape[-1],
        scales=(q_scale * kv_scale, kv_scale), outputs=(output.view(-1, *output.shape[-2:]), None, False),
    )
