"""Values in tensors that ``tilewright.flashinfer`` passes to kernels without reading them on the host."""

import numpy
import pytest
import tilewright as tw
from dense import attention, causal, paged

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402
from tilewright.flashinfer import _items  # noqa: E402


def close(actual, expected, tolerance=2e-5):
    numpy.testing.assert_allclose(actual.float().numpy(), expected, rtol=tolerance, atol=tolerance)


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
