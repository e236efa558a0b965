"""The functions of the TVM-FFI ABI that the extension library exports, called through tvm_ffi over NumPy arrays."""

import numpy
import pytest
import tilewright as tw
from conftest import HAS_TORCH
from dense import attention, paged
from tilewright import _core

tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")


@pytest.fixture(scope="module")
def library():
    """The extension library as a module of TVM-FFI."""
    return tvm_ffi.load_module(_core.__file__)


def tensor(array):
    return tvm_ffi.from_dlpack(array)


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_norms_and_appends(library, rng):
    x, weight = rng.standard_normal((3, 8)).astype("float32"), rng.standard_normal(8).astype("float32")
    out = numpy.zeros_like(x)
    assert library.rmsnorm(tensor(out), tensor(x), tensor(weight), 1e-6, False) is None
    close(out, tw.rmsnorm(x, weight, 1e-6))
    if HAS_TORCH:
        import torch

        like = torch.zeros(3, 8)
        library.rmsnorm(like, torch.from_numpy(x), torch.from_numpy(weight), 1e-6, False)
        close(like.numpy(), out, 0)

    k, v = (rng.standard_normal((2, 2, 8)).astype("float32") for _ in range(2))
    arrays = [numpy.array(values, "int32") for values in ([0, 1], [2, 4], [1, 0, 2], [0, 1, 3], [3, 1])]
    requests, positions, indices, indptr, last = arrays
    for layout in (0, 1):
        shape = (3, 4, 2, 8) if layout == 0 else (3, 2, 4, 8)
        caches = [numpy.zeros(shape, "float32") for _ in range(2)]
        library.append_paged_kv_cache(*map(tensor, (k, v, requests, positions, *caches, indices, indptr, last)), layout)
        for cache, new in zip(caches, (k, v)):
            rows = cache if layout == 0 else cache.swapaxes(1, 2)
            close(rows[1, 2], new[0], 0)
            close(rows[2, 0], new[1], 0)
            assert numpy.count_nonzero(cache) == 32


def test_decode_with_a_plan(library, rng):
    kv_lens = [5, 17]
    q = rng.standard_normal((2, 4, 16)).astype("float32")
    for layout, name in ((0, "NHD"), (1, "HND")):
        caches, (indptr, indices, last), rows = paged(rng, kv_lens, 4, 2, 16, layout=name)
        k, v = map(tensor, caches)
        plan = library.paged_decode_plan(tensor(q), k, *map(tensor, (indptr, indices, last)), layout, 0.3)
        out, lse = numpy.zeros_like(q), numpy.zeros((2, 4), "float32")
        library.paged_decode_run(plan, tensor(q), k, v, tensor(out), tensor(lse))
        again = numpy.zeros_like(q)
        library.paged_decode_run(plan, tensor(q), k, v, tensor(again), None)
        for r in range(2):
            expected = attention(q[r : r + 1], rows[0][r], rows[1][r], scale=0.3)
            close(out[r : r + 1], expected[0])
            close(lse[r : r + 1], expected[1])
        close(again, out, 0)
        library.paged_decode_free(plan)
        with pytest.raises(ValueError, match=f"tvm_ffi.paged_decode_run: plan = {plan} does not exist"):
            library.paged_decode_run(plan, tensor(q), k, v, tensor(out), None)


def test_samplers_draw_the_tokens_of_the_package(library, rng):
    logits = rng.standard_normal((5, 40)).astype("float32")
    tokens, valid = numpy.zeros(5, "int32"), numpy.zeros(5, "bool")
    library.sampling_from_logits(tensor(logits), tensor(tokens), None, True, None, 7, None, 3)
    assert tokens.tolist() == tw.sampling.sample(logits, seed=7, offset=3).tolist()
    rows = numpy.array([4, 0, 1, 2, 3], "int32")
    some = numpy.zeros(5, "int32")
    seeds = numpy.full(5, 7, "int64")
    library.sampling_from_logits(tensor(logits), tensor(some), tensor(rows), True, tensor(seeds), 0, None, 3)
    assert some.tolist() == tw.sampling.sample(logits[rows], seed=7, offset=3).tolist()
    probs = numpy.exp(logits) / numpy.exp(logits).sum(axis=-1, keepdims=True)
    top_k = numpy.array([1, 1, 1, 1, 1], "int32")
    library.top_k_top_p_sampling_from_probs(tensor(probs), tensor(tokens), tensor(valid), None, tensor(top_k), 0, None, 0.9,
                                            True, None, 7, None, 0)
    assert tokens.tolist() == logits.argmax(axis=-1).tolist() and valid.all()


def test_errors_name_function_and_argument(library):
    x, weight = numpy.zeros((3, 8), "float32"), numpy.zeros(7, "float32")
    with pytest.raises(ValueError, match="norm.rmsnorm_in_place: weight has shape"):
        library.rmsnorm(tensor(x), tensor(x), tensor(weight), 1e-6, False)
    with pytest.raises(TypeError, match="tvm_ffi.rmsnorm: eps is of type index 70, expected a number"):
        library.rmsnorm(tensor(x), tensor(x), tensor(x), tensor(x), False)
    with pytest.raises(TypeError, match="tvm_ffi.rmsnorm: weight is of type index 1, expected a tensor"):
        library.rmsnorm(tensor(x), tensor(x), 3, 1e-6, False)
    with pytest.raises(TypeError, match="tvm_ffi.paged_decode_free: 2 arguments, expected 1: plan"):
        library.paged_decode_free(1, 2)
    with pytest.raises(ValueError, match="layout = 2, expected 0"):
        library.paged_decode_plan(*[tensor(x)] * 5, 2, 1.0)
    with pytest.raises(ValueError, match="tvm_ffi.paged_decode_plan: k_cache has shape"):
        library.paged_decode_plan(tensor(x[None]), *[tensor(x)] * 4, 0, 1.0)
