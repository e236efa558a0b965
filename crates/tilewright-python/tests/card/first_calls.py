"""First calls of common operators on a GPU with torch: seconds with the bundle of the wheel, from the cache, and compiled by the driver.

    python crates/tilewright-python/tests/card/first_calls.py [--json FILE] [OPERATOR ...]

Each call is made in a process of its own, which has opened the device and has called another operator. The caches of the package and of
the driver are empty. It ends with 1 if an installed bundle lacks a kernel, or if the first call of attention from it takes over 50 ms.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

#: The maximum time of a first call of attention from a bundle, in milliseconds: 15 for each of the three kernels of a plan, and the call.
LIMIT = 50.0
REQUESTS, HEADS, KV_HEADS, PAGE = 64, 32, 8, 16


def tensor(*shape, dtype="bfloat16"):
    import torch

    values = torch.randn(*shape, device="cuda")
    return values.to(getattr(torch, dtype))


def attention(dim=128, kv_dtype="bfloat16", rows=1):
    """The plan and the run of decode steps, or of prompts of ``rows`` rows."""
    import tilewright as tw
    import torch

    requests = REQUESTS if rows == 1 else 2
    pages = torch.arange(requests * 8, dtype=torch.int32, device="cuda")
    table = tw.PageTable([8 * i for i in range(requests + 1)], pages, [PAGE] * requests, PAGE)
    cache = [tensor(len(pages), PAGE, KV_HEADS, dim).to(getattr(torch, kv_dtype)) for _ in range(2)]
    q = tensor(requests * rows, HEADS, dim)

    def call():
        problem = tw.Problem(HEADS, KV_HEADS, dim, dtype="bfloat16", kv_dtype=kv_dtype)
        operator = tw.Attention(problem, device=tw._device.device_of(q))
        return operator.run(operator.plan(tw.Batch.paged([rows * i for i in range(requests + 1)], table)), q, *cache)

    return call


def device_plan():
    """A decode step whose lengths are on the GPU."""
    import tilewright as tw
    import torch

    tables = torch.arange(REQUESTS * 8, dtype=torch.int32, device="cuda").view(REQUESTS, 8)
    lens = torch.full((REQUESTS,), 100, dtype=torch.int32, device="cuda")
    cache, q = [tensor(REQUESTS * 8, PAGE, KV_HEADS, 128) for _ in range(2)], tensor(REQUESTS, HEADS, 128)

    def call():
        operator = tw.Attention(tw.Problem(HEADS, KV_HEADS, 128, dtype="bfloat16"), device=tw._device.device_of(q))
        return operator.run(operator.plan(tw.DeviceBatch(1, tw.BlockTable(tables, lens, PAGE))), q, *cache)

    return call


def latent():
    """MLA of 16 heads, as a tensor-parallel rank of DeepSeek."""
    import tilewright.flashinfer as ours
    import torch

    wrapper = ours.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
    bounds, pages = torch.arange(REQUESTS + 1).int(), torch.arange(REQUESTS * 8, device="cuda").int()
    queries = tensor(REQUESTS, 16, 512), tensor(REQUESTS, 16, 64)
    caches = tensor(REQUESTS * 8, PAGE, 512), tensor(REQUESTS * 8, PAGE, 64)

    def call():
        lens = torch.full((REQUESTS,), 8 * PAGE).int()
        wrapper.plan(bounds, bounds * 8, pages, lens, 16, 512, 64, PAGE, True, 0.1, torch.bfloat16, torch.bfloat16)
        return wrapper.run(*queries, *caches)

    return call


def append(kv_dtype="bfloat16"):
    import tilewright as tw
    import torch

    new = [tensor(REQUESTS, KV_HEADS, 128) for _ in range(2)]
    cache = [tensor(REQUESTS, PAGE, KV_HEADS, 128).to(getattr(torch, kv_dtype)) for _ in range(2)]
    slots = torch.arange(REQUESTS, device="cuda")
    return lambda: tw.append_to_slots(*new, slots, *cache)


def rope():
    import tilewright as tw
    import torch

    q, k, positions = tensor(REQUESTS, HEADS, 128), tensor(REQUESTS, KV_HEADS, 128), torch.arange(REQUESTS, device="cuda").int()
    return lambda: tw.apply_rope(q, k, positions, tw.Rope(128))


def norm():
    import tilewright as tw

    x, weight = tensor(REQUESTS, 4096), tensor(4096)
    return lambda: tw.rmsnorm(x, weight)


def activation():
    import tilewright as tw

    x = tensor(REQUESTS, 2 * 14336)
    return lambda: tw.silu_and_mul(x)


def linear(rows=4):
    import tilewright as tw

    x, weight = tensor(rows, 4096), tensor(4096, 4096)
    return lambda: tw.linear(x, weight)


def sampling():
    import tilewright.flashinfer as ours

    probs = tensor(REQUESTS, 128256, dtype="float32").softmax(-1)
    return lambda: ours.top_k_top_p_sampling_from_probs(probs, 40, 0.9)


def softmax():
    import tilewright.flashinfer as ours

    logits = tensor(REQUESTS, 128256, dtype="float32")
    return lambda: ours.softmax(logits, temperature=0.7)


OPERATORS = {
    "decode, d128": attention,
    "decode, d64": lambda: attention(64),
    "decode, e4m3 cache": lambda: attention(kv_dtype="float8_e4m3fn"),
    "prompt, d128": lambda: attention(rows=512),
    "prompt, e4m3 cache": lambda: attention(kv_dtype="float8_e4m3fn", rows=512),
    "planned on the GPU": device_plan,
    "MLA": latent,
    "append": append,
    "append to e4m3": lambda: append("float8_e4m3fn"),
    "RoPE": rope,
    "rmsnorm": norm,
    "silu_and_mul": activation,
    "linear, 4 rows": linear,
    "sampling": sampling,
    "softmax": softmax,
}
#: Operators whose first call the limit holds for.
LIMITED = ("decode", "prompt", "MLA")


def measure(name):
    """Milliseconds of the first and of the second call of an operator, and the sources of its kernels."""
    import tilewright as tw
    import torch

    call = OPERATORS[name]()
    flags = torch.zeros(8, dtype=torch.uint8, device="cuda")
    device = tw._device.device_of(flags)
    # opens the stream and loads what all operators share
    tw.gelu_and_mul(tensor(1, 16, dtype="float32"))
    before, times = device.kernel_sources(), []
    torch.cuda.synchronize()
    for _ in range(2):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    sources = device.kernel_sources()
    counts = {source: sources[source] - before[source] for source in ("bundled", "cached", "assembled")}
    return {"first_ms": times[0], "second_ms": times[1], **counts, "bundle": sources["bundle"], "refusal": sources["refusal"]}


def in_process(name, cache):
    environment = {**os.environ, "TILEWRIGHT_CACHE": cache, "CUDA_CACHE_DISABLE": "1"}
    process = subprocess.run([sys.executable, __file__, "--child", name], env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", metavar="OPERATOR", nargs="*", help="a part of an operator's name; by default all")
    parser.add_argument("--json", metavar="FILE", help="write the results to a file")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child)))
        return
    import tilewright
    import torch

    print(torch.cuda.get_device_name(0), "torch", torch.__version__, "tilewright", tilewright.__version__)
    print(f"{'milliseconds of the first call':30} {'bundle':>8} {'again':>8} {'jit':>8} {'second':>8}  kernels bundled and assembled")
    chosen = [name for name in OPERATORS if not arguments.operators or any(part in name for part in arguments.operators)]
    results, is_wrong = {}, False
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            # with the bundle and an empty folder, then with that folder, then without either
            found = [in_process(name, cache) for cache in (folder, folder, "jit")]
        bundled, again, jit = found
        results[name] = {"bundle": bundled, "again": again, "jit": jit}
        times = [bundled["first_ms"], again["first_ms"], jit["first_ms"], bundled["second_ms"]]
        counts = f"{bundled['bundled']} and {bundled['assembled']}"
        print(f"{name:30}", *(f"{ms:8.1f}" for ms in times), f" {counts}", bundled["refusal"] or "", flush=True)
        if bundled["bundle"] is None:
            continue
        is_slow = name.startswith(LIMITED) and bundled["first_ms"] > LIMIT
        is_wrong |= bundled["assembled"] > 0 or is_slow
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    if all(result["bundle"]["bundle"] is None for result in results.values()):
        print("the installed package has no bundle")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
