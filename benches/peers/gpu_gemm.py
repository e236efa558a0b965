"""Contender of `--bench kernels`: torch (cuBLAS). `contenders.py` precedes this script."""

import torch


def build(case):
    graphs.clear()
    torch.cuda.empty_cache()
    m, n, k = case["gemm"]
    a, b = (torch.rand(rows, k, device=DEVICE).sub(0.5).bfloat16() for rows in (m, n))
    out = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    graphs["torch"] = graphed([lambda: torch.matmul(a, b.T, out=out)])
    return {"names": list(graphs)}


serve(build)
