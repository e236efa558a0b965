"""Batches with lengths on the device: planned by the kernel in the simulator, and by the host on the CPU."""

import math

import numpy
import pytest
import tilewright as tw
from conftest import HAS_TORCH, needs_torch
from dense import attention, causal, paged, rounds_to_e4m3

if HAS_TORCH:
    import tilewright.flashinfer as flashinfer
    import torch
    from tilewright.flashinfer import _pages, _planned, mla


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(numpy.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def block_table(table, kv_lens, columns):
    """Rows of pages, filled up with a page that is not in the cache."""
    indptr, indices, _ = table
    rows = numpy.full((len(kv_lens), columns), 1 << 20, dtype=numpy.int32)
    for r in range(len(kv_lens)):
        rows[r, : indptr[r + 1] - indptr[r]] = indices[indptr[r] : indptr[r + 1]]
    return rows


def check_rows(o, q, rows, kv_lens, qo_len, **options):
    for r, kv_len in enumerate(kv_lens):
        part = slice(r * qo_len, (r + 1) * qo_len)
        close(o[part], attention(q[part], rows[0][r], rows[1][r], visible=causal(qo_len, kv_len), **options)[0])


@pytest.fixture
def host_is_not_read(monkeypatch):
    """Claims that torch tensors are on a GPU, and fails if an array is copied to the host."""
    def copied(x):
        raise AssertionError(f"an array of shape {tuple(x.shape)} was copied to the host")

    previous = tw.set_host_device("simulator")
    monkeypatch.setattr(_planned, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(_pages, "on_host", copied)
    monkeypatch.setattr(tw.device_batch, "on_host", copied)
    yield
    tw.set_host_device(previous)


def test_block_tables_are_planned_anew_for_each_step(host, rng):
    operator = tw.Attention(tw.Problem(4, 2, 16))
    q, plan = rng.standard_normal((6, 4, 16)).astype("float32"), None
    for kv_lens, columns in (([5, 2, 17], 5), ([9, 30, 3], 8)):
        caches, table, rows = paged(rng, kv_lens, 4, 2, 16)
        batch = tw.DeviceBatch(2, tw.BlockTable(block_table(table, kv_lens, columns), numpy.array(kv_lens), 4))
        if plan is None:
            plan = operator.plan(batch)
        else:
            operator.replan(plan, batch)
        operator.check_plan(plan)
        assert plan.num_rows == 6
        check_rows(operator.run(plan, q, *caches), q, rows, kv_lens, 2)


def test_lists_of_pages_may_be_padded_as_engines_do(host, rng):
    kv_lens = [5, 0, 17]
    caches, (indptr, indices, last), rows = paged(rng, kv_lens, 4, 2, 16)
    operator = tw.Attention(tw.Problem(4, 2, 16))
    q = rng.standard_normal((6, 4, 16)).astype("float32")
    padded = numpy.where(last == 0, 1, last)
    spare = numpy.concatenate([[1 << 20], indices, [1 << 20]]).astype("int32")
    table = tw.PageTable(indptr + 1, spare, padded, 4)
    uniform = operator.plan(tw.DeviceBatch(2, table))
    bounds = numpy.array([0, 2, 4, 6])
    capacity = tw.Capacity(3, 6, 9)
    ragged = operator.plan(tw.DeviceBatch(bounds, table), capacity=capacity)
    for plan in (uniform, ragged):
        check_rows(operator.run(plan, q, *caches), q, rows, kv_lens, 2)


def test_errors_of_lengths_are_reported(host):
    operator = tw.Attention(tw.Problem(4, 2, 16))
    batch = tw.DeviceBatch(1, tw.BlockTable(numpy.zeros((2, 3), dtype="int32"), numpy.array([4, 13]), 4))
    if host == "cpu":
        with pytest.raises(tw.Error, match="attention.plan: request 1: seq_lens = 13 is not in 0..=12"):
            operator.plan(batch)
        return
    with pytest.raises(tw.Error, match="attention.plan: last_page_len is not in 1..=page_size, or a request has more keys"):
        operator.check_plan(operator.plan(batch))
    with pytest.raises(tw.Unsupported, match="split = 'never' of a batch on the device, expected 'balanced'"):
        operator.plan(batch, split="never")
    with pytest.raises(tw.Error, match="qo_indptr is on the device, expected capacity"):
        operator.plan(tw.DeviceBatch(numpy.array([0, 1, 2]), tw.BlockTable(numpy.zeros((2, 3), "int32"), [1, 1], 4)))
    with pytest.raises(tw.Error, match="the plan has no fixed capacity"):
        operator.replan(operator.plan(tw.Batch.ragged([0, 1], [0, 1])), batch)
    with pytest.raises(tw.Error, match=r"block_tables has shape \(2, 3\), expected \[1, max_pages\]"):
        tw.BlockTable(numpy.zeros((2, 3), dtype="int32"), [1], 4)


@needs_torch
def test_graph_wrappers_plan_lengths_on_the_gpu(host_is_not_read, rng):
    int32 = {"dtype": torch.int32}
    decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1024, dtype=torch.uint8), torch.zeros(3, **int32), torch.zeros(32, **int32), torch.zeros(2, **int32))
    q = rng.standard_normal((2, 4, 32)).astype("float32")
    plans = set()
    for kv_lens in ([5, 17], [9, 2]):
        caches, table, rows = paged(rng, kv_lens, 4, 2, 32)
        caches, table = ([torch.from_numpy(x) for x in arrays] for arrays in (caches, table))
        decode.plan(*table, 4, 2, 32, 4, q_data_type="float32")
        plans.add(next(iter(decode._attention._planned.values())))
        check_rows(decode.run(torch.from_numpy(q), tuple(caches)), q, rows, kv_lens, 1)
    assert len(plans) == 1
    decode.plan(*table, 4, 2, 32, 4, q_data_type="float32", window_left=1)
    o = decode.run(torch.from_numpy(q), tuple(caches))
    close(o[:1], attention(q[:1], rows[0][0], rows[1][0], visible=causal(1, 9, 1))[0])


@needs_torch
def test_a_graph_of_prefill_is_planned_on_the_gpu_after_its_first_plan(host, rng, monkeypatch):
    if host == "cpu":
        pytest.skip("the CPU plans on the host")
    int32 = {"dtype": torch.int32}
    bounds = torch.tensor([0, 3, 7], **int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1024, dtype=torch.uint8), use_cuda_graph=True, qo_indptr_buf=torch.zeros(3, **int32),
        paged_kv_indptr_buf=torch.zeros(3, **int32), paged_kv_indices_buf=torch.zeros(32, **int32),
        paged_kv_last_page_len_buf=torch.zeros(2, **int32))
    q = rng.standard_normal((7, 4, 32)).astype("float32")
    for step, kv_lens in enumerate(([5, 9], [3, 20])):
        caches, table, rows = paged(rng, kv_lens, 4, 2, 32)
        caches, table = ([torch.from_numpy(x) for x in arrays] for arrays in (caches, table))
        if step == 1:
            monkeypatch.setattr(_planned, "is_on_gpu", lambda x: True)
            monkeypatch.setattr(_pages, "on_host", lambda x: pytest.fail("an array was copied to the host"))
        wrapper.plan(bounds, *table, 4, 2, 32, 4, causal=True, q_data_type=torch.float32)
        o = wrapper.run(torch.from_numpy(q), tuple(caches))
        for r, (begin, end) in enumerate(((0, 3), (3, 7))):
            visible = causal(end - begin, kv_lens[r])
            close(o[begin:end], attention(q[begin:end], rows[0][r], rows[1][r], visible=visible)[0])


@needs_torch
def test_a_graph_of_latent_attention_is_planned_on_the_gpu_after_its_first_plan(host, rng, monkeypatch):
    if host == "cpu":
        pytest.skip("the CPU plans on the host")
    int32 = {"dtype": torch.int32}
    buffers = [torch.zeros(n, **int32) for n in (4, 4, 24, 3)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8), True, *buffers)
    ckv, kpe = (rng.standard_normal((20, 4, dim)).astype("float32") for dim in (32, 16))
    q_nope, q_pe = (rng.standard_normal((3, 4, dim)).astype("float32") for dim in (32, 16))
    # pages after the last token of a request are not read, and one request has no keys
    steps = ([5, 9, 4], [0, 2, 5, 6]), ([17, 0, 6], [1, 7, 8, 10]), ([3, 8, 1], [0, 4, 6, 9]), ([3, 12, 1], [0, 4, 6, 9])
    for step, (kv_lens, bounds) in enumerate(steps):
        pages = rng.permutation(20)[: bounds[-1]].astype("int32")
        if step == 1:
            monkeypatch.setattr(mla, "is_on_gpu", lambda x: True)
            monkeypatch.setattr(_pages, "on_host", lambda x: pytest.fail("an array was copied to the host"))
        arrays = [torch.tensor(x, **int32) for x in ([0, 1, 2, 3], bounds, pages, kv_lens)]
        wrapper.plan(*arrays, 4, 32, 16, 4, True, 0.2, torch.float32, torch.float32)
        if step == 3:
            with pytest.raises(tw.Error, match="a request has more keys"):
                wrapper._operator.check_plan(wrapper._plan)
            break
        o = wrapper.run(*(torch.from_numpy(x) for x in (q_nope, q_pe, ckv, kpe)))
        for r, length in enumerate(kv_lens):
            latent, rotated = (x[pages[bounds[r] : bounds[r + 1]]].reshape(-1, 1, x.shape[-1])[:length] for x in (ckv, kpe))
            q = numpy.concatenate([q_nope, q_pe], axis=2)[r : r + 1]
            if length:
                close(o[r : r + 1], attention(q, numpy.concatenate([latent, rotated], axis=2), latent, scale=0.2)[0])
            else:
                assert not o[r].any()


@needs_torch
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stateless_decode(host, rng, layout, monkeypatch):
    kv_lens = [5, 2, 17]
    caches, table, rows = paged(rng, kv_lens, 4, 2, 32, layout=layout)
    k, v = (torch.from_numpy(cache) for cache in caches)
    workspace, tables = torch.zeros(1 << 20, dtype=torch.uint8), torch.from_numpy(block_table(table, kv_lens, 6))
    q, lens = rng.standard_normal((6, 4, 32)).astype("float32"), torch.tensor(kv_lens, dtype=torch.int32)
    if host == "simulator":
        monkeypatch.setattr(_pages, "on_host", lambda x: pytest.fail("an array was copied to the host"))
    trtllm, xqa = flashinfer.trtllm_batch_decode_with_kv_cache, flashinfer.decode.xqa_batch_decode_with_kv_cache
    o, lse = trtllm(torch.from_numpy(q), torch.stack([k, v], 1), workspace, tables, lens, 17, 0.3, 2.0, kv_layout=layout,
                    q_len_per_req=2, return_lse=True)
    check_rows(o / 2.0, q, rows, kv_lens, 2, scale=0.3)
    assert lse.shape == (6, 4)
    out = torch.empty_like(o)
    bounds = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    assert xqa(torch.from_numpy(q), (k, v), workspace, tables, lens, 17, 1 / math.sqrt(32), out=out, kv_layout=layout,
               q_len_per_req=4, q_cu_seq_lens=bounds) is out
    close(out[2:], attention(q[2:], rows[0][2], rows[1][2], visible=causal(4, 17))[0])
    narrow, same = trtllm(torch.from_numpy(q), (k, v), workspace, tables, lens, 17, 0.3, 400.0, kv_layout=layout,
                          q_len_per_req=2, return_lse=True, out_dtype=torch.float8_e4m3fn, o_scale=3.0)
    assert rounds_to_e4m3(narrow, o * 200.0) and torch.equal(same, lse)
    assert (narrow.float().abs() == 448.0).any()
    into = torch.empty_like(narrow)
    assert trtllm(torch.from_numpy(q), (k, v), workspace, tables, lens, 17, 0.3, 400.0, kv_layout=layout, q_len_per_req=2,
                  out=into) is into
    assert torch.equal(into.view(torch.uint8), narrow.view(torch.uint8))
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (torch.from_numpy(q), k, v))
    options = {"kv_layout": layout, "q_len_per_req": 2}
    wide = trtllm(q8, (k8, v8), workspace, tables, lens, 17, 0.3, out_dtype=torch.float16, **options)
    expected = trtllm(q8.float(), (k8.float(), v8.float()), workspace, tables, lens, 17, 0.3, **options)
    torch.testing.assert_close(wide.float(), expected, rtol=5e-2, atol=5e-2)
    narrow = xqa(q8, (k8, v8), workspace, tables, lens, 17, 0.3, **options)
    assert narrow.dtype == q8.dtype and rounds_to_e4m3(narrow, wide)
    for changes, error, text in (
        ({"out_dtype": "nvfp4"}, tw.Unsupported, "out_dtype = 'nvfp4', expected float32 or float8_e4m3fn"),
        ({"out": o, "out_dtype": torch.float8_e4m3fn}, tw.Error, "out is torch.float32, expected out_dtype = float8_e4m3fn"),
        ({"mask": lens}, tw.Error, r"mask is torch.int32 of shape \(3,\), expected torch.uint16 \[6, 2\]"),
        ({"o_scale": 0.0}, tw.Error, "o_scale = 0.0, expected a finite number"),
        ({"max_q_len": 2}, tw.Error, "max_q_len = 2"), ({"q_len_per_req": 3}, tw.Error, "query has 6 rows"),
        ({"kv_layout": "HDN"}, KeyError, "kv_layout"), ({"backend": "cudnn"}, tw.Error, "backend = 'cudnn'"),
        ({"out": o[:2]}, tw.Error, "out has shape"), ({"uses_shared_paged_kv_idx": False}, tw.Unsupported, "expected True"),
    ):
        options = {"q_len_per_req": 2, "kv_layout": layout, **changes}
        with pytest.raises(error, match=text):
            trtllm(torch.from_numpy(q), (k, v), workspace, tables, lens, 17, **options)


@needs_torch
def test_a_scale_of_one_element_is_read_where_it_is(host, rng):
    """The form in which stateless calls pass a scale on the GPU: strides of 0 over pages and heads."""
    caches, table, rows = paged(rng, [9], 4, 2, 16)
    operator = tw.Attention(tw.Problem(4, 2, 16))
    q = rng.standard_normal((1, 4, 16)).astype("float32")
    plan = operator.plan(tw.Batch.paged([0, 1], tw.PageTable(*table, 4)))
    scales = [torch.tensor([[value]]).expand(caches[0].shape[0], 2) for value in (0.5, 3.0)]
    o = operator.run(plan, torch.from_numpy(q), *map(torch.from_numpy, caches), k_scale=scales[0], v_scale=scales[1])
    close(o, 3.0 * attention(q, rows[0][0], rows[1][0], scale=0.125)[0])


@needs_torch
def test_sinks_beside_the_queries_are_not_copied():
    sinks = torch.tensor([1.0, 2.0])
    assert _planned.sinks_of(None, sinks) is None
    assert _planned.sinks_of(sinks, sinks)["sinks"].data_ptr() == sinks.data_ptr()
    assert _planned.sinks_of(sinks.bfloat16(), sinks)["sinks"].dtype == torch.float32


def _keys(rng):
    """Queries, keys and values of one request, as torch tensors, and its batch."""
    q, k, v = (torch.from_numpy(rng.standard_normal(shape).astype("float32")) for shape in ((3, 2, 8), (9, 1, 8), (9, 1, 8)))
    return q, k, v, tw.Batch.ragged([0, 3], [0, 9])


@needs_torch
def test_tables_of_a_variant_are_read_by_each_run(host, rng):
    q, k, v, batch = _keys(rng)

    def biased(bias):
        return tw.Variant("biased", params={"bias": bias, "factor": 0.5}, logits=lambda at, logit: logit + at.factor * at.bias[at.kv])

    bias, sinks, slopes = torch.zeros(3, 3), torch.zeros(2), torch.zeros(2)
    bound = biased(bias).then(tw.variants.sinks(sinks)).then(tw.variants.alibi(2, slopes=slopes))
    attention = tw.Attention(tw.Problem(2, 1, 8), bound)
    plan = attention.plan(batch)
    parsed = tw.Attention(tw.Problem(2, 1, 8), tw.Variant.from_json(bound.to_json()))
    for step in range(2):
        for tensor in (bias, sinks, slopes):
            tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape)))
        copied = biased(bias.reshape(-1).tolist()).then(tw.variants.sinks(sinks.tolist()))
        copied = copied.then(tw.Variant("slopes", params={"own": slopes.tolist()},
                                        logits=lambda at, logit: logit + at.own[at.qo_head] * (at.kv - at.qo)))
        expected = tw.Attention(tw.Problem(2, 1, 8), copied).run(plan, q, k, v)
        close(attention.run(plan, q, k, v), expected, 1e-6)
        tables = {"bias": bias.reshape(-1), "sinks": sinks, "slopes": slopes}
        close(parsed.run(plan, q, k, v, tables=tables), expected, 1e-6)
    with pytest.raises(tw.Error, match='table "bias" is not bound, expected 9 elements of f32'):
        parsed.run(plan, q, k, v, tables={"sinks": sinks, "slopes": slopes})
    with pytest.raises(tw.Error, match='no table "sinks" to bind, or it is bound twice'):
        attention.run(plan, q, k, v, tables={"sinks": sinks})
    with pytest.raises(tw.Error, match="'sinks' is given twice, differently"):
        tw.variants.sinks(sinks).then(tw.variants.sinks(sinks.clone()))
    with pytest.raises(tw.Error, match="slopes is no contiguous torch tensor of float32"):
        tw.variants.alibi(2, slopes=[1.0, 2.0])
    with pytest.raises(tw.Error, match="o shares memory with sinks, expected separate tensors"):
        shared = torch.zeros(48)
        one = tw.Attention(tw.Problem(2, 1, 8), tw.variants.sinks(shared[:2]))
        one.run(one.plan(batch), q, k, v, out=shared.view(3, 2, 8))


@needs_torch
def test_scales_in_tensors_are_read_by_each_run(host, rng):
    q, k, v, batch = _keys(rng)
    q, k, v = q.repeat(1, 2, 1), k.repeat(1, 2, 1), v.repeat(1, 2, 1)
    k = k.to(torch.float8_e4m3fn)
    attention = tw.Attention(tw.Problem(4, 2, 8, kv_dtype="float8_e4m3fn"))
    plan = attention.plan(batch)
    v = v.to(torch.float8_e4m3fn)
    one, each = torch.ones(1), torch.ones(2)
    for factor in (0.5, 2.0):
        one.fill_(factor)
        each.copy_(torch.tensor([3.0, factor]))
        expected = attention.run(plan, q, k, v, k_scale=factor, v_scale=[3.0, factor])
        assert torch.equal(attention.run(plan, q, k, v, k_scale=one, v_scale=each), expected)
    with pytest.raises(tw.Error, match=r"v scale has shape \[3\], expected \[1\] or \[num_kv_heads\] = \[2\]"):
        attention.run(plan, q, k, v, v_scale=torch.ones(3))
    with pytest.raises(tw.Error, match="o shares memory with a scale"):
        out = torch.ones(3, 4, 8)
        attention.run(plan, q, k, v, out=out, v_scale=out.view(-1)[:2])


@needs_torch
def test_a_latent_scale_in_a_tensor_is_that_of_a_number(host, rng):
    q_nope, q_pe, ckv, kpe = (torch.from_numpy(rng.standard_normal(shape).astype("float32"))
                              for shape in ((2, 4, 16), (2, 4, 8), (1, 4, 16), (1, 4, 8)))
    ckv, kpe = ckv.to(torch.float8_e4m3fn), kpe.to(torch.float8_e4m3fn)
    latent = tw.Attention(tw.Problem.latent(4, 16, 8, scale=0.3, dtype="float32", kv_dtype="float8_e4m3fn"))
    plan = latent.plan(tw.Batch.paged([0, 2], tw.PageTable([0, 1], [0], [4], 4)))

    def run(ckv_scale, kpe_scale):
        return latent.run_latent(plan, q_nope, q_pe, ckv, kpe, ckv_scale=ckv_scale, kpe_scale=kpe_scale)

    for scales in ((0.5, 0.5), (0.5, 2.0), (0.5, None), (None, 2.0)):
        tensors = [None if scale is None else torch.tensor(scale) for scale in scales]
        close(run(*tensors), run(*scales), 1e-6)
    scale = torch.tensor([0.5])
    assert torch.equal(run(scale, scale), run(0.5, 0.5))
