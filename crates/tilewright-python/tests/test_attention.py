"""Attention, plans and variants over NumPy arrays, on the CPU and by the GPU kernels in the simulator."""

import numpy
import pytest
import tilewright as tw
from dense import attention, causal, paged
from tilewright.variants import maximum, tanh, where


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_batches_agree_with_the_definition(host, rng, layout):
    kv_lens, qo_lens = [5, 0, 17], [1, 0, 4]
    caches, table, rows = paged(rng, kv_lens, 4, 2, 32, layout=layout)
    q = rng.standard_normal((5, 4, 32)).astype("float32")
    operator = tw.Attention(tw.Problem(4, 2, 32, layout=layout))
    bounds = numpy.concatenate([[0], numpy.cumsum(qo_lens)])
    plan = operator.plan(tw.Batch.paged(bounds, tw.PageTable(*table, 4)))
    o, lse = operator.run(plan, q, *caches, return_lse=True)
    for r, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens)):
        part = slice(bounds[r], bounds[r + 1])
        expected = attention(q[part], rows[0][r], rows[1][r], visible=causal(qo_len, kv_len))
        close(o[part], expected[0])
        close(lse[part], expected[1])


def test_ragged_batches_with_windows_masks_and_scales(host, rng):
    q, k, v = (rng.standard_normal(shape).astype("float32") for shape in ((6, 4, 16), (9, 2, 16), (9, 2, 16)))
    windowed = tw.Attention(tw.Problem(4, 2, 16, window_left=2, scale=0.5))
    o = windowed.run(windowed.plan(tw.Batch.ragged([0, 6], [0, 9]), split="never"), q, k, v, k_scale=0.25, v_scale=[2.0, 3.0])
    visible = causal(6, 9, window_left=2)
    close(o, attention(q, k, v * numpy.array([2.0, 3.0])[None, :, None], scale=0.125, visible=visible)[0])

    flags = rng.random((6, 9)) < 0.5
    flags[2] = False  # a row without keys
    masked = tw.Attention(tw.Problem(4, 2, 16, causal=False))
    bits = tw.packbits(flags.reshape(-1), "little")
    o, lse = masked.run(masked.plan(tw.Batch.ragged([0, 6], [0, 9], mask=bits)), q, k, v, return_lse=True)
    expected = attention(q, k, v, visible=flags)
    close(o, expected[0])
    close(lse, expected[1])
    assert numpy.all(o[2] == 0) and numpy.all(numpy.isneginf(lse[2]))


def test_one_plan_is_rewritten_for_other_batches(host, rng):
    caches, table, rows = paged(rng, [5, 17], 4, 1, 16)
    operator = tw.Attention(tw.Problem(1, 1, 16))
    capacity = tw.Capacity(requests=2, rows=2, pages=16, qo_len=1)
    q = rng.standard_normal((2, 1, 16)).astype("float32")
    batch = tw.Batch.paged([0, 1, 2], tw.PageTable(*table, 4))
    plan = operator.plan(batch, capacity=capacity)
    indptr, indices, last = table
    swapped = tw.PageTable([0, 5, 7], numpy.concatenate([indices[2:], indices[:2]]), last[::-1].copy(), 4)
    for current, order in ((swapped, [1, 0]), (tw.PageTable(*table, 4), [0, 1])):
        operator.replan(plan, tw.Batch.paged([0, 1, 2], current))
        o = operator.run(plan, q, *caches)
        for row, request in enumerate(order):
            close(o[row : row + 1], attention(q[row : row + 1], rows[0][request], rows[1][request])[0])
    too_many = tw.Batch.paged([0, 1, 2, 3], tw.PageTable([0, 1, 2, 3], [0, 1, 2], [1, 1, 1], 4))
    with pytest.raises(tw.Error, match="attention.replan: "):
        operator.replan(plan, too_many)


def test_levels_and_states_merge_to_the_whole(host, rng):
    caches, (indptr, indices, last), rows = paged(rng, [8, 5, 3], 4, 2, 16)
    q = rng.standard_normal((2, 4, 16)).astype("float32")
    shared = tw.PageTable([0, 2], indices[:2], [4], 4)
    own = tw.PageTable([0, 2, 3], indices[2:], last[1:], 4)
    operator = tw.Attention(tw.Problem(4, 2, 16))
    batch = tw.Batch.paged([0, 1, 2], own, levels=[tw.Level([0, 2], shared)])
    o, lse = operator.run(operator.plan(batch), q, *caches, return_lse=True)
    for r in range(2):
        k, v = (numpy.concatenate([rows[i][0], rows[i][r + 1]]) for i in range(2))
        expected = attention(q[r : r + 1], k, v)
        close(o[r : r + 1], expected[0])
        close(lse[r : r + 1], expected[1])

    parts = [attention(q, rows[0][r], rows[1][r]) for r in (0, 1)]
    states = numpy.stack([part[0] for part in parts], axis=1).astype("float32")
    lses = numpy.stack([part[1] for part in parts], axis=1).astype("float32")
    whole = attention(q, *(numpy.concatenate([rows[i][0], rows[i][1]]) for i in range(2)))
    merged, merged_lse = tw.merge_states(states, lses)
    close(merged, whole[0])
    close(merged_lse, whole[1])
    first, first_lse = states[:, 0].copy(), lses[:, 0].copy()
    tw.merge_state(first, first_lse, states[:, 1].copy(), lses[:, 1].copy())
    close(first, whole[0])
    close(first_lse, whole[1])
    masked, masked_lse = states[:, 0].copy(), lses[:, 0].copy()
    tw.merge_state(masked, masked_lse, states[:, 1].copy(), lses[:, 1].copy(), mask=numpy.array([True, False]))
    for found, merged, before in ((masked, first, states[:, 0]), (masked_lse, first_lse, lses[:, 0])):
        close(found[0], merged[0], 0)
        close(found[1], before[1], 0)


def test_latent_attention_agrees_with_the_definition(host, rng):
    ckv, kpe = rng.standard_normal((3, 4, 32)).astype("float32"), rng.standard_normal((3, 4, 16)).astype("float32")
    q_nope, q_pe = rng.standard_normal((2, 4, 32)).astype("float32"), rng.standard_normal((2, 4, 16)).astype("float32")
    operator = tw.Attention(tw.Problem.latent(4, 32, 16, scale=0.2, dtype="float32"))
    plan = operator.plan(tw.Batch.paged([0, 2], tw.PageTable([0, 3], [2, 0, 1], [2], 4)))
    o = operator.run_latent(plan, q_nope, q_pe, ckv, kpe)
    latent, rotated = (x[[2, 0, 1]].reshape(12, 1, -1)[:10] for x in (ckv, kpe))
    keys = numpy.concatenate([latent, rotated], axis=2)
    queries = numpy.concatenate([q_nope, q_pe], axis=2)
    close(o, attention(queries, keys, latent, scale=0.2, visible=causal(2, 10))[0])
    # a cache of 8 bits with a scale for each of its tensors
    ckv, kpe = (rng.integers(-20, 20, shape).astype("int8") for shape in ((3, 4, 32), (3, 4, 16)))
    operator = tw.Attention(tw.Problem.latent(4, 32, 16, scale=0.2, dtype="float32", kv_dtype="int8"))
    plan = operator.plan(tw.Batch.paged([0, 2], tw.PageTable([0, 3], [2, 0, 1], [2], 4)))
    latent, rotated = (x[[2, 0, 1]].reshape(12, 1, -1)[:10].astype("float32") for x in (ckv, kpe))
    for scales in ({}, {"ckv_scale": 0.5}, {"kpe_scale": 0.03}, {"ckv_scale": 0.05, "kpe_scale": 0.03}):
        values, others = latent * scales.get("ckv_scale", 1.0), rotated * scales.get("kpe_scale", 1.0)
        expected = attention(queries, numpy.concatenate([values, others], axis=2), values, scale=0.2, visible=causal(2, 10))
        close(operator.run_latent(plan, q_nope, q_pe, ckv, kpe, **scales), expected[0])


def test_block_sparse_rows_see_their_blocks(host, rng):
    q, k, v = (rng.standard_normal((8, 2, 16)).astype("float32") for _ in range(3))
    operator = tw.Attention(tw.Problem(2, 2, 16, causal=False))
    plan = operator.plan(tw.Batch.block_sparse([0, 1, 3], [1, 0, 1], (4, 4), 8))
    visible = numpy.zeros((8, 8), dtype=bool)
    visible[:4, 4:] = visible[4:] = True
    close(operator.run(plan, q, k, v), attention(q, k, v, visible=visible)[0])


@tw.variant(cap=3.0)
def soft_cap(at, logit):
    return at.cap * tanh(logit / at.cap)


@tw.variant(slopes=[0.5, 0.25])
def slopes_of_heads(at, logit):
    return logit + at.slopes[at.qo_head] * (at.kv - at.qo)


WITHIN_TWO = tw.Variant("within_two", mask=lambda at: abs(at.kv - at.qo) <= 2.0)
RECTIFIED = tw.Variant("rectified", softmax=False, logits=lambda at, logit: where(logit > 0.0, maximum(logit, 0.0), 0.0))
SCALED = tw.Variant("scaled", output=lambda at, o: 2.0 * o, value=lambda at, x: x + 1.0,
                    query=lambda at, first, second: (second, -first), key=lambda at, first, second: (second, -first))


def position(q, k):
    return numpy.arange(k)[None, None] - (numpy.arange(q)[None, :, None] + k - q)


@pytest.mark.parametrize("variant, expected", [
    (soft_cap, lambda q, k, v: attention(q, k, v, logits=lambda s: 3.0 * numpy.tanh(s / 3.0))[0]),
    (tw.variants.soft_cap(3.0), lambda q, k, v: attention(q, k, v, logits=lambda s: 3.0 * numpy.tanh(s / 3.0))[0]),
    (slopes_of_heads, lambda q, k, v: attention(
        q, k, v, logits=lambda s: s + numpy.array([0.5, 0.25])[:, None, None] * position(*s.shape[1:]))[0]),
    (slopes_of_heads.then(soft_cap), lambda q, k, v: attention(q, k, v, logits=lambda s: 3.0 * numpy.tanh(
        (s + numpy.array([0.5, 0.25])[:, None, None] * position(*s.shape[1:])) / 3.0))[0]),
    (WITHIN_TWO, lambda q, k, v: attention(q, k, v, visible=abs(position(len(q), len(k))[0]) <= 2)[0]),
    (SCALED, lambda q, k, v: 2.0 * (attention(q, k, v)[0] + 1.0)),
    (tw.variants.flash_sigmoid(0.5), lambda q, k, v: weighted(q, k, v, lambda s: 1 / (1 + numpy.exp(-s - 0.5)))),
    (RECTIFIED, lambda q, k, v: weighted(q, k, v, lambda s: numpy.maximum(s, 0.0))),
], ids=lambda value: getattr(value, "name", None))
def test_variants_of_python_functions(host, rng, variant, expected):
    q, k, v = (rng.standard_normal(shape).astype("float32") for shape in ((3, 2, 16), (7, 2, 16), (7, 2, 16)))
    operator = tw.Attention(tw.Problem(2, 2, 16, causal=False), variant)
    o = operator.run(operator.plan(tw.Batch.ragged([0, 3], [0, 7])), q, k, v)
    close(o, expected(q, k, v), 1e-4)


def weighted(q, k, v, weight):
    s = numpy.einsum("qhd,khd->hqk", q.astype("float64"), k) * q.shape[2] ** -0.5
    return numpy.einsum("hqk,khd->qhd", weight(s), v)


def test_outputs_of_e4m3(host, rng):
    q, k, v = (rng.standard_normal((n, 2, 16)).astype("float16") for n in (5, 9, 9))
    wide, narrow = (tw.Attention(tw.Problem(2, 2, 16, dtype="float16", out_dtype=out)) for out in (None, "float8_e4m3fn"))
    batch = tw.Batch.ragged([0, 5], [0, 9])
    expected = wide.run(wide.plan(batch), q, k, v, v_scale=3000.0).astype("float32").clip(-448, 448)
    with pytest.raises(tw.Error, match="o is f32, expected e4m3"):
        narrow.run(narrow.plan(batch), q, k, v, out=expected)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    found = narrow.run(narrow.plan(batch), *map(torch.from_numpy, (q, k, v)), v_scale=3000.0)
    assert found.dtype == torch.float8_e4m3fn
    numpy.testing.assert_allclose(found.float(), expected, rtol=1 / 16, atol=1e-2)
    assert (found.float() == 448).any()
    with pytest.raises(tw.Error, match="out_dtype = f32, expected f16 as dtype, or e4m3"):
        tw.Problem(2, 2, 16, dtype="float16", out_dtype="float32")


def test_variants_survive_json_and_store_logits(rng):
    again = tw.Variant.from_json(slopes_of_heads.to_json())
    assert again.to_json() == slopes_of_heads.to_json() and again.name == "slopes_of_heads"

    def dump(at, logit):
        at.store("dump", at.kv, logit)
        return logit

    dumping = tw.Variant("dumping", logits=dump, buffers={"dump": 4})
    q, k = rng.standard_normal((1, 1, 8)).astype("float32"), rng.standard_normal((4, 1, 8)).astype("float32")
    operator = tw.Attention(tw.Problem(1, 1, 8), dumping)
    operator.run(operator.plan(tw.Batch.ragged([0, 1], [0, 4])), q, k, k)
    close(dumping.buffer("dump"), (k @ q[0, 0]).reshape(-1) / numpy.sqrt(8))


@pytest.mark.parametrize("make, text", [
    (lambda: tw.variant()(no_bool), "where(condition, a, b)"),
    (lambda: tw.Variant("x", logit=soft_cap), "unknown hook 'logit'"),
    (lambda: tw.Variant("x", query=lambda at, a, b: a), "expected a pair"),
    (lambda: tw.Variant("x", logits=lambda at, logit: at.nothing), "has no 'nothing'"),
    (lambda: tw.Variant("x", logits=lambda at, logit: "text"), "str is no operand"),
    (lambda: tw.Variant("x", mask=lambda at: 1.0), "a number, expected a condition"),
])
def test_mistakes_in_hooks_are_named(make, text):
    with pytest.raises((tw.Error, AttributeError), match=text.replace("(", r"\(").replace(")", r"\)")):
        make()


def no_bool(at, logit):
    return logit if logit > 0.0 else 0.0


def test_plans_explain_and_draw_themselves():
    operator = tw.Attention(tw.Problem(8, 2, 64), device=tw.Device("cpu", threads=2))
    plan = operator.plan(tw.Batch.ragged([0, 1, 65], [0, 4096, 4796]))
    assert "2 requests, 65 query rows" in repr(plan)
    numbers = plan.statistics()
    assert numbers["requests"] == 2 and numbers["rows"] == plan.num_rows == 65
    picture = plan._repr_svg_()
    assert picture.startswith("<svg") and "request 0: 1 × 4096" in picture and "2 threads" in picture
    assert plan.workspace_bytes == numbers["workspace_bytes"]


def test_prepare_loads_the_kernels(host, rng):
    """The kernels of a run were loaded before it; the simulator loads them like a GPU."""
    attention = tw.Attention(tw.Problem(4, 2, 32))
    attention.prepare()
    plan = attention.plan(tw.Batch.ragged([0, 2], [0, 5]))
    q, k = (rng.standard_normal(shape).astype("float32") for shape in ((2, 4, 32), (5, 2, 32)))
    assert numpy.isfinite(attention.run(plan, q, k, k)).all()
    attention.prepare()
