"""The largest scores of each row, and their indices as offsets or as slots of page tables."""

import enum

import torch

from .. import sampling
from .._core import Error
from ._compiled import is_compiling, operator
from ._refuse import check_choice, check_output


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
    for name, one in (("out", out), ("out_raw_indices", raw)):
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
