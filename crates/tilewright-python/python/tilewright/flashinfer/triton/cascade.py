"""Merges of attention states, also of a variable number per row."""

import torch

from ..._core import Error
from .._pages import host_array
from ..cascade import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]

#: The rows of a launch, whose states are padded to an equal number.
_ROWS = 64


def variable_length_merge_states(v, s, indptr):
    """Merges the states ``indptr[r]..indptr[r + 1]`` of each row: ``v`` ``[num_states, heads, dim]``, ``s`` ``[num_states,
    heads]`` in base 2, ``indptr`` ``[rows + 1]``. Returns ``v`` ``[rows, heads, dim]`` and ``s`` ``[rows, heads]`` float32; a
    row without states gives 0 and -inf. Bounds on a GPU are copied to the host, which waits."""
    bounds = torch.from_numpy(host_array(indptr)).long()
    if len(bounds) == 0 or int(bounds[0]) < 0 or int(bounds[-1]) > v.shape[0] or (bounds.diff() < 0).any():
        raise Error(f"flashinfer.variable_length_merge_states: indptr = {bounds[:8].tolist()}, expected ascending bounds of "
                    f"{v.shape[0]} states")
    rows = len(bounds) - 1
    out = torch.empty((rows, *v.shape[1:]), dtype=v.dtype, device=v.device)
    out_s = torch.empty((rows, s.shape[1]), dtype=torch.float32, device=s.device)
    for begin in range(0, rows, _ROWS):
        part = bounds[begin : begin + _ROWS + 1]
        counts = part.diff()
        each = torch.arange(max(int(counts.max()), 1))
        known = (each < counts[:, None]).to(v.device)
        index = (part[:-1, None] + each).clamp(max=max(v.shape[0] - 1, 0)).to(v.device)
        if v.shape[0] == 0:
            out[begin : begin + _ROWS], out_s[begin : begin + _ROWS] = 0.0, -torch.inf
            continue
        padded = v[index].masked_fill_(~known[..., None, None], 0.0)
        padded_s = s[index].float().masked_fill_(~known[..., None], -torch.inf)
        out[begin : begin + _ROWS], out_s[begin : begin + _ROWS] = merge_states(padded, padded_s)
    return out, out_s
