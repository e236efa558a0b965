"""The functions of the TVM-FFI ABI that the extension library exports, called through tvm_ffi over NumPy arrays, against the
functions of the package."""

import numpy
import pytest
import tilewright as tw
from conftest import needs_torch
from dense import attention, causal, paged
from tilewright import _core

tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")


@pytest.fixture(scope="module")
def library():
    """The extension library as a module of TVM-FFI."""
    return tvm_ffi.load_module(_core.__file__)


def tensor(array):
    return tvm_ffi.from_dlpack(array)


def tensors(*arrays):
    return [array if array is None else tensor(array) for array in arrays]


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def int32(*values):
    return numpy.array(values, "int32")


def test_norms(library, rng):
    x, weight, bias = floats(rng, 3, 8), floats(rng, 8), floats(rng, 8)
    for function, gemma in ((library.rmsnorm, False), (library.gemma_rmsnorm, True)):
        out = numpy.zeros_like(x)
        assert function(*tensors(out, x, weight), 1e-6, False) is None
        close(out, tw.rmsnorm(x, weight, 1e-6, gemma=gemma), 0)
    for function, gemma in ((library.fused_add_rmsnorm, False), (library.gemma_fused_add_rmsnorm, True)):
        ours, theirs = ([x.copy(), floats(numpy.random.default_rng(1), 3, 8)] for _ in range(2))
        function(*tensors(*theirs, weight), 0.5, False)
        tw.fused_add_rmsnorm(*ours, weight, 0.5, gemma=gemma)
        for actual, expected in zip(theirs, ours):
            close(actual, expected, 0)
    out = numpy.zeros_like(x)
    library.layernorm(*tensors(out, x, weight, bias), 1e-3)
    close(out, tw.layer_norm(x, weight, bias, 1e-3), 0)


@needs_torch
def test_norms_of_torch_tensors(library, rng):
    import torch

    x, weight, out = floats(rng, 3, 8), floats(rng, 8), torch.zeros(3, 8)
    library.rmsnorm(out, torch.from_numpy(x), torch.from_numpy(weight), 1e-6, False)
    close(out.numpy(), tw.rmsnorm(x, weight, 1e-6), 0)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations(library, rng, name):
    x, out = floats(rng, 3, 16), numpy.zeros((3, 8), "float32")
    getattr(library, name)(*tensors(out, x), False)
    close(out, getattr(tw, name)(x), 0)


def test_rotations(library, rng):
    q, k, positions = floats(rng, 4, 3, 16), floats(rng, 4, 1, 16), int32(7, 0, 31, 8)
    table = floats(rng, 32, 12)
    llama = ("llama31", [8.0, 1.0, 4.0, 64.0])
    for interleave in (False, True):
        cases = (
            (library.apply_rope_pos_ids, (positions,), (12, interleave, 1.0, 1e4), tw.Rope(12, 1e4, interleaved=interleave)),
            (library.apply_rope_pos_ids, (positions,), (16, interleave, 4.0, 1e4),
             tw.Rope(16, 1e4, interleaved=interleave, scaling=("linear", [4.0]))),
            (library.apply_llama31_rope_pos_ids, (positions,), (16, interleave, 8.0, 5e5, 1.0, 4.0, 64.0),
             tw.Rope(16, 5e5, interleaved=interleave, scaling=llama)),
            (library.apply_rope_pos_ids_cos_sin_cache, (table, positions), (interleave,),
             tw.CosSinCache(table, interleaved=interleave)),
        )
        for function, arrays, numbers, rope in cases:
            expected = tw.apply_rope(q, k, positions, rope, out=(numpy.zeros_like(q), numpy.zeros_like(k)))
            outputs = numpy.zeros_like(q), numpy.zeros_like(k)
            function(*tensors(q, k, *outputs, *arrays), *numbers)
            in_place = q.copy(), k.copy()
            function(*tensors(*in_place, *in_place, *arrays), *numbers)
            for actual, same, one in zip(outputs, in_place, expected):
                close(actual, one, 0)
                close(same, one, 0)


def test_merges(library, rng):
    v, s = floats(rng, 5, 3, 2, 8), floats(rng, 5, 3, 2)
    out, out_s = numpy.zeros((5, 2, 8), "float32"), numpy.zeros((5, 2), "float32")
    library.merge_states(*tensors(v, s, out, out_s))
    for actual, expected in zip((out, out_s), tw.merge_states(v, s)):
        close(actual, expected, 0)

    a, b = ((v[:, at].copy(), s[:, at].copy()) for at in range(2))
    expected = a[0].copy(), a[1].copy()
    tw.merge_state(*expected, *b)
    library.merge_state(*tensors(*a, *b, out, out_s))
    for actual, one in zip((out, out_s), expected):
        close(actual, one, 0)
    for mask in (None, numpy.array([True, False, False, True, True])):
        merged = a[0].copy(), a[1].copy()
        library.merge_state_in_place(*tensors(*merged, *b, mask))
        for actual, before, one in zip(merged, a, expected):
            rows = numpy.ones(5, "bool") if mask is None else mask
            close(actual[rows], one[rows], 0)
            close(actual[~rows], before[~rows], 0)


@pytest.mark.parametrize("order", ["big", "little"])
def test_packed_bits(library, rng, order):
    flags, indptr, packed = rng.random(21) < 0.5, int32(0, 3, 3, 21), numpy.zeros(3, "uint8")
    library.packbits(tensor(flags), order, tensor(packed))
    assert packed.tolist() == tw.packbits(flags, order).tolist() == numpy.packbits(flags, bitorder=order).tolist()
    expected, bounds = tw.segment_packbits(flags, indptr, order)
    packed = numpy.zeros(len(expected), "uint8")
    library.segment_packbits(*tensors(flags, indptr, numpy.asarray(bounds)), order, tensor(packed))
    assert packed.tolist() == expected.tolist()


def test_appends(library, rng):
    k, v = floats(rng, 2, 2, 8), floats(rng, 2, 2, 8)
    requests, positions, indices, indptr, last = int32(0, 1), int32(2, 4), int32(1, 0, 2), int32(0, 1, 3), int32(3, 1)
    for layout in (0, 1):
        shape = (3, 4, 2, 8) if layout == 0 else (3, 2, 4, 8)
        caches = [numpy.zeros(shape, "float32") for _ in range(2)]
        library.append_paged_kv_cache(*tensors(k, v, requests, positions, *caches, indices, indptr, last), layout)
        for cache, new in zip(caches, (k, v)):
            rows = cache if layout == 0 else cache.swapaxes(1, 2)
            close(rows[1, 2], new[0], 0)
            close(rows[2, 0], new[1], 0)
            assert numpy.count_nonzero(cache) == 32
    ckv, kpe = floats(rng, 2, 16), floats(rng, 2, 4)
    caches = [numpy.zeros((3, 4, dim), "float32") for dim in (16, 4)]
    library.append_paged_mla_kv_cache(*tensors(ckv, kpe, requests, positions, *caches, indices, indptr, last))
    for cache, new in zip(caches, (ckv, kpe)):
        close(cache[1, 2], new[0], 0)
        close(cache[2, 0], new[1], 0)
        assert numpy.count_nonzero(cache) == new.size


def test_decode_with_a_plan(library, rng):
    kv_lens = [5, 17]
    q = floats(rng, 2, 4, 16)
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


#: Causal, window_left and logits_soft_cap.
MASKS = [(False, -1, 0.0), (True, -1, 0.0), (True, 3, 0.0), (False, 6, 2.0), (True, -1, 1.5)]


def problem(is_causal, window_left, soft_cap, *heads, **options):
    window = None if window_left < 0 else window_left
    variant = tw.variants.soft_cap(soft_cap) if soft_cap else None
    return tw.Attention(tw.Problem(*heads, causal=is_causal, window_left=window, scale=0.3, dtype="float32", **options), variant)


@pytest.mark.parametrize("is_causal, window_left, soft_cap", MASKS)
def test_prefill_with_a_plan(library, rng, is_causal, window_left, soft_cap):
    kv_lens, bounds = [5, 17], int32(0, 3, 10)
    q, out, lse = floats(rng, 10, 4, 16), numpy.zeros((10, 4, 16), "float32"), numpy.zeros((10, 4), "float32")
    for layout, name in ((0, "NHD"), (1, "HND")):
        caches, table, _ = paged(rng, kv_lens, 4, 2, 16, layout=name)
        plan = library.paged_prefill_plan(*tensors(q, caches[0], bounds, *table), layout, is_causal, window_left, soft_cap, 0.3)
        library.paged_prefill_run(plan, *tensors(q, *caches, out, lse))
        library.paged_prefill_free(plan)
        operator = problem(is_causal, window_left, soft_cap, 4, 2, 16, layout=name)
        batch = tw.Batch.paged(bounds, tw.PageTable(*table, 4))
        expected = operator.run(operator.plan(batch), q, *caches, return_lse=True)
        close(out, expected[0], 0)
        close(lse, expected[1], 0)


@pytest.mark.parametrize("is_causal, window_left, soft_cap", MASKS)
def test_ragged_prefill_with_a_plan(library, rng, is_causal, window_left, soft_cap):
    rows, tokens = int32(0, 3, 10), int32(0, 5, 22)
    q, k, v = floats(rng, 10, 4, 24), floats(rng, 22, 2, 24), floats(rng, 22, 2, 16)
    out, lse = numpy.zeros((10, 4, 16), "float32"), numpy.zeros((10, 4), "float32")
    plan = library.ragged_prefill_plan(*tensors(q, k, v, rows, tokens), is_causal, window_left, soft_cap, 0.3)
    library.ragged_prefill_run(plan, *tensors(q, k, v, out, lse))
    operator = problem(is_causal, window_left, soft_cap, 4, 2, 24, head_dim_vo=16)
    expected = operator.run(operator.plan(tw.Batch.ragged(rows, tokens)), q, k, v, return_lse=True)
    close(out, expected[0], 0)
    close(lse, expected[1], 0)
    if (is_causal, window_left, soft_cap) == (True, -1, 0.0):
        close(out[:3], attention(q[:3], k[:5], v[:5], scale=0.3, visible=causal(3, 5))[0])
    again = numpy.zeros_like(out)
    library.ragged_prefill_run(plan, *tensors(q, k, v, again, None))
    close(again, out, 0)
    library.ragged_prefill_free(plan)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mla_with_a_plan(library, rng, is_causal):
    rows, indptr, indices, lens = int32(0, 1, 4, 4), int32(0, 2, 3, 3), int32(2, 0, 3), int32(7, 4, 0)
    q, q_pe, ckv, kpe = floats(rng, 4, 4, 32), floats(rng, 4, 4, 8), floats(rng, 4, 4, 32), floats(rng, 4, 4, 8)
    out, lse = numpy.zeros_like(q), numpy.zeros((4, 4), "float32")
    plan = library.mla_plan(*tensors(q, q_pe, ckv, rows, indptr, indices, lens), is_causal, 0.2)
    library.mla_run(plan, *tensors(q, q_pe, ckv, kpe, out, lse))
    operator = tw.Attention(tw.Problem.latent(4, 32, 8, causal=is_causal, scale=0.2, dtype="float32"))
    batch = tw.Batch.paged(rows, tw.PageTable(indptr, indices, int32(3, 4, 0), 4))
    expected = operator.run_latent(operator.plan(batch), q, q_pe, ckv, kpe, return_lse=True)
    close(out, expected[0], 0)
    close(lse, expected[1], 0)
    with pytest.raises(ValueError, match=f"paged_prefill_run: plan = {plan} is of mla_plan, expected one of paged_prefill_plan"):
        library.paged_prefill_run(plan, *tensors(q, ckv, ckv, out, None))
    library.mla_free(plan)
    with pytest.raises(ValueError, match=f"tvm_ffi.mla_free: plan = {plan} does not exist"):
        library.mla_free(plan)


def softmax(logits):
    weights = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def offsets(offset, rows):
    """The offset of each row: rows draw from parts of four numbers."""
    return [offset + 4 * row for row in range(rows)]


def test_samplers_draw_the_tokens_of_the_package(library, rng):
    logits = floats(rng, 5, 40)
    probs, tokens, valid = softmax(logits), numpy.zeros(5, "int32"), numpy.zeros(5, "bool")
    library.sampling_from_logits(*tensors(logits, tokens, None), True, None, 7, None, 3)
    assert tokens.tolist() == tw.sampling.sample(logits, seed=7, offset=offsets(3, 5)).tolist()
    rows, seeds = int32(4, 0, 1, 2, 3), numpy.arange(5, dtype="int64")
    library.sampling_from_logits(*tensors(logits, tokens, rows), True, tensor(seeds), 0, None, 3)
    assert tokens.tolist() == tw.sampling.sample(logits[rows], seed=seeds, offset=offsets(3, 5)).tolist()
    each = numpy.array([9, 1, 5, 5, 0], "int64")
    library.sampling_from_logits(*tensors(logits, tokens, None), True, None, 7, tensor(each), 0)
    assert tokens.tolist() == tw.sampling.sample(logits, seed=7, offset=each).tolist()
    counts, shares = int32(1, 2, 3, 30, 40), numpy.array([0.1, 0.5, 0.9, 1.0, 0.3], "float32")
    top_k_top_p = library.top_k_top_p_sampling_from_probs
    for function, arguments, params in (
        (library.sampling_from_probs, (), {}),
        (library.top_k_sampling_from_probs, (None, 3), {"top_k": 3}),
        (library.top_k_sampling_from_probs, (tensor(counts), 0), {"top_k": counts}),
        (library.top_p_sampling_from_probs, (None, 0.6), {"top_p": 0.6}),
        (library.top_p_sampling_from_probs, (tensor(shares), 0.0), {"top_p": shares}),
        (library.min_p_sampling_from_probs, (None, 0.5), {"min_p": 0.5}),
        (library.min_p_sampling_from_probs, (tensor(shares), 0.0), {"min_p": shares}),
        (top_k_top_p, (tensor(counts), 0, None, 0.8), {"top_k": counts, "top_p": 0.8, "joint": True}),
    ):
        for seed in range(8):
            valid[:] = False
            function(*tensors(probs, tokens, valid, None), *arguments, True, None, seed, None, 3)
            expected = tw.sampling.sampling_from_probs(probs, seed=seed, offset=offsets(3, 5), **params)
            assert tokens.tolist() == expected.tolist() and valid.all()


def test_equal_rows_draw_different_tokens(library):
    probs, tokens = numpy.full((64, 100), 0.01, "float32"), numpy.zeros(64, "int32")
    library.sampling_from_probs(*tensors(probs, tokens, None, None), True, None, 7, None, 0)
    assert len(set(tokens.tolist())) > 20


def test_filters_give_the_rows_of_the_package(library, rng):
    logits = floats(rng, 5, 40)
    probs, out, scratch = softmax(logits), numpy.zeros((5, 40), "float32"), numpy.zeros(8, "uint8")
    counts, shares = int32(1, 2, 3, 30, 40), numpy.array([0.1, 0.5, 0.9, 1.0, 0.3], "float32")
    for array, value in ((None, 0.5), (shares, 0.0)):
        param = value if array is None else array
        library.softmax(*tensors(scratch, logits, out, array), value, False)
        close(out, tw.sampling.softmax(logits, temperature=param), 1e-6)
        library.top_p_renorm_probs(*tensors(probs, out, array), value, True, tensor(scratch))
        close(out, tw.sampling.top_p_renorm_probs(probs, param), 1e-6)
    for array, value in ((None, 3), (counts, 0)):
        param = value if array is None else array
        library.top_k_renorm_probs(*tensors(probs, out, array), value, tensor(scratch))
        close(out, tw.sampling.top_k_renorm_probs(probs, param), 1e-6)
        library.top_k_mask_logits(*tensors(logits, out, array), value, None)
        close(out, tw.sampling.top_k_mask_logits(logits, param), 0)


def test_chains_of_drafts(library, rng):
    draft, target, ids = softmax(floats(rng, 3, 2, 10)), softmax(floats(rng, 3, 3, 10)), int32(3, 1, 7, 2, 5, 5).reshape(3, 2)
    tokens, accepted, emitted = numpy.zeros((3, 3), "int32"), int32(1, 2, 3), int32(10, 20, 30)
    library.chain_speculative_sampling(*tensors(draft, ids, target, tokens, accepted, emitted), True, None, 9, None, 4)
    expected = tw.sampling.chain_speculative_sampling(draft, ids, target, seed=9, offset=offsets(4, 3))
    assert tokens.tolist() == expected[0].tolist()
    for total, first, counts in zip((accepted, emitted), (int32(1, 2, 3), int32(10, 20, 30)), zip(*expected[1])):
        assert total.tolist() == (first + counts).tolist() and max(counts) > 0


def test_errors_name_function_and_argument(library):
    x, weight, flags, packed = (numpy.zeros(shape, dtype) for shape, dtype in
                                (((3, 8), "float32"), (7, "float32"), (9, "bool"), (2, "uint8")))
    x, weight, flags, packed = tensors(x, weight, flags, packed)
    ints, three, latent = tensors(int32(0, 3), numpy.zeros((3, 2, 4), "float32"), numpy.zeros((2, 4, 8), "float32"))
    ids, counts = tensors(int32(0, 0, 0, 0, 0, 0).reshape(3, 2), int32(0, 0, 0))
    for kind, message, call in (
        (ValueError, "norm.rmsnorm_in_place: weight has shape", lambda: library.rmsnorm(x, x, weight, 1e-6, False)),
        (TypeError, "tvm_ffi.rmsnorm: eps is of type index 70, expected a number", lambda: library.rmsnorm(x, x, x, x, False)),
        (TypeError, "tvm_ffi.rmsnorm: weight is of type index 1, expected a tensor",
         lambda: library.rmsnorm(x, x, 3, 1e-6, False)),
        (TypeError, "tvm_ffi.paged_decode_free: 2 arguments, expected 1: plan", lambda: library.paged_decode_free(1, 2)),
        (ValueError, "layout = 2, expected 0", lambda: library.paged_decode_plan(*[x] * 5, 2, 1.0)),
        (ValueError, "tvm_ffi.paged_decode_plan: q has shape", lambda: library.paged_decode_plan(x, *[x] * 4, 0, 1.0)),
        (ValueError, "tvm_ffi.paged_decode_plan: k_cache has shape", lambda: library.paged_decode_plan(three, *[x] * 4, 0, 1.0)),
        (ValueError, "norm.fused_add_rmsnorm.*: weight has shape",
         lambda: library.fused_add_rmsnorm(x, tensor(numpy.ones((3, 8), "float32")), weight, 1e-6, False)),
        (ValueError, "norm.layer_norm: weight has shape",
         lambda: library.layernorm(tensor(numpy.ones((3, 8), "float32")), x, weight, weight, 1e-6)),
        (ValueError, "activation.act_and_mul: out shares memory with x", lambda: library.silu_and_mul(x, x, False)),
        (ValueError, "tvm_ffi.apply_rope_pos_ids: one of q_rope and k_rope is in place, expected both or none",
         lambda: library.apply_rope_pos_ids(*[three] * 3, latent, ints, 4, False, 1.0, 1e4)),
        (ValueError, "rope.*rotary_dim = 0", lambda: library.apply_rope_pos_ids(*[three] * 4, ints, -1, False, 1.0, 1e4)),
        (ValueError, "token 1: position = 3, expected below max_positions = 3",
         lambda: library.apply_rope_pos_ids_cos_sin_cache(*[three] * 4, x, ints, False)),
        (ValueError, r"cos_sin_cache has shape \[3, 2, 4\], expected \[max_positions, rotary_dim\]",
         lambda: library.apply_rope_pos_ids_cos_sin_cache(*[three] * 4, three, ints, False)),
        (ValueError, "attention.merge_states: .*shape", lambda: library.merge_states(three, x, latent, weight)),
        (ValueError, "attention.merge_state: mask has shape",
         lambda: library.merge_state_in_place(three, *tensors(numpy.zeros((3, 2), "float32"), numpy.zeros((3, 2, 4), "float32"),
                                                              numpy.zeros((3, 2), "float32")), flags)),
        (ValueError, 'tvm_ffi.packbits: bitorder = "middle", expected "big" or "little"',
         lambda: library.packbits(flags, "middle", packed)),
        (ValueError, 'tvm_ffi.packbits: bitorder = "least significant first", expected',
         lambda: library.packbits(flags, "least significant first", packed)),
        (TypeError, "tvm_ffi.packbits: bitorder is of type index 1, expected a text", lambda: library.packbits(flags, 1, packed)),
        (ValueError, r"tvm_ffi.packbits: y is float32 of shape \[7\], expected uint8 \[2\]",
         lambda: library.packbits(flags, "big", weight)),
        (ValueError, r"tvm_ffi.segment_packbits: output_indptr is \[0, 3\], expected \[0, 1\]",
         lambda: library.segment_packbits(tensor(numpy.zeros(3, "bool")), ints, ints, "big", tensor(numpy.zeros(1, "uint8")))),
        (ValueError, "tvm_ffi.append_paged_mla_kv_cache: ckv_cache has shape",
         lambda: library.append_paged_mla_kv_cache(*[x] * 4, x, x, ints, ints, ints)),
        (ValueError, "tvm_ffi.paged_prefill_plan: window_left = -2, expected -1 or at least 0",
         lambda: library.paged_prefill_plan(three, tensor(numpy.zeros((1, 4, 2, 4), "float32")), ints, ints, ints, ints, 0, True,
                                            -2, 0.0, 1.0)),
        (ValueError, "attention.soft_cap: ",
         lambda: library.ragged_prefill_plan(three, three, three, ints, ints, True, -1, -2.0, 1.0)),
        (ValueError, "tvm_ffi.ragged_prefill_plan: v has shape",
         lambda: library.ragged_prefill_plan(three, three, x, ints, ints, True, -1, 0.0, 1.0)),
        (ValueError, "tvm_ffi.mla_plan: request 0: kv_len = 3 needs 1 pages, kv_indptr has 3",
         lambda: library.mla_plan(three, three, latent, ints, ints, ints, tensor(int32(3)), True, 1.0)),
        (ValueError, "tvm_ffi.mla_plan: kv_indptr has 2 bounds, expected num_requests . 1 = 3",
         lambda: library.mla_plan(three, three, latent, ints, ints, ints, ints, True, 1.0)),
        (ValueError, "sampling.sampling_from_probs: .*seed",
         lambda: library.sampling_from_probs(x, counts, None, None, True, tensor(numpy.zeros(2, "int64")), 0, None, 0)),
        (ValueError, "sampling.*top_k = 0", lambda: library.top_k_mask_logits(x, tensor(numpy.ones((3, 8), "float32")), None, 0, None)),
        (ValueError, "sampling.distribution: out has shape", lambda: library.softmax(None, x, three, None, 1.0, False)),
        (ValueError, "output_emitted_draft_token_num has shape .*, expected .batch_size. = .3.",
         lambda: library.chain_speculative_sampling(three, ids, *tensors(numpy.zeros((3, 3, 4), "float32"),
                                                    numpy.zeros((3, 3), "int32")), counts, ints, True, None, 0, None, 0)),
    ):
        with pytest.raises(kind, match=message):
            call()
