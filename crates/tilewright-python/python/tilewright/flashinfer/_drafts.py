"""Masks of draft tokens, as XQA has them, as tables that runs bind."""

import torch

from .. import variants
from .._core import Error


def drafts_variant(num_requests: int, num_flags: int):
    """A mask of the draft tokens of each request, which are its last keys; all keys before them are visible. Runs bind
    :func:`draft_tables` of these sizes."""

    def visible(at):
        draft = at.kv - at.draft_begin[at.request]
        row = at.draft_row[at.request] + (at.qo - at.draft_begin[at.request])
        return (draft < 0.0) | (at.draft_flags[row * at.draft_width[0.0] + variants.maximum(draft, 0.0)] > 0.0)

    sizes = {"draft_begin": num_requests, "draft_row": num_requests, "draft_flags": num_flags, "draft_width": 1}
    tables = {name: torch.empty(size, dtype=torch.float32) for name, size in sizes.items()}
    return variants.Variant._of(variants.Variant("drafts", params=tables, mask=visible)._core)


def draft_tables(function: str, mask, bounds, qo_len: int, seq_lens, num_rows: int):
    """The sizes and the tables of a mask uint16 ``[num_rows, ceil(qo_len / 32) · 2]``, on its device, without waiting.

    Rows of request ``r`` are ``bounds[r]..bounds[r + 1]``, or ``qo_len`` without ``bounds``. Sizes are powers of two, so that other
    batches have the same operator."""
    words = -(-qo_len // 32) * 2
    if mask.dtype != torch.uint16 or mask.numel() != num_rows * words:
        raise Error(f"flashinfer.{function}: mask is {mask.dtype} of shape {tuple(mask.shape)}, expected torch.uint16 "
                    f"[{num_rows}, {words}]")
    device, width, requests = mask.device, words * 16, seq_lens.shape[0]
    if num_rows * width > 1 << 24:
        raise Error(f"flashinfer.{function}: mask has {num_rows * width} bits, expected at most {1 << 24}")
    bits = mask.contiguous().view(torch.uint8).reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)
    if bounds is None:
        rows, counts = torch.arange(0, requests * qo_len, qo_len, device=device), qo_len
    else:
        bounds = bounds.to(device, torch.int32)
        rows, counts = bounds[:-1], bounds.diff()
    found = {"draft_flags": (bits & 1).reshape(-1), "draft_row": rows, "draft_begin": seq_lens.to(device, torch.int32) - counts}
    tables = {name: _padded(values) for name, values in found.items()}
    tables["draft_width"] = torch.full((1,), width, dtype=torch.float32, device=device)
    return (tables["draft_row"].shape[0], tables["draft_flags"].shape[0]), tables


def _padded(values):
    """The values as float32, of a size that is a power of two."""
    table = torch.zeros(1 << max(values.shape[0] - 1, 0).bit_length(), dtype=torch.float32, device=values.device)
    table[: values.shape[0]] = values
    return table
