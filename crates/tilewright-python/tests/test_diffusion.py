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


ROWS, HIDDEN = 5, 48
NORMS = {name: getattr(flashinfer, f"fused_dit_{name}") for name in (
    "gate_residual_layernorm_gamma_beta", "gate_residual_layernorm_scale_shift", "residual_layernorm_scale_shift")}


@pytest.fixture
def block(rng):
    """The tensors of a transformer block by name; gate, scale and shift are parts of one tensor."""
    input, residual = normal(rng, 2, ROWS, HIDDEN), normal(rng, 2, ROWS, HIDDEN)
    modulation = dict(zip(("gate", "scale", "shift"), normal(rng, 2, ROWS, 6, HIDDEN).unbind(2)))
    vectors = {name: torch.from_numpy(rng.standard_normal(HIDDEN)).float() for name in (
        "gamma", "beta", "gate_bias", "scale_bias", "shift_bias")}
    return {"input": input, "residual": residual, **modulation, **vectors}


def arguments_of(name, block):
    """Those of a function: all but gates without ``gate``, and weights of the norm or of rows."""
    unused = ("scale", "shift") if name.endswith("gamma_beta") else ("gamma", "beta")
    unused += () if name.startswith("gate") else ("gate",)
    return {key: value for key, value in block.items() if not key.startswith(unused)}


def expected_norm(found, name, factor=1.0):
    """``x`` and its norm in float64; what is missing is 0."""
    x = {key: value.double() for key, value in found.items()}
    gate = x["gate"] + x.get("gate_bias", 0.0) if "gate" in x else 1.0
    total = x.get("residual", 0.0) + factor * x["input"] * gate
    centered = total - total.mean(-1, keepdim=True)
    norm = centered / ((centered**2).mean(-1, keepdim=True) + 1e-3).sqrt()
    if name.endswith("gamma_beta"):
        return total, norm * x["gamma"] + x["beta"]
    return total, norm * (1 + x["scale"] + x.get("scale_bias", 0.0)) + x["shift"] + x.get("shift_bias", 0.0)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("missing", [(), ("gate_bias", "shift_bias"), ("scale_bias", "residual")])
def test_norms_of_modulated_rows(block, name, missing, no_host_reads):
    found = arguments_of(name, block)
    for key in missing:
        if key != "residual" or not name.startswith("gate"):
            found.pop(key, None)
    given = dict(found)
    for key in ("gate", "scale"):
        if key in found:
            given[key] = found[key].flatten(0, 1)  # rows of all requests
    if "scale_bias" in found:
        given["scale_bias"] = found["scale_bias"][None]
    for factor, outputs in ((None, None), (0.5, None), (0.5, [torch.empty_like(block["input"]) for _ in range(2)])):
        options = {} if factor is None else {"input_global_scaling_factor": torch.tensor([factor])}
        if outputs is not None:
            options |= {"residual_out": outputs[0], "norm_out": outputs[1]}
        results = NORMS[name](**given, epsilon=1e-3, **options)
        assert outputs is None or all(a is b for a, b in zip(results, outputs))
        for result, wide in zip(results, expected_norm(found, name, factor or 1.0)):
            assert result.dtype == torch.bfloat16
            torch.testing.assert_close(result.double(), wide, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("change, text", [
    ({"input": torch.zeros(4, 48)}, r"input is torch.float32 of shape \(4, 48\), expected bfloat16 \[batch, rows, hidden\]"),
    ({"input": torch.zeros(2, 5, 48)}, r"input is torch.float32 of shape \(2, 5, 48\)"),
    ({"residual": torch.zeros(2, 5, 48)}, r"residual is torch.float32 of shape \(2, 5, 48\), expected bfloat16 \(2, 5, 48\)"),
    ({"gate": torch.zeros(2, 1, 48).bfloat16()}, r"gate is torch.bfloat16 of shape \(2, 1, 48\), expected bfloat16 \(2, 5, 48\)"),
    ({"shift": torch.zeros(2, 5, 32).bfloat16()}, r"shift is torch.bfloat16 of shape \(2, 5, 32\)"),
    ({"gamma": torch.zeros(48).bfloat16()}, r"gamma is torch.bfloat16 of shape \(48,\), expected float32 \[48\]"),
    ({"scale_bias": torch.zeros(2, 48)}, r"scale_bias is torch.float32 of shape \(2, 48\), expected float32 \[48\]"),
    ({"input_global_scaling_factor": torch.ones(2)}, r"input_global_scaling_factor is torch.float32 of shape \(2,\), expected float32 \[1\]"),
    ({"norm_out": torch.zeros(2, 5, 48)}, "norm_out is torch.float32, expected torch.bfloat16"),
    ({"residual_out": torch.zeros(2, 5, 32).bfloat16()}, r"residual_out has shape \(2, 5, 32\), expected \(2, 5, 48\)"),
    ({"use_nvfp4": True}, "use_nvfp4 = True, expected None"),
    ({"use_mxfp8": True}, "use_mxfp8 = True, expected None"),
    ({"sf_out": torch.zeros(1)}, "sf_out = a tensor"),
    ({"global_scaling_factor": torch.ones(1)}, "global_scaling_factor = a tensor"),
])
def test_arguments_of_norms_of_modulated_rows(block, change, text):
    (key,) = change
    for name, call in NORMS.items():
        found = arguments_of(name, block)
        if key in found or key not in block:
            with pytest.raises((tw.Error, tw.Unsupported), match=f"flashinfer.fused_dit_{name}: {text}"):
                call(**{**found, **change})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_activated_norms(rng, dtype, no_host_reads):
    x, weight = normal(rng, 6, 48), 1 + normal(rng, 48)
    weight[0], x[0, 0] = 1e4, 10.0  # saturates
    out = None if dtype is None else torch.empty(6, 48, dtype=dtype)
    result = flashinfer.fused_rmsnorm_silu(x, weight, 1e-3, out)
    assert result is out or dtype is None
    wide = x.double() / ((x.double() ** 2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    wide = wide / (1 + (-wide).exp())
    assert result.dtype == (dtype or torch.bfloat16)
    if dtype == torch.float8_e4m3fn:
        torch.testing.assert_close(result.double(), wide.clamp(-448.0, 448.0), rtol=2.0**-4, atol=2.0**-10)
    else:
        torch.testing.assert_close(result.double(), wide, rtol=2.0**-8, atol=1e-5)
    for change, text in (({"input": x.float()}, r"input is torch.float32 of shape \(6, 48\), expected bfloat16 \[rows, hidden\]"),
                         ({"weight": weight[:32]}, r"weight is torch.bfloat16 of shape \(32,\), expected bfloat16 \[48\]"),
                         ({"weight": weight.float()}, r"weight is torch.float32 of shape \(48,\)"),
                         ({"out": torch.empty(6, 48)}, "out.dtype = torch.float32, expected one of torch.bfloat16"),
                         ({"out": torch.empty(6, 32, dtype=torch.bfloat16)}, r"out has shape \(6, 32\), expected \(6, 48\)"),
                         ({"block_scale": x}, "block_scale = a tensor of shape")):
        with pytest.raises((tw.Error, tw.Unsupported), match=f"flashinfer.fused_rmsnorm_silu: {text}"):
            flashinfer.fused_rmsnorm_silu(**{"input": x, "weight": weight, **change})
