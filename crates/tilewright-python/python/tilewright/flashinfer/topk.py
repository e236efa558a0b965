"""The largest scores of each row."""

import enum

import torch

from .. import sampling
from ._refuse import check_choice


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
