"""The 45 cases of docs/checked-inputs.md, through Python."""

import pathlib
import re

import numpy
import pytest
import tilewright as tw
from conftest import OnDevice, needs_torch
from dense import attention, causal, paged

PAGE = pathlib.Path(__file__).parents[3] / "docs/checked-inputs.md"


def ones(*shape):
    return numpy.ones(shape, "float32")


def close(actual, expected, tolerance=1e-5):
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def ints(values, dtype="int32"):
    return numpy.array(values, dtype)


def operator(**settings):
    return tw.Attention(tw.Problem(2, 1, 8, **settings))


def ragged(qo_len=1, kv_len=2, **others):
    return tw.Batch.ragged([0, qo_len], [0, kv_len], **others)


def table(indptr=(0, 1), indices=(0,), last=(1,), page_size=4):
    return tw.PageTable(list(indptr), list(indices), list(last), page_size)


def plan(batch, **options):
    return operator().plan(batch, **options)


def run(*, batch=None, planned_by=None, q=None, k=None, v=None, **others):
    one = operator()
    made = (planned_by or one).plan(batch or ragged())
    k = ones(2, 1, 8) if k is None else k
    return one.run(made, ones(1, 2, 8) if q is None else q, k, k if v is None else v, **others)


def on_pages(k, **others):
    return run(batch=tw.Batch.paged([0, 1], table()), k=k, **others)


def append(requests, positions, last=(1, 1)):
    caches = numpy.zeros((2, 2, 5, 1, 8), "float32")
    tw.append_paged_kv_cache(ones(2, 1, 8), ones(2, 1, 8), requests, positions, *caches, table((0, 1, 2), (0, 1), last, 5))
    return caches


class Claimed:
    """An array that claims a shape and an address."""

    def __init__(self, shape, typestr="<f4"):
        self.shape = shape
        self.__array_interface__ = {"data": (4096, False), "shape": shape, "typestr": typestr, "version": 3}


def on_gpu(*shape):
    """Floats that claim to be in the memory of GPU 0."""
    tensor = OnDevice("<f4")
    tensor.shape = tensor.__cuda_array_interface__["shape"] = shape
    return tensor


def drafts(ids):
    return tw.sampling.chain_speculative_sampling(ones(2, 2, 4) / 4, ints(ids), ones(2, 3, 4) / 4)


@pytest.mark.parametrize("case, call, text", [
    (1, lambda: tw.Attention(tw.Problem(2, 1, 8), tw.variants.sinks([1.0])),
     "variant attention_sinks: sinks: 1, expected one for each of the 2 query heads"),
    (1, lambda: tw.Attention(tw.Problem(2, 1, 8), tw.variants.soft_cap(3.0).then(tw.variants.alibi(4))),
     "variant alibi: slopes: 4, expected one for each of the 2"),
    (1, lambda: tw.Attention(tw.Problem(2, 1, 8), tw.variants.rotary(tw.Rope(4))), "rotary_dim = 4, expected head_dim_qk = 8"),
    (1, lambda: tw.Attention(tw.Problem(2, 1, 8), tw.variants.prefix_lm([1])), "prefix_lm: mask = causal, expected full"),
    (3, lambda: run(v_scale=ones(1, 1)), "attention.run: v scale is per page, but the cache is ragged"),
    (3, lambda: on_pages(ones(1, 4, 1, 8), k_scale=ones(1, 2)), "k scale has shape [1, 2], expected"),
    (4, lambda: tw.Problem(2, 1, 8, dtype="float8_e4m3fn"), "q/o dtype = e4m3, expected f32, f16 or bf16"),
    (6, lambda: plan(ragged(2, 9, mask=numpy.zeros(2, "uint8"))), "attention.plan: mask has 2 bytes, expected 3"),
    (6, lambda: plan(ragged(2, 9, mask=numpy.zeros(4, "uint8"))), "attention.plan: mask has 4 bytes, expected 3"),
    (8, lambda: run(planned_by=operator(dtype="float16")), "the plan was made by another operator"),
    (9, lambda: plan(tw.Batch.paged([0, 1], table(indices=(-1,)))), "page = -1"),
    (9, lambda: plan(tw.Batch.paged([0, 1], table(last=(0,)))), "request 0: last_page_len = 0 is not in 1..=4"),
    (9, lambda: plan(tw.Batch.paged([0, 1, 2], table((0, 2, 1), (0, 1), (1, 1)))), "request 1: kv indptr decreases from 2 to 1"),
    (9, lambda: run(batch=tw.Batch.paged([0, 1], table(indices=(7,))), k=ones(2, 4, 1, 8)),
     "page = 7 is not in 0..2, the pages of k"),
    (10, lambda: run(q=ones(1, 3, 8)), "q has shape [1, 3, 8], expected [num_rows, num_qo_heads, head_dim] = [1, 2, 8]"),
    (10, lambda: on_pages(ones(1, 8, 1, 8)), "k has shape [1, 8, 1, 8], expected"),
    (10, lambda: on_pages(ones(1, 4, 2, 8)), "k has shape [1, 4, 2, 8], expected"),
    (11, lambda: tw.Problem(8, 3, 8), "qo heads = 8 is not a multiple of kv heads = 3"),
    (13, lambda: tw.Attention(tw.Problem(2, 1, 1025)), "head_dim.qk = 1025 is above 1024"),
    (14, lambda: run(q=on_gpu(1, 2, 8), out=ones(1, 2, 8)), "q is in the memory of device 0, expected host memory"),
    (14, lambda: run(q=ones(1, 2, 16)[..., ::2]), "head_dim, the last axis, must have stride 1"),
    (14, lambda: run(out=ones(1, 2, 16)[..., ::2]), "o has strides [16, 16, 2]: head_dim, the last axis, must have stride 1"),
    (15, lambda: plan(tw.Batch.paged([0, 1], tw.PageTable([0, 1], ints([2**31], "int64"), [1], 4))),
     "page = 2147483648 does not fit in 32 bits"),
    (19, lambda: plan(ragged(2**26, 2**26), split=1), "work items, the most is 16777216"),
    (20, lambda: tw.Attention(tw.Problem.latent(2, 8, 4, scale=1.0, dtype="float32")).plan(ragged(2**26, 2**26), split=1),
     "work items, the most is 16777216"),
    (22, lambda: tw.variants.soft_cap(0.0), "attention.soft_cap: cap = 0, expected a normal number above 0"),
    (23, lambda: tw.merge_state(ones(2, 2, 8), numpy.ones((2, 2), "float16"), ones(2, 2, 8), ones(2, 2)),
     "lse is f16, expected f32"),
    (24, lambda: plan(tw.Batch.paged([0, 1], table(), levels=[tw.Level([0, 2], table())])),
     "level 0: qo_indptr ends at 2, the batch has 1"),
    (25, lambda: tw.sampling.sample(ones(3, 4), seed=[1, 2]), "seed has 2 elements, expected rows = 3"),
    (25, lambda: tw.sampling.sample(ones(3, 4), offset=ints([1, 2])), "offset has 2 elements, expected rows = 3"),
    (28, lambda: tw.rmsnorm(Claimed((2**33, 2**30)), ones(8), out=ones(2, 8)), "with these strides exceeds the address space"),
    (30, lambda: tw.sampling.sample(ones(2, 4), top_k=0), "request 0: top_k = 0 is not at least 1"),
    (30, lambda: tw.sampling.sample(ones(2, 4), top_p=0.0), "request 0: top_p = 0 is not in (0, 1]"),
    (30, lambda: tw.sampling.sampling_from_probs(0 * ones(2, 4)), "request 0: every probability is 0"),
    (31, lambda: drafts([[0, 1], [1, 4]]), "request 1: ids[1] = 4 is neither in 0..4 nor -1"),
    (32, lambda: append([0, 2], [0, 0]), "token 1: batch_index = 2 is not in 0..2, nor -1 to skip the token"),
    (33, lambda: append([0, 1], [0, 5], (1, 5)), "token 1: position = 5 is not in 0..5 of request 1"),
    (33, lambda: append([0, 0], [1, 1], (2, 5)), "tokens 0 and 1 both go to slot 1 of page 0"),
    (34, lambda: plan(tw.Batch.block_sparse([0, 1], [3], (4, 4), 12)), "block row 0: block = 3 is not in 0..3"),
    (41, lambda: run(planned_by=operator(kv_dtype="int8")), "the plan was made by another operator"),
    (43, lambda: run(planned_by=operator(window_left=3)), "the plan was made by another operator"),
])
def test_errors(case, call, text):
    with pytest.raises((tw.Error, tw.Unsupported)) as refused:
        call()
    assert text in str(refused.value)


@pytest.mark.parametrize("case, name", [(1, "sinks"), (7, "max_sequence_kv"), (38, "logits_soft_cap"), (43, "window_left")])
def test_arguments_that_run_does_not_have(case, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        run(**{name: 1})


#: The cases that no argument of Python can express, with the reason.
IMPOSSIBLE = {
    2: "there is no cache of 4 bits",
    17: "plans share no buffer",
    18: "a plan owns its workspace",
}


def scales_of_ragged_tensors(rng):
    """3"""
    q, k, v = (rng.standard_normal((3, 2, 8)).astype("float32") for _ in range(3))
    one = tw.Attention(tw.Problem(2, 2, 8))
    o = one.run(one.plan(tw.Batch.ragged([0, 3], [0, 3])), q, k, v, k_scale=0.5, v_scale=[2.0, 3.0])
    close(o, attention(q, 0.5 * k, v * numpy.array([2.0, 3.0])[None, :, None], visible=causal(3, 3))[0])


def a_scaled_output_is_the_caller_s(rng):
    """4"""
    q, k, out = ones(1, 2, 8), rng.standard_normal((2, 1, 8)).astype("float32"), ones(1, 2, 8)
    assert run(q=q, k=k, v_scale=3.0, out=out) is out
    close(out, 3.0 * attention(q, k, k)[0])


def a_plan_without_a_mask_after_one_with_it(rng):
    """5"""
    q, k = ones(1, 2, 8), rng.standard_normal((2, 1, 8)).astype("float32")
    one = operator(causal=False)
    masked = one.plan(ragged(mask=numpy.array([1], "uint8")))
    close(one.run(masked, q, k, k), attention(q, k[:1], k[:1])[0])
    close(one.run(one.plan(ragged()), q, k, k), attention(q, k, k)[0])
    close(one.run(masked, q, k, k), attention(q, k[:1], k[:1])[0])


def groups_of_any_size(rng):
    """12"""
    for group in (5, 7, 9, 33):
        q, k = rng.standard_normal((1, group, 8)).astype("float32"), rng.standard_normal((4, 1, 8)).astype("float32")
        one = tw.Attention(tw.Problem(group, 1, 8))
        close(one.run(one.plan(ragged(1, 4)), q, k, k), attention(q, k, k)[0])


def head_dims_of_any_size(rng):
    """13"""
    for qk, vo in ((33, 17), (40, 40), (1, 1)):
        q, k, v = (rng.standard_normal(shape).astype("float32") for shape in ((1, 2, qk), (4, 1, qk), (4, 1, vo)))
        one = tw.Attention(tw.Problem(2, 1, qk, head_dim_vo=vo))
        close(one.run(one.plan(ragged(1, 4)), q, k, v), attention(q, k, v)[0])


def strides_of_outer_axes(rng):
    """14"""
    q, k, out = rng.standard_normal((2, 3, 8)).astype("float32"), rng.standard_normal((4, 2, 8)).astype("float32"), ones(1, 4, 8)
    run(q=q[:1, ::2], k=k[::2, 1:], out=out[:, ::2])
    close(out[:, ::2], attention(q[:1, ::2], k[::2, 1:], k[::2, 1:])[0])
    assert (out[:, 1::2] == 1).all()


def indices_of_64_bits(rng):
    """15"""
    caches, arrays, rows = paged(rng, [5, 9], 4, 1, 8)
    q = rng.standard_normal((2, 2, 8)).astype("float32")
    one = operator()
    wide = tw.PageTable(*(array.astype("int64") for array in arrays), 4)
    o = one.run(one.plan(tw.Batch.paged(ints([0, 1, 2], "int64"), wide)), q, *caches)
    for r in range(2):
        close(o[r : r + 1], attention(q[r : r + 1], rows[0][r], rows[1][r])[0])


def a_refused_batch_leaves_no_plan(rng):
    """16"""
    one = operator()
    made = one.plan(ragged(1, 2), capacity=tw.Capacity(1, 1, 1))
    with pytest.raises(tw.Error, match="2 query rows, the capacity is 1"):
        one.replan(made, tw.Batch.ragged([0, 2], [0, 2]))
    one.replan(made, ragged(1, 1))
    k = rng.standard_normal((1, 1, 8)).astype("float32")
    close(one.run(made, ones(1, 2, 8), k, k), numpy.repeat(k, 2, axis=1))


def requests_without_rows_or_keys(rng):
    """19"""
    q, k = rng.standard_normal((2, 2, 8)).astype("float32"), rng.standard_normal((3, 1, 8)).astype("float32")
    one = operator()
    made = one.plan(tw.Batch.ragged([0, 0, 1, 1, 2, 2], [0, 2, 2, 2, 3, 3]))
    o, lse = one.run(made, q, k, k, return_lse=True)
    assert (o[0] == 0).all() and numpy.isneginf(lse[0]).all()
    close(o[1:], attention(q[1:], k[2:], k[2:])[0])


def no_requests(rng):
    """21"""
    one, out = operator(), ones(0, 2, 8)
    made = one.plan(tw.Batch.paged([0], tw.PageTable([0], [], [], 4)))
    assert made.num_rows == 0 and one.run(made, out, ones(1, 4, 1, 8), ones(1, 4, 1, 8)).shape == (0, 2, 8)


def windows_count_through_levels(rng):
    """24"""
    caches, (_, indices, _), rows = paged(rng, [14], 4, 1, 8)
    q = rng.standard_normal((1, 2, 8)).astype("float32")
    one = operator(window_left=9)
    own, shared = table((0, 2), indices[2:], (2,)), table((0, 2), indices[:2], (4,))
    o = one.run(one.plan(tw.Batch.paged([0, 1], own, levels=[tw.Level([0, 1], shared)])), q, *caches)
    close(o, attention(q, rows[0][0], rows[1][0], visible=causal(1, 14, 9))[0])


def seeds_of_each_row(rng):
    """25"""
    logits = numpy.zeros((64, 1000), "float32")
    seeds = numpy.arange(64)
    tokens = tw.sampling.sample(logits, seed=seeds)
    assert len(set(tokens.tolist())) > 32
    for row in (0, 5, 63):
        assert tw.sampling.sample(logits[:1], seed=int(seeds[row])).tolist() == tokens[row : row + 1].tolist()


def row_numbers_select_rows(rng):
    """26 27 45"""
    import tilewright.flashinfer as flashinfer
    import torch

    probs = torch.softmax(torch.from_numpy(rng.standard_normal((3, 50)).astype("float32")), dim=-1)
    rows = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    for top_k in (torch.tensor([1, 3, 1, 50]), torch.tensor([1, 3, 1, 50], dtype=torch.int32)):
        arguments = {"seed": torch.tensor([5] * 4), "offset": torch.tensor([0, 4, 8, 12])}
        indexed = flashinfer.top_k_top_p_sampling_from_probs(probs, top_k, 0.9, rows, "joint", **arguments)
        copied = flashinfer.top_k_top_p_sampling_from_probs(probs[rows], top_k, 0.9, None, "joint", **arguments)
        assert indexed.tolist() == copied.tolist()
        assert indexed[0] == probs[2].argmax() and indexed[2] == probs[0].argmax()


def temperature_0_is_greedy(rng):
    """29"""
    logits = rng.integers(0, 3, (5, 40)).astype("float32")
    assert tw.sampling.sample(logits, temperature=0.0, seed=3).tolist() == logits.argmax(axis=-1).tolist()


def other_rows_are_drawn(rng):
    """30 31"""
    probs = ones(3, 4)
    probs[1] = 0
    tokens, valid = tw.sampling.sampling_from_probs(probs, return_valid=True)
    assert valid.tolist() == [True, False, True] and tokens[1] == 0


def appends_convert_and_skip(rng):
    """32"""
    caches = numpy.zeros((2, 2, 5, 1, 8), "float16")
    k = rng.standard_normal((2, 1, 8)).astype("float32")
    tw.append_paged_kv_cache(k, k, [-1, 1], [0, 4], *caches, table((0, 1, 2), (1, 0), (5, 5), 5))
    close(caches[:, 0, 4], numpy.stack([k[1]] * 2).astype("float16"), 0)
    assert numpy.count_nonzero(caches) == 16


def failed_appends_write_nothing(rng):
    """33"""
    caches = numpy.zeros((2, 2, 5, 1, 8), "float32")
    with pytest.raises(tw.Error, match="position = 5"):
        tw.append_paged_kv_cache(ones(2, 1, 8), ones(2, 1, 8), [0, 1], [0, 5], *caches, table((0, 1, 2), (0, 1), (1, 5), 5))
    assert not caches.any()


def small_blocks_are_causal(rng):
    """35"""
    q, k = (rng.standard_normal((6, 1, 8)).astype("float32") for _ in range(2))
    one = tw.Attention(tw.Problem(1, 1, 8, causal=True))
    o = one.run(one.plan(tw.Batch.block_sparse([0, 1, 3, 5], [0, 0, 1, 0, 2], (2, 2), 6)), q, k, k)
    blocks = numpy.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], "bool").repeat(2, axis=0).repeat(2, axis=1)
    close(o, attention(q, k, k, visible=blocks & causal(6, 6))[0])


def blocks_of_any_size_are_causal(rng):
    """36"""
    q, k = (rng.standard_normal((6, 1, 8)).astype("float32") for _ in range(2))
    one = tw.Attention(tw.Problem(1, 1, 8, causal=True))
    made = one.plan(tw.Batch.variable_block_sparse(numpy.array([[[1, 0], [0, 1]]], "bool"), ints([[1, 5]]), ints([[4, 2]])))
    blocks = numpy.zeros((6, 6), "bool")
    blocks[:1, :4] = blocks[1:, 4:] = True
    close(one.run(made, q, k, k), attention(q, k, k, visible=blocks & causal(6, 6))[0])


def windows_without_causal(rng):
    """37"""
    q, k = rng.standard_normal((70, 2, 8)).astype("float32"), rng.standard_normal((200, 1, 8)).astype("float32")
    one = operator(causal=False, window_left=20, window_right=2)
    key, row = numpy.arange(200)[None], numpy.arange(70)[:, None] + 130
    close(one.run(one.plan(ragged(70, 200)), q, k, k), attention(q, k, k, visible=(key >= row - 20) & (key <= row + 2))[0])


def scales_of_pages_with_strides(rng):
    """39"""
    k = rng.integers(-100, 100, (3, 4, 2, 8)).astype("int8")
    scales = rng.random((2, 6)).astype("float32")[:, ::2].T  # [pages, heads]
    one = tw.Attention(tw.Problem(2, 2, 8, kv_dtype="int8"))
    made = one.plan(tw.Batch.paged([0, 1], table((0, 3), (2, 0, 1), (4,))))
    q = rng.standard_normal((1, 2, 8)).astype("float32")
    rows = (k * scales[:, None, :, None])[[2, 0, 1]].reshape(12, 2, 8)
    close(one.run(made, q, k, k, k_scale=scales, v_scale=scales), attention(q, rows, rows)[0], 1e-4)


def variants_of_one_name(rng):
    """40"""
    q, k = rng.standard_normal((1, 2, 8)).astype("float32"), rng.standard_normal((4, 1, 8)).astype("float32")
    for factor in (2.0, 3.0, 2.0):
        one = tw.Attention(tw.Problem(2, 1, 8), tw.Variant("same", logits=lambda at, s, factor=factor: s * factor))
        close(one.run(one.plan(ragged(1, 4)), q, k, k), attention(q, k, k, scale=factor / 8**0.5)[0])


def slots_without_a_token(rng):
    """42"""
    caches, arrays, rows = paged(rng, [5], 4, 1, 8)
    used = arrays[1][1]
    for cache in caches:
        cache[used, 1:] = numpy.nan
        cache[[page for page in range(len(cache)) if page not in arrays[1]]] = numpy.inf
    q, one = rng.standard_normal((1, 2, 8)).astype("float32"), operator()
    o = one.run(one.plan(tw.Batch.paged([0, 1], tw.PageTable(*arrays, 4))), q, *caches)
    close(o, attention(q, rows[0][0], rows[1][0])[0])


def alibi_with_a_soft_cap(rng):
    """44"""
    q, k = rng.standard_normal((1, 2, 8)).astype("float32"), rng.standard_normal((4, 1, 8)).astype("float32")
    one = tw.Attention(tw.Problem(2, 1, 8), tw.variants.alibi(2).then(tw.variants.soft_cap(3.0)))
    slopes = numpy.array([2.0**-4, 2.0**-8])[:, None, None]
    biased = lambda s: 3.0 * numpy.tanh((s + slopes * (numpy.arange(4) - 3.0)) / 3.0)  # noqa: E731
    close(one.run(one.plan(ragged(1, 4)), q, k, k), attention(q, k, k, logits=biased)[0])


#: Valid inputs; the docstring of each has its cases.
RIGHT = [scales_of_ragged_tensors, a_scaled_output_is_the_caller_s, a_plan_without_a_mask_after_one_with_it, groups_of_any_size,
         head_dims_of_any_size, strides_of_outer_axes, indices_of_64_bits, a_refused_batch_leaves_no_plan,
         requests_without_rows_or_keys, no_requests, windows_count_through_levels, seeds_of_each_row, row_numbers_select_rows,
         temperature_0_is_greedy, other_rows_are_drawn, appends_convert_and_skip, failed_appends_write_nothing,
         small_blocks_are_causal, blocks_of_any_size_are_causal, windows_without_causal, scales_of_pages_with_strides,
         variants_of_one_name, slots_without_a_token, alibi_with_a_soft_cap]


def marked(check):
    return pytest.param(check, marks=needs_torch) if check is row_numbers_select_rows else check


@pytest.mark.parametrize("check", [marked(check) for check in RIGHT], ids=lambda check: check.__name__)
def test_results(host, rng, check):
    check(rng)


def test_every_case_of_the_page_is_here():
    page = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)}
    tables = [mark.args[1] for test in (test_errors, test_arguments_that_run_does_not_have) for mark in test.pytestmark]
    here = {row[0] for rows in tables for row in rows} | set(IMPOSSIBLE)
    here |= {int(number) for check in RIGHT for number in check.__doc__.split()}
    assert page == here == set(range(1, 46))
