"""Multi-item scoring: the mask of requests whose items see a shared prefix and themselves."""

import numpy

from .._core import Error
from ._pages import host_array


def pack_items(function: str, bounds, kv_lens, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len):
    """The packed bits of all requests, each from a new byte, or ``None`` without ``prefix_len_ptr``.

    ``bounds`` of query rows, ``kv_lens``, and ``prefix_len_ptr`` ``[num_requests]``. Row ``r`` of ``token_pos_in_items_ptr``,
    of ``token_pos_in_items_len`` integers, has the position of each token after the prefix in its item, 0 for delimiters. A row
    at position ``p`` sees the keys up to its own, of which those after the prefix are the last ``token_pos_in_items[p -
    prefix]``."""
    if (prefix_len_ptr is None) != (token_pos_in_items_ptr is None):
        raise Error(f"flashinfer.{function}: one of prefix_len_ptr and token_pos_in_items_ptr is None, expected both or none")
    if prefix_len_ptr is None:
        return None
    prefixes, places = (host_array(x).reshape(-1).astype(numpy.int64) for x in (prefix_len_ptr, token_pos_in_items_ptr))
    if len(prefixes) != len(kv_lens):
        raise Error(f"flashinfer.{function}: prefix_len_ptr has {len(prefixes)} lengths, expected {len(kv_lens)}")
    bits = []
    for request, (prefix, kv_len) in enumerate(zip(prefixes.tolist(), kv_lens)):
        begin, count = request * token_pos_in_items_len, max(int(kv_len) - prefix, 0)
        if (len(kv_lens) > 1 and count > token_pos_in_items_len) or begin + count > len(places):
            raise Error(f"flashinfer.{function}: request {request}: token_pos_in_items_ptr has {len(places)} positions, "
                        f"token_pos_in_items_len = {token_pos_in_items_len}, expected {count} of the tokens after the prefix")
        # the last key that each token does not see because of its item
        tokens = numpy.arange(kv_len)
        hidden = numpy.full(kv_len, -1)
        hidden[prefix:] = tokens[prefix:] - places[begin : begin + count]
        rows = slice(int(kv_len) - int(bounds[request + 1] - bounds[request]), None)
        if rows.start < 0:
            raise Error(f"flashinfer.{function}: request {request} has {-rows.start} query rows more than keys, expected at "
                        f"most {kv_len} with prefix_len_ptr")
        visible = (tokens <= tokens[rows, None]) & ((tokens < prefix) | (tokens > hidden[rows, None]))
        bits.append(numpy.packbits(visible.reshape(-1), bitorder="little"))
    return numpy.concatenate(bits) if bits else numpy.zeros(0, dtype=numpy.uint8)
