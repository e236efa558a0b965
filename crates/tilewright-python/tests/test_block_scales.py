"""Products of operands of 8 bits with a scale per block of 128, against the definition."""

import numpy
import pytest
import tilewright as tw

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
import tilewright.flashinfer as flashinfer  # noqa: E402

gemm = flashinfer.gemm
call = gemm.fp8_blockscale_gemm_sm90
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


class ScaledMm:
    """``torch.nn.functional.scaled_mm`` with scales per block on the CPU. It requires the layouts that the GPU requires."""

    def __init__(self):
        self.operands, self.outputs = [], 0

    def __call__(self, a, b, a_scale, a_recipe, b_scale, b_recipe, *, output_dtype):
        recipes = torch.nn.functional.ScalingType
        assert (a_recipe, b_recipe) == (recipes.BlockWise1x128, recipes.BlockWise128x128)
        (m, k), n = a.shape, b.shape[1]
        blocks, padded = k // 128, -(-k // 512) * 4
        assert m % 4 == 0 and k % 128 == 0 and n % 16 == 0 and b.shape[0] == k
        assert a.dtype == b.dtype == E4M3 and a_scale.dtype == b_scale.dtype == torch.float32
        assert a.stride() == (k, 1) and b.stride() == (1, k)
        for scale, shape in ((a_scale, (m, blocks)), (b_scale, (padded, -(-n // 128)))):
            assert scale.shape == shape and scale.stride() in ((1, shape[0]), *([(1, 1)] if shape[1] == 1 else []))
        assert all(x.data_ptr() % 16 == 0 for x in (a, b, a_scale, b_scale))
        self.operands.append((a, b, a_scale, b_scale))
        column_scales = b_scale[:blocks].t().repeat_interleave(128, 0)[:n]
        return expected(a, b.t(), a_scale, column_scales).to(output_dtype)

    def into(self, a, b, a_scales, a_recipes, a_swizzles, b_scales, b_recipes, b_swizzles, bias, dtype, *, out):
        """The operator that ``scaled_mm`` calls, with an output."""
        recipes = torch.nn.functional.ScalingType
        assert (a_recipes, b_recipes) == ([recipes.BlockWise1x128.value], [recipes.BlockWise128x128.value])
        assert (a_swizzles, b_swizzles, bias, dtype) == ([], [], None, out.dtype) and out.is_contiguous()
        product = self(a, b, *a_scales, recipes.BlockWise1x128, *b_scales, recipes.BlockWise128x128, output_dtype=dtype)
        self.outputs += 1
        return out.copy_(product)


@pytest.fixture
def scaled_mm(monkeypatch):
    """Makes the package multiply in 8 bits on the CPU."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip("torch has no scaled_mm")
    stand_in = ScaledMm()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
    monkeypatch.setattr(gemm, "_scaled_mm_out", stand_in.into)
    monkeypatch.setattr(gemm, "_has_blockwise_scaled_mm", lambda device: True)
    return stand_in


def row_scales(blocks, n):
    """Scales of each row of a weight with scales per block of 128 rows."""
    return blocks.repeat_interleave(128, 0)[:n]


def misaligned(x):
    """A copy of a matrix that begins one element after a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("m", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n, k", [(64, 128), (192, 256), (128, 512), (320, 640)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_8_bits(rng, scaled_mm, m, n, k, dtype, no_host_reads):
    a, b = operand(rng, m, E4M3, k), operand(rng, n, E4M3, k)
    a_scale, b_scale = scales(rng, m, k // 128), scales(rng, -(-n // 128), k // 128)
    product, columns = expected(a, b, a_scale, row_scales(b_scale, n)), a_scale.t().contiguous()
    padded = torch.full((k // 128, 8), torch.nan)
    padded[:, :m] = columns
    wide = torch.full((len(b_scale), k // 128 + 3), torch.nan)
    wide[:, : k // 128] = b_scale
    for given in (columns, columns.t(), padded[:, :m], padded[:, :m].t(), misaligned(columns)):
        close(call(a, b, given, b_scale, out_dtype=dtype), product, dtype)
    for given in (wide[:, : k // 128], misaligned(b_scale)):
        close(call(a, b, columns, given, out_dtype=dtype), product, dtype)
    close(call(misaligned(a), misaligned(b), columns, b_scale, out_dtype=dtype), product, dtype)
    close(call(a.t().contiguous().t(), b.t().contiguous().t(), columns, b_scale, out_dtype=dtype), product, dtype)
    for out in (torch.empty(n, m, dtype=dtype).t(), torch.empty(m, n, dtype=dtype)):
        assert call(a, b, columns, b_scale, out) is out
        close(out, product, dtype)
    # cuBLAS writes to an output of all rows of its operands
    assert len(scaled_mm.operands) == 11 and scaled_mm.outputs == (m % 4 == 0)
    for rows, _, of_rows, of_columns in scaled_mm.operands:
        assert (rows[m:].float() == 0).all() and (of_rows[m:] == 1).all() and of_columns.isfinite().all()


@pytest.mark.parametrize("m", [1, 4, 6])
def test_inputs_of_16_bits_are_quantized_for_products_in_8_bits(rng, scaled_mm, m, no_host_reads):
    n, k = 192, 384
    magnitudes = torch.from_numpy(numpy.repeat(10.0 ** rng.integers(-12, 4, (m, k // 128)), 128, axis=1))
    a = (operand(rng, m, torch.float64, k) * magnitudes).bfloat16()
    a[0, :128] = 0
    b, b_scale = operand(rng, n, E4M3, k), scales(rng, 2, k // 128)
    for given in (a, a.t().contiguous().t(), misaligned(a)):
        found = call(given, b, None, b_scale)
        rows, _, of_rows, _ = scaled_mm.operands[-1]
        maxima = a.double().unflatten(1, (-1, 128)).abs().amax(-1)
        torch.testing.assert_close(of_rows[:m].double(), maxima.clamp(min=1e-30) / 448, rtol=1e-6, atol=0)
        assert (rows[m:].float() == 0).all() and of_rows.isfinite().all() and (of_rows > 0).all()
        # half a unit in the last of 3 bits, or of the subnormal numbers
        steps = of_rows[:m].double().repeat_interleave(128, 1)
        error = (rows[:m].double() * steps - a.double()).abs()
        assert (error <= torch.maximum(a.double().abs() * 2.0**-4, steps * 2.0**-10) * (1 + 1e-6)).all()
        close(found, expected(rows[:m], b, of_rows[:m], row_scales(b_scale, n)))
    assert len(scaled_mm.operands) == 3


def test_other_operands_are_dequantized(rng, scaled_mm):
    a, b = operand(rng, 3, torch.bfloat16), operand(rng, 64, torch.bfloat16)
    close(call(a, b), expected(a, b))
    a_scale, b_scale = scales(rng, 3, 2), scales(rng, 64, 2)
    close(call(a, b.to(E4M3), None, b_scale), expected(a, b.to(E4M3), None, b_scale))
    close(call(a.to(E4M3), b.to(E4M3), a_scale.t(), b_scale), expected(a.to(E4M3), b.to(E4M3), a_scale, b_scale))
    empty = call(a[:0], b.to(E4M3), None, scales(rng, 1, 2))
    assert empty.shape == (0, 64) and empty.dtype == torch.bfloat16
    assert not scaled_mm.operands


@pytest.mark.parametrize("device, cuda, capability, usable", [
    ("cuda:0", "12.9", (9, 0), True), ("cuda:0", "13.0", (9, 0), True), ("cuda:0", "12.8", (9, 0), False),
    ("cuda:0", "12.10", (9, 0), True), ("cuda:0", None, (9, 0), False), ("cuda:0", "13.0", (10, 0), False),
    ("cuda:0", "13.0", (8, 9), False), ("cpu", "13.0", (9, 0), False),
])
def test_where_products_are_in_8_bits(monkeypatch, device, cuda, capability, usable):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", None, raising=False)
    find = gemm._has_blockwise_scaled_mm.__wrapped__
    assert find(torch.device(device)) is usable
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert find(torch.device(device)) is False


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
