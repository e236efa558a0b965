"""The largest scores of each row, and their indices as offsets or as slots of page tables."""

import enum

import torch

from .. import sampling
from .._core import Error
from ._compiled import is_compiling, operator
from ._refuse import check_choice, check_output, served


class TopKTieBreak(enum.IntEnum):
    """The rule for equal scores."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(input, k, sorted=False, deterministic=False, tie_break=TopKTieBreak.NONE, dsa_graph_safe=False):
    """The ``k`` largest scores of each row and their indices, int64. Ties go to the lowest index unless ``tie_break`` is LARGE;
    ``deterministic`` and ``dsa_graph_safe`` have no effect, because the selection always is."""
    check_choice("top_k", "tie_break", int(tie_break), (0, 1, 2))
    values, indices = sampling.top_k(input, k, sorted=sorted, highest_ties=int(tie_break) == TopKTieBreak.LARGE)
    return values, indices.to(torch.int64)


@operator("top_k_transform(Tensor input, Tensor lengths, int k, Tensor? starts, Tensor? offsets, Tensor? table, Tensor? table_rows, "
          "Tensor? table_starts, int page_size, bool highest_ties, Tensor(a!) out, Tensor(b!)? window_indices)")
def _transform(input, lengths, k, starts, offsets, table, table_rows, table_starts, page_size, highest_ties, out, window_indices):
    sampling.top_k_transform(
        input, lengths, k, starts=starts, offsets=offsets, table=table, table_rows=table_rows, table_starts=table_starts,
        page_size=page_size, highest_ties=highest_ties, out=out, window_indices=window_indices)


def _transformed(function, input, lengths, k, tie_break, out=None, raw=None, **mapping):
    check_choice(function, "tie_break", int(tie_break), (0, 1, 2))
    shape = (input.shape[0], k)
    for name, one in (("out_indices" if function == "top_k_varlen" else "out", out), ("out_raw_indices", raw)):
        if one is not None:
            check_output(function, name, one, shape, torch.int32, input.device)
    out = torch.empty(shape, dtype=torch.int32, device=input.device) if out is None else out
    highest = int(tie_break) == TopKTieBreak.LARGE
    if is_compiling():
        named = {"starts": None, "offsets": None, "table": None, "table_rows": None, "table_starts": None, "page_size": 1} | mapping
        _transform(input, lengths, k, **named, highest_ties=highest, out=out, window_indices=raw)
    else:
        sampling.top_k_transform(input, lengths, k, **mapping, highest_ties=highest, out=out, window_indices=raw)
    return out


def top_k_page_table_transform(
    input, src_page_table, lengths, k, row_to_batch=None, deterministic=False, tie_break=TopKTieBreak.NONE, dsa_graph_safe=False,
    row_starts=None, page_table_row_starts=None, *, page_size=1, out=None, out_raw_indices=None,
):
    """The slots of the ``k`` largest scores of each window in ``src_page_table`` int32 ``[batch_size, width]``, int32 ``[rows, k]``:
    ascending by index, then -1. ``out_raw_indices`` receives the indices in the window. The order of ties is as in :func:`top_k`."""
    if page_size != 1 and row_starts is not None and page_table_row_starts is None:
        raise Error("flashinfer.top_k_page_table_transform: page_table_row_starts = None, expected a tensor with row_starts and "
                    f"page_size = {page_size}")
    starts = row_starts if page_table_row_starts is None else page_table_row_starts
    return _transformed("top_k_page_table_transform", input, lengths, k, tie_break, out, out_raw_indices, starts=row_starts,
                        table=src_page_table, table_rows=row_to_batch, table_starts=starts, page_size=page_size)


def top_k_ragged_transform(
    input, offsets, lengths, k, deterministic=False, tie_break=TopKTieBreak.NONE, dsa_graph_safe=False, row_starts=None,
):
    """The indices of the ``k`` largest scores of each window plus the offset of its row, int32 ``[rows, k]``: ascending, then -1."""
    return _transformed("top_k_ragged_transform", input, lengths, k, tie_break, starts=row_starts, offsets=offsets)


@served("auto", "radix_cutlass")
def top_k_varlen(
    logits, seq_lens, top_k, pre_idx=None, compress_ratio=1, next_n=1, return_values=False, out_indices=None, out_values=None,
    backend="auto", load_balance=True, workspace=None,
):
    """The indices of the ``top_k`` largest of the first logits of each row, int32 ``[rows, top_k]``: ascending, then -1; and
    their values, 0 for -1, with ``return_values``, else ``None``.

    ``logits`` ``[rows, max_seq_len]``; ``seq_lens`` int32 ``[rows / next_n]`` tokens of each request, of which row ``i`` of its
    ``next_n`` has ``next_n - 1 - i`` fewer; a row has a logit per ``compress_ratio`` tokens. Ties go to the lowest index.
    ``pre_idx``, ``backend``, ``load_balance`` and ``workspace`` are hints without effect."""
    check_choice("top_k_varlen", "backend", backend, top_k_varlen._backends)
    if logits.dim() != 2 or logits.shape[0] != seq_lens.numel() * next_n:
        raise Error(f"flashinfer.top_k_varlen: logits has shape {tuple(logits.shape)}, expected "
                    f"[len(seq_lens) * next_n, max_seq_len] = [{seq_lens.numel() * next_n}, max_seq_len]")
    if next_n > 1:
        fewer = torch.arange(next_n - 1, -1, -1, dtype=seq_lens.dtype, device=seq_lens.device)
        seq_lens = (seq_lens[:, None] - fewer).reshape(-1)
    lengths = torch.div(seq_lens, compress_ratio, rounding_mode="floor").clamp(min=0, max=logits.shape[1]).int()
    indices = _transformed("top_k_varlen", logits, lengths, top_k, TopKTieBreak.NONE, out_indices,
                           offsets=torch.zeros_like(lengths))
    if not return_values:
        return indices, None
    values = logits.gather(1, indices.clamp(min=0).long()).masked_fill_(indices < 0, 0)
    if out_values is None:
        return indices, values
    check_output("top_k_varlen", "out_values", out_values, values.shape, values.dtype, values.device)
    return indices, out_values.copy_(values)
