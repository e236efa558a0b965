"""A check of quantized groups, draft masks and scales in tensors on a GPU with torch: results, CUDA graphs and times.

    python crates/tilewright-python/tests/card/check_drafts_and_groups.py

It prints one line per check and ends with 1 if one fails. Times are medians of graphs of ten calls, per call.
"""

import pathlib
import statistics
import sys
import traceback

import torch

import tilewright.flashinfer as ours
from tilewright.flashinfer import quantization

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from dense import packed_drafts  # noqa: E402

DEVICE = "cuda:0"
failures: list = []


def check(name):
    """Runs a check at once and notes whether it passes."""

    def run(function):
        try:
            print(f"ok   {name}: {function()}", flush=True)
        except Exception as why:  # noqa: BLE001: a check reports every failure
            traceback.print_exc()
            failures.append(name)
            print(f"FAIL {name}: {type(why).__name__}: {why}", flush=True)

    return run


def microseconds(call, calls=10, replays=30) -> float:
    """The median time of a call in a replayed graph of several."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # stateless calls keep a plan per stream
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def launches(call) -> list:
    """The names of the kernels of a call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def check_quantization():
    """All dtypes, sizes and layouts have the bits of torch; times of rows of 7,168."""
    call, lines = quantization.per_token_group_quant_8bit, []
    tma = {"column_major_scales": True, "scale_tma_aligned": True}
    for source in (torch.float32, torch.float16, torch.bfloat16):
        for rows, width, size in ((1, 7168, 128), (5, 4096, 64), (64, 7168, 128), (333, 1536, 16), (4096, 7168, 128)):
            x = (torch.randn(rows, width, device=DEVICE) * 10.0 ** torch.randint(-3, 4, (rows, 1), device=DEVICE)).to(source)
            x[0, :size] = 0.0
            for options in ({}, tma, {**tma, "scale_ue8m0": True}):
                for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                    found, kernel_sizes = call(x, size, dst_dtype=dtype, **options), quantization._GROUP_SIZES
                    quantization._GROUP_SIZES = ()
                    expected = call(x, size, dst_dtype=dtype, **options)
                    quantization._GROUP_SIZES = kernel_sizes
                    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)), (source, rows, width, options)
                    assert torch.equal(found[1], expected[1]), (source, rows, width, options)
    for rows in (1, 64, 4096):
        x = torch.randn(rows, 7168, device=DEVICE, dtype=torch.bfloat16)
        took, kernel_sizes = microseconds(lambda: call(x, 128, **tma)), quantization._GROUP_SIZES
        quantization._GROUP_SIZES = ()
        by_torch = microseconds(lambda: call(x, 128, **tma))
        quantization._GROUP_SIZES = kernel_sizes
        lines.append(f"{rows} rows {took:.2f} µs, torch {by_torch:.2f}")
    return "; ".join(lines)


def check_product():
    """A product of a bfloat16 input is one launch of this package and those of cuBLAS, into an output as well."""
    names = []
    for m in (1, 4, 64):
        x, weight = torch.randn(m, 7168, device=DEVICE).bfloat16(), torch.randn(4096, 7168, device=DEVICE).to(torch.float8_e4m3fn)
        scale, out = torch.rand(32, 56, device=DEVICE) + 0.5, torch.empty(m, 4096, device=DEVICE, dtype=torch.bfloat16)
        product = ours.gemm.fp8_blockscale_gemm_sm90(x, weight, None, scale)
        assert ours.gemm.fp8_blockscale_gemm_sm90(x, weight, None, scale, out) is out
        assert torch.equal(out, product)
        names.append(launches(lambda: ours.gemm.fp8_blockscale_gemm_sm90(x, weight, None, scale, out)))
    return f"kernels of m = 1, 4 and 64: {[[name[:40] for name in each] for each in names]}"


def check_drafts():
    """Trees of drafts over long contexts, against float32; the times beside those of causal drafts."""
    lines = []
    for requests, rows, kv_len in ((1, 8, 8192), (16, 4, 4096), (64, 8, 2048), (16, 40, 1000)):
        blocks = [(torch.rand(rows, rows) < 0.5).logical_or(torch.eye(rows, dtype=torch.bool)).numpy() for _ in range(requests)]
        mask = torch.from_numpy(packed_drafts(blocks, rows)).to(DEVICE)
        pages = -(-kv_len // 16)
        cache = torch.randn(requests * pages, 2, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
        table = torch.randperm(requests * pages, device=DEVICE).int().view(requests, pages)
        lens = torch.randint(kv_len // 2, kv_len + 1, (requests,), device=DEVICE, dtype=torch.int32)
        q = torch.randn(requests * rows, 32, 128, device=DEVICE, dtype=torch.bfloat16)
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)

        def call(mask=mask, q=q, cache=cache, workspace=workspace, table=table, lens=lens, rows=rows, kv_len=kv_len):
            return ours.xqa_batch_decode_with_kv_cache(q, cache, workspace, table, lens, kv_len, 128**-0.5, mask=mask, q_len_per_req=rows)

        o, worst = call(), 0.0
        for r, count in enumerate(lens.tolist()):
            keys, values = (cache[table[r].long(), i].reshape(-1, 8, 128)[:count].float().repeat_interleave(4, 1) for i in range(2))
            s = torch.einsum("qhd,khd->hqk", q[r * rows : (r + 1) * rows].float(), keys) * 128**-0.5
            s[:, :, count - rows :].masked_fill_(~torch.from_numpy(blocks[r]).to(DEVICE), -torch.inf)
            expected = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
            worst = max(worst, (o[r * rows : (r + 1) * rows].float() - expected).abs().max().item())
        assert worst < 1e-2, worst
        lines.append(f"{requests} x {rows} of {kv_len}: error {worst:.1e}, {microseconds(call):.1f} µs, causal "
                     f"{microseconds(lambda: call(None)):.1f}, {len(launches(call))} launches")
    return "; ".join(lines)


def check_scales():
    """Scales in tensors give the outputs of numbers, in a graph whose replays read other values."""
    table, positions = torch.randn(64, 64, device=DEVICE), torch.arange(5, device=DEVICE)
    parts = [torch.randn(5, heads, dim, device=DEVICE).bfloat16() for dim in (64, 64) for heads in (4, 2)]
    scale, graph = torch.tensor([2.0], device=DEVICE), torch.cuda.CUDAGraph()

    def rotated(scale):
        return ours.rope_quantize_fp8(parts[0], parts[1], parts[2], parts[3], table, positions, quant_scale_q=scale, quant_scale_kv=scale)

    rotated(scale)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = rotated(scale)
    for value in (2.0, 0.25):
        scale.fill_(value)
        graph.replay()
        for one, other in zip(found, rotated(value), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), value
    return "replays have the bits of numbers"


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for one in (check_quantization, check_product, check_drafts, check_scales):
        check(one.__doc__.splitlines()[0])(one)
    sys.exit(bool(failures))
