"""The variants of FlashInfer's tests of custom kernels, on the CPU and in the simulator of the GPU kernels."""

import numpy
import pytest

import jit_variants


#: The simulator takes minutes for the shapes of the others.
SIMULATED = (jit_variants.single_decode_with_mask, jit_variants.prefill_with_mask, jit_variants.batch_decode_with_alibi)
CASES = [("cpu", make) for make in (*jit_variants.ALL, jit_variants.prefill_with_distance)] + [("simulator", make) for make in SIMULATED]


@pytest.mark.parametrize("device, make", CASES, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_variants_of_flashinfers_tests(rng, device, make):
    case = make(rng)
    operator = case.operator(device)
    o = operator.run(operator.plan(case.batch), case.q, case.k, case.v)
    numpy.testing.assert_allclose(o.astype(numpy.float64), case.o, rtol=1e-3, atol=1e-3)
    if case.logits is not None:
        dumped = numpy.array(case.variant.buffer("logits")).reshape(case.logits.shape)
        numpy.testing.assert_allclose(dumped, case.logits, rtol=1e-5, atol=1e-5)
