"""Multi-item scoring: the mask of requests whose items see a shared prefix and themselves."""

import torch

from .._core import Error
from ._pages import is_on_gpu


def item_flags(function: str, bounds, kv_lens, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len):
    """The flags of all requests, bool ``[sum(qo_len · kv_len)]`` on the device of the positions, or ``None`` without
    ``prefix_len_ptr``.

    ``bounds`` of query rows and ``kv_lens`` are on the host, ``prefix_len_ptr`` has ``[num_requests]`` lengths. Row ``r`` of
    ``token_pos_in_items_ptr``, of ``token_pos_in_items_len`` integers, has the position of each token after the prefix in its
    item, 0 for delimiters. A row at position ``p`` sees the keys up to its own, of which those after the prefix are the last
    ``token_pos_in_items[p - prefix]``. Values on a GPU are not checked, and nothing waits for them."""
    if (prefix_len_ptr is None) != (token_pos_in_items_ptr is None):
        raise Error(f"flashinfer.{function}: one of prefix_len_ptr and token_pos_in_items_ptr is None, expected both or none")
    if prefix_len_ptr is None:
        return None
    device = token_pos_in_items_ptr.device
    places = token_pos_in_items_ptr.reshape(-1).to(torch.int64)
    prefixes = prefix_len_ptr.reshape(-1).to(device, torch.int64, non_blocking=True)
    if len(prefixes) != len(kv_lens):
        raise Error(f"flashinfer.{function}: prefix_len_ptr has {len(prefixes)} lengths, expected {len(kv_lens)}")
    if not is_on_gpu(places):
        _check_counts(function, kv_lens, prefixes.tolist(), len(places), token_pos_in_items_len)
    places = torch.cat([places, places.new_zeros(1)])  # an index for requests that have no token after the prefix
    flags = []
    for request, kv_len in enumerate(map(int, kv_lens)):
        qo_len, prefix = int(bounds[request + 1] - bounds[request]), prefixes[request]
        if qo_len > kv_len:
            raise Error(f"flashinfer.{function}: request {request} has {qo_len - kv_len} query rows more than keys, expected at "
                        f"most {kv_len} with prefix_len_ptr")
        keys = torch.arange(kv_len, device=device)
        rows = keys[kv_len - qo_len :]
        at = (request * token_pos_in_items_len + rows - prefix).clamp(0, len(places) - 1)
        # the last key that a row does not see because of its item
        hidden = torch.where(rows < prefix, -1, rows - places[at])
        flags.append(((keys <= rows[:, None]) & ((keys < prefix) | (keys > hidden[:, None]))).reshape(-1))
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)


def _check_counts(function: str, kv_lens, prefixes: list, num_places: int, row_len: int) -> None:
    """Rejects requests with more tokens after the prefix than positions."""
    for request, (prefix, kv_len) in enumerate(zip(prefixes, kv_lens)):
        begin, count = request * row_len, max(int(kv_len) - prefix, 0)
        if (len(kv_lens) > 1 and count > row_len) or begin + count > num_places:
            raise Error(f"flashinfer.{function}: request {request}: token_pos_in_items_ptr has {num_places} positions, "
                        f"token_pos_in_items_len = {row_len}, expected {count} of the tokens after the prefix")
