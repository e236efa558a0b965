"""Quantization to 8 bits with a scale per group, against the definition."""

import numpy
import pytest
import tilewright as tw

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


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("group_size", [16, 64, 128, 256])
def test_the_kernel_gives_the_bits_of_torch(host, rng, source, dtype, group_size, monkeypatch):
    x = torch.from_numpy(rng.standard_normal((3, 5, 256)) * 10.0 ** rng.integers(-6, 4, (3, 5, 1))).to(source)
    x[0, 0, :16], x[0, 1, 3], x[0, 1, 4:16] = 0.0, -448.0, 17.0  # 17 and 34 are between two numbers
    arguments = x.view(15, 256), group_size, 1e-10, dtype
    for options in ({}, {"column_major_scales": True}, {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": True}):
        found = flashinfer.quantization.per_token_group_quant_8bit(*arguments, **options)
        with monkeypatch.context() as patch:
            patch.setattr(flashinfer.quantization, "_GROUP_SIZES", ())
            expected = flashinfer.quantization.per_token_group_quant_8bit(*arguments, **options)
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1]) and found[1].stride() == expected[1].stride()
    cube = flashinfer.quantization.per_token_group_quant_8bit(x, *arguments[1:])
    assert cube[0].shape == x.shape and cube[1].shape == (3, 5, 256 // group_size)
    plain = flashinfer.quantization.per_token_group_quant_8bit(*arguments)
    assert all(torch.equal(one.float().flatten(), other.float().flatten()) for one, other in zip(cube, plain))


def test_the_kernel_replaces_the_launches_of_torch(rng):
    from test_host_reads import Launches

    for options, count in (({}, 0), ({"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": True}, 0),
                           ({"group_size": 12}, 5)):
        launches, x = Launches(), normal(rng, 4, 384)
        with launches:
            flashinfer.quantization.per_token_group_quant_8bit(x, **{"group_size": 128, **options})
        assert (launches.count == 0) == (count == 0) and launches.count >= count


def test_rows_after_those_of_the_input_are_zeros(host, rng):
    x = normal(rng, 3, 256)
    out, scales = torch.full((4, 256), 3.0).to(torch.float8_e4m3fn), torch.full((2, 4), -1.0).t()
    found = tw.quantize_groups(x, out=out, scales=scales, eps=1e-30)
    assert found[0] is out and found[1] is scales
    alone = tw.quantize_groups(x, eps=1e-30)
    assert alone[0].dtype == torch.float8_e4m3fn and alone[1].shape == (3, 2)
    assert torch.equal(out[:3].float(), alone[0].float()) and torch.equal(scales[:3], alone[1])
    assert not out[3].float().any() and torch.equal(scales[3], torch.full((2,), 1e-30) / 448)
    powers = tw.quantize_groups(x, 64, power_of_two=True, dtype=torch.float8_e5m2)
    assert powers[0].dtype == torch.float8_e5m2 and (torch.frexp(powers[1])[0] == 0.5).all()
    for wrong, text in (({"group_size": 48}, "group_size = 48, expected one of"), ({"scales": scales[:3]}, "scales has shape"),
                        ({"out": out[:2]}, r"out has shape \[2, 256\], expected \[rows or more, width\]"), ({"eps": 0.0}, "eps = 0"),
                        ({"x": x.t()}, "x has stride"), ({"scales": x.view(torch.float32)}, "scales")):
        with pytest.raises(tw.Error, match=text):
            tw.quantize_groups(**{"x": x, "group_size": 128, "out": out, "scales": scales, **wrong})


class Bytes:
    """Bytes of NumPy as a tensor of a dtype that NumPy lacks."""

    def __init__(self, values, name):
        self.values, self.dtype = values, type("Dtype", (), {"name": name})
        self.__array_interface__ = {**values.__array_interface__, "typestr": "|V1"}
        self.shape = values.shape


def test_groups_of_numpy_arrays(host, rng):
    x = rng.standard_normal((4, 128)).astype("float32")
    out = Bytes(numpy.zeros((4, 128), "uint8"), "float8_e4m3fn")
    _, scales = tw.quantize_groups(x, 32, out=out)
    expected = tw.quantize_groups(torch.from_numpy(x), 32)
    assert isinstance(scales, numpy.ndarray) and (scales == expected[1].numpy()).all()
    assert (out.values == expected[0].view(torch.uint8).numpy()).all()
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(tw.Unsupported, match="out = None of float8_e4m3fn, which NumPy lacks, expected out or the package ml_dtypes"):
            tw.quantize_groups(x, 32)
    else:
        found, _ = tw.quantize_groups(x, 32)
        assert found.dtype == ml_dtypes.float8_e4m3fn and (found.view("uint8") == out.values).all()
