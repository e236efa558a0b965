"""Sampling: logits or probabilities ``[rows, vocab]`` to tokens. Parameters are numbers, or arrays ``[rows]``."""

from . import _core
from ._device import queue_of
from ._tensors import device_bytes, device_indices, dtype_name, empty, from_bytes, from_list, on_host, shape_of

__all__ = ["apply_token_bitmask", "chain_speculative_sampling", "distribution", "sample", "sampling_from_probs", "softmax",
           "top_k", "top_k_mask_logits", "top_k_renorm_probs", "top_k_transform", "top_p_renorm_probs"]


def _params(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, joint=False, seed=0, offset=0) -> dict:
    return {"temperature": on_host(temperature), "top_k": on_host(top_k), "top_p": on_host(top_p), "min_p": on_host(min_p),
            "joint": joint, "seed": on_host(seed), "offset": on_host(offset)}


def _draw(scores, probs: bool, return_valid: bool, params: dict):
    tokens, errors = _core.sample(queue_of(scores), scores, probs, _params(**params))
    if errors and not return_valid:
        raise _core.Error(errors[0][1])
    drawn = from_bytes(tokens, "int32", scores)
    if not return_valid:
        return drawn
    failed = {row for row, _ in errors}
    return drawn, from_list([row not in failed for row in range(len(drawn))], "bool", scores)


def sample(logits, *, return_valid: bool = False, **params):
    """Draws a token per row: temperature, softmax, ``top_k``, ``top_p``, ``min_p``, draw. Returns int32 ``[rows]``.

    Keywords: ``temperature`` (0 is greedy), ``top_k``, ``top_p``, ``min_p``, ``joint`` (both filters on the original
    distribution), ``seed``, ``offset``. A row's token depends on its logits and parameters only. A row that cannot be sampled is
    an error; with ``return_valid`` its token is 0, and a bool ``[rows]`` is returned too.
    """
    return _draw(logits, False, return_valid, params)


def sampling_from_probs(probs, *, return_valid: bool = False, **params):
    """:func:`sample` from probabilities, which need not sum to 1; the temperature must be 1."""
    return _draw(probs, True, return_valid, params)


def distribution(scores, *, probs: bool = False, out=None, **params):
    """The distribution that :func:`sample` (or :func:`sampling_from_probs` with ``probs``) draws from."""
    if out is None:
        out = empty(shape_of(scores), dtype_name(scores.dtype), scores)
    fields = {"tensor": scores, "probs": probs, "params": _params(**params), "out": out}
    _core.sampling_distribution(queue_of(scores), fields)
    return out


def _filter(name: str, x, param, out):
    if out is None:
        out = empty(shape_of(x), dtype_name(x.dtype), x)
    _core.filter_scores(queue_of(x), {"filter": name, "param": on_host(param), "x": x, "out": out})
    return out


def softmax(logits, temperature=1.0, *, out=None):
    """The softmax of ``logits / temperature``; temperature 0 puts all mass on the largest logit."""
    return _filter("softmax", logits, temperature, out)


def top_k_renorm_probs(probs, top_k, *, out=None):
    """Keeps the ``top_k`` largest probabilities, ties included, and renormalises them."""
    return _filter("top_k_renorm", probs, top_k, out)


def top_p_renorm_probs(probs, top_p, *, out=None):
    """Keeps the smallest set of the largest probabilities whose share reaches ``top_p``, and renormalises it."""
    return _filter("top_p_renorm", probs, top_p, out)


def top_k_mask_logits(logits, top_k, *, out=None):
    """Keeps the ``top_k`` largest logits, ties included; the others become -inf."""
    return _filter("top_k_mask", logits, top_k, out)


def top_k(scores, k: int, *, sorted: bool = True, highest_ties: bool = False):
    """Exactly the ``k`` largest scores of each row, ties to the lowest index (or the highest). Returns ``(values, indices)``
    ``[rows, k]``; the indices are int32."""
    values = empty((*shape_of(scores)[:1], k), dtype_name(scores.dtype), scores)
    indices = empty((*shape_of(scores)[:1], k), "int32", scores)
    _core.top_k_selection(queue_of(scores), {"scores": scores, "k": k, "highest_ties": highest_ties, "sorted": sorted,
                                             "values": values, "indices": indices})
    return values, indices


def top_k_transform(
    scores, lengths, k: int, *, starts=None, offsets=None, table=None, table_rows=None, table_starts=None, page_size: int = 1,
    highest_ties: bool = False, out=None, window_indices=None,
):
    """The indices of the ``k`` largest scores in the window ``starts[r] : starts[r] + lengths[r]`` of each row, ascending and
    followed by -1, int32 ``[rows, k]``; all of a window of up to ``k``.

    With ``offsets`` ``[rows]`` an index becomes ``offsets[r] + i``. With ``table`` ``[num_tables, width]`` it becomes the slot ``page *
    page_size + i % page_size`` of ``page = table[table_rows[r], table_starts[r] + i // page_size]``, by default of table ``r`` from 0
    on, and -1 if there is no such page. ``window_indices`` int32 ``[rows, k]`` receives the indices before that. Arrays on a GPU are
    read there."""
    if out is None:
        out = empty((*shape_of(scores)[:1], k), "int32", scores)
    arrays = {"lengths": lengths, "starts": starts, "offsets": offsets, "table_rows": table_rows, "table_starts": table_starts}
    _core.top_k_transform(queue_of(scores), {
        "scores": scores, "k": k, "highest_ties": highest_ties, "indices": out, "window_indices": window_indices,
        **{name: None if array is None else device_indices(array) for name, array in arrays.items()},
        "table": None if table is None else device_indices(table.reshape(-1)), "page_size": page_size,
        "width": 0 if table is None else shape_of(table)[1],
    })
    return out


def apply_token_bitmask(logits, words, rows=None) -> None:
    """Sets the logits of tokens whose bit is 0 to -inf: ``words`` int32 or uint32 ``[rows, ceil(vocab / 32)]``, in the layout
    of xgrammar; words on a GPU are read there. ``rows``: the masked rows on the host, by default all."""
    words = words.reshape(-1) if hasattr(words, "reshape") else words
    _core.token_bitmask(queue_of(logits), logits, device_bytes(words), None if rows is None else list(rows))


def chain_speculative_sampling(draft_probs, draft_ids, target, *, probs: bool = True, return_valid: bool = False, **params):
    """Verifies drafted tokens: ``draft_probs`` ``[batch, n, vocab]``, ``draft_ids`` int32 ``[batch, n]``, ``target`` ``[batch,
    n + 1, vocab]``. Returns the tokens int32 ``[batch, n + 1]``, padded with -1, and ``(accepted, emitted)`` of each request."""
    fields = {"draft_probs": draft_probs, "draft_ids": on_host(draft_ids), "target": target, "probs": probs,
              "params": _params(**params)}
    tokens, counts, errors = _core.chain_sample(queue_of(target), fields)
    if errors and not return_valid:
        raise _core.Error(errors[0][1])
    return from_list(tokens, "int32", target, (target.shape[0], target.shape[1])), counts
