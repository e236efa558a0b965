"""Norms with RoPE of diffusion transformers, against the definition."""

import numpy
import pytest
import tilewright as tw

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402

PATCHES, CHANNELS, HEADS, DIM = (3, 2, 4), (24, 20, 20), (3, 2, 1), 64
LENGTH = 24
SIZES = dict(zip(("ppf", "pph", "ppw"), PATCHES)) | dict(zip(
    ("num_frame_channels", "num_height_channels", "num_width_channels"), CHANNELS)) | dict(zip(
        ("num_heads_q", "num_heads_k", "num_heads_v"), HEADS)) | {"head_dim": DIM}


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)


def expected_heads(x, weight, is_interleaved, eps=1e-6, yarn=None):
    """Normed and rotated heads of all tokens, in float64."""
    x = x.double()
    if weight is not None:
        x = x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps) * weight.double()
    x = x.view(*x.shape[:-1], -1, DIM)
    out = torch.empty_like(x)
    for token in range(x.shape[-3]):
        place = token % LENGTH
        coordinates = place // 8, place // 4 % 2, place % 4
        at = 0
        for coordinate, channels in zip(coordinates, CHANNELS):
            for i in range(channels // 2):
                frequency = 10000.0 ** (-2 * i / channels)
                if yarn is not None:
                    share = min(max((i - yarn["low"]) / (yarn["high"] - yarn["low"]), 0.0), 1.0)
                    frequency *= share / yarn["factor"] + 1 - share
                cos, sin = numpy.cos(coordinate * frequency), numpy.sin(coordinate * frequency)
                a, b = (2 * at, 2 * at + 1) if is_interleaved else (at, at + DIM // 2)
                first, second = x[..., token, :, a], x[..., token, :, b]
                out[..., token, :, a], out[..., token, :, b] = first * cos - second * sin, second * cos + first * sin
                at += 1
    return out * (yarn["attention_factor"] if yarn else 1.0)


@pytest.fixture
def layer(rng):
    """``qkv`` of two sequences with the weights of queries and keys."""
    weights = [1 + 0.25 * normal(rng, heads * DIM) for heads in HEADS[:2]]
    return normal(rng, 2, LENGTH, sum(HEADS) * DIM), *weights


def parts(qkv):
    return qkv.split([heads * DIM for heads in HEADS], dim=-1)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("is_normed", [True, False])
def test_norms_and_rotation_of_patches(host, layer, is_interleaved, is_normed):
    qkv, *weights = layer
    options = {"interleave": is_interleaved, "is_qk_norm": is_normed, **SIZES}
    found = flashinfer.fused_qk_rmsnorm_rope(*layer, eps=0.5, **options)
    for x, weight, got, heads in zip(parts(qkv), weights, found, HEADS):
        assert got.shape == (2, LENGTH, heads, DIM)
        expected = expected_heads(x, weight if is_normed else None, is_interleaved, eps=0.5)
        torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[2].flatten(2), parts(qkv)[2])
    outputs = [torch.empty(2 * LENGTH, heads, DIM, dtype=torch.bfloat16) for heads in HEADS]
    flat = flashinfer.norm.fused_qk_rmsnorm_rope(qkv.flatten(0, 1), *weights, eps=0.5, q_out=outputs[0], k_out=outputs[1],
                                                 v_out=outputs[2], **options)
    for got, out, batched in zip(flat, outputs, found):
        assert got is out and torch.equal(out, batched.flatten(0, 1))


def test_yarn_and_8_bits(host, layer):
    qkv, *weights = layer
    yarn = {"factor": 4.0, "low": 1.0, "high": 6.0, "attention_factor": 1.25}
    found = flashinfer.diffusion_ops.fused_qk_rmsnorm_rope(*layer, **yarn, **SIZES)
    for x, weight, got in zip(parts(qkv), weights, found):
        torch.testing.assert_close(got.double(), expected_heads(x, weight, True, yarn=yarn), rtol=2e-2, atol=4e-2)
    narrow = flashinfer.fused_qk_rmsnorm_rope(*layer, output_fp8=True, output_quant_scale=2.0, v_quant_scale=512.0, **yarn, **SIZES)
    for wide, got, scale in zip(found, narrow, (2.0, 2.0, 512.0)):
        assert got.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(got.float(), (wide.float() * scale).clamp(-448, 448), rtol=0.08, atol=0.02)
    assert (narrow[2].float().abs() == 448).any()  # saturated


def test_invalid_layers(layer):
    qkv, q_weight, k_weight = layer
    for wrong, text in (({"head_dim": 96}, "head_dim = 96"), ({"ppw": 3}, r"sequences of ppf \* pph \* ppw = 18 tokens"),
                        ({"ppw": 0}, r"ppf, pph, ppw = \(3, 2, 0\)"), ({"num_width_channels": 18}, r"\(24, 20, 18\), expected even"),
                        ({"num_heads_v": 2}, "expected rows of 7 heads of 64"), ({"attention_factor": 2.0}, "attention_factor = 2.0"),
                        ({"output_quant_scale": 0.0}, "output_quant_scale = 0.0"),
                        ({"q_out": torch.empty(2, 3)}, r"q_out has shape \(2, 3\)"),
                        ({"v_out": torch.empty(2, LENGTH, 1, DIM)}, "v_out is torch.float32")):
        with pytest.raises(tw.Error, match=f"fused_qk_rmsnorm_rope: .*{text}"):
            flashinfer.fused_qk_rmsnorm_rope(qkv, q_weight, k_weight, **{**SIZES, **wrong})
    with pytest.raises(tw.Error, match="q_weight is torch.bfloat16 of shape"):
        flashinfer.fused_qk_rmsnorm_rope(qkv, k_weight, k_weight, **SIZES)
    with pytest.raises(tw.Error, match="qkv is torch.float32"):
        flashinfer.fused_qk_rmsnorm_rope(qkv.float(), q_weight, k_weight, **SIZES)
