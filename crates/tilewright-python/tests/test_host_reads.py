"""Values in tensors that ``tilewright.flashinfer`` passes to kernels without reading them on the host."""

import numpy
import pytest
import tilewright as tw
from dense import attention, causal, paged

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402
from tilewright.flashinfer import _items, _planned  # noqa: E402


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
