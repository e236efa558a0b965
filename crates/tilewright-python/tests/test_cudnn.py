"""Prefill and decode with the arguments of cuDNN, against the definition."""

import math

import numpy
import pytest
import tilewright as tw
from dense import attention, causal

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402

HEADS, KV_HEADS, PAGE_SIZE = 4, 2, 4
WORKSPACE = torch.empty(1 << 20, dtype=torch.int8)
LENS, KV_LENS = torch.tensor([3, 0, 5, 1]), torch.tensor([9, 4, 5, 0])
MOST, MOST_KV = 6, 11


def bounds(lens):
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype("float32"))


def close(found, expected):
    numpy.testing.assert_allclose(found, expected, rtol=3e-5, atol=3e-5)


class Ragged:
    """Queries, keys and values of all requests, with gaps of ``gap`` rows of NaN before each request."""

    def __init__(self, rng, dims=(16, 8), gap=0):
        self.starts, self.kv_starts = (bounds(lens) + gap * torch.arange(1, len(lens) + 2) for lens in (LENS, KV_LENS))
        self.q, self.k, self.v = (torch.full((int(starts[-1]), heads, dim), math.nan) for starts, heads, dim in (
            (self.starts, HEADS, dims[0]), (self.kv_starts, KV_HEADS, dims[0]), (self.kv_starts, KV_HEADS, dims[1])))
        self.requests = []
        for start, kv_start, length, kv_len in zip(self.starts, self.kv_starts, LENS, KV_LENS):
            rows, kv_rows = slice(start, start + length), slice(kv_start, kv_start + kv_len)
            for x, at in ((self.q, rows), (self.k, kv_rows), (self.v, kv_rows)):
                x[at] = normal(rng, *x[at].shape)
            self.requests.append((rows, [self.q[rows], self.k[kv_rows], self.v[kv_rows]]))
        self.dims = dims

    def offsets(self, units, names="qokv"):
        rows = {"q": (self.starts, HEADS * self.dims[0]), "o": (self.starts, HEADS * self.dims[1]),
                "k": (self.kv_starts, KV_HEADS * self.dims[0]), "v": (self.kv_starts, KV_HEADS * self.dims[1])}
        found = {f"batch_offsets_{name}": rows[name][0] * (rows[name][1] if units == "elements" else 1) for name in names}
        return {**found, "batch_offsets_units": units}

    def call(self, **options):
        options = {"causal": True, "return_lse": True, "max_token_per_sequence": MOST, "max_sequence_kv": MOST_KV,
                   "actual_seq_lens_q": LENS.int().view(-1, 1, 1, 1), "actual_seq_lens_kv": KV_LENS.int().view(-1, 1, 1, 1),
                   **options}
        return flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(self.q, self.k, self.v, 0.3, WORKSPACE, **options)

    def check(self, found, is_causal=True, scale=0.3, v_scale=1.0, stats=None):
        o, lse = found
        expected_lse = numpy.full(lse.shape, -numpy.inf)
        for r, (rows, parts) in enumerate(self.requests):
            visible = causal(len(parts[0]), len(parts[1])) if is_causal else None
            expected, of_request = attention(*parts, scale=scale, visible=visible)
            close(o[rows], v_scale * expected)
            first = r * MOST if stats is None else int(stats[r])
            expected_lse.reshape(-1, HEADS)[first : first + len(parts[0])] = of_request * math.log(2)
        close(lse, expected_lse)


@pytest.mark.parametrize("units", ["elements", "tokens"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("gap", [0, 2])
def test_ragged_prefill(host, rng, units, is_causal, gap):
    batch = Ragged(rng, gap=gap)
    out = torch.full((len(batch.q), HEADS, 8), 7.0)
    lse = torch.empty(len(LENS), MOST, HEADS)
    found = batch.call(causal=is_causal, out=out, lse=lse, **batch.offsets(units))
    assert found[0] is out and found[1] is lse
    batch.check(found, is_causal)
    untouched = torch.ones(len(out), dtype=torch.bool)
    for rows, _ in batch.requests:
        untouched[rows] = False
    assert untouched.sum() == 4 * gap + gap and (out[untouched] == 7.0).all()


def test_defaults_of_offsets_and_lengths(host, rng):
    batch = Ragged(rng)
    batch.check(batch.call())
    batch.check(batch.call(backend="cubin", max_sequence_kv=MOST_KV))
    tokens = batch.offsets("tokens", "qk")
    batch.check(batch.call(actual_seq_lens_q=None, actual_seq_lens_kv=None, is_cuda_graph_compatible=True, **tokens))
    assert batch.call(return_lse=False)[1] is None
    # keys without offsets, of queries with them, begin every max_sequence_kv rows
    padded = Ragged(rng)
    padded.k, padded.v = (torch.full((MOST_KV * len(LENS), KV_HEADS, dim), math.nan) for dim in padded.dims)
    for r, (_, parts) in enumerate(padded.requests):
        padded.k[r * MOST_KV :][: len(parts[1])], padded.v[r * MOST_KV :][: len(parts[2])] = parts[1:]
    padded.check(padded.call(**padded.offsets("elements", "q")))


def test_offsets_of_statistics_and_scales(host, rng):
    batch = Ragged(rng)
    stats = torch.tensor([10, 0, 0, 7, 11])
    scales = {"q_scale": torch.full((1, 1, 1, 1), 0.5), "k_scale": torch.tensor(2.5), "v_scale": torch.tensor([3.0])}
    found = batch.call(batch_offsets_stats=stats * HEADS, **scales)
    batch.check(found, scale=0.3 * 0.5 * 2.5, v_scale=3.0, stats=stats)
    batch.check(batch.call(batch_offsets_stats=stats, **batch.offsets("tokens")), stats=stats)


def test_8_bits(host, rng):
    batch = Ragged(rng, dims=(32, 32), gap=1)
    exact = Ragged(rng, dims=(32, 32), gap=1)
    narrow = [x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v)]
    batch.q, batch.k, batch.v = narrow
    o, lse = batch.call(o_data_type=torch.bfloat16, v_scale=torch.tensor([0.5]), **batch.offsets("elements"))
    exact.q, exact.k, exact.v = (x.to(torch.bfloat16) for x in narrow)
    expected, expected_lse = exact.call(**exact.offsets("elements"))
    assert o.dtype == torch.bfloat16 and lse.shape == expected_lse.shape
    for rows, _ in batch.requests:
        numpy.testing.assert_allclose(2 * o[rows].float(), expected[rows].float(), rtol=0.1, atol=0.1)
    numpy.testing.assert_allclose(lse, expected_lse, rtol=0.05, atol=0.05)


def cache(rng, batch):
    """Caches with the strides of NHD, and block tables, of the keys of a ragged batch."""
    pages = sum(-(-int(n) // PAGE_SIZE) for n in KV_LENS)
    order, table = rng.permutation(pages).tolist(), torch.full((len(KV_LENS), 3), 1 << 20, dtype=torch.int32)
    caches = [torch.full((pages, PAGE_SIZE, KV_HEADS, dim), math.nan) for dim in batch.dims]
    for r, (_, parts) in enumerate(batch.requests):
        for token in range(len(parts[1])):
            if token % PAGE_SIZE == 0:
                table[r, token // PAGE_SIZE] = order.pop()
            for to, x in zip(caches, parts[1:]):
                to[table[r, token // PAGE_SIZE], token % PAGE_SIZE] = x[token]
    return [x.transpose(1, 2) for x in caches], table


@pytest.mark.parametrize("units", ["elements", "tokens", None])
@pytest.mark.parametrize("is_causal", [True, False])
def test_paged_prefill(host, rng, units, is_causal):
    batch = Ragged(rng, dims=(16, 16))
    (batch.k, batch.v), table = cache(rng, batch)
    offsets = {} if units is None else batch.offsets(units, "qo")
    batch.check(batch.call(block_tables=table, causal=is_causal, **offsets), is_causal)
    if units == "tokens":
        batch.check(batch.call(block_tables=table, causal=is_causal, actual_seq_lens_q=None, **offsets), is_causal)


def test_decode(host, rng):
    batch = Ragged(rng, dims=(16, 16))
    caches, table = cache(rng, batch)
    q, out = normal(rng, 4, HEADS, 16), torch.empty(4, HEADS, 16)
    starts = torch.arange(5) * HEADS * 16
    call = flashinfer.cudnn_batch_decode_with_kv_cache
    assert call is flashinfer.decode.cudnn_batch_decode_with_kv_cache
    arguments = {"max_sequence_kv": MOST_KV, "block_tables": table, "actual_seq_lens_kv": KV_LENS.int().view(-1, 1, 1, 1)}
    found = call(q, *caches, 0.3, WORKSPACE, batch_offsets_q=starts, batch_offsets_o=starts, out=out,
                 is_cuda_graph_compatible=True, **arguments)
    assert found is out
    for r, (_, parts) in enumerate(batch.requests):
        close(out[r : r + 1], attention(q[r : r + 1], *parts[1:], scale=0.3)[0])
    # all lengths are the maximum without lengths
    whole = call(q[2:3], *caches, 0.3, WORKSPACE, max_sequence_kv=5, block_tables=table[2:3])
    assert torch.equal(whole, out[2:3])
    for wrong, text in (({"block_tables": None}, "block_tables is None"), ({"batch_offsets_q": starts[1:]}, r"begins \[64, 128"),
                        ({"actual_seq_lens_kv": KV_LENS[1:]}, r"actual_seq_lens_kv has shape \(3,\), expected 4 lengths"),
                        ({"max_sequence_kv": 8}, "lengths 0 to 9, expected 0 to max_sequence_kv = 8"),
                        ({"batch_offsets_k": starts}, "batch_offsets_k = a tensor"), ({"out": out[1:]}, "out has shape")):
        with pytest.raises((tw.Error, tw.Unsupported), match=f"cudnn_batch_decode_with_kv_cache: .*{text}"):
            call(q, *caches, 0.3, WORKSPACE, **{**arguments, **wrong})
    with pytest.raises(tw.Error, match="q has shape"):
        call(q[0], *caches, 0.3, WORKSPACE, **arguments)


def test_invalid_prefill(rng):
    batch = Ragged(rng)
    short = batch.starts[1:] * HEADS * 16
    for wrong, text in (({"batch_offsets_units": "rows"}, "batch_offsets_units = 'rows'"), ({"backend": "fa2"}, "backend = 'fa2'"),
                        ({"actual_seq_lens_q": None}, "actual_seq_lens_q is None"),
                        ({"actual_seq_lens_kv": KV_LENS[1:]}, r"actual_seq_lens_kv has shape \(3,\)"),
                        ({"batch_offsets_q": short}, "batch_offsets_q has 4 offsets, expected batch_size"),
                        ({"batch_offsets_q": batch.starts}, "multiples of 64 elements, or batch_offsets_units = 'tokens'"),
                        ({"batch_offsets_o": (batch.starts + 2) * HEADS * 8}, "rows 2 to 11 of o, which has 9"),
                        ({"max_token_per_sequence": 4}, "lengths 0 to 5, expected 0 to max_token_per_sequence = 4"),
                        ({"max_sequence_kv": 8}, "lengths 0 to 9, expected 0 to max_sequence_kv = 8"),
                        ({"lse": torch.empty(9, HEADS)}, "lse has shape"), ({"out": batch.q}, "out has shape"),
                        ({"block_tables": torch.zeros(4, 3)}, r"k_cache has shape \(18, 2, 16\), expected 4 axes"),
                        ({"o_data_type": torch.float16}, "out_dtype|o_data_type|out = ")):
        with pytest.raises((tw.Error, tw.Unsupported), match=f"cudnn_batch_prefill_with_kv_cache: .*({text})"):
            batch.call(**wrong)
    paged = Ragged(rng, dims=(16, 16))
    (paged.k, paged.v), table = cache(rng, paged)
    offsets = paged.offsets("tokens", "qo")
    for wrong, text in (({"actual_seq_lens_q": LENS + 1}, "actual_seq_lens_q has the bounds"),
                        ({"batch_offsets_o": paged.starts + 1}, "batch_offsets_o has the bounds"),
                        ({"batch_offsets_k": paged.kv_starts}, "batch_offsets_k = a tensor of shape .*, expected None with")):
        with pytest.raises((tw.Error, tw.Unsupported), match=text):
            paged.call(block_tables=table, **{**offsets, **wrong})


def test_wrappers(host, rng):
    batch = Ragged(rng)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", backend="cudnn")
    elements = {"qo_indptr": batch.starts * HEADS * 16, "kv_indptr": batch.kv_starts * KV_HEADS * 16,
                "v_indptr": batch.kv_starts * KV_HEADS * 8, "o_indptr": batch.starts * HEADS * 8}
    options = {"head_dim_vo": 8, "causal": True, "sm_scale": 0.3, "q_data_type": torch.float32, "seq_lens": KV_LENS,
               "seq_lens_q": LENS, "max_token_per_sequence": MOST, "max_sequence_kv": MOST_KV}
    arguments = HEADS, KV_HEADS, 16
    wrapper.plan(elements.pop("qo_indptr"), elements.pop("kv_indptr"), *arguments, **elements, **options)
    o = wrapper.run(batch.q, batch.k, batch.v)
    assert torch.equal(o, batch.call(return_lse=False)[0])
    # keys after the last bound are not read
    spare = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3), value=math.nan) for x in (batch.k, batch.v)]
    assert torch.equal(o, wrapper.run(batch.q, *spare))
    for name in elements:
        with pytest.raises(tw.Error, match=f"{name} has other rows than those of"):
            wrapper.plan(batch.starts * HEADS * 16, batch.kv_starts * KV_HEADS * 16, *arguments,
                         **{**elements, name: elements[name] * 2}, **options)
    with pytest.raises(tw.Error, match=r"qo_indptr = \[0, 3.*, expected multiples of 64 elements"):
        wrapper.plan(batch.starts, batch.kv_starts * KV_HEADS * 16, *arguments, **options)
    paged = Ragged(rng, dims=(16, 16))
    caches, table = cache(rng, paged)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="cudnn")
    pages = -(-KV_LENS // PAGE_SIZE)
    indices = torch.cat([row[:n] for row, n in zip(table, pages)])
    last = torch.where(KV_LENS > 0, (KV_LENS - 1) % PAGE_SIZE + 1, 0).int()
    wrapper.plan(paged.starts * HEADS * 16, bounds(pages), indices, last, *arguments, PAGE_SIZE, causal=True, sm_scale=0.3,
                 q_data_type=torch.float32, block_tables=table)
    o = wrapper.run(paged.q, tuple(caches))
    for rows, parts in paged.requests:
        close(o[rows], attention(*parts, scale=0.3, visible=causal(len(parts[0]), len(parts[1])))[0])
    with pytest.raises(tw.Error, match="kv_layout = 'HND' with backend = 'cudnn', expected 'NHD'"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "HND", backend="cudnn")
    with pytest.raises(tw.Unsupported, match="backend = 'cudnn', expected one of auto, fa2, fa3"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="cudnn")
