"""FlashInfer's names over torch tensors on the CPU, against the definitions."""

import functools
import importlib
import inspect
import math
import sys

import numpy
import pytest
import tilewright as tw
from dense import attention, causal, packed_drafts, paged, rounds_to_e4m3

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402


def close(actual, expected, tolerance=2e-5):
    actual = actual.float().numpy() if isinstance(actual, torch.Tensor) else actual
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def tensor(array):
    return torch.from_numpy(numpy.ascontiguousarray(array))


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


class Paged:
    """A cache, its table and the expected keys, as torch tensors."""

    def __init__(self, rng, kv_lens, layout="NHD", heads=2, dim=32, page_size=4):
        caches, table, self.rows = paged(rng, kv_lens, page_size, heads, dim, layout=layout)
        self.kv_lens, self.page_size = kv_lens, page_size
        self.pair = tuple(tensor(cache) for cache in caches)
        self.joined = torch.stack(self.pair, dim=1)
        self.indptr, self.indices, self.last = (tensor(array) for array in table)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
def test_decode_of_a_batch(host, rng, layout, joined):
    cache = Paged(rng, [5, 0, 17], layout)
    q = rng.standard_normal((3, 4, 32)).astype("float32")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout, use_tensor_cores=True, backend="fa2")
    # engines pad: a last page of 1 token without pages, and more indices than the bounds name
    last, indices = cache.last.clone(), torch.cat([cache.indices, torch.tensor([7, 7], dtype=torch.int32)])
    last[1] = 1
    wrapper.plan(cache.indptr, indices, last, 4, 2, 32, 4, pos_encoding_mode="NONE", data_type=torch.float32,
                 q_data_type=torch.float32, seq_lens=None, non_blocking=True)
    o, lse = wrapper.run(tensor(q), cache.joined if joined else cache.pair, return_lse=True)
    for r, kv_len in enumerate(cache.kv_lens):
        expected = attention(q[r : r + 1], cache.rows[0][r], cache.rows[1][r])
        close(o[r : r + 1], expected[0])
        close(lse[r : r + 1], expected[1])
        assert kv_len or torch.isneginf(lse[r]).all()
    scaled = wrapper.run(tensor(q), cache.pair, q_scale=0.5, k_scale=0.5, v_scale=3.0)
    close(scaled[:1], 3.0 * attention(q[:1], cache.rows[0][0], cache.rows[1][0], scale=0.25 / math.sqrt(32))[0])
    capped = wrapper.forward(tensor(q), cache.pair, logits_soft_cap=2.0, sm_scale=0.5)
    expected = attention(q[:1], cache.rows[0][0], cache.rows[1][0], scale=0.5, logits=lambda s: 2 * numpy.tanh(s / 2))
    close(capped[:1], expected[0])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    with_sinks = wrapper.forward(tensor(q), cache.pair), wrapper.run(tensor(q), cache.pair, sinks=sinks)
    close(with_sinks[0][:1], attention(q[:1], cache.rows[0][0], cache.rows[1][0])[0])
    state = attention(q[:1], cache.rows[0][0], cache.rows[1][0])
    weight = 1 / (1 + numpy.exp(sinks.numpy() - state[1] * math.log(2)))
    close(with_sinks[1][:1], state[0] * weight[..., None])


def test_decode_of_a_fixed_batch_is_replanned(host, rng):
    first, second = Paged(rng, [5, 17]), Paged(rng, [9, 2])
    buffers = [torch.zeros(3, dtype=torch.int32), torch.zeros(32, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    assert wrapper.is_cuda_graph_enabled
    q = rng.standard_normal((2, 4, 32)).astype("float32")
    for cache in (first, second):
        wrapper.plan(cache.indptr, cache.indices, cache.last, 4, 2, 32, 4, q_data_type="float32")
        plan = next(iter(wrapper._attention._planned.values()))
        assert buffers[0].tolist() == cache.indptr.tolist()
        o = wrapper.run(tensor(q), cache.pair)
        for r in range(2):
            close(o[r : r + 1], attention(q[r : r + 1], cache.rows[0][r], cache.rows[1][r])[0])
    assert plan is next(iter(wrapper._attention._planned.values()))
    with pytest.raises(ValueError, match="batch size should be fixed"):
        wrapper.plan(first.indptr[:2], first.indices, first.last[:1], 4, 2, 32, 4, q_data_type="float32")
    bounds = second.indptr.clone()
    flashinfer.fast_decode_plan(wrapper, torch.zeros(3), second.indices, second.last, 4, 2, 32, 4, q_data_type="float32",
                                global_override_indptr_cpu=bounds)
    close(wrapper.run(tensor(q), second.pair)[:1], attention(q[:1], second.rows[0][0], second.rows[1][0])[0])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("is_graph", [False, True])
def test_engines_plan_by_the_module_of_a_wrapper(host, rng, is_graph, rows):
    """The calls of ``fast_plan_decode`` of vLLM and ``fast_prefill_plan`` of SGLang."""
    from tilewright.flashinfer.decode import _get_range_buf, get_seq_lens

    first, second = Paged(rng, [5, 17]), Paged(rng, [9, 2])
    buffers = [torch.zeros(3, dtype=torch.int32), torch.zeros(32, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]
    bounds = _get_range_buf(3, "cpu") * rows
    if rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", is_graph, True, *buffers, backend="fa2")
        plan = wrapper.plan
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", is_graph, bounds.clone(), *buffers)
        plan = functools.partial(wrapper.plan, bounds, causal=True)
    assert wrapper._cached_module is None
    plan(first.indptr, first.indices, first.last, 4, 2, 32, 4, q_data_type="float32")
    q = rng.standard_normal((2 * rows, 4, 32)).astype("float32")

    def planned(cache, heads=4, window_left=-1):
        wrapper._paged_kv_indices_buf[: len(cache.indices)].copy_(cache.indices)
        lens = get_seq_lens(cache.indptr, cache.last, 4)
        return wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer, bounds,
            cache.indptr, lens, wrapper._max_total_num_rows or 2 * rows, 2, heads, 2, 4, wrapper.is_cuda_graph_enabled, 32, 32,
            rows > 1, window_left, -1, False, 0)

    for cache in (second, first) if is_graph else (second,):
        wrapper._plan_info = planned(cache)
        o = wrapper.run(tensor(q), cache.pair)
        for r in range(2):
            expected = attention(q[r * rows : (r + 1) * rows], cache.rows[0][r], cache.rows[1][r],
                                 visible=causal(rows, cache.kv_lens[r]))
            close(o[r * rows : (r + 1) * rows], expected[0])
    second.last -= 1
    second.indptr[1:] += 1
    with pytest.raises(tw.Error, match=r"_cached_module.plan: lengths \[12, 1\] do not fit the pages of kv_indptr = \[0, 4, 5\]"):
        planned(second)
    with pytest.raises(tw.Error, match=r"heads, dims and kv_lens are \(\(8, 2\), .* expected those of the last plan \(4, 2\)"):
        planned(first, heads=8)
    if rows > 1 and not is_graph:
        plan(first.indptr, first.indices, first.last, 4, 2, 32, 4, q_data_type="float32",
             custom_mask=torch.ones(3 * 22, dtype=torch.bool))
        with pytest.raises(tw.Unsupported, match="the plan has a mask, expected a call of BatchPrefillWithPagedKVCacheWrapper.plan"):
            planned(first)
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        ragged.plan(bounds, bounds, 4, 2, 32, q_data_type="float32")
        with pytest.raises(tw.Unsupported, match="keys are ragged"):
            ragged._cached_module.plan(*[None] * 16)


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_prefill_of_paged_and_ragged_batches(host, rng, is_causal, window_left):
    cache = Paged(rng, [5, 9])
    q = rng.standard_normal((7, 4, 32)).astype("float32")
    qo_indptr = torch.tensor([0, 3, 7], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(qo_indptr, cache.indptr, cache.indices, cache.last, 4, 2, 32, 4, causal=is_causal,
                          window_left=window_left, q_data_type=torch.float32)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    kv_indptr = torch.tensor([0, 5, 14], dtype=torch.int32)
    ragged.plan(qo_indptr, kv_indptr, 4, 2, 32, causal=is_causal, window_left=window_left, q_data_type=torch.float32)
    k, v = (tensor(numpy.concatenate(rows)) for rows in cache.rows)
    outputs = [wrapper.run(tensor(q), cache.joined, return_lse=True), ragged.run_return_lse(tensor(q), k, v)]
    for r, (start, stop) in enumerate(((0, 3), (3, 7))):
        qo_len, kv_len = stop - start, cache.kv_lens[r]
        visible = causal(qo_len, kv_len, None if window_left < 0 else window_left)
        if not is_causal:
            position = numpy.arange(qo_len)[:, None] + kv_len - qo_len
            visible = numpy.arange(kv_len)[None] >= (position - window_left if window_left >= 0 else 0)
        expected = attention(q[start:stop], cache.rows[0][r], cache.rows[1][r], visible=visible)
        for o, lse in outputs:
            close(o[start:stop], expected[0])
            close(lse[start:stop], expected[1])
    out = torch.empty_like(outputs[0][0])
    assert wrapper.run(tensor(q), cache.pair, out=out) is out
    other = wrapper.forward(tensor(q), cache.pair, causal=not is_causal, sm_scale=0.3)
    visible = numpy.ones((3, 5), bool) if is_causal else causal(3, 5)
    close(other[:3], attention(q[:3], cache.rows[0][0], cache.rows[1][0], scale=0.3, visible=visible)[0])
    wrapper.end_forward()


def test_custom_masks_replace_causal(host, rng):
    cache = Paged(rng, [5, 9])
    q = rng.standard_normal((7, 4, 32)).astype("float32")
    flags = [rng.random((3, 5)) < 0.6, rng.random((4, 9)) < 0.6]
    mask = torch.from_numpy(numpy.concatenate([one.reshape(-1) for one in flags]))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    bounds = torch.tensor([0, 15, 51], dtype=torch.int32)
    packed, _ = flashinfer.segment_packbits(mask, bounds, bitorder="little")
    assert torch.equal(flashinfer.segment_packbits(0.5 * mask, bounds, bitorder="little")[0], packed)
    assert torch.equal(flashinfer.packbits(0.5 * mask), flashinfer.packbits(mask))
    for given in ({"custom_mask": mask}, {"custom_mask": 0.5 * mask}, {"packed_custom_mask": packed}):
        wrapper.plan(torch.tensor([0, 3, 7]), cache.indptr, cache.indices, cache.last, 4, 2, 32, 4, causal=True,
                     q_data_type="float32", **given)
        o = wrapper.run(tensor(q), cache.pair)
        for r, part in enumerate((slice(0, 3), slice(3, 7))):
            close(o[part], attention(q[part], cache.rows[0][r], cache.rows[1][r], visible=flags[r])[0])
    request = tensor(q[:3]), tensor(cache.rows[0][0]), tensor(cache.rows[1][0])
    for one in (flags[0], flags[0].reshape(-1), 0.5 * flags[0]):
        single = flashinfer.single_prefill_with_kv_cache(*request, custom_mask=torch.from_numpy(one), causal=True)
        close(single, attention(q[:3], cache.rows[0][0], cache.rows[1][0], visible=flags[0])[0])
    with pytest.raises(tw.Error, match=r"custom_mask has shape \(5, 3\), expected \(3, 5\) or \(15,\)"):
        flashinfer.single_prefill_with_kv_cache(*request, custom_mask=torch.from_numpy(flags[0].T))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_fixed_plan_has_the_masks_of_its_buffer(host, rng, is_ragged):
    cache, q = Paged(rng, [5, 9]), rng.standard_normal((4, 4, 32)).astype("float32")
    bounds, buffers = torch.tensor([0, 3, 4], dtype=torch.int32), [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 8, 2)]
    masks = {"custom_mask_buf": torch.zeros(64, dtype=torch.uint8), "mask_indptr_buf": torch.zeros(3, dtype=torch.int32)}
    if is_ragged:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, *buffers[:2], **masks)
        plan = functools.partial(wrapper.plan, bounds, torch.tensor([0, 5, 14], dtype=torch.int32), 4, 2, 32)
        keys = [tensor(numpy.concatenate(rows)) for rows in cache.rows]
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, bounds.clone(), *buffers[1:], **masks)
        plan = functools.partial(wrapper.plan, bounds, cache.indptr, cache.indices, cache.last, 4, 2, 32, 4)
        keys = [cache.pair]
    visible = [rng.random((3, 5)) < 0.6, rng.random((1, 9)) < 0.6]
    flags = tensor(numpy.concatenate([one.reshape(-1) for one in visible]))
    for mask in (None, flags, None, flags):
        plan(custom_mask=mask, q_data_type="float32")
        o = wrapper.run(tensor(q), *keys)
        for r, rows in enumerate((slice(0, 3), slice(3, 4))):
            shown = None if mask is None else visible[r]
            close(o[rows], attention(q[rows], cache.rows[0][r], cache.rows[1][r], visible=shown)[0])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_multi_item_scoring(host, rng, is_ragged):
    cache, items = Paged(rng, [14, 11]), ([3, 4], [2, 3])
    q = rng.standard_normal((17, 4, 32)).astype("float32")
    bounds, heads = torch.tensor([0, 10, 17], dtype=torch.int32), (4, 2, 32)
    places, expected = [], []
    for r, (prefix, lens) in enumerate(zip((4, 3), items)):
        # a delimiter before each item and after the last one; its position is 0
        item = numpy.concatenate([numpy.full(prefix, -1), *(numpy.full(n + 1, at) for at, n in enumerate(lens)), [len(lens)]])
        places.append([*(x for n in lens for x in range(n + 1)), 0])
        kv_len = cache.kv_lens[r]
        assert len(item) == kv_len
        own = numpy.arange(kv_len)
        is_delimiter = numpy.concatenate([numpy.full(prefix, False), numpy.array(places[r]) == 0])
        visible = (own <= own[:, None]) & ((item[:, None] == item) & ~is_delimiter & ~is_delimiter[:, None] | (own < prefix))
        rows = slice(bounds[r], bounds[r + 1])
        expected.append(attention(q[rows], cache.rows[0][r], cache.rows[1][r], visible=visible[kv_len - len(q[rows]) :]))
    width = 12
    given = {"prefix_len_ptr": torch.tensor([4, 3], dtype=torch.uint32), "token_pos_in_items_len": width,
             "token_pos_in_items_ptr": torch.tensor([*places[0], *[0] * (width - len(places[0])), *places[1]]).to(torch.uint16),
             "max_item_len_ptr": torch.tensor([4, 3], dtype=torch.uint16)}
    if is_ragged:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        arrays = bounds, torch.tensor([0, 14, 25], dtype=torch.int32), *heads
        kv = tuple(tensor(numpy.concatenate(rows)) for rows in cache.rows)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
        arrays, kv = (bounds, cache.indptr, cache.indices, cache.last, *heads, 4), (cache.pair,)
    wrapper.plan(*arrays, causal=True, q_data_type="float32", **given)
    o, lse = wrapper.run(tensor(q), *kv, return_lse=True)
    for r, (start, stop) in enumerate(((0, 10), (10, 17))):
        close(o[start:stop], expected[r][0])
        close(lse[start:stop], expected[r][1])
    one = {name: value for name, value in given.items() if name == "token_pos_in_items_len"}
    for changes, text in ((one, "token_pos_in_items_len = 12, expected None without prefix_len_ptr"),
                          ({**given, "token_pos_in_items_ptr": None}, "expected both or none"),
                          ({**given, "prefix_len_ptr": torch.tensor([4])}, "prefix_len_ptr has 1 lengths, expected 2"),
                          ({**given, "token_pos_in_items_len": 8}, "request 0: .*expected 10 of the tokens after the prefix"),
                          ({**given, "custom_mask": torch.ones(3)}, "custom_mask = .*, expected None with prefix_len_ptr")):
        with pytest.raises(tw.Error if "expected None" not in text else tw.Unsupported, match=text):
            wrapper.plan(*arrays, q_data_type="float32", **changes)


def test_single_requests_with_encodings(host, rng):
    q, k, v = (rng.standard_normal(shape).astype("float32") for shape in ((4, 2, 32), (9, 2, 32), (9, 2, 32)))
    position = numpy.arange(9)[None] - (numpy.arange(4)[:, None] + 5)
    slopes = numpy.array([2.0 ** -4, 2.0 ** -8])[:, None, None]
    o = flashinfer.single_prefill_with_kv_cache(tensor(q), tensor(k), tensor(v), pos_encoding_mode="ALIBI", causal=True)
    close(o, attention(q, k, v, visible=causal(4, 9), logits=lambda s: s + slopes * position)[0])
    half = 10000.0 ** (-numpy.arange(16) / 16)

    def rotate(x, positions):
        angle = positions[:, None] * half
        cos, sin = numpy.cos(angle)[:, None], numpy.sin(angle)[:, None]
        return numpy.concatenate([x[..., :16] * cos - x[..., 16:] * sin, x[..., 16:] * cos + x[..., :16] * sin], axis=-1)

    o, lse = flashinfer.single_prefill_with_kv_cache_return_lse(tensor(q), tensor(k), tensor(v), pos_encoding_mode="ROPE_LLAMA")
    expected = attention(rotate(q, numpy.arange(5, 9)), rotate(k, numpy.arange(9)), v)
    close(o, expected[0], 1e-4)
    close(lse, expected[1], 1e-4)
    hnd = tensor(k.swapaxes(0, 1)), tensor(v.swapaxes(0, 1))
    o = flashinfer.single_decode_with_kv_cache(tensor(q[-1]), *hnd, kv_layout="HND", window_left=2, logits_soft_cap=5.0)
    expected = attention(q[-1:], k, v, visible=causal(1, 9, 2), logits=lambda s: 5 * numpy.tanh(s / 5))
    close(o, expected[0][0])


def test_appends_and_positions(host, rng):
    cache = Paged(rng, [3, 6])
    k, v = (tensor(rng.standard_normal((4, 2, 32)).astype("float32")) for _ in range(2))
    lens = flashinfer.get_seq_lens(cache.indptr, cache.last, 4)
    assert lens.tolist() == [3, 6]
    requests, positions = flashinfer.get_batch_indices_positions(torch.tensor([0, 1, 4], dtype=torch.int32), lens, 6)
    assert requests.tolist() == [0, 1, 1, 1, -1, -1] and positions.tolist()[:4] == [2, 3, 4, 5]
    flashinfer.append_paged_kv_cache(k, v, requests[:4], positions[:4], cache.joined, cache.indices, cache.indptr, cache.last)
    for token, (request, position) in enumerate(zip(requests[:4].tolist(), positions[:4].tolist())):
        page = cache.indices[cache.indptr[request] + position // 4]
        assert torch.equal(cache.joined[page, 0, position % 4], k[token])
        assert torch.equal(cache.joined[page, 1, position % 4], v[token])
    ckv, kpe = torch.zeros(2, 4, 8), torch.zeros(2, 4, 4)
    rows = torch.ones(1, 8), torch.ones(1, 4)
    zero = torch.tensor([0], dtype=torch.int32)
    flashinfer.append_paged_mla_kv_cache(*rows, zero, zero + 4, ckv, kpe, torch.tensor([1, 0], dtype=torch.int32),
                                         torch.tensor([0, 2], dtype=torch.int32), zero + 1)
    assert ckv.sum() == ckv[0, 0].sum() == 8 and kpe[0, 0].sum() == 4


def test_positions_of_arrays_on_a_gpu():
    """The operators of torch that compute positions on a GPU, on the CPU: the same numbers as those of checked arrays."""
    from tilewright.flashinfer import page

    for bounds, lens, nnz in (([0, 1, 4], [3, 6], 6), ([0, 0, 2, 2], [5, 2, 0], 2), ([0], [], 3), ([0, 2, 2], [2, 9], 5)):
        for dtype in (torch.int32, torch.int64):
            arrays = torch.tensor(bounds, dtype=dtype), torch.tensor(lens, dtype=dtype)
            for found, expected in zip(page._on_device(*arrays, nnz), page._on_host(*arrays, nnz)):
                assert found.dtype == torch.int32 and torch.equal(found, expected)


def test_merges_and_cascades(host, rng):
    cache = Paged(rng, [8, 5, 3])
    q = rng.standard_normal((2, 4, 32)).astype("float32")
    parts = [attention(q, cache.rows[0][r], cache.rows[1][r]) for r in (0, 1)]
    states = [(tensor(part[0].astype("float32")), tensor(part[1].astype("float32"))) for part in parts]
    whole = attention(q, *(numpy.concatenate([cache.rows[i][0], cache.rows[i][1]]) for i in range(2)))
    merged = flashinfer.merge_state(*states[0], *states[1])
    stacked = flashinfer.merge_states(*(torch.stack([one[at] for one in states], dim=1) for at in range(2)))
    in_place = states[0][0].clone(), states[0][1].clone()
    flashinfer.merge_state_in_place(*in_place, *states[1], mask=torch.tensor([1, 0]))
    for v, s in (merged, stacked):
        close(v, whole[0])
        close(s, whole[1])
    close(in_place[0][0], whole[0][0])
    assert torch.equal(in_place[0][1], states[0][0][1])

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan([torch.tensor([0, 2]), torch.tensor([0, 1, 2])], [torch.tensor([0, 2]), cache.indptr[1:] - 2],
                 [cache.indices[:2], cache.indices[2:]], [torch.tensor([4]), cache.last[1:]], 4, 2, 32, 4, causal=True,
                 q_data_type="float32")
    o = wrapper.run(tensor(q), cache.joined)
    shared = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace())
    shared.begin_forward(cache.indptr[1:] - 2, cache.indices[2:], cache.last[1:], 4, 2, 32, 4, data_type="float32")
    prefix = [tensor(cache.rows[i][0]) for i in range(2)]
    other = shared.forward(tensor(q), *prefix, cache.pair)
    for r in range(2):
        k, v = (numpy.concatenate([cache.rows[i][0], cache.rows[i][r + 1]]) for i in range(2))
        close(o[r : r + 1], attention(q[r : r + 1], k, v)[0])
        close(other[r : r + 1], attention(q[r : r + 1], k, v)[0])


def test_latent_attention(host, rng):
    ckv, kpe = (rng.standard_normal((3, 4, dim)).astype("float32") for dim in (32, 16))
    q_nope, q_pe = (rng.standard_normal((2, 4, dim)).astype("float32") for dim in (32, 16))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), backend="fa2")
    wrapper.plan(torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([2, 0, 1]), torch.tensor([10]), 4, 32, 16, 4, True, 0.2,
                 torch.float32, torch.float32)
    o, lse = wrapper.run(*(tensor(x) for x in (q_nope, q_pe, ckv, kpe)), return_lse=True)
    latent, rotated = (x[[2, 0, 1]].reshape(12, 1, -1)[:10] for x in (ckv, kpe))
    expected = attention(numpy.concatenate([q_nope, q_pe], axis=2), numpy.concatenate([latent, rotated], axis=2), latent,
                         scale=0.2, visible=causal(2, 10))
    close(o, expected[0])
    close(lse, expected[1])
    out = torch.empty(2, 4, 32, dtype=torch.float8_e4m3fn)
    assert wrapper.run(*(tensor(x) for x in (q_nope, q_pe, ckv, kpe)), out=out, o_scale=2.0**-10) is out
    assert torch.equal(out.view(torch.uint8), (o * 1024.0).clamp(-448.0, 448.0).to(out.dtype).view(torch.uint8))
    with pytest.raises(ValueError, match="out tensor must be provided"):
        wrapper.run(*(tensor(x) for x in (q_nope, q_pe, ckv, kpe)), o_scale=1.0)
    # a page after the last token is not read
    q = tensor(numpy.concatenate([q_nope, q_nope])), tensor(numpy.concatenate([q_pe, q_pe]))
    wrapper.plan(torch.tensor([0, 2, 4]), torch.tensor([0, 4, 7]), torch.tensor([2, 0, 1, 9, 2, 0, 1]), torch.tensor([10, 10]), 4, 32,
                 16, 4, True, 0.2, torch.float32, torch.float32)
    both = wrapper.run(*q, tensor(ckv), tensor(kpe))
    close(both[:2], expected[0])
    close(both[2:], expected[0])
    # fast_mla_decode_plan of SGLang
    recorded = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), True, *(torch.zeros(n, dtype=torch.int32) for n in (2, 2, 8, 1)))
    assert recorded._cached_module is None
    recorded.plan(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([3]), 4, 32, 16, 4, True, 0.2,
                  torch.float32, torch.float32)
    recorded._kv_indices_buf[:3] = torch.tensor([2, 0, 1])
    workspaces = recorded._float_workspace_buffer, recorded._int_workspace_buffer, recorded._pin_memory_int_workspace_buffer
    arguments = *workspaces, torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([10]), 4, 32
    recorded._cached_module.plan(*arguments, True)
    close(recorded.run(*(tensor(x) for x in (q_nope, q_pe, ckv, kpe))), expected[0])
    with pytest.raises(tw.Error, match=r"are \(4, 32, False\), expected those of the last plan, \(4, 32, True\)"):
        recorded._cached_module.plan(*arguments, False)
    # caches of 8 bits
    narrow = [tensor(x).to(torch.float8_e4m3fn) for x in (ckv, kpe)]
    wrapper.plan(torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([2, 0, 1]), torch.tensor([10]), 4, 32, 16, 4, True, 0.2,
                 torch.float32, torch.float8_e4m3fn)
    o = wrapper.run(tensor(q_nope), tensor(q_pe), *narrow, ckv_scale=0.5, kpe_scale=2.0)
    latent, rotated = (s * x.float().numpy()[[2, 0, 1]].reshape(12, 1, -1)[:10] for s, x in zip((0.5, 2.0), narrow))
    close(o, attention(numpy.concatenate([q_nope, q_pe], axis=2), numpy.concatenate([latent, rotated], axis=2), latent, scale=0.2,
                       visible=causal(2, 10))[0])
    with pytest.raises(tw.Error, match="kpe_scale = None, expected a number for caches of float8_e4m3fn"):
        wrapper.run(tensor(q_nope), tensor(q_pe), *narrow, ckv_scale=0.5)
    with pytest.raises(tw.Error, match="a scale of a latent cache is one number for elements of 8 bits, the cache is f32"):
        wrapper.plan(torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([2, 0, 1]), torch.tensor([10]), 4, 32, 16, 4, True, 0.2,
                     torch.float32, torch.float32)
        wrapper.run(tensor(q_nope), tensor(q_pe), tensor(ckv), tensor(kpe), ckv_scale=0.5)
    # no rotated part
    wrapper.plan(torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([2, 0, 1]), torch.tensor([10]), 4, 32, 0, 4, True, 0.2,
                 torch.float32, torch.float32)
    o, lse = wrapper.run(tensor(q_nope), torch.empty(2, 4, 0), tensor(ckv), torch.empty(3, 4, 0), return_lse=True)
    latent = ckv[[2, 0, 1]].reshape(12, 1, -1)[:10]
    expected = attention(q_nope, latent, latent, scale=0.2, visible=causal(2, 10))
    close(o, expected[0])
    close(lse, expected[1])


def test_sparse_and_mixed_batches(host, rng):
    q, k, v = (rng.standard_normal((8, 2, 16)).astype("float32") for _ in range(3))
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    wrapper.plan(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), 8, 8, 4, 4, 2, 2, 16, q_data_type="float32")
    visible = numpy.zeros((8, 8), dtype=bool)
    visible[:4, 4:] = visible[4:] = True
    close(wrapper.run(tensor(q), tensor(k), tensor(v)), attention(q, k, v, visible=visible)[0])
    wrapper.plan(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), 8, 8, 4, 4, 2, 2, 16, torch.full((3, 4, 4), 0.5),
                 q_data_type="float32")
    close(wrapper.run(tensor(q), tensor(k), tensor(v)), attention(q, k, v, visible=visible)[0])
    variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    blocks = torch.tensor([[[0, 1], [1, 1]]] * 2, dtype=torch.bool)
    variable.plan(blocks, torch.tensor([[4, 4]] * 2), torch.tensor([[4, 4]] * 2), 2, 2, 16, q_data_type="float32")
    heads = [tensor(x.swapaxes(0, 1)) for x in (q, k, v)]
    o = variable.run(*heads)
    close(o.transpose(0, 1), attention(q, k, v, visible=visible)[0])
    # settings of forward replace those of the plan
    for changed, tensors in ((wrapper, list(map(tensor, (q, k, v)))), (variable, heads)):
        found = changed.forward(*tensors, sm_scale=0.7, logits_soft_cap=2.0)
        assert torch.equal(changed.run(*tensors), found) and not torch.equal(changed.forward(*tensors), found)

    cache = Paged(rng, [5, 9])
    rows = rng.standard_normal((4, 4, 32)).astype("float32")
    mixed = flashinfer.BatchAttention()
    mixed.plan(torch.tensor([0, 3, 4]), cache.indptr, cache.indices, torch.tensor([5, 9]), 4, 2, 32, 32, 4, causal=True,
               q_data_type=torch.float32, kv_data_type=torch.float32)
    o, _ = mixed.run(tensor(rows), cache.joined)
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    pod.plan(cache.indptr, cache.indices, cache.last, 4, 2, 32, 4, q_data_type="float32")
    prefill, decode = pod.run(tensor(rows[:3]), tensor(cache.rows[0][0]), tensor(cache.rows[1][0]), tensor(rows[2:]),
                              cache.pair, causal_p=True)
    expected = attention(rows[:3], cache.rows[0][0], cache.rows[1][0], visible=causal(3, 5))[0]
    close(o[:3], expected)
    close(prefill, expected)
    last = attention(rows[3:], cache.rows[0][1], cache.rows[1][1])[0]
    close(o[3:], last)
    close(decode[1:], last)
    # settings of the decodes are those of the plan
    pod.plan(cache.indptr, cache.indices, cache.last, 4, 2, 32, 4, window_left=2, sm_scale=0.3, q_data_type="float32")
    parts = [tensor(x) for x in (rows[:3], cache.rows[0][0], cache.rows[1][0], rows[2:])]
    near = attention(rows[3:], cache.rows[0][1], cache.rows[1][1], visible=causal(1, 9, 2), scale=0.6)
    prefill, decode = pod.run(*parts, cache.pair, causal_p=True, sm_scale_d=0.3, k_scale=2.0, v_scale=0.5, return_lse_d=True)
    close(prefill, expected)
    close(decode[0][1:], 0.5 * near[0])
    close(decode[1][1:], near[1])
    with pytest.raises(tw.Unsupported, match="PODWithPagedKVCacheWrapper.run: window_left_d = 3, expected that of plan, 2"):
        pod.run(*parts, cache.pair, window_left_d=3)
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    table = cache.indptr, cache.indices, cache.last
    both.plan(torch.tensor([0, 3, 3]), *table, torch.tensor([0, 0, 2]), *table, 4, 2, 32, 4, q_data_type="float32")
    prefill, decode = both.run(tensor(rows[:3]), cache.pair, tensor(rows[2:]), cache.pair, causal_p=True, v_scale=2.0)
    close(prefill, expected)
    close(decode, 2.0 * attention(rows[2:], cache.rows[0][1], cache.rows[1][1])[0])


def test_scales_of_latent_blocks_are_refused_and_not_in_the_signature():
    run = flashinfer.BatchMLAPagedAttentionWrapper.run
    assert "ckv_scale_arr" not in inspect.signature(run).parameters  # the check of vLLM
    wrapper, tensors = flashinfer.BatchMLAPagedAttentionWrapper(workspace()), [torch.ones(1, 1, 16)] * 4
    with pytest.raises(tw.Unsupported, match="BatchMLAPagedAttentionWrapper.run: ckv_scale_arr = a tensor"):
        wrapper.run(*tensors, ckv_scale_arr=torch.ones(1))
    with pytest.raises(TypeError, match="unexpected keyword arguments .'ckv_scales'"):
        wrapper.run(*tensors, ckv_scales=1.0)
    with pytest.raises(tw.Error, match="plan.. has not been called"):
        wrapper.run(*tensors, ckv_scale_arr=None)


@pytest.mark.parametrize("num_rows", [8, 7])
@pytest.mark.parametrize("mask", ["causal", "packed", None])
def test_block_rows_are_requests(host, rng, mask, num_rows):
    """``causal`` and ``packed_mask`` are those of the keys of each block row, in the order of its blocks."""
    q = rng.standard_normal((num_rows, 4, 16)).astype("float32")
    k, v = (rng.standard_normal((9, 2, 16)).astype("float32") for _ in range(2))
    arrays, keys = (torch.tensor([0, 1, 3]), torch.tensor([1, 2, 0])), ([3, 4, 5], [6, 7, 8, 0, 1, 2])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    flags = [rng.random((rows, len(at))) < 0.6 for rows, at in zip((4, num_rows - 4), keys)]
    packed = tensor(numpy.concatenate([numpy.packbits(one, bitorder="little") for one in flags])) if mask == "packed" else None
    if mask is None:
        arrays = arrays[0], torch.tensor([1, 0, 2])
        keys = keys[0], sorted(keys[1])
    wrapper.plan(*arrays, num_rows, 9, 4, 3, 4, 2, 16, causal=mask is not None, packed_mask=packed, q_data_type="float32")
    o, lse = wrapper.run(*map(tensor, (q, k, v)), return_lse=True)
    scaled = wrapper.forward(*map(tensor, (q, k, v)), sm_scale=0.3)
    for rows, at, one in zip((slice(0, 4), slice(4, num_rows)), keys, flags):
        visible = {"packed": one, "causal": causal(len(q[rows]), len(at)), None: None}[mask]
        expected = attention(q[rows], k[at], v[at], visible=visible)
        close(o[rows], expected[0])
        close(lse[rows], expected[1])
        close(scaled[rows], attention(q[rows], k[at], v[at], visible=visible, scale=0.3)[0])


def test_block_rows_of_variable_size_are_causal(host, rng):
    q = rng.standard_normal((6, 4, 16)).astype("float32")
    k, v = (rng.standard_normal((9, 2, 16)).astype("float32") for _ in range(2))
    blocks = numpy.array([[[1, 0, 1], [1, 1, 0]], [[0, 1, 0], [1, 1, 1]]], dtype=bool)
    sizes = torch.tensor([[2, 4], [5, 1]]), torch.tensor([[2, 4, 3], [6, 1, 2]])
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(tensor(blocks), *sizes, 4, 2, 16, causal=True, q_data_type="float32")
    heads = [tensor(x.swapaxes(0, 1)) for x in (q, k, v)]
    out, states = torch.empty(4, 6, 16), torch.empty(4, 6)
    for o, lse in (wrapper.run(*heads, return_lse=True), wrapper.run(*heads, out, states, True)):
        for head, block in ((head, block) for head in range(2) for block in range(2)):
            first = int(sizes[0][head, :block].sum())
            rows = slice(first, first + int(sizes[0][head, block]))
            at = numpy.flatnonzero(numpy.repeat(blocks[head, block], sizes[1][head].numpy()))
            one = [x[at, head : head + 1] for x in (k, v)]
            expected = attention(q[rows, 2 * head : 2 * head + 2], *one, visible=causal(len(q[rows]), len(at)))
            close(o[2 * head : 2 * head + 2, rows].transpose(0, 1), expected[0])
            close(lse[2 * head : 2 * head + 2, rows].t(), expected[1])
    assert o is out and lse is states
    for arrays, text in (((tensor(blocks[:, :1]), *sizes), r"block_mask_map, .* have shapes \(2, 1, 3\), .* expected \(2, 2, 3\)"),
                         ((tensor(blocks), sizes[0] + sizes[0][:, :1], sizes[1]), r"block_row_sz = \[\[4, 6\], \[10, 6\]\], expected")):
        with pytest.raises(tw.Error, match=f"VariableBlockSparseAttentionWrapper.plan: {text}"):
            wrapper.plan(*arrays, 4, 2, 16, causal=True, q_data_type="float32")
    with pytest.raises(tw.Error, match="plan: num_qo_heads = 5, expected a multiple of num_kv_heads = 2"):
        wrapper.plan(tensor(blocks), *sizes, 5, 2, 16, causal=True, q_data_type="float32")


@pytest.mark.parametrize("latent", [False, True])
def test_rotations_to_8_bits(host, rng, latent):
    half = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).half()  # noqa: E731
    heads = () if latent else (2,)
    q, k, v = half(5, 4, 24), half(5, *heads, 24), None if latent else half(5, 2, 24)
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    table, positions = torch.cat([angle.cos(), angle.sin()], dim=1), torch.tensor([3, 4, 0, 1, 2])
    flat = [x.reshape(5, -1) for x in (q, k)]
    expected = flashinfer.apply_rope_with_cos_sin_cache(positions, *flat, 24, table, is_neox=False)
    q_expected, k_expected = (one.float().view(x.shape).numpy() for one, x in zip(expected, (q, k)))
    joined = torch.zeros(5, 4, 24, dtype=torch.float8_e5m2)
    parts = q[..., :8], k[..., :8], q[..., 8:], k[..., 8:]
    outputs = flashinfer.rope_quantize_fp8(*parts, table, positions, False, quant_scale_q=2.0, quant_scale_kv=0.5,
                                           q_rope_out=joined[..., :8], q_nope_out=joined[..., 8:])
    close(joined, 2 * q_expected, 0.13)
    close(torch.cat([outputs[1].float(), outputs[3].float()], dim=-1), k_expected / 2, 0.13)

    shape = (3, 2, 24) if latent else (3, 2, 2, 24)
    caches = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
    pair = (caches[0][..., 8:].clone(), caches[0][..., :8].clone()) if latent else tuple(caches)
    requests, places = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    q_rope, q_nope = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        *parts, v, table, positions, pair, torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), requests, places, False,
        quant_scale_kv=4.0, page_size=2)
    close(torch.cat([q_rope.float(), q_nope.float()], dim=-1), q_expected, 0.07)
    slots = torch.tensor([4, 5, 0, 2, 3])
    keys = torch.cat([pair[1].float(), pair[0].float()], dim=-1) if latent else pair[0].float()
    close(keys.reshape(6, *k.shape[1:])[slots], 4 * k_expected, 0.07)
    if not latent:
        close(pair[1].float().reshape(6, 2, 24)[slots], 4 * v.float().numpy(), 0.07)
        with pytest.raises(tw.Error, match="v is None, expected a tensor"):
            flashinfer.rope_quantize_fp8_append_paged_kv_cache(*parts, None, table, positions, pair, *(requests,) * 4)


def test_transforms_of_top_k(host, rng):
    scores = torch.from_numpy(rng.permutation(3 * 20).reshape(3, 20)).float()
    lengths, starts = torch.tensor([20, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)
    windows = [scores[row, start : start + length] for row, (start, length) in enumerate(zip(starts, lengths))]
    kept = [window.topk(min(4, len(window))).indices.sort().values for window in windows]
    padded = lambda rows: [row.tolist() + [-1] * (4 - len(row)) for row in rows]  # noqa: E731
    offsets = torch.tensor([100, 200, 300], dtype=torch.int32)
    out = flashinfer.top_k_ragged_transform(scores, offsets, lengths, 4, row_starts=starts)
    assert out.dtype == torch.int32 and out.tolist() == padded([offset + row for offset, row in zip(offsets, kept)])
    pages, to = torch.from_numpy(rng.permutation(40).reshape(2, 20)).int(), torch.tensor([1, 0, 1], dtype=torch.int32)
    out, raw = torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 4, dtype=torch.int32)
    first = torch.tensor([2, 0, 1], dtype=torch.int32)
    assert flashinfer.top_k_page_table_transform(scores, pages, lengths, 4, to, row_starts=starts, page_table_row_starts=first,
                                                 page_size=4, out=out, out_raw_indices=raw) is out
    assert raw.tolist() == padded(kept)
    assert out.tolist() == padded([pages[to[r], first[r] + row // 4] * 4 + row % 4 for r, row in enumerate(kept)])
    # entries of the window by default
    out = flashinfer.top_k_page_table_transform(scores[1:], pages, lengths[1:], 4, row_starts=starts[1:])
    assert out.tolist() == padded([pages[r, starts[r + 1] + kept[r + 1]] for r in range(2)])
    with pytest.raises(tw.Error, match="page_table_row_starts = None, expected a tensor with row_starts and page_size = 2"):
        flashinfer.top_k_page_table_transform(scores, pages, lengths, 4, to, row_starts=starts, page_size=2)
    with pytest.raises(tw.Error, match="page_size = 3, expected a power of two"):
        flashinfer.top_k_page_table_transform(scores, pages, lengths, 4, to, page_size=3)
    with pytest.raises(tw.Error, match="window_indices shares memory|indices shares memory"):
        flashinfer.top_k_page_table_transform(scores, pages, lengths, 4, to, out=raw, out_raw_indices=raw)


def test_norms_activations_and_rotations(host, rng):
    x = torch.from_numpy(rng.standard_normal((3, 32)).astype("float32"))
    weight = torch.from_numpy(rng.standard_normal(32).astype("float32"))
    normed = torch.nn.functional.rms_norm(x, (32,), eps=1e-6)
    close(flashinfer.rmsnorm(x, weight), (normed * weight).numpy())
    close(flashinfer.gemma_rmsnorm(x, weight), (normed * (1 + weight)).numpy())
    total, residual = x.clone(), torch.zeros_like(x)
    flashinfer.fused_add_rmsnorm(total, residual, weight)
    close(total, (normed * weight).numpy())
    assert torch.equal(residual, x)
    bias = torch.from_numpy(rng.standard_normal(32).astype("float32"))
    layer = torch.nn.functional.layer_norm(x, (32,), weight, bias, 1e-6)
    close(flashinfer.layernorm(x, weight, bias), layer.numpy())
    narrow, scale = torch.zeros(3, 32, dtype=torch.float8_e4m3fn), torch.tensor(0.25)
    flashinfer.rmsnorm_quant(narrow, x, weight, scale)
    close(narrow, (normed * weight / 0.25).numpy(), 0.07)
    flashinfer.layernorm_quant(narrow, x, weight, bias, 0.25)
    close(narrow, (layer / 0.25).numpy(), 0.07)
    residual = torch.zeros_like(x).half()
    flashinfer.fused_add_rmsnorm_quant(narrow, x.half(), residual, weight, scale)
    close(narrow, (normed * weight / 0.25).numpy(), 0.07)
    close(residual, x.numpy(), 1e-3)
    with pytest.raises(ValueError, match=r"flashinfer.rmsnorm_quant: scale has shape \(2,\), expected one number"):
        flashinfer.rmsnorm_quant(narrow, x, weight, torch.ones(2))
    gate, up = x.view(3, 1, 32)[..., :16], x.view(3, 1, 32)[..., 16:]
    close(flashinfer.silu_and_mul(x.view(3, 1, 32)), (torch.nn.functional.silu(gate) * up).numpy())
    close(flashinfer.gelu_tanh_and_mul(x), (torch.nn.functional.gelu(x[:, :16], approximate="tanh") * x[:, 16:]).numpy())
    q, k = torch.from_numpy(rng.standard_normal((5, 2, 16))).float(), torch.from_numpy(rng.standard_normal((5, 1, 16))).float()
    ragged = flashinfer.apply_rope(q, k, torch.tensor([0, 2, 5]), torch.tensor([3, 0]))
    positions = torch.tensor([3, 4, 0, 1, 2])
    by_positions = flashinfer.apply_rope_pos_ids(q, k, positions)
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    by_table = flashinfer.apply_rope_with_cos_sin_cache(positions, q.view(5, -1), k.view(5, -1), 16, table)
    in_place = q.clone(), k.clone()
    flashinfer.apply_rope_pos_ids_inplace(*in_place, positions)
    for other in (by_positions, by_table, in_place):
        for one, expected in zip(other, ragged):
            close(one.reshape(expected.shape), expected.numpy(), 1e-5)
    llama = flashinfer.apply_llama31_rope_pos_ids(q, k, positions)[0]
    assert not torch.allclose(llama, ragged[0])
    for present in (table, torch.cat([table, table], dim=1)[:, :16]):  # contiguous, and a part of wider rows
        present.mul_(0.5)
        scaled = flashinfer.apply_rope_with_cos_sin_cache(positions, q.view(5, -1), k.view(5, -1), 16, present)
        close(scaled[0].view(ragged[0].shape), (present[0, 0] * ragged[0]).numpy(), 1e-5)


def test_samplers(host, rng):
    logits = torch.from_numpy(rng.standard_normal((4, 50)).astype("float32"))
    probs = flashinfer.softmax(logits, temperature=torch.tensor([1.0, 2.0, 0.5, 1.0]))
    close(probs[0], torch.softmax(logits[0], 0).numpy())
    generator = torch.Generator().manual_seed(1)
    first = flashinfer.sampling_from_probs(probs, generator=generator)
    assert first.dtype == torch.int32
    assert torch.equal(first, flashinfer.sampling_from_probs(probs, generator=torch.Generator().manual_seed(1)))
    best = probs.argmax(dim=1)
    assert torch.equal(flashinfer.top_k_sampling_from_probs(probs, 1).long(), best)
    assert torch.equal(flashinfer.top_p_sampling_from_probs(probs, torch.full((4,), 1e-6)).long(), best)
    assert torch.equal(flashinfer.min_p_sampling_from_probs(probs, 1.0).long(), best)
    chosen = torch.tensor([2, 2, 0], dtype=torch.int32)
    tokens, valid = flashinfer.top_k_top_p_sampling_from_probs(probs, torch.tensor([1] * 4), 0.9, indices=chosen, return_valid=True)
    assert tokens.tolist() == best[chosen.long()].tolist() and valid.all()
    assert torch.equal(flashinfer.top_k_top_p_sampling_from_logits(logits, 1, 0.5, filter_apply_order="joint").long(), best)
    rows = 20000 if host == "cpu" else 400
    counts = torch.bincount(flashinfer.sampling_from_probs(torch.full((rows, 4), 0.25), seed=5, offset=0).long(), minlength=4)
    # five standard deviations of a share of 1/4
    assert (abs(counts / rows - 0.25) < 5 * (0.25 * 0.75 / rows) ** 0.5).all()
    values, indices = flashinfer.top_k(logits, 3, sorted=True)
    assert torch.equal(indices, logits.topk(3).indices) and torch.equal(values, logits.topk(3).values)
    close(flashinfer.top_p_renorm_probs(probs, 1.0), probs.numpy())
    assert (flashinfer.top_k_renorm_probs(probs, torch.tensor([2, 3, 4, 5])) > 0).sum(1).tolist() == [2, 3, 4, 5]
    broken = probs.clone()
    broken[1] = float("nan")
    tokens, valid = flashinfer.sampling_from_probs(broken, return_valid=True)
    assert valid.tolist() == [True, False, True, True] and tokens[1] == 0
    with pytest.raises(ValueError, match="contains NaN"):
        flashinfer.sampling_from_probs(broken, check_nan=True)
    draft, target = torch.full((1, 2, 4), 0.25), torch.zeros(1, 3, 4)
    target[0, :, 3] = 1.0
    total = torch.ones(1, dtype=torch.int32)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, torch.tensor([[3, 1]]), target, total)
    assert tokens.tolist() == [[3, 3, -1]] and emitted.tolist() == [1] and accepted is total


def test_masks_and_chains_read_parameters_in_tensors(host, rng):
    logits = torch.from_numpy(rng.standard_normal((4, 50)).astype("float32"))
    for counts in (3, torch.tensor([1, 3, 50, 7]), [1, 3, 50, 7], numpy.array([1, 3, 50, 7])):
        kept = (flashinfer.top_k_mask_logits(logits, counts) == logits).sum(1)
        assert kept.tolist() == ([3] * 4 if isinstance(counts, int) else [1, 3, 50, 7])
    assert flashinfer.top_k_mask_logits(logits.double(), 3).dtype == torch.float64
    with pytest.raises(tw.Error, match="top_k = 0, expected at least 1"):
        flashinfer.top_k_mask_logits(logits, 0)
    with pytest.raises(tw.Error, match="request 1: top_k = 0 is not at least 1"):
        flashinfer.top_k_mask_logits(logits, torch.tensor([1, 0, 1, 1]))
    draft = torch.from_numpy(rng.random((3, 4, 20)).astype("float32"))
    target = torch.from_numpy(rng.random((3, 5, 20)).astype("float32"))
    ids = torch.tensor([[1, 2, 3, 4], [5, -1, -1, -1], [0, 19, 7, 7]])
    expected, counts = tw.sampling.chain_speculative_sampling(draft, ids.int(), target, seed=5, offset=[8, 12, 16])
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, ids, target, seed=5, offset=8)
    assert torch.equal(tokens, expected) and list(zip(accepted.tolist(), emitted.tolist())) == counts
    target[1, 0, 4] = float("nan")
    others = flashinfer.chain_speculative_sampling(draft, ids, target, seed=torch.tensor([5]), offset=torch.tensor([8]))
    assert others[0][1].tolist() == [-1] * 5 and others[1][1] == others[2][1] == 0
    assert torch.equal(others[0][::2], tokens[::2])
    with pytest.raises(tw.Error, match=r"request 0: ids\[0\] = 20 is neither in 0..20 nor -1"):
        flashinfer.chain_speculative_sampling(draft, ids + 19, target)


def test_samplers_read_parameters_in_tensors(host, rng):
    logits = torch.from_numpy(rng.standard_normal((6, 50)).astype("float32"))
    probs = torch.softmax(logits, 1)
    k, p = torch.tensor([1, 3, 10, 50, 7, 2], dtype=torch.int32), torch.tensor([0.9, 0.5, 1.0, 0.3, 0.99, 0.7])
    seed, offset = torch.tensor([5]), torch.tensor([8])
    for draw, scores in ((flashinfer.top_k_top_p_sampling_from_logits, logits), (flashinfer.top_k_top_p_sampling_from_probs, probs)):
        for order in ("top_k_first", "joint"):
            def one(row, k=k, p=p, offset=8):
                return draw(scores[row : row + 1], int(k[row]), float(p[row]), filter_apply_order=order, seed=5, offset=offset)

            expected = torch.cat([one(row, offset=8 + 4 * row) for row in range(6)])
            for kinds in ((k, p), (k.long(), p.double()), (k.tolist(), p.numpy())):
                found = draw(scores, *kinds, filter_apply_order=order, seed=seed, offset=offset)
                assert torch.equal(found, expected) and found.dtype == torch.int32
            each = draw(scores, k, p, filter_apply_order=order, seed=seed.repeat(6), offset=torch.full((6,), 8))
            assert torch.equal(each, torch.cat([one(row) for row in range(6)]))
    halves = logits.half()
    assert torch.equal(flashinfer.sampling_from_logits(halves, seed=1, offset=0),
                       flashinfer.sampling_from_logits(halves.float(), seed=1, offset=0))
    assert torch.equal(flashinfer.sampling_from_probs(probs.T.contiguous().T, seed=-1, offset=0),
                       flashinfer.sampling_from_probs(probs, seed=2**64 - 1, offset=0))
    for row in range(6):
        close(flashinfer.top_k_renorm_probs(probs, k)[row], flashinfer.top_k_renorm_probs(probs[row:], int(k[row]))[0].numpy())
        close(flashinfer.top_p_renorm_probs(probs, p.double())[row], flashinfer.top_p_renorm_probs(probs[row:], float(p[row]))[0].numpy())
    close(flashinfer.softmax(halves, p), torch.softmax(halves.float() / p[:, None], 1).numpy())
    none = flashinfer.top_k_top_p_sampling_from_probs(probs[:0], k[:0], p[:0])
    assert none.shape == (0,) and flashinfer.top_k_renorm_probs(probs[:0], 3).shape == (0, 50)
    chosen = torch.tensor([5, 0, 0, 3])
    tokens = flashinfer.top_k_sampling_from_probs(probs, torch.ones(6, dtype=torch.int32), indices=chosen)
    assert torch.equal(tokens, probs.argmax(1)[chosen]) and tokens.dtype == torch.int64
    first = flashinfer.min_p_sampling_from_probs(probs, torch.full((4,), 0.1), indices=chosen, seed=3, offset=0)
    assert first[0] == flashinfer.min_p_sampling_from_probs(probs[5:], 0.1, seed=3, offset=0)[0]


@pytest.mark.parametrize("arguments, message", [
    ({"top_p": torch.tensor(0.5)}, "0-dimensional tensor"),
    ({"top_p": torch.ones(2, 1)}, "2D tensor"),
    ({"top_p": torch.ones(3)}, "batch size mismatch: 3 numbers, expected batch_size = 2"),
    ({"top_p": torch.tensor([0.5, 1.5])}, "request 1: top_p = 1.5 is not in"),
    ({"top_p": 0.0}, "request 0: top_p = 0 is not in"),
    ({"top_k": torch.tensor([3, -1])}, "request 1: top_k = -1 is not at least 1"),
    ({"top_k": -1}, "request 0: top_k = -1, expected an integer of at least 1"),
    ({"seed": torch.zeros(3, dtype=torch.int64), "offset": 0}, "seed has 3 elements, expected 1 or batch_size = 2"),
    ({"seed": 1}, "given together"),
    ({"indices": torch.tensor([0, 2])}, r"rows\[1\] = 2 is not in 0..2"),
])
def test_samplers_reject(arguments, message):
    with pytest.raises(ValueError, match=message):
        flashinfer.top_k_top_p_sampling_from_probs(torch.full((2, 4), 0.25), **{"top_k": 2, "top_p": 0.5, **arguments})


@pytest.mark.parametrize("call, name", [
    (lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=["x"]), "jit_args"),
    (lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="trtllm-gen"), "backend"),
    (lambda: planned().run(torch.ones(1, 2, 16), Paged(numpy.random.default_rng(0), [3], heads=1, dim=16).pair,
                           kv_cache_sf=torch.ones(1)), "kv_cache_sf"),
    (lambda: planned(o_data_type="bfloat16"), "o_data_type"),
    (lambda: planned(window_right=3), "window_right"),
    (lambda: flashinfer.single_prefill_with_kv_cache(*[torch.ones(2, 1, 16)] * 3, use_fp16_qk_reduction=True),
     "use_fp16_qk_reduction"),
    (lambda: flashinfer.single_prefill_with_kv_cache(*[torch.ones(2, 1, 16)] * 3, scale_q=torch.ones(1)), "scale_q"),
])
def test_unsupported_arguments_are_named(call, name):
    with pytest.raises(tw.Unsupported, match=f"flashinfer.*{name} = .*, expected"):
        call()


def planned(**options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    zero = torch.zeros(1, dtype=torch.int32)
    wrapper.plan(torch.tensor([0, 1], dtype=torch.int32), zero, zero + 3, 2, 1, 16, 4, q_data_type="float32", **options)
    return wrapper


def test_a_wrapper_replans_in_place_and_forgets_a_refused_batch(rng):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    arguments = (2, 1, 16, 4)
    for lens in ([5, 40], [300], [1, 2, 3]):
        cache = Paged(rng, lens, dim=16, heads=1, page_size=4)
        q = tensor(rng.standard_normal((len(lens), 2, 16)).astype("float32"))
        wrapper.plan(cache.indptr, cache.indices, cache.last, *arguments, q_data_type="float32")
        fresh = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        fresh.plan(cache.indptr, cache.indices, cache.last, *arguments, q_data_type="float32")
        assert torch.equal(wrapper.run(q, cache.pair), fresh.run(q, cache.pair))
    with pytest.raises(tw.Error, match="attention.plan: request 0: last_page_len = 9 is not in 1..=4"):
        wrapper.plan(cache.indptr, cache.indices, cache.last * 9, *arguments, q_data_type="float32")
    with pytest.raises(tw.Error, match="plan.. has not been called"):
        wrapper.run(q, cache.pair)
    wrapper.plan(cache.indptr, cache.indices, cache.last, *arguments, q_data_type="float32")
    assert torch.equal(wrapper.run(q, cache.pair), fresh.run(q, cache.pair))


def test_a_plan_after_forward_has_the_settings_of_its_arguments(rng):
    cache = Paged(rng, [5, 40], dim=16, heads=1, page_size=4)
    q = tensor(rng.standard_normal((2, 2, 16)).astype("float32"))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())

    def outputs(**options):
        wrapper.plan(cache.indptr, cache.indices, cache.last, 2, 1, 16, 4, pos_encoding_mode="ROPE_LLAMA",
                     q_data_type="float32", **options)
        return wrapper.run(q, cache.pair)

    first, scaled = outputs(), outputs(sm_scale=0.5)
    assert not torch.equal(first, scaled)
    assert torch.equal(outputs(), first)
    other = wrapper.forward(q, cache.pair, pos_encoding_mode="ROPE_LLAMA", rope_theta=5.0)
    assert not torch.equal(other, first)
    assert torch.equal(outputs(), first)


@pytest.mark.parametrize("name, tensors", [
    ("PODWithPagedKVCacheWrapper.run", 5), ("BatchPODWithPagedKVCacheWrapper.run", 4),
    ("BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward", 4), ("VariableBlockSparseAttentionWrapper.forward", 3),
])
def test_wrappers_name_the_plan_that_is_missing(name, tensors):
    wrapper, method = name.split(".")
    planner = "begin_forward" if "SharedPrefix" in name else "plan"
    with pytest.raises(tw.Error, match=rf"flashinfer.{name}: {planner}\(\) has not been called"):
        getattr(getattr(flashinfer, wrapper)(workspace()), method)(*[torch.ones(1, 1, 16)] * tensors)


def test_mistakes_have_their_messages():
    with pytest.raises(tw.Error, match="plan.. has not been called"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).run(torch.ones(1, 1, 16), torch.ones(1, 2, 4, 1, 16))
    with pytest.raises(tw.Error, match="q is torch.float16, plan.. was given q_data_type = torch.float32"):
        planned().run(torch.ones(1, 2, 16, dtype=torch.float16), torch.ones(1, 2, 4, 1, 16))
    with pytest.raises(AssertionError, match="window_left = 4"):
        planned().run(torch.ones(1, 2, 16), torch.ones(1, 2, 4, 1, 16), window_left=4)
    with pytest.raises(tw.Error, match="requires a gradient"):
        flashinfer.rmsnorm(torch.ones(2, 8, requires_grad=True), torch.ones(8))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        planned(window=3)


@pytest.mark.parametrize("is_old", [False, True])
def test_tensors_are_read_through_dlpack_or_their_attributes(rng, monkeypatch, is_old):
    if is_old:  # as before torch 2.10
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    x, weight = (tensor(rng.standard_normal(shape).astype("float32")) for shape in ((4, 16), 8))
    expected = torch.nn.functional.rms_norm(x[:, 8:], (8,), weight, 1e-6)
    close(flashinfer.rmsnorm(x[:, 8:], weight), expected)
    learned = weight.clone().requires_grad_()
    with torch.no_grad():
        close(flashinfer.rmsnorm(x[:, 8:], learned), expected)
    for wrong, text in ((learned, "tensor: it requires a gradient"), (weight.to("meta"), "on device 'meta'"),
                        (weight.to(torch.complex64), "dtype = complex64, expected one of float32")):
        with pytest.raises(tw.Error, match=text):
            flashinfer.rmsnorm(x[:, :8], wrong)


@pytest.mark.parametrize("is_old", [False, True])
def test_tensors_whose_signs_are_not_in_memory_are_refused(rng, monkeypatch, is_old):
    if is_old:
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    both = torch.view_as_complex(tensor(rng.standard_normal((4, 2, 8, 2)).astype("float32")))
    imaginary = both.conj().imag
    assert imaginary.is_neg()
    weight, out = torch.ones(8), torch.empty(4, 8)
    refused = "tensor: it has the negative bit, expected a tensor whose signs are in its memory: use resolve_neg"
    for x in (imaginary[:, 0], torch.nn.Parameter(imaginary[:, 1], requires_grad=False), imaginary[:1, 0]):
        with pytest.raises(tw.Error, match=refused):
            tw.rmsnorm(x, weight, out=out[: len(x)])
    with pytest.raises(tw.Error, match=refused):
        tw.rmsnorm(out, imaginary[0, 0])
    with pytest.raises(tw.Error, match=refused):
        tw.rmsnorm(out[:, :1], imaginary[0, 0, :1])
    resolved = imaginary[:, 0].resolve_neg()
    close(tw.rmsnorm(resolved, weight), torch.nn.functional.rms_norm(resolved, (8,), weight, 1e-6))


def test_engines_find_this_package_as_flashinfer():
    assert "flashinfer" not in sys.modules
    flashinfer.install()
    try:
        found = importlib.import_module("flashinfer")
        assert found is flashinfer and importlib.util.find_spec("flashinfer") is not None
        assert found.__version__ == importlib.metadata.version("flashinfer-python") == "0.6.18"
        version = importlib.import_module("flashinfer.version")
        assert (found.__git_version__, found.__git_commit__) == (version.__git_version__, version.__git_commit__)
        decode = importlib.import_module("flashinfer.decode")
        assert decode.BatchDecodeWithPagedKVCacheWrapper is flashinfer.BatchDecodeWithPagedKVCacheWrapper
        assert importlib.import_module("flashinfer.utils").next_positive_power_of_2(5) == 8
        assert importlib.import_module("flashinfer.gemm.gemm_base").bmm_fp8 is flashinfer.bmm_fp8
        assert importlib.import_module("flashinfer.triton.cascade").merge_states is flashinfer.merge_states
        assert importlib.import_module("flashinfer.logits_processor.types") is flashinfer.logits_processor
        # importing modules does not replace functions
        assert importlib.import_module("flashinfer.xqa").xqa is found.xqa is flashinfer.xqa
        assert importlib.import_module("flashinfer.quantization.packbits").packbits is found.quantization.packbits
        for module, name in (("gemm.routergemm", "tinygemm_bf16"), ("grouped_mm.core", "grouped_mm_fp8"),
                             ("quantization.fp8_quantization", "per_token_group_quant_8bit")):
            assert callable(getattr(importlib.import_module(f"flashinfer.{module}"), name))
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flashinfer.fused_moe")
    finally:
        flashinfer.uninstall()
    assert "flashinfer" not in sys.modules


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_tensors_and_eight_bit_caches(rng, dtype):
    cache = Paged(rng, [40], dim=64, heads=1, page_size=16)
    q = tensor(rng.standard_normal((1, 4, 64)).astype("float32")).to(dtype)
    expected = attention(q.float().numpy(), cache.rows[0][0], cache.rows[1][0])[0]
    for kv_dtype, tolerance in ((dtype, 0.02), (torch.float8_e4m3fn, 0.15)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        wrapper.plan(cache.indptr, cache.indices, cache.last, 4, 1, 64, 16, q_data_type=dtype, kv_data_type=kv_dtype)
        o = wrapper.run(q, tuple(one.to(kv_dtype) for one in cache.pair))
        assert o.dtype == dtype
        close(o, expected, tolerance)


def test_autocast_changes_no_result(host, rng):
    q, k, v = (tensor(rng.standard_normal((9, heads, 32)).astype("float32")) for heads in (4, 2, 2))
    calls = [
        lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True),
        lambda: flashinfer.rmsnorm(q.flatten(1), torch.ones(128)),
        lambda: flashinfer.silu_and_mul(q.flatten(1)),
        lambda: flashinfer.softmax(q.flatten(1)),
    ]
    for call in calls:
        expected = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = call()
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)


def test_properties_follow_the_compute_capability(monkeypatch):
    properties = flashinfer.properties
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    supported = {
        (8, 0): [], (9, 0): ["sm90a", "pdl"], (10, 0): ["sm100a", "pdl"], (11, 0): ["sm110a", "pdl"], (12, 0): ["sm12x", "pdl"],
    }
    gpu = torch.device("cuda", 0)
    for capability, expected in supported.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        names = ("sm90a", "sm100a", "sm110a", "sm12x")
        found = [name for name in names if getattr(properties, f"is_{name}_supported")(gpu)]
        assert found + ["pdl"] * properties.device_support_pdl(gpu) == expected, capability
    assert not properties.device_support_pdl(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not properties.is_sm90a_supported(gpu)


@pytest.mark.parametrize("paged", [False, True])
def test_queries_keys_and_values_of_e4m3(paged):
    """FP8 attention with scales per head, against attention of the dequantized tensors."""
    torch.manual_seed(3)
    heads, kv_heads, dim, lens, kv_lens = 4, 2, 64, [5, 17], [32, 48]
    e4m3, rows, tokens = torch.float8_e4m3fn, sum(lens), sum(kv_lens)
    q, k, v = (torch.randn(n, h, dim).to(e4m3) for n, h in ((rows, heads), (tokens, kv_heads), (tokens, kv_heads)))
    scales = [torch.tensor([0.5, 0.5, 2.0, 2.0]), torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.5])]
    float_q, float_k, float_v = (x.float() * s[:, None] for x, s in zip((q, k, v), scales, strict=True))
    bounds, kv_bounds = [torch.tensor([0, *n]).cumsum(0).int() for n in (lens, kv_lens)]
    options = {"causal": True, "q_data_type": e4m3, "kv_data_type": e4m3, "o_data_type": torch.bfloat16}
    if paged:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
        pages = torch.tensor([0, 2, 5]).int()
        wrapper.plan(bounds, pages, torch.arange(5).int(), torch.tensor([16, 16]).int(), heads, kv_heads, dim, 16, **options)
        cache = tuple(x.view(5, 16, kv_heads, dim) for x in (k, v))
        run = lambda *args, **kwargs: wrapper.run(q, cache, *args, **kwargs)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
        wrapper.plan(bounds, kv_bounds, heads, kv_heads, dim, **options)
        run = lambda *args, **kwargs: wrapper.run(q, k, v, *args, **kwargs)
    found = run(*scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, run(q_scale=scales[0], k_scale=scales[1], v_scale=scales[2]))
    for request, (length, kv_length) in enumerate(zip(lens, kv_lens, strict=True)):
        of_q, of_k = bounds[request], kv_bounds[request]
        at = slice(of_q, of_q + length)
        keys, values = (x[of_k : of_k + kv_length].repeat_interleave(2, 1) for x in (float_k, float_v))
        logits = torch.einsum("qhd,khd->hqk", float_q[at], keys) / dim**0.5
        visible = torch.arange(kv_length)[None] <= torch.arange(length)[:, None] + kv_length - length
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(found[at].float(), expected, rtol=1e-2, atol=2e-2)
    if paged:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
        del options["causal"]
        decode.plan(pages, torch.arange(5).int(), torch.tensor([16, 16]).int(), heads, kv_heads, dim, 16, **options)
        last = bounds[1:].long() - 1
        torch.testing.assert_close(decode.run(q[last], cache, *scales), found[last], rtol=1e-2, atol=2e-2)
        with pytest.raises(tw.Error, match="scales are passed twice"):
            decode.run(q[last], cache, *scales, q_scale=2.0)
    one = flashinfer.single_prefill_with_kv_cache(q[:5], k[:32], v[:32], *scales, o_dtype=torch.bfloat16, causal=True)
    assert torch.equal(one, found[:5])
    # further factors of keys and values, as numbers
    halves = {"scale_q": scales[0], "scale_k": 2 * scales[1], "scale_v": 0.5 * scales[2], "k_scale": 0.5, "v_scale": 2.0}
    assert torch.equal(flashinfer.single_prefill_with_kv_cache(q[:5], k[:32], v[:32], o_dtype=torch.bfloat16, causal=True,
                                                               **halves), one)
    last, equal = q[4], flashinfer.single_prefill_with_kv_cache(q[4:5], k[:32], v[:32], 0.25, 0.5, 3.0)[0]
    found_one = flashinfer.single_decode_with_kv_cache(last, k[:32], v[:32], q_scale=0.25, k_scale=0.5, v_scale=3.0)
    assert torch.equal(found_one.float(), equal.float())
    # scales that differ within a group of heads
    other = run(torch.tensor([0.5, 1.5, 2.0, 2.0]), *scales[1:])
    torch.testing.assert_close(other[:, [0, 2, 3]], found[:, [0, 2, 3]], rtol=1e-2, atol=2e-2)
    equal = run(torch.tensor([1.5, 1.5, 2.0, 2.0]), *scales[1:])
    torch.testing.assert_close(other[:, 1], equal[:, 1], rtol=1e-2, atol=2e-2)
    assert (equal[:, 0] - found[:, 0]).abs().max() > 0.1
    with pytest.raises(tw.Error, match=r"q_scale has shape \(3,\), expected \(4,\)"):
        run(torch.ones(3), *scales[1:])
    with pytest.raises(tw.Unsupported, match="o_dtype = 'float32', expected float16 or bfloat16 or float8_e4m3fn"):
        flashinfer.single_prefill_with_kv_cache(q[:5], k[:32], v[:32], o_dtype=torch.float32, causal=True)
    wide, narrow = (flashinfer.single_prefill_with_kv_cache(q[:5], k[:32], v[:32], o_dtype=dtype, causal=True)
                    for dtype in (torch.float16, None))
    assert narrow.dtype == e4m3 and rounds_to_e4m3(narrow, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_outputs_of_e4m3(dtype):
    """Outputs over their scale, rounded once and saturated."""
    torch.manual_seed(4)
    e4m3, bounds, kv_bounds = torch.float8_e4m3fn, torch.tensor([0, 3, 8]).int(), torch.tensor([0, 20, 52]).int()
    q, k, v = (torch.randn(n, h, 32).to(dtype) for n, h in ((8, 4), (52, 2), (52, 2)))

    def run(o_data_type, wrapper=None, **options):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
        wrapper.plan(bounds, kv_bounds, 4, 2, 32, causal=True, q_data_type=dtype, kv_data_type=dtype, o_data_type=o_data_type)
        return wrapper.run(q, k, v, return_lse=True, **options)

    unscaled, _ = run(torch.float16 if dtype == e4m3 else None)
    wide, lse = run(torch.float16 if dtype == e4m3 else None, o_scale=2.0**-9)
    torch.testing.assert_close(wide.float(), unscaled.float() * 512.0)
    out = torch.empty(8, 4, 32, dtype=e4m3)
    narrow, same = run(e4m3, o_scale=2.0**-9, out=out)
    assert narrow is out and torch.equal(same, lse)
    assert rounds_to_e4m3(out, wide)
    assert (out.float().abs() == 448.0).any() and out.float().isfinite().all()
    halved, _ = run(e4m3, o_scale=2.0**-9, v_scale=0.5)
    assert rounds_to_e4m3(halved, wide / 2.0)
    with pytest.raises(tw.Error, match="run: out is torch.bfloat16, expected torch.float8_e4m3fn"):
        run(e4m3, out=out.to(torch.bfloat16))
    with pytest.raises(tw.Error, match="run: o_scale = -1.0, expected a finite number above 0"):
        run(e4m3, o_scale=-1.0)


def block_table(cache):
    """The pages of a cache as rows of a block table, and the lengths of its requests."""
    counts = cache.indptr.diff().tolist()
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    for row, pages in zip(table, cache.indices.split(counts)):
        row[: len(pages)] = pages
    return table, torch.tensor(cache.kv_lens, dtype=torch.int32)


@pytest.mark.parametrize("is_causal, window_left", [(True, -1), (True, 3), (False, -1)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stateless_prefill(host, rng, layout, is_causal, window_left):
    cache = Paged(rng, [5, 9], layout)
    table, lens = block_table(cache)
    q, bounds = tensor(rng.standard_normal((7, 4, 32)).astype("float32")), torch.tensor([0, 3, 7], dtype=torch.int32)
    arguments = (table, lens, 4, 9, 0.25, 2.0, 2, bounds, torch.tensor([0, 5, 14], dtype=torch.int32))
    call = flashinfer.prefill.trtllm_batch_context_with_kv_cache
    options = {"kv_layout": layout, "causal": is_causal, "window_left": window_left}
    o, lse = call(q, cache.joined, workspace(), *arguments, return_lse=True, **options)
    for r, (start, stop) in enumerate(((0, 3), (3, 7))):
        visible = causal(stop - start, cache.kv_lens[r], None if window_left < 0 else window_left) if is_causal else None
        expected = attention(q[start:stop].numpy(), cache.rows[0][r], cache.rows[1][r], scale=0.25, visible=visible)
        close(o[start:stop], 2 * expected[0])
        close(lse[start:stop], expected[1])
    out, sinks = torch.empty_like(q), torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert call(q, cache.pair, workspace(), *arguments, sinks=sinks, out=out, **options) is out
    close(out, o.numpy() / (1 + numpy.exp(sinks.numpy() - lse.numpy() * math.log(2)))[..., None])
    with pytest.raises(tw.Unsupported, match="window_left = 2, expected -1 with causal = False"):
        call(q, cache.pair, workspace(), *arguments, causal=False, window_left=2, kv_layout=layout)
    with pytest.raises(tw.Error, match="seq_lens has 2 requests, expected batch_size = 3"):
        call(q, cache.pair, workspace(), *arguments[:6], 3, bounds, None, kv_layout=layout)


@pytest.mark.parametrize("mode", ["causal", "tree"])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_xqa_with_drafts(host, rng, is_ragged, mode):
    cache, counts = Paged(rng, [7, 11]), [3, 2] if is_ragged else [3, 3]
    table, lens = block_table(cache)
    blocks = [numpy.tri(count, dtype=bool) for count in counts]
    if mode == "tree":
        blocks[0][2] = [True, False, True]
        blocks[1][0, 1] = True
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    q = tensor(rng.standard_normal((sum(counts), 4, 32)).astype("float32"))
    given = q if is_ragged else q.view(2, 1, 3, 4, 32)
    output = torch.full_like(given, math.nan)
    arguments = (table, lens[:, None].view(torch.uint32), output, workspace(), None, 2, 4)
    sinks = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    options = {"q_seq_len": 3, "q_cu_seq_lens": bounds if is_ragged else None}
    flashinfer.xqa(given, *cache.pair, *arguments, sinks=sinks, q_scale=0.5, kv_scale=torch.tensor(2.0), rcp_out_scale=0.25,
                   mask=torch.from_numpy(packed_drafts(blocks, 3)), **options)
    found = output.view(-1, 4, 32)
    for r, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        visible = numpy.ones((counts[r], cache.kv_lens[r]), dtype=bool)
        visible[:, cache.kv_lens[r] - counts[r] :] = blocks[r]
        expected, lse = attention(q[start:stop].numpy(), cache.rows[0][r], cache.rows[1][r], visible=visible)
        weight = 1 / (1 + numpy.exp(sinks.reshape(-1).numpy() - lse * math.log(2)))
        close(found[start:stop], 0.5 * expected * weight[..., None])
    with pytest.raises(tw.Error, match=r"mask is torch.uint8 of shape \(3,\), expected torch.uint16"):
        flashinfer.xqa(given, *cache.pair, *arguments, mask=torch.zeros(3, dtype=torch.uint8), **options)
    with pytest.raises(tw.Error, match="xqa: q has shape .*expected"):
        flashinfer.xqa(q[None, None], *cache.pair, *arguments)
    with pytest.raises(tw.Error, match="expected num_kv_heads = 2 and page_size = 8 in NHD"):
        flashinfer.xqa(given, *cache.pair, *arguments[:-1], 8, **options)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_drafts_of_all_bits(host, rng, is_ragged):
    """35 drafts have bits in three words of int16, also the sign; halves of 33,000 and 66,000 are negative and above 1."""
    counts = [35, 3, 34] if is_ragged else [35, 35, 35]
    cache = Paged(rng, [41, 66_000, 33_000] if host == "cpu" and is_ragged else [41, 44, 35], heads=1, page_size=16)
    table, lens = block_table(cache)
    for r, count in enumerate(counts):  # so that each draft changes the outputs
        positions = torch.arange(lens[r] - count, lens[r])
        cache.pair[1][table[r, positions // 16].long(), positions % 16] *= lens[r]
        cache.rows[1][r][positions.numpy()] *= cache.kv_lens[r]
    blocks = [(rng.random((count, count)) < 0.5) | numpy.eye(count, dtype=bool) for count in counts]
    bounds = torch.tensor([0, *counts]).cumsum(0)
    q = tensor(rng.standard_normal((sum(counts), 1, 32)).astype("float32"))
    found = flashinfer.xqa_batch_decode_with_kv_cache(
        q, cache.pair, workspace(), table, lens.long(), max(cache.kv_lens), 32**-0.5, q_len_per_req=35,
        q_cu_seq_lens=bounds if is_ragged else None, mask=torch.from_numpy(packed_drafts(blocks, 35)))
    for r, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        visible = numpy.ones((counts[r], cache.kv_lens[r]), dtype=bool)
        visible[:, cache.kv_lens[r] - counts[r] :] = blocks[r]
        expected = attention(q[start:stop].numpy(), cache.rows[0][r], cache.rows[1][r], visible=visible)[0]
        close(found[start:stop] / 32, expected / 32)


def test_xqa_of_one_row_with_a_window(host, rng):
    cache = Paged(rng, [7, 11], "HND")
    table, lens = block_table(cache)
    q = tensor(rng.standard_normal((2, 1, 4, 32)).astype("float32"))
    output = torch.empty_like(q)
    flashinfer.xqa(q, *cache.pair, table, lens[:, None], output, workspace(), None, 2, 4, sliding_win_size=3, kv_layout="HND")
    for r, kv_len in enumerate(cache.kv_lens):
        close(output[r], attention(q[r].numpy(), cache.rows[0][r], cache.rows[1][r], visible=causal(1, kv_len, 2))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_stateless_latent_attention(host, rng, dtype):
    lens, q_len = [5, 9], 2
    table, lens_tensor = torch.tensor([[3, 1, 7], [4, 0, 2]], dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    cache = tensor(rng.standard_normal((5, 4, 128 + 64)).astype("float32")).to(dtype)
    q = tensor(rng.standard_normal((2, q_len, 3, 192)).astype("float32")).to(dtype)
    arguments = (workspace(), 128, 128, 64, table, lens_tensor, 9)
    call = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla
    o, lse = call(q, cache[:, None], *arguments, bmm1_scale=0.125, bmm2_scale=torch.tensor(2.0), return_lse=True)
    assert o.dtype == torch.bfloat16 and o.shape == (2, q_len, 3, 128) and lse.shape == (4, 3)
    for r, kv_len in enumerate(lens):
        keys = cache.float()[table[r, : -(-kv_len // 4)]].reshape(-1, 1, 192)[:kv_len]
        expected = attention(q[r].float().numpy(), keys.numpy(), keys[..., :128].numpy(), scale=0.125,
                             visible=causal(q_len, kv_len))
        close(o[r], 2 * expected[0], 0.03)
        close(lse[2 * r : 2 * r + 2], expected[1], 2e-3)
    bounds, out = torch.tensor([0, 2, 4], dtype=torch.int32), torch.empty(4, 3, 128, dtype=torch.bfloat16)
    flat = call(q.flatten(0, 1), cache, *arguments, bmm1_scale=0.125, bmm2_scale=2.0, cum_seq_lens_q=bounds, out=out)
    assert flat is out and torch.equal(flat, o.flatten(0, 1))
    one = call(q[:, 1:], cache, *arguments, bmm1_scale=0.125, bmm2_scale=2.0)
    assert torch.equal(one, flashinfer.decode.xqa_batch_decode_with_kv_cache_mla(q[:, 1:], cache, *arguments, None, 0.125, 2.0))
    output = torch.empty(2, 1, 3, 128, dtype=torch.bfloat16)
    flashinfer.xqa_mla(q[:, 1:], cache.view(20, 192), cache, table, lens_tensor[:, None], output, workspace(), None, 4, 0.0625,
                       2.0)
    close(output, one.float().numpy(), 0.03)
    for wrong, text in (({"sparse_mla_top_k": 128}, "sparse_mla_top_k = 128, expected 0"), ({"cp_world": 2}, "cp_world = 2"),
                        ({"sinks": q}, "sinks = a tensor"), ({"uses_shared_paged_kv_idx": False}, "expected True")):
        with pytest.raises(tw.Unsupported, match=text):
            call(q, cache, *arguments, **wrong)
    for wrong, text in (({"max_q_len": 2}, "expected it together with cum_seq_lens_q"),
                        ({"bmm1_scale": 0.0}, "bmm1_scale = 0.0"), ({"out": o[..., 1:]}, "out has shape"),
                        ({"backend": "cudnn"}, "backend = 'cudnn'")):
        with pytest.raises(tw.Error, match=text):
            call(q, cache, *arguments, **wrong)
    with pytest.raises(tw.Unsupported, match="expected BatchMLAPagedAttentionWrapper"):
        flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace())


def test_stateless_prefill_of_ragged_keys(host, rng):
    lens, kv_lens = [3, 0, 4, 2], [5, 6, 9, 0]
    q, k, v = (tensor(rng.standard_normal(shape).astype("float32")) for shape in ((9, 4, 48), (20, 2, 48), (20, 2, 32)))
    bounds, kv_bounds = (torch.tensor([0, *x]).cumsum(0).int() for x in (lens, kv_lens))
    call, memory = flashinfer.prefill.trtllm_ragged_attention_deepseek, workspace()

    def run(is_causal=True, window_left=-1, sinks=None, at=(bounds, kv_bounds), **options):
        return call(q, k, v, memory, None, 4, 9, torch.tensor(0.25), 2.0, 1.0, 4, window_left, *at, None, is_causal, True,
                    sinks, **options)

    for is_causal, window_left in ((True, -1), (False, -1), (True, 2)):
        o, lse = run(is_causal, window_left)
        for r in range(4):
            rows, keys = slice(bounds[r], bounds[r + 1]), slice(kv_bounds[r], kv_bounds[r + 1])
            visible = causal(lens[r], kv_lens[r], None if window_left < 0 else window_left) if is_causal else None
            expected = attention(q[rows].numpy(), k[keys].numpy(), v[keys].numpy(), scale=0.25, visible=visible)
            close(o[rows], 2 * expected[0])
            close(lse[rows], expected[1])
    moved = run(at=(torch.tensor([0, 4, 5, 7, 9]).int(), kv_bounds))[0]
    close(moved[:4], 2 * attention(q[:4].numpy(), k[:5].numpy(), v[:5].numpy(), scale=0.25, visible=causal(4, 5))[0])
    sinks, (o, lse) = torch.tensor([0.5, -1.0, 2.0, 0.0]), run()
    close(run(sinks=sinks)[0], o.numpy() / (1 + numpy.exp(sinks.numpy() - lse.numpy() * math.log(2)))[..., None])
    mirrors = {"q_seq_lens_cpu": torch.tensor(lens), "kv_seq_lens_cpu": torch.tensor(kv_lens)}
    out, states = torch.empty_like(o), torch.empty_like(lse)
    found = run(at=(None, None), out=out, lse=states, **mirrors)
    assert found[0] is out and found[1] is states and torch.equal(out, o) and torch.equal(states, lse)
    for wrong, text in (({"q_seq_lens_cpu": mirrors["q_seq_lens_cpu"]}, "expected both or none"),
                        ({**mirrors, "q_seq_lens_cpu": torch.tensor([9])}, r"with shape \(1,\), expected \(4,\) on the host"),
                        ({"at": (bounds[1:], kv_bounds)}, "cum_seq_lens_q has 4 bounds, expected batch_size . 1 = 5")):
        with pytest.raises(tw.Error, match=text):
            run(**wrong)
    for name, value in (("sage_attn_sfs", (q, None, None, None)), ("num_elts_per_sage_attn_blk", (1, 0, 0, 0)),
                        ("use_fp16_softmax", True), ("out", o.half())):
        with pytest.raises(tw.Unsupported, match=f"{name} = "):
            run(**{name: value})


@pytest.mark.parametrize("next_n, compress_ratio", [(1, 1), (2, 1), (2, 4)])
def test_top_k_of_rows_with_lengths(host, rng, next_n, compress_ratio):
    logits = tensor(rng.standard_normal((4, 40)).astype("float32")) + torch.arange(40)  # the last ones of a row are the largest
    lens = torch.tensor([37, 90, 5, 160][: 4 // next_n], dtype=torch.int32)
    out = torch.empty(4, 6, dtype=torch.int32)
    indices, values = flashinfer.top_k_varlen(logits, lens, 6, compress_ratio=compress_ratio, next_n=next_n, return_values=True,
                                              out_indices=out)
    assert indices is out
    for row in range(4):
        length = int(lens[row // next_n]) - (next_n - 1 - row % next_n)
        visible = logits[row, : min(length // compress_ratio, 40)]
        expected = visible.topk(min(6, len(visible)))[1].sort()[0].tolist()
        assert indices[row].tolist() == expected + [-1] * (6 - len(expected))
        assert values[row].tolist() == [*logits[row, expected].tolist(), *[0.0] * (6 - len(expected))]
    assert flashinfer.top_k_varlen(logits, lens, 6, next_n=next_n)[1] is None
    for wrong, text in (({"next_n": 3}, r"logits has shape \(4, 40\)"), ({"backend": "x"}, "backend = 'x'"),
                        ({"out_indices": out.long()}, "out_indices is torch.int64"),
                        ({"return_values": True, "out_values": out}, "out_values is torch.int32")):
        with pytest.raises(tw.Error, match=text):
            flashinfer.top_k_varlen(logits, lens, 6, **{"next_n": next_n, **wrong})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_of_deepseek_are_joined(rng, dtype):
    nope, rope = (tensor(rng.standard_normal(shape).astype("float32")).to(dtype) for shape in ((5, 4, 24), (5, 1, 8)))
    k = torch.zeros(5, 4, 40, dtype=dtype)
    flashinfer.concat_ops.concat_mla_k(k[..., :24], nope[..., :16], rope)
    parts = [nope[..., :16].float(), rope.float().expand(5, 4, 8), torch.zeros(5, 4, 16)]
    assert torch.equal(k.float(), torch.cat(parts, dim=2))
    for given, text in (((k, nope, rope), r"k is .* of shape \(5, 4, 40\), expected .* of \(5, 4, 32\)"),
                        ((k[..., :32], nope, rope.half()), "k_rope is torch.float16")):
        with pytest.raises(tw.Error, match=text):
            flashinfer.concat_ops.concat_mla_k(*given)


def test_dense_products(rng):
    def operand(*shape):
        return tensor(rng.standard_normal(shape).astype("float32")).to(torch.bfloat16)

    a, b, bias = operand(3, 5, 32), operand(3, 7, 32).transpose(1, 2), operand(7)
    expected = a.float() @ b.float()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for found, exact in ((flashinfer.bmm_bf16(a, b, out_dtype=dtype), expected),
                             (flashinfer.mm_bf16(a[0], b[0], out_dtype=dtype), expected[0]),
                             (flashinfer.mm_bf16(a[0], b[0], bias, out_dtype=dtype), expected[0] + bias.float())):
            assert found.dtype == dtype
            close(found, exact.numpy(), {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype])
    out = torch.empty(5, 7, dtype=torch.bfloat16)
    flashinfer.gemm.tinygemm_bf16(a[0], b[0].t(), out, bias)
    assert torch.equal(out, flashinfer.mm_bf16(a[0], b[0], bias))
    narrow = a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn)
    found = flashinfer.bmm_fp8(*narrow, torch.tensor(0.5), torch.tensor([0.25]), torch.float16)
    close(found, (narrow[0].float() @ narrow[1].float() / 8).numpy(), 2e-3)
    bounds = torch.tensor([0, 2, 2, 5])
    weights = b.transpose(1, 2).contiguous()
    grouped = flashinfer.grouped_mm.grouped_mm_bf16(a[1], weights, bounds, out_dtype=torch.float32)
    segments = flashinfer.SegmentGEMMWrapper(workspace())
    moved = segments.run(a[1], weights, 3, True, seg_indptr=bounds, weight_indices=torch.tensor([2, 0, 1]))
    for segment, weight in enumerate((2, 0, 1)):
        rows = slice(bounds[segment], bounds[segment + 1])
        close(grouped[rows], (a[1, rows].float() @ weights[segment].float().t()).numpy(), 2e-2)
        close(moved[rows], (a[1, rows].float() @ weights[weight].float().t()).numpy(), 2e-2)
    with flashinfer.autotune(True):
        assert torch.equal(segments.run(a[1], b, 3, False, seg_lens=torch.tensor([2, 0, 3])), grouped.to(torch.bfloat16))
    assert flashinfer.bmm_bf16.is_backend_supported("cudnn", 90) and not flashinfer.bmm_bf16.is_backend_supported("tgv")
    assert flashinfer.mm_bf16.is_compute_capability_supported(90)
    scale = torch.ones(1)
    for call, text in ((lambda: flashinfer.bmm_bf16(a.half(), b), "bmm_bf16: a is torch.float16"),
                       (lambda: flashinfer.mm_bf16(a[0], b[0].t()), r"b has shape \(7, 32\), expected \(32, 'n'\)"),
                       (lambda: flashinfer.mm_bf16(a[0], b[0], out_dtype=torch.int8), "out_dtype = torch.int8"),
                       (lambda: flashinfer.mm_bf16(a[0], b[0], out=out, out_dtype=torch.float16), "out is torch.bfloat16, expected"),
                       (lambda: flashinfer.bmm_bf16(a, b, torch.empty(3, 5, 7)), "bmm_bf16: out is torch.float32, expected"),
                       (lambda: flashinfer.mm_bf16(a[0], b[0], backend="tgv"), "backend = 'tgv'"),
                       (lambda: flashinfer.bmm_fp8(*narrow, torch.ones(3), scale, torch.float16), "A_scale has shape"),
                       (lambda: flashinfer.bmm_fp8(*narrow, scale, scale, torch.float32), "dtype = torch.float32"),
                       (lambda: flashinfer.grouped_mm.grouped_mm_bf16(a[1], weights, bounds[1:]), "m_indptr has 3 bounds"),
                       (lambda: segments.run(a[1], weights, 3, True, seg_indptr=bounds + 1), r"gemm.segment_gemm: indptr = \[1, 3, 3, 6\] does")):
        with pytest.raises(tw.Error, match=text):
            call()


def test_pipelines_of_logits(host, rng):
    pipes = importlib.import_module("tilewright.flashinfer.logits_processor")
    logits = tensor(rng.standard_normal((4, 50)).astype("float32"))
    probs = torch.softmax(logits, 1)
    k, p = torch.tensor([3, 1, 50, 7], dtype=torch.int32), torch.tensor([0.5, 0.9, 0.1, 0.7])
    temperatures = torch.tensor([0.5, 1, 2, 3])

    def outputs(processors, x, input_type=None, **kwargs):
        return [pipes.LogitsPipe(processors, compile, input_type)(x, **kwargs) for compile in (True, False)]

    for found in outputs([pipes.Temperature(), pipes.Softmax()], logits, temperature=temperatures):
        close(found, torch.softmax(logits / temperatures[:, None], 1).numpy())
    for found in outputs([pipes.TopK(), pipes.Softmax(), pipes.TopP()], logits, pipes.TensorType.LOGITS, top_k=k, top_p=p):
        kept = logits.masked_fill(logits < logits.sort(1, descending=True)[0].gather(1, k[:, None].long() - 1), -math.inf)
        close(found, flashinfer.top_p_renorm_probs(torch.softmax(kept, 1), p).numpy())
    for found in outputs([pipes.MinP()], probs, min_p=p):
        kept = probs * (probs >= probs.amax(1, keepdim=True) * p[:, None])
        close(found, (kept / kept.sum(1, keepdim=True)).numpy())
    for found in outputs([pipes.TopK(), pipes.Sample()], probs, pipes.TensorType.PROBS, top_k=1):
        assert torch.equal(found.long(), probs.argmax(1))
    both = [pipes.TopK(joint_topk_topp=True), pipes.TopP(), pipes.Sample(deterministic=False)]
    pipe = pipes.LogitsPipe([pipes.Temperature(), pipes.Softmax(), *both])
    assert repr(pipe) == ("LogitsPipe([Temperature -> Softmax -> TopK -> TopP -> Sample], "
                          "ops=[TemperatureOp -> SoftmaxOp -> ProbsTopKOp -> TopPOp -> ProbsSampleOp], "
                          "compiled_ops=[FusedTemperatureSoftmaxOp -> FusedProbsTopKTopPSampleOp])")
    assert pipe.initial_type == pipes.TensorType.LOGITS
    tokens = pipe(logits.repeat(20, 1), temperature=temperatures.repeat(20), top_k=k.repeat(20), top_p=p.repeat(20),
                  generator=torch.Generator().manual_seed(3))
    ranks = (logits[:, None] > logits.gather(1, tokens.view(20, 4).t().long())[..., None]).sum(2)
    assert (ranks.amax(1) < k).all() and (ranks > 0).any()
    for order in ("joint", "top_k_first"):
        same = flashinfer.top_k_top_p_sampling_from_probs(
            flashinfer.softmax(logits.repeat(20, 1), temperatures.repeat(20)), k.repeat(20), p.repeat(20),
            filter_apply_order=order, generator=torch.Generator().manual_seed(3))
        assert torch.equal(tokens, same) == (order == "joint")
    names = [type(op).__name__ for one in ("TopK", "TopP", "MinP")
             for op in pipes.LogitsPipe([getattr(pipes, one)(), pipes.Sample()], True, pipes.TensorType.PROBS).compiled_ops]
    assert names == ["FusedProbsTopKSampleOp", "FusedProbsTopPSampleOp", "FusedProbsMinPSampleOp"]

    class Double(pipes.Op):
        IN = OUT = pipes.TensorType.LOGITS

        def __call__(self, tensor, **kwargs):
            return pipes.TaggedTensor(tensor.data * kwargs["factor"], self._validate_input_type(tensor))

    class Doubled(pipes.LogitsProcessor):
        def legalize(self, input_type):
            return [Double()]

    rule = pipes.FusionRule((Double, Double), lambda ops: True, lambda ops: ops[0])
    once = pipes.LogitsPipe([Doubled()] * 3, input_type=pipes.TensorType.LOGITS, custom_fusion_rules=[rule])
    assert torch.equal(once(logits, factor=2), logits * 2) and len(once.ops) == 3
    for prio, name in ((11, "MinPOp"), (9, "FusedProbsTopPSampleOp")):
        rule = pipes.FusionRule((pipes.TopPOp, pipes.ProbsSampleOp), lambda ops: True, lambda ops: pipes.MinPOp(), prio)
        assert name in repr(pipes.LogitsPipe([pipes.TopP(), pipes.Sample()], custom_fusion_rules=[rule]))

    def refuse(ops):
        raise pipes.CompileError("refused")

    for call, text in ((lambda: pipes.LogitsPipe([]), "processors is empty"),
                       (lambda: pipes.LogitsPipe([pipes.Sample()]), "Sample takes LOGITS and PROBS, expected input_type"),
                       (lambda: pipes.LogitsPipe([pipes.Softmax(), pipes.Temperature()]),
                        "input_type = PROBS, expected LOGITS"),
                       (lambda: pipes.LogitsPipe([pipes.TopP(), pipes.Sample(), pipes.TopP()]), "input_type = INDICES"),
                       (lambda: pipes.LogitsPipe([pipes.TopP()], custom_validity_checks=[refuse]), "refused"),
                       (lambda: pipes.LogitsPipe([pipes.TopP()])(probs), "top_p is missing"),
                       (lambda: pipes.LogitsPipe([pipes.TopP()])(probs, top_p=1.5),
                        r"top_p = 1.5, expected a number in \(0, 1\]"),
                       (lambda: pipes.LogitsPipe([pipes.TopP()])(probs, top_p=0.5, top_k=3), "top_k is read by no operator"),
                       (lambda: pipes.LogitsPipe([pipes.TopP()])(pipes.TaggedTensor.logits(probs), top_p=0.5),
                        "tensor has type LOGITS, expected PROBS"),
                       (lambda: pipes.Op(), "IN = None, OUT = None")):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(pipes.CompileError, match="2 operators are a softmax"):
        pipes.single_softmax_rule([pipes.SoftmaxOp(), pipes.SoftmaxOp()])
    with pytest.raises(pipes.CompileError, match="TopPOp follows ProbsSampleOp"):
        pipes.indices_terminal_rule([pipes.ProbsSampleOp(), pipes.TopPOp()])


def test_merges_of_variable_numbers_of_states(host, rng):
    merge = importlib.import_module("tilewright.flashinfer.triton").cascade.variable_length_merge_states
    counts = [3, 0, 1, *[2] * 70]
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    v, s = (tensor(rng.standard_normal(shape).astype("float32")) for shape in ((int(indptr[-1]), 2, 8), (int(indptr[-1]), 2)))
    o, lse = merge(v, s, indptr)
    for row, (begin, end) in enumerate(zip(indptr[:-1], indptr[1:])):
        weights = torch.exp2(s[begin:end])
        expected = (weights[..., None] * v[begin:end]).sum(0) / weights.sum(0)[:, None].clamp(min=1e-9)
        close(o[row], expected.numpy())
        close(lse[row], weights.sum(0).log2().numpy())
    assert torch.equal(merge(v[:0], s[:0], indptr[:1].repeat(3))[0], torch.zeros(2, 2, 8))
    with pytest.raises(tw.Error, match="expected ascending bounds of 3 states"):
        merge(v[:3], s[:3], indptr)


def test_workspaces_have_sizes_and_alignment():
    wrapper = planned()
    first, zero = wrapper._plan_info, torch.zeros(1, dtype=torch.int32)
    wrapper.plan(torch.tensor([0, 1], dtype=torch.int32), zero, zero + 2, 2, 1, 16, 4, q_data_type="float32")
    assert first and wrapper._plan_info and wrapper._plan_info is not first
    assert flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())._plan_info is None
    sizes = wrapper.workspace_size(torch.zeros(2), torch.zeros(1), torch.ones(1), 2, 1, 16, 4)
    wrapper.reset_workspace_buffer(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
    for at, name in enumerate(("float_workspace_buffer", "int_workspace_buffer")):
        buffers = [workspace(), workspace()]
        buffers[at] = buffers[at][1:]
        with pytest.raises(ValueError, match=f"{name} must be 16-byte aligned"):
            wrapper.reset_workspace_buffer(*buffers)


def test_names_of_what_is_not_served_are_there():
    with pytest.raises(tw.Unsupported, match="flashinfer.jit.gen_batch_prefill_module: no compiler"):
        flashinfer.jit.gen_batch_prefill_module(1, name=2)
    for module, name in ((flashinfer.decode, "decode"), (flashinfer.prefill, "prefill")):
        with pytest.raises(tw.Unsupported, match=f"single_{name}_with_kv_cache_with_jit_module: no compiler"):
            getattr(module, f"single_{name}_with_kv_cache_with_jit_module")()
    with pytest.raises(tw.Unsupported, match="FP4 needs SM100"):
        flashinfer.utils.FP4Tensor(torch.ones(1))
    with pytest.raises(AttributeError, match=r"has no mm_fp4: docs/from-flashinfer.md lists the names"):
        flashinfer.mm_fp4  # noqa: B018
    assert not hasattr(flashinfer, "__path_of_nothing__")
    assert not hasattr(flashinfer, "comm") and not hasattr(flashinfer.jit, "__wrapped__")
    properties = flashinfer.utils
    assert properties.ceil_div(7, 4) == 2 and properties.round_up(7, 4) == 8
    assert properties.get_trtllm_gen_multi_ctas_kv_counter_bytes(3, 4, 5) >= 48


def test_queries_of_e5m2(host, rng):
    """Queries of e5m2 are converted to 16 bits, exactly: the same bits as theirs."""
    e5m2 = torch.float8_e5m2
    q, k, v = (tensor(rng.standard_normal((n, h, 32)).astype("float32")).to(e5m2) for n, h in ((6, 4), (16, 2), (16, 2)))
    scales = [torch.tensor([0.5, 0.5, 2.0, 2.0]), torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.5])]
    expected = attention(*((x.float() * s[:, None]).numpy() for x, s in zip((q, k, v), scales)), visible=causal(6, 16))[0]
    bounds, options = torch.tensor([0, 6]).int(), {"causal": True, "q_data_type": e5m2, "kv_data_type": e5m2}
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(bounds, torch.tensor([0, 16]).int(), 4, 2, 32, o_data_type=torch.float16, **options)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(bounds, torch.tensor([0, 2]).int(), torch.tensor([0, 1]).int(), torch.tensor([8]).int(), 4, 2, 32, 8,
               o_data_type=torch.float16, **options)
    found = ragged.run(q, k, v, *scales)
    close(found, expected, 5e-3)
    assert torch.equal(paged.run(q, tuple(x.view(2, 8, 2, 32) for x in (k, v)), *scales), found)
    assert torch.equal(flashinfer.single_prefill_with_kv_cache(q, k, v, *scales, o_dtype=torch.float16, causal=True), found)
    with pytest.raises(tw.Unsupported, match="o_data_type = 'float8_e5m2', expected float16 or bfloat16 or float8_e4m3fn"):
        ragged.plan(bounds, bounds, 4, 2, 32, **options)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_sparse_blocks_of_8_bits(host, rng, dtype):
    q, k, v = (tensor(rng.standard_normal((n, 2, 32)).astype("float32")).to(dtype) for n in (8, 16, 16))
    scales = [torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.5])]
    blocks = numpy.array([[True, False, True, False], [False, True, True, True]])
    expected = attention(*((x.float() * s[:, None]).numpy() for x, s in zip((q, k, v), scales)),
                         visible=numpy.repeat(numpy.repeat(blocks, 4, 0), 4, 1))[0]
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(), backend="fa3")
    arrays = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 1, 2, 3], dtype=torch.int32)
    wrapper.plan(*arrays, 8, 16, 4, 4, 2, 2, 32, q_data_type=dtype, kv_data_type=dtype, o_data_type=torch.float16)
    found = wrapper.run(q, k, v, *scales)
    close(found, expected, 2e-2)
    assert torch.equal(wrapper.forward(q, k, v, *scales), found)
    with pytest.raises(tw.Unsupported, match="o_data_type = 'float32', expected float16 or bfloat16 or float8_e4m3fn"):
        wrapper.plan(*arrays, 8, 16, 4, 4, 2, 2, 32, q_data_type=dtype, kv_data_type=dtype, o_data_type=torch.float32)
