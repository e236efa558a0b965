"""The operators around attention over NumPy arrays, against their definitions."""

import math

import numpy
import pytest
import tilewright as tw
from conftest import OnDevice
from dense import paged


def close(actual, expected, tolerance=1e-5):
    numpy.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def norm(x, factor, eps=1e-6):
    return x / numpy.sqrt((x.astype("float64") ** 2).mean(axis=-1, keepdims=True) + eps) * factor


def test_norms(host, rng):
    x, residual = (rng.standard_normal((3, 32)).astype("float32") for _ in range(2))
    weight = rng.standard_normal(32).astype("float32")
    close(tw.rmsnorm(x, weight), norm(x, weight))
    close(tw.rmsnorm(x, weight, gemma=True), norm(x, 1 + weight))
    total = x + residual
    summed, normed = residual.copy(), x.copy()
    tw.fused_add_rmsnorm(normed, summed, weight, 1e-5)
    close(summed, total)
    close(normed, norm(total, weight, 1e-5))
    in_place = x.copy()
    assert tw.rmsnorm(in_place, weight, out=in_place) is in_place
    close(in_place, norm(x, weight))


def test_layer_norm_and_int8_norms(host, rng):
    x, residual = (rng.standard_normal((3, 32)).astype("float32") + 1 for _ in range(2))
    weight, bias = (rng.standard_normal(32).astype("float32") for _ in range(2))
    wide = x.astype("float64") - x.mean(axis=-1, keepdims=True, dtype="float64")
    close(tw.layer_norm(x, weight, bias), norm(wide, weight, 1e-5) + bias)
    narrow = numpy.zeros((3, 32), "int8")
    assert tw.rmsnorm(x, weight, scale=0.05, out=narrow) is narrow
    close(narrow, norm(x, weight) / 0.05, 0.51)
    before = x.copy()
    tw.fused_add_rmsnorm(x, residual, weight, scale=numpy.array([0.05], "float32"), out=narrow)
    close(narrow, norm(residual, weight) / 0.05, 0.51)
    close(x, before)
    tw.layer_norm(x, weight, bias, scale=0.05, out=narrow)
    close(narrow, (norm(wide, weight, 1e-5) + bias) / 0.05, 0.51)
    with pytest.raises(tw.Error, match="out = None with a scale, expected a tensor of 8 bits"):
        tw.rmsnorm(x, weight, scale=0.05)
    with pytest.raises(tw.Error, match="norm.layer_norm: out shares memory with x"):
        tw.layer_norm(x, weight, bias, out=x)
    with pytest.raises(tw.Error, match="residual shares memory with x"):
        tw.fused_add_rmsnorm(x, x, weight, scale=0.05, out=narrow)


def test_a_slice_between_the_elements_of_the_output_is_copied(host, rng):
    both = rng.standard_normal((4, 2, 16)).astype("float32")
    x, weight = both[:, 0].copy(), rng.standard_normal(16).astype("float32")
    tw.rmsnorm(both[:, 0], weight, out=both[:, 1])
    close(both[:, 1], norm(x, weight))
    with pytest.raises(tw.Error, match="out shares memory with x"):
        tw.rmsnorm(both[:3, 0], weight, out=both[1:, 0])


def test_activations(host, rng):
    x = rng.standard_normal((3, 8)).astype("float32")
    gate, up = x[:, :4].astype("float64"), x[:, 4:]
    erf = numpy.vectorize(math.erf)
    close(tw.silu_and_mul(x), gate / (1 + numpy.exp(-gate)) * up)
    close(tw.gelu_and_mul(x), gate * (1 + erf(gate / math.sqrt(2))) / 2 * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(tw.gelu_tanh_and_mul(x), gate / 2 * (1 + numpy.tanh(inner)) * up)


def rotated(x, positions, theta, interleaved):
    half = x.shape[2] // 2
    angle = positions[:, None] * theta ** (-numpy.arange(half) / half)
    cos, sin = numpy.cos(angle)[:, None], numpy.sin(angle)[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    return numpy.stack([a, b], axis=-1).reshape(x.shape) if interleaved else numpy.concatenate([a, b], axis=-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings(host, rng, interleaved):
    qkv = rng.standard_normal((5, 4, 16)).astype("float32")
    positions = numpy.array([0, 3, 9, 1, 2], dtype=numpy.int64)
    rope = tw.Rope(16, 10000.0, interleaved=interleaved)
    expected = rotated(qkv[:, :3].astype("float64"), positions, 10000.0, interleaved)
    out = numpy.empty((5, 2, 16), "float32"), numpy.empty((5, 1, 16), "float32")
    tw.apply_rope(qkv[:, :2], qkv[:, 2:3], positions, rope, out=out)
    close(numpy.concatenate(out, axis=1), expected)
    last = qkv[:, 3].copy()
    tw.apply_rope(qkv[:, :2], qkv[:, 2:3], positions, rope)  # parts of one projection, in place
    close(qkv[:, :3], expected)
    close(qkv[:, 3], last, 0)


def test_a_table_of_cosines_rotates_as_its_rope(host, rng):
    q, k = rng.standard_normal((3, 2, 8)).astype("float32"), rng.standard_normal((3, 1, 8)).astype("float32")
    angle = numpy.arange(10)[:, None] * 10000.0 ** (-numpy.arange(4) / 4)
    table = numpy.concatenate([numpy.cos(angle), numpy.sin(angle)], axis=1).astype("float32")
    cache = tw.CosSinCache(table)
    expected = rotated(q.astype("float64"), numpy.array([9, 0, 4]), 10000.0, False)
    out = numpy.empty_like(q), numpy.empty_like(k)
    close(tw.apply_rope(q, k, [9, 0, 4], cache, out=out)[0], expected)
    table *= 2  # the table is not copied
    close(tw.apply_rope(q, k, [9, 0, 4], cache)[0], 2 * expected)
    with pytest.raises(tw.Error, match="position = 10"):
        tw.apply_rope(q, k, [10, 0, 4], cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
def test_appends_write_each_token_to_its_page(host, rng, layout, joined):
    caches, (indptr, indices, last), _ = paged(rng, [3, 6], 4, 2, 8, layout=layout)
    if joined:
        whole = numpy.stack(caches, axis=1)
        caches = [whole[:, 0], whole[:, 1]]
    before = [cache.copy() for cache in caches]
    k, v = (rng.standard_normal((4, 2, 8)).astype("float32") for _ in range(2))
    requests, positions = tw.get_batch_indices_positions([0, 1, 4], [3, 6])
    assert requests.tolist() == [0, 1, 1, 1] and positions.tolist() == [2, 3, 4, 5]
    table = tw.PageTable(indptr, indices, last, 4)
    assert tw.get_seq_lens(table).tolist() == [3, 6]
    requests[2] = -1  # skipped
    tw.append_paged_kv_cache(k, v, requests, positions, *caches, table, layout=layout)
    for cache, old, new in zip(caches, before, (k, v)):
        for token in (0, 1, 3):
            page, slot = indices[indptr[requests[token]] + positions[token] // 4], positions[token] % 4
            place = (page, slot) if layout == "NHD" else (page, slice(None), slot)
            close(cache[place], new[token], 0)
            old[place] = new[token]
        close(cache, old, 0)


def test_latent_appends(host, rng):
    ckv, kpe = numpy.zeros((2, 4, 8), "float32"), numpy.zeros((2, 4, 4), "float32")
    rows = rng.standard_normal((2, 8)).astype("float32"), rng.standard_normal((2, 4)).astype("float32")
    tw.append_paged_mla_kv_cache(*rows, [0, 0], [3, 4], ckv, kpe, tw.PageTable([0, 2], [1, 0], [1], 4))
    close(ckv[1, 3], rows[0][0], 0)
    close(kpe[0, 0], rows[1][1], 0)
    assert numpy.count_nonzero(ckv) == 16


def test_appends_to_slots(host, rng):
    k, v = (rng.standard_normal((3, 2, 8)).astype("float32") for _ in range(2))
    for layout, dtype in (("NHD", "int64"), ("HND", "int32")):
        shape = (2, 4, 2, 8) if layout == "NHD" else (2, 2, 4, 8)
        caches = [numpy.zeros(shape, "float32") for _ in range(2)]
        tw.append_to_slots(k, v, numpy.array([6, -1, 1], dtype), *caches, layout=layout, v_scale=0.5)
        for cache, new in zip(caches, (k, v * 2)):
            rows = cache if layout == "NHD" else cache.swapaxes(1, 2)
            close(rows[1, 2], new[0], 0)
            close(rows[0, 1], new[2], 0)
            assert numpy.count_nonzero(cache) == 32
    # keys and values of vLLM are halves of the last axis of one cache
    joined = numpy.zeros((2, 2, 4, 16), "float32")
    tw.append_to_slots(k, v, [6, -1, 1], joined[..., :8], joined[..., 8:], layout="HND", k_scale=0.5)
    close(joined[1, :, 2], numpy.concatenate([k[0] * 2, v[0]], axis=-1), 0)
    close(joined[0, :, 1], numpy.concatenate([k[2] * 2, v[2]], axis=-1), 0)
    assert numpy.count_nonzero(joined) == 64
    with pytest.raises(tw.Error, match="k_cache shares memory with v_cache"):
        tw.append_to_slots(k, v, [6, -1, 1], joined[..., :8], joined[..., 7:15], layout="HND")
    ckv, kpe = numpy.zeros((2, 4, 8), "float32"), numpy.zeros((2, 4, 4), "float32")
    tw.append_mla_to_slots(k[:, 0], v[:, 0, :4], [-1, 7, 0], ckv, kpe)
    close(ckv[1, 3], k[1, 0], 0)
    close(kpe[0, 0], v[2, 0, :4], 0)
    assert numpy.count_nonzero(ckv) == 16 and numpy.count_nonzero(kpe) == 8


def test_arrays_on_a_device_reach_the_operator(rng):
    k = rng.standard_normal((2, 1, 8)).astype("float32")
    caches = [numpy.zeros((1, 4, 1, 8), "float32") for _ in range(2)]
    table = tw.PageTable([0, 1], [0], [2], 4)
    there = "is in the memory of device 0, expected host memory"
    with pytest.raises(tw.Error, match=f"kv.append_to_slots: batch_indices {there}"):
        tw.append_paged_kv_cache(k, k, OnDevice(), [0, 1], *caches, table)
    with pytest.raises(tw.Error, match=f"kv.append_to_slots: kv indices {there}"):
        tw.append_paged_kv_cache(k, k, [0, 0], [0, 1], *caches, tw.PageTable([0, 1], OnDevice(length=1), [2], 4))
    with pytest.raises(tw.Error, match=f"kv.append_to_slots: slot_mapping {there}"):
        tw.append_to_slots(k, k, OnDevice("<i8"), *caches)
    with pytest.raises(tw.Error, match="slot_mapping is int32 with strides .*, expected contiguous int64"):
        tw.append_to_slots(k, k, OnDevice(), *caches)
    with pytest.raises(tw.Error, match=f"kv.append_mla_to_slots: positions {there}"):
        tw.append_paged_mla_kv_cache(k[:, 0], k[:, 0], [0, 0], OnDevice(), caches[0][:, :, 0], caches[1][:, :, 0], table)
    with pytest.raises(tw.Error, match="batch_index is int64 with strides .*, expected contiguous int32"):
        tw.append_paged_kv_cache(k, k, OnDevice("<i8"), [0, 1], *caches, table)
    with pytest.raises(tw.Error, match=f"positions {there}"):
        tw.apply_rope(k, k.copy(), OnDevice(), tw.Rope(8))


def test_linear_layers_and_packed_bits(host, rng):
    x, weight, bias = (rng.standard_normal(shape).astype("float32") for shape in ((3, 8), (5, 8), (5,)))
    close(tw.linear(x, weight, bias), x @ weight.T + bias)
    segments = tw.segment_gemm(x, numpy.stack([weight, -weight]), [0, 1, 3], [1, 0])
    close(segments, numpy.concatenate([-x[:1], x[1:]]) @ weight.T)
    flags = rng.random(21) < 0.5
    assert tw.packbits(flags).tolist() == numpy.packbits(flags).tolist()
    packed, bounds = tw.segment_packbits(flags, [0, 3, 21], "little")
    expected = numpy.concatenate([numpy.packbits(part, bitorder="little") for part in (flags[:3], flags[3:])])
    assert packed.tolist() == expected.tolist() and bounds.tolist() == [0, 1, 4]


def test_samplers(host, rng):
    logits = rng.standard_normal((4, 50)).astype("float32")
    assert tw.sampling.sample(logits, temperature=0.0).tolist() == logits.argmax(axis=1).tolist()
    probs = tw.sampling.softmax(logits, [1.0, 2.0, 0.5, 1.0])
    close(probs.sum(axis=1), numpy.ones(4))
    seeds = numpy.arange(4, dtype=numpy.int64)
    drawn = tw.sampling.sampling_from_probs(probs, top_k=3, seed=seeds, offset=2)
    again = tw.sampling.sampling_from_probs(probs, top_k=[3, 3, 3, 3], seed=seeds, offset=2)
    assert drawn.tolist() == again.tolist()
    best = numpy.argsort(-probs, axis=1)[:, :3]
    assert all(token in row for token, row in zip(drawn, best))
    kept = tw.sampling.top_k_renorm_probs(probs, 3)
    assert (kept > 0).sum(axis=1).tolist() == [3] * 4
    close(kept, tw.sampling.distribution(probs, probs=True, top_k=3))
    assert numpy.isneginf(tw.sampling.top_k_mask_logits(logits, 5)).sum() == 4 * 45
    close(tw.sampling.top_p_renorm_probs(probs, 0.5).sum(axis=1), numpy.ones(4))
    values, indices = tw.sampling.top_k(logits, 2)
    close(values, numpy.take_along_axis(logits, indices.astype("int64"), axis=1), 0)
    assert indices[:, 0].tolist() == logits.argmax(axis=1).tolist()


def test_rows_that_cannot_be_sampled_are_errors_or_flags(host):
    probs = numpy.array([[0.5, 0.5], [numpy.nan, 1.0]], dtype="float32")
    with pytest.raises(tw.Error, match="request 1"):
        tw.sampling.sampling_from_probs(probs)
    tokens, valid = tw.sampling.sampling_from_probs(probs, return_valid=True)
    assert valid.tolist() == [True, False] and tokens[1] == 0


def test_masks_of_tokens_and_chains(host):
    logits = numpy.zeros((2, 40), dtype="float32")
    words = numpy.array([[0b101, 0], [0, 1]], dtype="int32")
    tw.sampling.apply_token_bitmask(logits, words)
    assert [numpy.flatnonzero(numpy.isfinite(row)).tolist() for row in logits] == [[0, 2], [32]]
    unsigned = numpy.zeros((2, 40), dtype="float32")
    tw.sampling.apply_token_bitmask(unsigned, words.astype("uint32"))
    assert (unsigned == logits).all()
    # words on a device reach the kernel, and the CPU refuses them
    refused = "bitmask is in the memory of device 0, expected host memory" if host == "cpu" else "out of bounds: 4 bytes at 0x100000"
    with pytest.raises((tw.Error, tw.DeviceError), match=refused):
        tw.sampling.apply_token_bitmask(logits, OnDevice(length=4))
    with pytest.raises(tw.Error, match="bitmask is float32 with strides .*, expected contiguous int32"):
        tw.sampling.apply_token_bitmask(logits, OnDevice("<f4", 4))
    draft, target = numpy.full((1, 2, 4), 0.25, "float32"), numpy.zeros((1, 3, 4), "float32")
    target[0, :, 3] = 1.0
    tokens, counts = tw.sampling.chain_speculative_sampling(draft, numpy.array([[3, 1]], "int32"), target)
    assert tokens.tolist() == [[3, 3, -1]] and counts[0][1] == 1


def test_drafts_in_another_order_than_row_major_are_refused(host):
    probs = numpy.full((2, 3, 4), 0.25, "float32")
    drafts = numpy.asfortranarray(numpy.arange(4, dtype="int32").reshape(2, 2))
    with pytest.raises(tw.Error, match="strides .*expected a contiguous tensor"):
        tw.sampling.chain_speculative_sampling(probs[:, :2].copy(), drafts, probs)
