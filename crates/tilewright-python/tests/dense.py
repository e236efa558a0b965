"""Attention from its definition, in float64: the expected values of all tests. And masks of drafts, as XQA packs them."""

import numpy


def attention(q, k, v, *, scale=None, visible=None, logits=None):
    """Outputs and base-2 LSE of one request. ``visible`` bool ``[qo_len, kv_len]``; ``logits`` maps scaled logits ``[heads,
    qo_len, kv_len]``."""
    q, k, v = (numpy.asarray(x, dtype=numpy.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = numpy.repeat(k, group, axis=1), numpy.repeat(v, group, axis=1)
    s = numpy.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    s = s if logits is None else logits(s)
    if visible is not None:
        s = numpy.where(visible[None], s, -numpy.inf)
    top = s.max(axis=-1, keepdims=True, initial=-numpy.inf)
    weights = numpy.exp(s - numpy.where(numpy.isinf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        lse = (top + numpy.log(total))[..., 0] / numpy.log(2.0)
        probabilities = numpy.where(total > 0, weights / total, 0.0)
    return numpy.einsum("hqk,khd->qhd", probabilities, v), numpy.where(total[..., 0] > 0, lse, -numpy.inf).T


def causal(qo_len, kv_len, window_left=None):
    """The bottom-right aligned causal mask, with ``window_left`` keys before a row's own position."""
    position = numpy.arange(qo_len)[:, None] + kv_len - qo_len
    key = numpy.arange(kv_len)[None]
    visible = key <= position
    return visible if window_left is None else visible & (key >= position - window_left)


def paged(rng, kv_lens, page_size, heads, dim, dtype="float32", layout="NHD"):
    """A cache with shuffled pages, its table, and the keys and values of each request."""
    pages = [-(-n // page_size) for n in kv_lens]
    total = sum(pages) + 3
    indices = rng.permutation(total)[: sum(pages)].astype(numpy.int32)
    indptr = numpy.concatenate([[0], numpy.cumsum(pages)]).astype(numpy.int32)
    last = numpy.array([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages)], dtype=numpy.int32)
    shape = (total, page_size, heads, dim)
    caches = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    rows = [[cache[indices[indptr[r]:indptr[r + 1]]].reshape(-1, heads, dim)[:n] for r, n in enumerate(kv_lens)]
            for cache in caches]
    if layout == "HND":
        caches = [numpy.ascontiguousarray(cache.swapaxes(1, 2)) for cache in caches]
    return caches, (indptr, indices, last), rows


def rounds_to_e4m3(narrow, wide):
    """Whether a torch tensor of e4m3 is the rounding of numbers within the error of ``wide``, which is rounded to its dtype."""
    import torch

    error = torch.finfo(wide.dtype).eps * wide.double().abs()
    low, high = ((wide.double() + sign * error).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() for sign in (-1, 1))
    return bool(((low <= narrow.float()) & (narrow.float() <= high)).all())


def packed_drafts(blocks, longest):
    """Draft masks of requests, bool ``[rows, rows]`` each, as XQA has them: bits of 32 per word, two uint16 each."""
    flags = numpy.zeros((sum(map(len, blocks)), -(-longest // 32) * 32), dtype=bool)
    begin = 0
    for block in blocks:
        flags[begin : begin + len(block), : len(block)] = block
        begin += len(block)
    return numpy.packbits(flags, axis=1, bitorder="little").view(numpy.uint16)
