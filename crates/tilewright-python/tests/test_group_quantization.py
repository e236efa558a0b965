"""Quantization to 8 bits with a scale per group, against the definition."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype, most", [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.int8, 127.0)])
@pytest.mark.parametrize("column_major", [False, True])
def test_groups_of_8_bits(rng, dtype, most, column_major):
    x = normal(rng, 5, 48)
    x[2, 12:24] = 0.0
    quantized, scales = flashinfer.quantization.per_token_group_quant_8bit(x, 12, 1e-4, dtype, column_major)
    groups = x.double().view(5, 4, 12)
    expected = groups.abs().amax(-1).clamp(min=1e-4) / most
    torch.testing.assert_close(scales.double(), expected, rtol=1e-6, atol=0)
    assert quantized.dtype == dtype and scales.stride() == ((1, 5) if column_major else (4, 1))
    steps = {torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8, torch.int8: 0}[dtype]
    error = (quantized.double().view(5, 4, 12) - groups / expected[..., None]).abs()
    assert (error <= steps * (groups / expected[..., None]).abs() + (0.5001 if dtype == torch.int8 else 2e-3)).all()
    # the largest magnitude of a group is the largest number of the dtype
    assert (quantized.double().view(5, 4, 12).abs().amax(-1)[expected > 2e-4 / most] >= most - 1).all()


def test_scales_of_groups_for_tma(rng):
    x = 8 * normal(rng, 6, 32)
    x[0, :16], x[0, 0], x[1, :16] = 0.0, 448.0, 0.0
    call = flashinfer.quantization.per_token_group_quant_8bit
    exact = call(x, 16)[1]
    _, aligned = call(x, 16, column_major_scales=True, scale_tma_aligned=True)
    assert aligned.shape == (6, 2) and aligned.stride() == (1, 8) and torch.equal(aligned, exact)
    quantized, powers = call(x, 16, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True)
    assert powers[0, 0] == 1.0 and (torch.frexp(powers)[0] == 0.5).all()
    assert ((exact <= powers) & (powers < 2 * exact)).all()
    error = (quantized.float() * powers.repeat_interleave(16, 1) - x.float()).abs()
    assert (error <= x.float().abs() / 16 + powers.repeat_interleave(16, 1) * 2**-9).all()
    for wrong, text in (({"group_size": 5}, "expected contiguous rows of groups of group_size = 5"), ({"eps": 0.0}, "eps = 0.0"),
                        ({"dst_dtype": torch.uint8}, "dst_dtype = torch.uint8"), ({"backend": "cuda"}, "backend = 'cuda'"),
                        ({"scale_ue8m0": True}, "scale_ue8m0 = True without column_major_scales"),
                        ({"x": x.t()}, r"strides \(1, 32\)"),
                        ({"x": x.view(1, 6, 32), "column_major_scales": True}, "with column_major_scales, expected two axes")):
        with pytest.raises(ValueError, match=f"per_token_group_quant_8bit: .*{text}"):
            call(**{"x": x, "group_size": 16, **wrong})
