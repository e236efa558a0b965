"""Values in tensors that ``tilewright.flashinfer`` passes to kernels without reading them on the host."""

import numpy
import pytest
import tilewright as tw
from dense import attention, causal, packed_drafts, paged

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tilewright.flashinfer as flashinfer  # noqa: E402
from tilewright.flashinfer import _items, _pages, _planned, mla  # noqa: E402


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(actual.float().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_scales_of_query_heads_are_read_by_runs(host, rng, dtype, monkeypatch, no_host_reads):
    """One per query head, of which a KV head has two: factors of logits before the soft cap, with one plan and without a host copy."""
    monkeypatch.setattr(_planned, "is_on_gpu", lambda x: True)
    q, k, v = (torch.from_numpy(rng.standard_normal((n, heads, 32))).to(dtype) for n, heads in ((3, 4), (9, 2), (9, 2)))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    out_dtype = dtype if dtype == torch.float32 else torch.float16
    wrapper.plan(torch.tensor([0, 3]), torch.tensor([0, 9]), 4, 2, 32, causal=True, logits_soft_cap=2.0, q_data_type=dtype,
                 kv_data_type=dtype, o_data_type=out_dtype)
    scales = torch.tensor([0.5, 3.0, 2.0, 1.0])
    given = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0])}
    arrays = [x.float().numpy() for x in (q, k, v)]

    def check(found, scales, k_scale=(0.5, 2.0)):
        factor = scales.numpy() * numpy.repeat(k_scale, 2)
        expected, _ = attention(arrays[0] * factor[:, None], arrays[1], 3.0 * arrays[2], visible=causal(3, 9),
                                logits=lambda s: 2.0 * numpy.tanh(s / 2.0))
        numpy.testing.assert_allclose(found.float().numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 2e-2,
                                      atol=1e-5 if dtype == torch.float32 else 2e-2)

    check(wrapper.run(q, k, v, q_scale=scales, **given), scales)
    scales.add_(0.5)
    check(wrapper.run(q, k, v, q_scale=scales.double(), **given), scales)
    sinks = torch.full((4,), -1e9)
    check(wrapper._run(q, (k, v), scales=(scales, given["k_scale"], given["v_scale"]), out=None, lse=None, return_lse=False,
                       sinks=sinks), scales)
    check(wrapper.run(q, k, v, **given), torch.ones(4))
    assert len(wrapper._attention._planned) == 1
    monkeypatch.undo()
    with pytest.raises(tw.Error, match=r"run: q_scale = \[0.5, -1.0, 2.0, 1.0\], expected finite numbers above 0"):
        wrapper.run(q, k, v, q_scale=torch.tensor([0.5, -1.0, 2.0, 1.0]))


@pytest.mark.parametrize("counts, longest, window_left", [([3, 3, 3], 3, -1), ([2, 34, 1], 34, -1), ([3, 3, 3], 3, 4)])
def test_masks_of_drafts_are_read_by_runs(host, rng, counts, longest, window_left, monkeypatch, no_host_reads):
    """Each call reads the present bits and lengths; requests of one size share a plan and an operator."""
    if host == "simulator":
        monkeypatch.setattr(_pages, "on_host", lambda x: pytest.fail("an array was copied to the host"))
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: make(*size, **options).fill_(1))  # memory without values
    caches, (indptr, indices, _), rows = paged(rng, [40, 39, 39], 4, 2, 32)
    table = torch.full((3, 10), 0, dtype=torch.int32)
    for r in range(3):
        table[r, : indptr[r + 1] - indptr[r]] = torch.from_numpy(indices[indptr[r] : indptr[r + 1]])
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.from_numpy(rng.standard_normal((sum(counts), 4, 32)).astype("float32"))
    lens, blocks = torch.tensor([40, 36, 39], dtype=torch.int32), [numpy.eye(count, dtype=bool) for count in counts]
    mask = torch.from_numpy(packed_drafts(blocks, longest))
    workspace, is_ragged = torch.zeros(1 << 20, dtype=torch.uint8), counts[0] != counts[1]
    known = None
    for kv_lens in ([40, 36, 39], [37, 39, 36], [37, 39, 36]):
        # also drafts that see later ones
        blocks = [(rng.random((count, count)) < 0.6) | numpy.eye(count, dtype=bool) for count in counts]
        lens.copy_(torch.tensor(kv_lens))
        mask.view(torch.uint8).copy_(torch.from_numpy(packed_drafts(blocks, longest)).view(torch.uint8))
        o = flashinfer.xqa_batch_decode_with_kv_cache(
            q, tuple(map(torch.from_numpy, caches)), workspace, table, lens, 40, 0.2, mask=mask, q_len_per_req=longest,
            window_left=window_left, q_cu_seq_lens=bounds if is_ragged else None)
        for r, kv_len in enumerate(kv_lens):
            visible = numpy.ones((counts[r], kv_len), dtype=bool)
            visible[:, kv_len - counts[r] :] = blocks[r]
            if window_left >= 0:
                position = numpy.arange(kv_len - counts[r], kv_len)[:, None]
                visible &= numpy.arange(kv_len)[None] >= position - window_left
            part, keys = slice(int(bounds[r]), int(bounds[r + 1])), [x[r][:kv_len] for x in rows]
            close(o[part], attention(q[part].numpy(), *keys, scale=0.2, visible=visible)[0])
        assert known in (None, len(_planned._operators))
        known = len(_planned._operators)


@pytest.mark.parametrize("rows", [3, 40])
def test_masks_of_drafts_hide_keys_of_two_tiles(host, rng, rows):
    """Drafts on both sides of multiples of 64 and 128 keys. Kernels of 16 bits call the mask hook in the tiles of the last keys."""
    kv_lens = [128 + rows // 2, 64 + rows // 2, 256 + rows - 1]
    caches, (indptr, indices, _), keys = paged(rng, kv_lens, 16, 2, 64, "float16")
    table = torch.zeros(3, int(numpy.diff(indptr).max()), dtype=torch.int32)
    for r in range(3):
        table[r, : indptr[r + 1] - indptr[r]] = torch.from_numpy(indices[indptr[r] : indptr[r + 1]])
    q, block = torch.from_numpy(rng.standard_normal((3 * rows, 4, 64))).half(), numpy.eye(rows, dtype=bool)
    o = flashinfer.xqa_batch_decode_with_kv_cache(
        q, tuple(map(torch.from_numpy, caches)), torch.zeros(1 << 22, dtype=torch.uint8), table, torch.tensor(kv_lens).int(), 300, 0.3,
        mask=torch.from_numpy(packed_drafts([block] * 3, rows)), q_len_per_req=rows)
    for r, kv_len in enumerate(kv_lens):
        part, visible = slice(r * rows, (r + 1) * rows), numpy.ones((rows, kv_len), dtype=bool)
        visible[:, kv_len - rows :] = block
        close(o[part], attention(q[part].numpy(), *(x[r] for x in keys), scale=0.3, visible=visible)[0], 5e-3)


class Launches(TorchDispatchMode):
    """Counts operations of torch that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        makes_views = any(result.alias_info is not None and not result.alias_info.is_write for result in function._schema.returns)
        self.count += not makes_views and "empty" not in function._schema.name
        return function(*args, **(kwargs or {}))


def stateless(rng, rows, **options):
    """A stateless call of two requests with this number of rows each."""
    q, cache = torch.from_numpy(rng.standard_normal((2 * rows, 4, 32))).float(), torch.zeros(4, 2, 2, 8, 32)
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    return flashinfer.xqa_batch_decode_with_kv_cache(q, cache, torch.empty(1 << 20, dtype=torch.uint8), table, lens, 16,
                                                     q_len_per_req=rows, kv_layout="HND", **options)


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 3, 6], dtype=torch.int32)])
def test_masks_of_drafts_are_converted_by_one_launch(rng, bounds):
    plain, masked = Launches(), Launches()
    for options, launches in (({}, plain), ({"mask": torch.zeros(6, 2, dtype=torch.uint16)}, masked)):
        with launches:
            stateless(rng, 3, q_cu_seq_lens=bounds, **options)
    assert masked.count - plain.count == 1


def test_drafts_without_a_mask_are_plain_causal_attention(rng, monkeypatch):
    """Also a single row, whose mask has no meaning."""
    monkeypatch.setattr(_planned, "_operators", {})
    stateless(rng, 3)
    stateless(rng, 1)
    stateless(rng, 1, mask=torch.zeros(2, 2, dtype=torch.uint16))
    (((*_, is_causal, _), variant, _),) = _planned._operators
    assert is_causal and variant[-1] is None
    for rows in (3, 4, 3):  # of 256 flags with padding; the number of rows is a parameter
        stateless(rng, rows, mask=torch.zeros(2 * rows, 2, dtype=torch.uint16))
    assert len(_planned._operators) == 3
    with pytest.raises(tw.Error, match=r"kv_cache: the bounds of query rows have shape \(2,\), expected \[3\]"):
        stateless(rng, 3, mask=torch.zeros(6, 2, dtype=torch.uint16), q_cu_seq_lens=torch.tensor([0, 6]))


def test_positions_in_items_are_not_read(host, rng, monkeypatch, no_host_reads):
    """The mask is made where the positions are."""
    monkeypatch.setattr(_items, "is_on_gpu", lambda x: True)
    q, k, v = (rng.standard_normal((n, heads, 32)).astype("float32") for n, heads in ((5, 4), (9, 2), (9, 2)))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    # two requests; items of 2 and 1 tokens after a prefix of 2, then a request that is all prefix
    prefixes, places = torch.tensor([2, 3], dtype=torch.uint32), torch.tensor([0, 1, 2, 0, 0, 0], dtype=torch.uint16)
    arguments = torch.tensor([0, 3, 5]), torch.tensor([0, 6, 9]), 4, 2, 32
    wrapper.plan(*arguments, causal=True, q_data_type=torch.float32, prefix_len_ptr=prefixes, token_pos_in_items_ptr=places,
                 token_pos_in_items_len=4)
    o = wrapper.run(*map(torch.from_numpy, (q, k, v)))
    # rows 3, 4 and 5 are at positions 1, 2 and 0 of their items
    visible = numpy.array([[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0]], dtype=bool)
    close(o[:3], attention(q[:3], k[:6], v[:6], visible=visible)[0])
    close(o[3:], attention(q[3:], k[6:], v[6:], visible=causal(2, 3))[0])
    with pytest.raises(tw.Error, match="request 1 has 1 query rows more than keys, expected at most 3 with prefix_len_ptr"):
        wrapper.plan(torch.tensor([0, 1, 5]), *arguments[1:], prefix_len_ptr=prefixes, token_pos_in_items_ptr=places,
                     token_pos_in_items_len=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_latent_logits_is_not_read(host, rng, dtype, monkeypatch, no_host_reads):
    """Queries are multiplied by it; calls of all values share an operator."""
    monkeypatch.setattr(mla, "output_scale", lambda function, name, value: value.reshape(()) if isinstance(value, torch.Tensor) else 1.0)
    q, cache = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in ((2, 1, 4, 96), (4, 4, 96)))
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32)
    for value in (0.25, 1.5):
        before = mla._latent_operator.cache_info().misses
        o = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
            q, cache, torch.empty(1 << 20, dtype=torch.uint8), 32, 64, 32, table, lens, 8, bmm1_scale=torch.tensor(value))
        for r, pages in enumerate(table):
            keys = cache[pages.long()].reshape(-1, 1, 96)[: int(lens[r])].float().numpy()
            expected, _ = attention(q[r].float().numpy(), keys, keys[..., :64], scale=value)
            close(o[r], expected, 2e-5 if dtype == torch.float32 else 3e-2)
    assert mla._latent_operator.cache_info().misses == before


def test_the_scale_of_logits_with_sinks_is_not_read(host, rng, monkeypatch, no_host_reads):
    """The second argument of a run: one plan and one operator for all values, and for scales of keys beside it."""
    from tilewright.flashinfer import prefill

    (k_cache, v_cache), (indptr, indices, last), rows = paged(rng, [9, 5], 4, 2, 32)
    q, sinks = torch.from_numpy(rng.standard_normal((5, 4, 32))).float(), torch.tensor([0.5, -1.0, 2.0, 0.0])
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        torch.empty(1024, dtype=torch.uint8), q_data_type=torch.float32, kv_data_type=torch.float32, head_dim_qk=32, head_dim_vo=32)
    wrapper.plan(torch.tensor([0, 3, 5]), *map(torch.from_numpy, (indptr, indices, last)), 4, 2, 32, 4, causal=True,
                 sm_scale=0.7, q_data_type=torch.float32, kv_data_type=torch.float32)
    monkeypatch.setattr(prefill, "is_on_gpu", lambda x: isinstance(x, torch.Tensor))
    cache, operators = (torch.from_numpy(k_cache), torch.from_numpy(v_cache)), []
    for value, k_scale in ((0.25, None), (1.5, None), (0.5, 3.0), (0.5, torch.tensor([3.0])), (0.5, torch.tensor([2.0, 0.5]))):
        o = wrapper.run(q, cache, sinks, torch.tensor(value), k_scale=k_scale)
        for r, part in enumerate((slice(0, 3), slice(3, 5))):
            keys = rows[0][r] * numpy.asarray(1.0 if k_scale is None else k_scale).reshape(-1, 1)
            state = attention(q[part].numpy(), keys, rows[1][r], scale=value, visible=causal(part.stop - part.start, len(keys)))
            weight = 1 / (1 + numpy.exp(sinks.numpy() - state[1] * numpy.log(2)))
            close(o[part], state[0] * weight[..., None])
        operators.append(len(_planned._operators))
    assert len(set(operators)) == 1
    assert (wrapper.run(q, cache, sinks, 0.25) - wrapper.run(q, cache, sinks, torch.tensor(0.25))).abs().max() < 1e-6


@pytest.mark.parametrize("latent", [False, True])
def test_scales_of_quantized_rotations_are_not_read(host, rng, latent, monkeypatch, no_host_reads):
    """Powers of two give the bits of numbers."""
    from tilewright.flashinfer import rope

    def half(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).half()

    heads = () if latent else (2,)
    parts, v = (half(5, 4, 8), half(5, *heads, 8), half(5, 4, 16), half(5, *heads, 16)), None if latent else half(5, 2, 24)
    table, positions = torch.from_numpy(rng.standard_normal((8, 8))).float(), torch.tensor([3, 4, 0, 1, 2])
    arrays = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])

    def results(q_scale, kv_scale):
        shape = (3, 2, 24) if latent else (3, 2, 2, 24)
        caches = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
        pair = (caches[0][..., 8:].clone(), caches[0][..., :8].clone()) if latent else tuple(caches)
        scales = {"quant_scale_q": q_scale, "quant_scale_kv": kv_scale}
        outputs = flashinfer.rope_quantize_fp8(*parts, table, positions, **scales)
        return [*outputs, *flashinfer.rope_quantize_fp8_append_paged_kv_cache(*parts, v, table, positions, pair, *arrays,
                                                                              page_size=2, **scales), *pair]

    expected = results(2.0, 0.5)
    monkeypatch.setattr(rope, "is_on_gpu", lambda x: isinstance(x, torch.Tensor))
    for scales in ((torch.tensor(2.0), torch.tensor([0.5])), (torch.tensor([2.0]), 0.5), (2.0, torch.tensor(0.5))):
        for one, other in zip(results(*scales), expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_scales_of_diffusion_outputs_are_not_read(host, rng, monkeypatch, no_host_reads):
    from tilewright.flashinfer import diffusion_ops

    qkv = torch.from_numpy(rng.standard_normal((8, 3 * 64))).bfloat16()
    ones = torch.ones(64, dtype=torch.bfloat16)
    fields = {"ppf": 2, "pph": 2, "ppw": 2, "num_frame_channels": 16, "num_height_channels": 24, "num_width_channels": 24,
              "num_heads_q": 1, "num_heads_k": 1, "num_heads_v": 1, "head_dim": 64, "output_fp8": True}
    call = flashinfer.diffusion_ops.fused_qk_rmsnorm_rope
    expected = call(qkv, ones, ones, output_quant_scale=4.0, v_quant_scale=0.5, **fields)
    monkeypatch.setattr(diffusion_ops, "output_scale", lambda function, name, value: value.reshape(()))
    found = call(qkv, ones, ones, output_quant_scale=torch.tensor([4.0]), v_quant_scale=torch.tensor(0.5), **fields)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
