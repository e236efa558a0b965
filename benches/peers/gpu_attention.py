"""Times attention of torch and, if installed, FlashInfer on a GPU, for `attention --peer`, one case at a time.

Reads one JSON request per line from stdin and writes one response per line to stdout:

    {"about": true}                            -> {"about": "torch 2.11.0, FlashInfer 0.6.18"}
    {"prefill": {"heads", "head_dim", "batch", "len", "causal"}, "calls": n}        -> {"seconds": 0.0123, "best": "cudnn"}
    {"decode": {"heads", "head_dim", "lens", "page_size", "kv"}, "calls": n}        -> {"seconds": 0.0123, "best": "flashinfer tc"}

The first request for a case tries all implementations and keeps the fastest, which later requests time: `calls` calls of a
captured graph, measured with events after one warm-up call.
"""

import json
import sys

import torch

try:
    import flashinfer
except ImportError:
    flashinfer = None

DEVICE = "cuda"
WORKSPACE = 256 << 20
best = {}


def noise(*shape, dtype=torch.bfloat16):
    return (torch.rand(*shape, device=DEVICE) - 0.5).to(dtype)


def workspace():
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def prefill(case):
    """The implementations of a prefill, by name."""
    (qo, kv), dim, batch, length, causal = (case[k] for k in ("heads", "head_dim", "batch", "len", "causal"))
    q, k, v = (noise(batch, length, heads, dim) for heads in (qo, kv, kv))
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=causal, enable_gqa=qo != kv)

        return call

    calls = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "torch flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    if flashinfer and case.get("flashinfer", True):
        flat = [x.reshape(batch * length, -1, dim) for x in (q, k, v)]
        indptr = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        for backend in ("fa2", "fa3"):
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend=backend)
            wrapper.plan(indptr, indptr, qo, kv, dim, causal=causal, q_data_type=torch.bfloat16)
            calls[f"flashinfer {backend}"] = lambda wrapper=wrapper: wrapper.run(*flat)
    return calls


def decode(case):
    """The implementations of a paged decode step, by name."""
    (qo, kv), dim, lens, page = (case[k] for k in ("heads", "head_dim", "lens", "page_size"))
    dtype = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[case["kv"]]
    pages = [-(-length // page) for length in lens]
    indptr = torch.tensor([0] + pages).cumsum(0).int()
    indices = torch.randperm(sum(pages), device=DEVICE).int()
    last = torch.tensor([length - (n - 1) * page for length, n in zip(lens, pages)]).int()
    q = noise(len(lens), qo, dim)
    calls = {}
    if flashinfer:
        cache = noise(sum(pages), 2, page, kv, dim).to(dtype)
        for tensor_cores in (True, False):
            name = "flashinfer tc" if tensor_cores else "flashinfer"
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=tensor_cores)
            try:
                wrapper.plan(indptr, indices, last, qo, kv, dim, page, q_data_type=torch.bfloat16, kv_data_type=dtype)
            except Exception as why:  # without tensor cores it does not support groups of 5 or 16
                print(f"{name}: {str(why)[-200:]}", file=sys.stderr)
                continue
            calls[name] = lambda wrapper=wrapper: wrapper.run(q, cache)
    elif len(set(lens)) == 1 and dtype == torch.bfloat16:
        k, v = (noise(len(lens), kv, lens[0], dim) for _ in range(2))
        calls["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(2), k, v, enable_gqa=qo != kv
        )
    return calls


def seconds(call, calls):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls


def graphed(call):
    """The call captured as a CUDA graph, to exclude host time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def choose(kind, case, calls):
    """Name and call of the fastest implementation of a case."""
    found = []
    for name, call in {"prefill": prefill, "decode": decode}[kind](case).items():
        try:
            call()
            torch.cuda.synchronize()
            call = graphed(call)
            found.append((min(seconds(call, calls) for _ in range(3)), name, call))
        except Exception as why:  # skip backends that do not support the case
            print(f"{name}: {str(why)[:200]}", file=sys.stderr)
    if not found:
        raise RuntimeError(f"nothing computes {kind} {case}")
    for time, name, _ in found:
        print(f"{kind} {case}: {name} {time * 1e6:.1f} us", file=sys.stderr)
    return min(found, key=lambda entry: entry[0])[1:]


def respond(request):
    if "about" in request:
        version = f", FlashInfer {flashinfer.__version__}" if flashinfer else ""
        return {"about": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}{version}"}
    kind = "prefill" if "prefill" in request else "decode"
    key = json.dumps(request)
    if key not in best:
        best.clear()  # keep only one case in memory
        torch.cuda.empty_cache()
        best[key] = choose(kind, request[kind], request["calls"])
    name, call = best[key]
    return {"seconds": seconds(call, request["calls"]), "best": name}


for line in sys.stdin:
    try:
        response = respond(json.loads(line))
    except Exception as why:
        response = {"error": str(why)[:300]}
    print(json.dumps(response), flush=True)
