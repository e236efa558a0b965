"""Masks of draft tokens, as XQA has them, as tables that runs bind."""

import torch

from .. import variants
from .._core import Error

#: Bits of a word of masks.
_WORD = 16


def drafts_variant(num_requests: int, num_words: int, width: int, qo_len: int):
    """A mask of the draft tokens of each request, which are its last keys; all keys before them are visible. Runs bind
    :func:`draft_tables` of these sizes."""

    def visible(at):
        if qo_len:
            first, count = at.request * at.draft_rows, at.draft_rows
        else:
            first, end = (_int32(at.draft_requests, at.request + column) for column in (num_requests, num_requests + 1))
            count = end - first
        begin = _int32(at.draft_requests, at.request) - count
        draft, row = at.kv - begin, first + (at.qo - begin)
        index = variants.maximum(draft, 0.0)
        word = variants.floor(index * (1.0 / _WORD))
        return (draft < 0.0) | _bit(at.draft_words[row * (width / _WORD) + word], index - word * _WORD)

    sizes = {"draft_requests": 2 * num_requests if qo_len else 4 * num_requests + 2, "draft_words": num_words}
    params = {name: torch.empty(size, dtype=torch.float32) for name, size in sizes.items()}
    if qo_len:  # a parameter, so that one kernel serves all numbers of rows
        params["draft_rows"] = qo_len
    return variants.Variant._of(variants.Variant("drafts", params=params, mask_tail=width, mask=visible)._core)


def _int32(halves, index):
    """The number whose halves are ``halves[2 * index]`` and the next one, as int16: exact below 2^24."""
    low = halves[2.0 * index]
    return variants.where(low < 0.0, low + 65536.0, low) + 65536.0 * halves[2.0 * index + 1.0]


def _bit(word, index):
    """Whether a bit of an int16 is set. A quarter is added because the power of two has an error of the last bits."""
    shifted = variants.floor((word + 0.25) * variants.exp2(-index))
    return shifted - 2.0 * variants.floor(0.5 * shifted) > 0.5


def draft_tables(function: str, mask, bounds, qo_len: int, seq_lens, num_rows: int):
    """The sizes and the tables of a mask uint16 ``[num_rows, ceil(qo_len / 32) · 2]``, on its device, with one launch for lengths
    and bounds of int32, without waiting: the words of the mask, then lengths of requests, with bounds of their rows unless all have
    ``qo_len``. The kernels convert int16 to float32, so a length is two numbers.

    Rows of request ``r`` are ``bounds[r]..bounds[r + 1]``, or ``qo_len`` without ``bounds``. Sizes are powers of two, so that other
    batches have the same operator. The values after those of this batch are not set, and no key that a row can see reads them."""
    words = -(-qo_len // 32) * 2
    if mask.dtype != torch.uint16 or mask.numel() != num_rows * words:
        raise Error(f"flashinfer.{function}: mask is {mask.dtype} of shape {tuple(mask.shape)}, expected torch.uint16 "
                    f"[{num_rows}, {words}]")
    device, requests = mask.device, seq_lens.shape[0]
    if bounds is not None and bounds.numel() != requests + 1:
        raise Error(f"flashinfer.{function}: the bounds of query rows have shape {tuple(bounds.shape)}, expected [{requests + 1}]")
    if mask.numel() > 1 << 24:
        raise Error(f"flashinfer.{function}: mask has {mask.numel()} words, expected at most {1 << 24}")
    num_words, num_requests = _power_of_2(mask.numel()), _power_of_2(requests)
    flags = torch.empty(num_words, dtype=torch.float32, device=device)
    rows = torch.empty(2 * num_requests if bounds is None else 4 * num_requests + 2, dtype=torch.float32, device=device)
    sources, targets = [_halves(mask), _halves(seq_lens.int())], [flags[: mask.numel()], rows[: 2 * requests]]
    if bounds is not None:
        sources.append(_halves(bounds.int()))
        targets.append(rows[2 * num_requests : 2 * (num_requests + requests + 1)])
    torch._foreach_copy_(targets, sources)
    return (num_requests, num_words, words * _WORD, qo_len if bounds is None else 0), {"draft_words": flags, "draft_requests": rows}


def _halves(x):
    """The memory of a tensor as int16."""
    return x.contiguous().view(torch.int16).view(-1)


def _power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` and 1."""
    return 1 << max(size - 1, 0).bit_length()
