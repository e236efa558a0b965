"""Times torch on the GPU for the bench of kernels, one request at a time.

Reads one JSON object per line from stdin and writes one per line to stdout:

    {"gemm": [m, n, k], "calls": 20}                                    -> {"seconds": ..}   per call of bf16 A · Bᵀ (cuBLAS)
    {"attention": [heads, kv_heads, length], "causal": .., "calls": 5}  -> {"seconds": ..}   per call by cuDNN
    {"about": true}                                                     -> {"about": "torch 2.11, cuDNN 9.."}
"""

import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

cached = {}


def gemm(m, n, k):
    a, b = (torch.rand(rows, k, device="cuda", dtype=torch.float32).sub(0.5).bfloat16() for rows in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.matmul(a, b.T, out=out)


def attention(heads, kv_heads, length, causal):
    q, k, v = (torch.rand(1, h, length, 128, device="cuda").sub(0.5).bfloat16() for h in (heads, kv_heads, kv_heads))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    return call


def seconds(call, calls):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / calls


for line in sys.stdin:
    request = json.loads(line)
    try:
        if "about" in request:
            answer = {"about": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"}
        else:
            key = line
            if key not in cached:
                cached.clear()
                if "gemm" in request:
                    cached[key] = gemm(*request["gemm"])
                else:
                    cached[key] = attention(*request["attention"], request["causal"])
            answer = {"seconds": seconds(cached[key], request["calls"])}
    except Exception as why:  # the bench reports every error
        answer = {"error": f"{type(why).__name__}: {why}"}
    print(json.dumps(answer), flush=True)
