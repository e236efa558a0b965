"""Operators and functions of NumPy and torch in hooks, by their values."""

import math

import numpy
import pytest
import tilewright as tw
from conftest import HAS_TORCH, needs_torch
from tilewright import variants

KEYS = 32


def weights(hook, dtype, **params):
    """The values of a hook of logits for each position of a query and of a key: without softmax they are the weights of ``v``."""
    variant = tw.Variant("values", softmax=False, logits=hook, params={"three": 3.0, **params})
    attention = tw.Attention(tw.Problem(1, 1, KEYS, causal=False, dtype=dtype), variant)
    plan = attention.plan(tw.Batch.ragged([0, KEYS], [0, KEYS]))
    zeros, rows = numpy.zeros((KEYS, 1, KEYS), dtype), numpy.eye(KEYS, dtype=dtype)[:, None]
    return attention.run(plan, zeros, zeros, rows)[:, 0].astype("float64")


QO, KV = numpy.mgrid[:KEYS, :KEYS].astype("float64")

ARITHMETIC = {
    "// 3": (lambda at, logit: at.kv // 3, KV // 3),
    "// 61": (lambda at, logit: (at.kv + at.qo) * 61 // 61, KV + QO),
    "// 8": (lambda at, logit: at.kv // 8, KV // 8),
    "// -7": (lambda at, logit: at.kv // -7, KV // -7),
    "negative // 5": (lambda at, logit: (at.kv - 20) // 5, (KV - 20) // 5),
    "% 3": (lambda at, logit: at.kv % 3, KV % 3),
    "% -3": (lambda at, logit: (at.kv - 9.0) % -3, (KV - 9) % -3),
    "traced // traced": (lambda at, logit: (at.kv - 16) // (at.qo - 15.5), (KV - 16) // (QO - 15.5)),
    "traced %": (lambda at, logit: 47 % (at.kv + 1.0), 47 % (KV + 1)),
    "number // traced": (lambda at, logit: 31 // (at.kv + at.three), 31 // (KV + 3)),
    "**": (lambda at, logit: (at.kv * 0.25) ** 3, (KV / 4) ** 3),
    "log": (lambda at, logit: variants.log(at.kv + 1.0), numpy.log(KV + 1)),
}

NUMPY = {
    "functions": (lambda at, logit: numpy.tanh(at.kv * 0.1) + numpy.exp(-at.qo), numpy.tanh(KV * 0.1) + numpy.exp(-QO)),
    "where": (lambda at, logit: numpy.where(at.kv < at.qo, numpy.maximum(at.kv, 3.0), 0), numpy.where(KV < QO, numpy.maximum(KV, 3), 0)),
    "numbers": (lambda at, logit: numpy.float32(2) * at.kv - numpy.int64(3) + numpy.array(0.5), 2 * KV - 2.5),
    "reflected": (lambda at, logit: variants.where(numpy.int32(3) >= at.kv, numpy.float64(1.5) - at.qo, 0), numpy.where(KV <= 3, 1.5 - QO, 0)),
    "remainder": (lambda at, logit: numpy.remainder(at.kv, 5) + numpy.floor(at.qo / 4.0), KV % 5 + QO // 4),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", [*ARITHMETIC, *NUMPY])
def test_values_of_hooks(host, dtype, name):
    hook, expected = {**ARITHMETIC, **NUMPY}[name]
    tolerance = 1e-6 if dtype == "float32" else 2.0**-10
    numpy.testing.assert_allclose(weights(hook, dtype), expected, rtol=tolerance, atol=4 * tolerance)


@needs_torch
def test_functions_of_torch_record(host):
    if not HAS_TORCH:
        pytest.skip("torch is not installed")
    import torch

    def hook(at, logit):
        return torch.where(at.kv < 4, torch.tanh(at.qo / 8), torch.tensor(2.0) * at.kv)

    expected = numpy.where(KV < 4, numpy.tanh(QO / 8), 2 * KV)
    numpy.testing.assert_allclose(weights(hook, "float32"), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(tw.Error, match="torch.softmax does not record, expected operators and functions of tilewright.variants"):
        weights(lambda at, logit: torch.softmax(logit, -1), "float32")


@pytest.mark.parametrize("hook, text", [
    (lambda at, logit: numpy.sin(logit), "numpy.sin does not record, expected operators and functions of tilewright.variants"),
    (lambda at, logit: numpy.add.reduce(logit), "numpy.add does not record"),
    (lambda at, logit: numpy.ones(2) * logit, "ndarray is no operand, expected a traced value or a number"),
    (lambda at, logit: logit * numpy.ones(2), "ndarray is no operand"),
    (lambda at, logit: logit ** 0.5, r"\*\* 0.5, expected an integer from 1 to 16; sqrt, exp2 and log2 compute others"),
    (lambda at, logit: logit if at.kv < at.qo else 0.0, r"use where\(condition, a, b\), and &, \| and ~ for and, or and not"),
    (lambda at, logit: math.tanh(logit), "a number has no value while a hook is traced"),
])
def test_calls_that_do_not_record(hook, text):
    with pytest.raises(tw.Error, match=text):
        weights(hook, "float32")
