"""Times torch on the GPU for the bench of kernels, one request at a time.

Reads one JSON object per line from stdin and writes one per line to stdout:

    {"gemm": [m, n, k], "calls": 20}  -> {"seconds": ..}   per call of bf16 A · Bᵀ (cuBLAS)
    {"about": true}                   -> {"about": "torch 2.11, cuDNN 9.."}
"""

import json
import sys

import torch

cached = {}


def gemm(m, n, k):
    a, b = (torch.rand(rows, k, device="cuda", dtype=torch.float32).sub(0.5).bfloat16() for rows in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.matmul(a, b.T, out=out)


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
                cached[key] = gemm(*request["gemm"])
            answer = {"seconds": seconds(cached[key], request["calls"])}
    except Exception as why:  # the bench reports every error
        answer = {"error": f"{type(why).__name__}: {why}"}
    print(json.dumps(answer), flush=True)
