"""``trtllm_fmha_v2_prefill`` in all layouts and masks, against the definition."""

import math

import numpy
import pytest
import tilewright as tw
from dense import attention, causal

torch = pytest.importorskip("torch", reason="torch is not installed")
import tilewright.flashinfer as flashinfer  # noqa: E402

LENS, PAGE_SIZE, HEADS, DIM = [9, 1, 6], 4, 2, 32
BOUNDS = torch.tensor([0, *LENS]).cumsum(0).int()
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
WORKSPACE = torch.empty(1024, dtype=torch.uint8)


def tensor(array):
    return torch.from_numpy(numpy.ascontiguousarray(array.astype("float32")))


@pytest.fixture
def qkv(rng):
    """Queries, keys and values of all tokens."""
    return [tensor(rng.standard_normal((sum(LENS), HEADS, DIM))) for _ in range(3)]


def arguments(qkv, layout):
    """``qkv`` in a layout, with the block tables of its pages."""
    q, k, v = qkv
    if layout == "PACKED_QKV":
        return torch.stack(qkv, dim=1), None
    if layout == "SEPARATE_Q_K_V":
        return (q, k, v), None
    if layout == "CONTIGUOUS_Q_KV":
        return (q, torch.stack([k, v], dim=1)), None
    tables, cache = torch.tensor([[4, 0, 5], [2, 9, 9], [1, 3, 9]], dtype=torch.int32), torch.full((6, 2, PAGE_SIZE, HEADS, DIM), 7.0)
    for r, length in enumerate(LENS):
        for at in range(length):
            page, token = tables[r, at // PAGE_SIZE], BOUNDS[r] + at
            cache[page, 0, at % PAGE_SIZE], cache[page, 1, at % PAGE_SIZE] = k[token], v[token]
    return (q, cache if layout.endswith("NHD") else cache.transpose(2, 3).contiguous()), tables


def call(qkv, layout, tables, **options):
    options = {"bmm1_scale": 0.25, "bmm2_scale": 2.0, **options}
    return flashinfer.trtllm_fmha_v2_prefill(
        qkv, layout, WORKSPACE, torch.tensor(LENS).int(), max(LENS), max(LENS), batch_size=len(LENS), cum_seq_lens_q=BOUNDS,
        cum_seq_lens_kv=BOUNDS, block_tables=tables, **options)


def expected(qkv, visible, **options):
    """Outputs and base-2 LSEs of all requests."""
    parts = [[x[BOUNDS[r] : BOUNDS[r + 1]].numpy() for x in qkv] for r in range(len(LENS))]
    found = [attention(*part, scale=0.25, visible=visible(len(part[0])), **options) for part in parts]
    return [numpy.concatenate(part) for part in zip(*(one[:2] for one in found))]


def in_chunks(size):
    return lambda n: causal(n, n) & (numpy.arange(n)[:, None] // size == numpy.arange(n) // size)


MASKS = [
    ({}, lambda n: causal(n, n)),
    ({"mask_mode": "SLIDING_WINDOW", "window_left": 2}, lambda n: causal(n, n, 2)),
    ({"mask_mode": "chunked", "chunked_attention_size": 4}, in_chunks(4)),
    ({"mask_mode": "chunked", "chunked_attention_size": 3}, in_chunks(3)),
    ({"mask_mode": "padding"}, lambda n: None),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options, visible", MASKS, ids=["causal", "window", "chunks of 4", "chunks of 3", "all"])
def test_layouts_and_masks(host, qkv, layout, options, visible):
    o, lse = expected(qkv, visible)
    out = torch.empty_like(qkv[0])
    found, stats = call(*swapped(qkv, layout), out=out, save_softmax_stats=True, **options)
    assert found is out
    numpy.testing.assert_allclose(found, 2 * o, rtol=2e-5, atol=2e-5)
    of_stats = stats[..., 0].numpy() * 0.25 * math.sqrt(DIM) + numpy.log(stats[..., 1].numpy())
    numpy.testing.assert_allclose(of_stats, lse * math.log(2), rtol=2e-5, atol=2e-5)


def swapped(qkv, layout):
    """``qkv``, layout and tables in the order of :func:`call`."""
    qkv, tables = arguments(qkv, layout)
    return qkv, layout, tables


def test_caps_encodings_and_sinks(host, qkv):
    of_causal = MASKS[0][1]
    for layout in ("SEPARATE_Q_K_V", "Q_PAGED_KV_HND"):
        capped, stats = call(*swapped(qkv, layout), logits_soft_cap_scale=1.5, save_softmax_stats=True)
        o, lse = expected(qkv, of_causal, logits=lambda s: 1.5 * numpy.tanh(s / 1.5))
        numpy.testing.assert_allclose(capped, 2 * o, rtol=2e-5, atol=2e-5)
        numpy.testing.assert_allclose(stats[..., 0] * math.sqrt(DIM), lse * math.log(2), rtol=2e-5, atol=2e-5)
        o, lse = expected(qkv, of_causal)
        sinks = torch.tensor([0.5, -1.0])
        share = 1 / (1 + numpy.exp(sinks.numpy() - lse * math.log(2)))
        numpy.testing.assert_allclose(call(*swapped(qkv, layout), sinks=sinks), 2 * o * share[..., None], rtol=2e-5, atol=2e-5)
        # slopes 2 ** -4 and 2 ** -8 of two heads
        distance = lambda s: s + numpy.array([0.0625, 0.00390625])[:, None, None] * (  # noqa: E731
            numpy.arange(s.shape[2]) - numpy.arange(s.shape[1])[:, None])
        o, _ = expected(qkv, of_causal, logits=distance)
        numpy.testing.assert_allclose(call(*swapped(qkv, layout), pos_encoding_mode="ALIBI"), 2 * o, rtol=2e-5, atol=2e-5)


def test_caches_in_one_allocation(host, qkv):
    (q, cache), tables = arguments(qkv, "Q_PAGED_KV_NHD")
    halves = torch.stack(cache.unbind(1))
    both = torch.stack([tables, tables + cache.shape[0]], dim=1)
    o = call((q, (halves[0], halves[1])), "Q_PAGED_KV_NHD", both)
    assert torch.equal(o, call((q, cache), "Q_PAGED_KV_NHD", tables))
    with pytest.raises(tw.Error, match="other distances of keys and values than their caches, 6 pages"):
        call((q, (halves[0], halves[1])), "Q_PAGED_KV_NHD", both + torch.tensor([[0], [1]]).int())


def test_invalid_arguments(qkv):
    separate = ((qkv[0], qkv[1], qkv[2]), "SEPARATE_Q_K_V", None)
    for wrong, text in (({"mask_mode": "none"}, "mask_mode = 'none', expected one of 'causal'"),
                        ({"window_left": 2}, "window_left = 2 with mask_mode = causal, expected it with 'sliding_window' alone"),
                        ({"mask_mode": "chunked"}, "chunked_attention_size = 0 with mask_mode = chunked"),
                        ({"pos_encoding_mode": "rope"}, "pos_encoding_mode = 'ROPE'"),
                        ({"bmm1_scale": 0.0}, "bmm1_scale = 0.0"),
                        ({"out": qkv[0][1:]}, "out has shape")):
        with pytest.raises(tw.Error, match=text):
            call(*separate, **wrong)
    with pytest.raises(tw.Error, match=r"qkv has shapes \[\(16, 2, 32\)\] with PACKED_QKV, expected one tensor"):
        call(qkv[0], "PACKED_QKV", None)
    with pytest.raises(tw.Error, match="with CONTIGUOUS_Q_KV, expected queries of three axes"):
        call(separate[0], "CONTIGUOUS_Q_KV", None)
    with pytest.raises(tw.Error, match="block_tables is None, expected a table"):
        call(arguments(qkv, "Q_PAGED_KV_NHD")[0], "Q_PAGED_KV_NHD", None)
    with pytest.raises(tw.Unsupported, match="block_tables = a tensor"):
        call(separate[0], "SEPARATE_Q_K_V", torch.zeros(3, 3))
    with pytest.raises(tw.Error, match="input_layout = 'NHD'"):
        call(qkv[0], "NHD", None)
    with pytest.raises(tw.Error, match="chunked: size = 0, expected a count above 0"):
        tw.variants.chunked(0)
    for function in (flashinfer.prefill.fmha_v2_prefill_deepseek, flashinfer.prefill.fmha_v2_prefill_sm120):
        with pytest.raises(tw.Unsupported, match="device = 'SM90', expected trtllm"):
            function()
