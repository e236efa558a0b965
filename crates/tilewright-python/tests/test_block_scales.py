"""Products of operands of 8 bits with a scale per block of 128, against the definition."""

import numpy
import pytest
import tilewright as tw

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402

call = flashinfer.gemm.fp8_blockscale_gemm_sm90
E4M3 = torch.float8_e4m3fn


def operand(rng, rows, dtype, k=256):
    return torch.from_numpy(rng.standard_normal((rows, k))).to(dtype)


def scales(rng, *shape):
    """Powers of two, by which a product with 8 bits is exact in bfloat16."""
    return torch.from_numpy(2.0 ** rng.integers(-3, 4, shape)).float()


def expected(a, b, a_scale=None, b_scale=None):
    """The product in float64; scales are those of each row and block of 128 columns."""
    a, b = (x.double().numpy().copy() for x in (a, b))
    for x, scale in ((a, a_scale), (b, b_scale)):
        if scale is not None:
            x *= numpy.repeat(scale.double().numpy(), 128, axis=1)
    return torch.from_numpy(a @ b.T)


def close(found, product, dtype=torch.bfloat16):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), product, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("m", [1, 2, 5])  # with 2 blocks, scales of 2 rows are square
@pytest.mark.parametrize("n", [64, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_of_8_bits(rng, m, n, dtype, no_host_reads):
    a, b, a_scale, b_scale = operand(rng, m, E4M3), operand(rng, n, E4M3), scales(rng, m, 2), scales(rng, n, 2)
    product, columns = expected(a, b, a_scale, b_scale), a_scale.t().contiguous()
    padded = torch.empty(2, 8)
    padded[:, :m] = columns
    for given in (columns, columns.t(), padded[:, :m], padded[:, :m].t()):
        close(call(a, b, given, b_scale, out_dtype=dtype), product, dtype)
    out = torch.empty(m, n, dtype=dtype)
    assert call(a, b, columns, b_scale, out) is out
    close(out, product, dtype)
    blocks = scales(rng, -(-n // 128), 2)
    product = expected(a, b, a_scale, torch.from_numpy(numpy.repeat(blocks.numpy(), 128, axis=0)[:n]))
    close(call(a, b, columns, blocks, out_dtype=dtype), product, dtype)


def test_inputs_of_16_bits_are_not_quantized(rng, no_host_reads):
    a, b, scale = operand(rng, 3, torch.bfloat16), operand(rng, 64, torch.bfloat16), scales(rng, 1, 2)
    close(call(a, b), expected(a, b))
    close(call(a, b.to(E4M3), None, scale), expected(a, b.to(E4M3), None, scale.expand(64, 2)))


def test_dequantized_weights_are_rounded_once(rng):
    """Scales that are no powers of two, in rows of a larger tensor."""
    a, b, scale = operand(rng, 3, torch.bfloat16), operand(rng, 64, E4M3), torch.from_numpy(rng.random((64, 3))).float()[:, 1:]
    rounded = (b.double() * scale.double().repeat_interleave(128, 1)).bfloat16()
    close(call(a, b, None, scale), expected(a, rounded))


@pytest.mark.parametrize("change, text", [
    ({"input": torch.zeros(4, 256, dtype=torch.half)}, r"input is torch.float16 of shape \(4, 256\), expected FP8 .* or BF16 .*\[m, k\]"),
    ({"weight": torch.zeros(2, 64, 256, dtype=E4M3)}, r"weight is torch.float8_e4m3fn of shape \(2, 64, 256\), .* of shape \[n, k\]"),
    ({"weight": torch.zeros(64, 256, dtype=torch.bfloat16)}, "FP8 input with BF16 weight is not supported, expected weight of"),
    ({"input": torch.zeros(4, 192).to(E4M3)}, "input has k = 192, expected k divisible by block size 128"),
    ({"weight": torch.zeros(64, 128).to(E4M3)}, r"weight has shape \(64, 128\) on cpu, expected \[n, 256\] on cpu with n divisible by 64"),
    ({"weight": torch.zeros(96, 256).to(E4M3)}, r"weight has shape \(96, 256\) on cpu, expected \[n, 256\]"),
    ({"input": torch.zeros(4, 256).bfloat16()}, r"input_scale should not be provided for BF16 input, it has shape \(2, 4\), expected None"),
    ({"input_scale": None}, "input_scale is required when input is FP8, it is None, expected a tensor"),
    ({"weight_scale": None}, "weight_scale is required when weight is FP8, it is None, expected a tensor"),
    ({"weight_scale": torch.ones(64, 2).double()}, "weight_scale is torch.float64 on cpu, expected torch.float32 on cpu"),
    ({"input_scale": torch.ones(4, 2)}, r"input_scale has shape \(4, 2\) and strides \(2, 1\), expected \(2, 4\), or \(4, 2\) with"),
    ({"weight_scale": torch.ones(2, 64)}, r"weight_scale has shape \(2, 64\), expected \(64, 2\) or \(1, 2\)"),
    ({"out": torch.empty(4, 63, dtype=torch.bfloat16)}, r"out has shape \(4, 63\), expected \(4, 64\)"),
    ({"out": torch.empty(4, 64, dtype=torch.half), "out_dtype": torch.bfloat16}, "out is torch.float16, expected torch.bfloat16"),
    ({"out_dtype": torch.float32}, "out_dtype = torch.float32, expected one of torch.bfloat16, torch.float16"),
])
def test_arguments(change, text):
    arguments = {"input": torch.zeros(4, 256).to(E4M3), "weight": torch.zeros(64, 256).to(E4M3), "input_scale": torch.ones(2, 4),
                 "weight_scale": torch.ones(64, 2)}
    call(**arguments)
    with pytest.raises(tw.Error, match=f"flashinfer.fp8_blockscale_gemm_sm90: {text}"):
        call(**{**arguments, **change})
