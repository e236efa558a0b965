"""Masks of draft tokens, as XQA has them, as tables that runs bind."""

import functools

import torch

from .. import variants
from .._core import Error


def drafts_variant(num_requests: int, num_flags: int, width: int, qo_len: int):
    """A mask of the draft tokens of each request, which are its last keys; all keys before them are visible. Runs bind
    :func:`draft_tables` of these sizes."""

    def visible(at):
        if qo_len:
            first, count = at.request * at.draft_rows, at.draft_rows
        else:
            first, end = (at.draft_requests[at.request + column] for column in (num_requests, num_requests + 1))
            count = end - first
        begin = at.draft_requests[at.request] - count
        draft, row = at.kv - begin, first + (at.qo - begin)
        return (draft < 0.0) | (at.draft_flags[row * width + variants.maximum(draft, 0.0)] > 0.0)

    sizes = {"draft_requests": num_requests if qo_len else 2 * num_requests + 1, "draft_flags": num_flags}
    params = {name: torch.empty(size, dtype=torch.float32) for name, size in sizes.items()}
    if qo_len:  # a parameter, so that one kernel serves all numbers of rows
        params["draft_rows"] = qo_len
    return variants.Variant._of(variants.Variant("drafts", params=params, mask_tail=width, mask=visible)._core)


def draft_tables(function: str, mask, bounds, qo_len: int, seq_lens, num_rows: int):
    """The sizes and the tables of a mask uint16 ``[num_rows, ceil(qo_len / 32) · 2]``, on its device, with three launches and
    without waiting: a flag per bit, then lengths of requests, with bounds of their rows unless all have ``qo_len``.

    Rows of request ``r`` are ``bounds[r]..bounds[r + 1]``, or ``qo_len`` without ``bounds``. Sizes are powers of two, so that other
    batches have the same operator. The values after those of this batch are not set, and no key that a row can see reads them."""
    words = -(-qo_len // 32) * 2
    if mask.dtype != torch.uint16 or mask.numel() != num_rows * words:
        raise Error(f"flashinfer.{function}: mask is {mask.dtype} of shape {tuple(mask.shape)}, expected torch.uint16 "
                    f"[{num_rows}, {words}]")
    device, width, requests = mask.device, words * 16, seq_lens.shape[0]
    if bounds is not None and bounds.numel() != requests + 1:
        raise Error(f"flashinfer.{function}: the bounds of query rows have shape {tuple(bounds.shape)}, expected [{requests + 1}]")
    bits = num_rows * width
    if bits > 1 << 24:
        raise Error(f"flashinfer.{function}: mask has {bits} bits, expected at most {1 << 24}")
    num_flags, num_requests = _power_of_2(bits), _power_of_2(requests)
    flags = torch.empty(num_flags, dtype=torch.float32, device=device)
    # results of another dtype are refused on GPUs
    flags[:bits].view(-1, 8).copy_(mask.contiguous().view(torch.uint8).view(-1, 1) & _bits_of_a_byte(device))
    rows = torch.empty(num_requests if bounds is None else 2 * num_requests + 1, dtype=torch.float32, device=device)
    if bounds is None:
        rows[:requests] = seq_lens
    else:
        torch._foreach_copy_([rows[:requests], rows[num_requests : num_requests + requests + 1]], [seq_lens, bounds])
    sizes = num_requests, num_flags, width, qo_len if bounds is None else 0
    return sizes, {"draft_flags": flags, "draft_requests": rows}


@functools.cache
def _bits_of_a_byte(device):
    """The powers of two of a byte. The first call copies them to a GPU, which waits, so it cannot be recorded."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


def _power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` and 1."""
    return 1 << max(size - 1, 0).bit_length()
