"""The five variants of FlashInfer's ``tests/utils/test_jit_example.py`` as Python functions, with its shapes, and their definitions.

Only NumPy: the tests run them on the CPU and in the simulator, ``card/check_gpu.py`` on a GPU.
"""

import dataclasses
from typing import Optional

import numpy

import tilewright
from tilewright.variants import exp2

DIM = 128
LOG2_E = 1.4426950408889634


@dataclasses.dataclass
class Case:
    """Arguments of a run in float16, and its outputs in float64."""

    name: str
    variant: tilewright.Variant
    batch: tilewright.Batch
    q: numpy.ndarray
    k: numpy.ndarray
    v: numpy.ndarray
    o: numpy.ndarray
    #: Values of the buffer ``logits`` after a run.
    logits: Optional[numpy.ndarray] = None

    def operator(self, device="cpu"):
        heads = self.q.shape[1]
        return tilewright.Attention(tilewright.Problem(heads, heads, DIM, causal=False, dtype="float16"), self.variant, device=device)


def sigmoid(at, logit):
    return 1.0 / (1.0 + exp2(-LOG2_E * (logit + at.bias)))


def alibi(at, logit):
    return logit + at.slopes[at.qo_head] * (at.kv - at.qo)


def visible(at):
    return at.flags[at.qo * at.columns + at.kv] > 0.0


def single_decode_with_mask(rng):
    flags = rng.integers(0, 2, 254)
    mask = lambda at: at.flags[at.kv] > 0.0  # noqa: E731
    variant = tilewright.Variant("decode_with_mask", mask=mask, params={"flags": flags})
    return _ragged(rng, variant, (1, 254, 32), lambda s: _softmax(numpy.where(flags > 0, s, -numpy.inf)))


def sigmoid_prefill(rng):
    variant = tilewright.Variant("sigmoid", softmax=False, params={"bias": 0.25}, logits=sigmoid)
    return _ragged(rng, variant, (128, 1027, 8), lambda s: 1 / (1 + numpy.exp(-(s + 0.25))))


def prefill_with_dumped_logits(rng):
    rows, keys, heads = 128, 1023, 32

    def dumped(at, logit):
        at.store("logits", (at.qo_head * rows + at.qo - (keys - rows)) * keys + at.kv, logit)
        return logit

    variant = tilewright.Variant("dumped", logits=dumped, buffers={"logits": heads * rows * keys})
    return _ragged(rng, variant, (rows, keys, heads), _softmax, dumps=True)


def prefill_with_mask(rng):
    tokens = 16
    flags = numpy.tril(numpy.ones((tokens, tokens)))
    variant = tilewright.Variant("prefill_with_mask", mask=visible, params={"flags": flags.ravel(), "columns": tokens})
    return _ragged(rng, variant, (tokens, tokens, 8), lambda s: _softmax(numpy.where(flags > 0, s, -numpy.inf)))


def batch_decode_with_alibi(rng):
    requests, keys, heads = 4, 128, 32
    slopes = 2.0 ** -((numpy.arange(heads) + 1) / 4)
    variant = tilewright.Variant("decode_with_alibi", logits=alibi, params={"slopes": slopes})
    indptr = numpy.arange(requests + 1) * keys
    table = tilewright.PageTable(indptr=indptr, indices=rng.permutation(requests * keys), last_page_len=[1] * requests, page_size=1)
    q, k, v = _tensors(rng, (requests, requests * keys, heads))
    distance = numpy.arange(keys) - (keys - 1)
    o = [_attention(q[at : at + 1], k[pages], v[pages], lambda s: _softmax(s + slopes[:, None, None] * distance))[0]
         for at, pages in enumerate(numpy.split(numpy.asarray(table.indices), requests))]
    batch = tilewright.Batch.paged(numpy.arange(requests + 1), table)
    return Case(variant.name, variant, batch, q, k[:, None], v[:, None], numpy.concatenate(o))


def prefill_with_distance(rng):
    """Not one of FlashInfer's: logits that fall with the distance, of a long prompt."""
    rows, keys, heads = 128, 1027, 8
    variant = tilewright.Variant("prefill_with_distance", params={"rate": 0.01},
                                 logits=lambda at, logit: logit - at.rate * abs(at.kv - at.qo))
    distance = abs(numpy.arange(keys) - (numpy.arange(rows)[:, None] + keys - rows))
    return _ragged(rng, variant, (rows, keys, heads), lambda s: _softmax(s - 0.01 * distance))


ALL = (single_decode_with_mask, sigmoid_prefill, prefill_with_dumped_logits, prefill_with_mask, batch_decode_with_alibi)


def _tensors(rng, lengths):
    rows, keys, heads = lengths
    return (rng.standard_normal((n, heads, DIM)).astype(numpy.float16) for n in (rows, keys, keys))


def _ragged(rng, variant, lengths, weights, dumps=False):
    q, k, v = _tensors(rng, lengths)
    o, scores = _attention(q, k, v, weights)
    batch = tilewright.Batch.ragged([0, lengths[0]], [0, lengths[1]])
    return Case(variant.name, variant, batch, q, k, v, o, scores if dumps else None)


def _attention(q, k, v, weights):
    q, k, v = (x.astype(numpy.float64) for x in (q, k, v))
    scores = numpy.einsum("qhd,khd->hqk", q, k) / numpy.sqrt(DIM)
    return numpy.einsum("hqk,khd->qhd", weights(scores), v), scores


def _softmax(scores):
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
