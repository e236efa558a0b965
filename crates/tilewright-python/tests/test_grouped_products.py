"""Products of experts of 8 bits, against the definition."""

import pytest
import tilewright as tw

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_experts_of_8_bits(rng, dtype, alpha):
    a, b = torch.from_numpy(rng.standard_normal((7, 32))), torch.from_numpy(rng.standard_normal((3, 5, 32)))
    a, b = a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn)
    bounds = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    factor = None if alpha is None else torch.tensor([alpha])
    out = torch.empty(7, 5, dtype=dtype)
    assert flashinfer.grouped_mm.grouped_mm_fp8(a, b, bounds, factor, out) is out
    for expert, rows in ((0, slice(0, 4)), (2, slice(4, 7))):
        expected = a[rows].double() @ b[expert].double().t() * (alpha or 1.0)
        torch.testing.assert_close(out[rows].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(out, flashinfer.grouped_mm_fp8(a, b, bounds, factor, out_dtype=dtype))
    for wrong, text in (({"a": a.half()}, "a is torch.float16"), ({"b": b[..., :16]}, r"b is .* shape \(3, 5, 16\).* k = 32"),
                        ({"m_indptr": bounds[1:]}, r"m_indptr is torch.int32 \[4, 4, 7\]"), ({"m_indptr": bounds.long()}, "m_indptr is"),
                        ({"m_indptr": bounds.flip(0)}, "m_indptr is"), ({"alpha": torch.ones(2)}, "alpha has shape"),
                        ({"out": out[1:]}, "out has shape"), ({"out_dtype": torch.int8}, "out_dtype = torch.int8"),
                        ({"backend": "cutlass"}, "backend = 'cutlass'")):
        with pytest.raises(tw.Error, match=f"grouped_mm_fp8: .*{text}"):
            flashinfer.grouped_mm_fp8(**{"a": a, "b": b, "m_indptr": bounds, **wrong})
