"""Times torch's `scaled_dot_product_attention` on the CPU for `cpu_attention --peer`, one call at a time.

Reads one JSON request per line from stdin and writes one response per line to stdout:

    {"threads": 2}                                     -> {"version": "2.11.0", "threads": 2}
    {"cases": [{"name", "heads", "head_dim", "dtype", "requests", "qo_len", "kv_len"}, ...]}   -> {}
    {"run": "<name>", "form": "gqa" | "rows"}          -> {"seconds": 0.0123}

`gqa` passes all query heads with `enable_gqa=True`, as models do, causal for more than one row. `rows` passes the query
heads of a group as rows of their KV head, for one row per request; it is usually faster, and its results are compared
with `gqa`. Each request times the second of two calls, then waits until torch's threads are idle, so that they do not
disturb the next measurement.
"""

import json
import sys
import time

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
attention = torch.nn.functional.scaled_dot_product_attention


def noise(*shape, dtype):
    """Uniform in -1..1, contiguous: torch's fastest layout."""
    return (torch.rand(*shape) * 2 - 1).to(dtype)


def forms(case):
    """The calls of a case by form, warmed up."""
    (qo, kv), dim, dtype = case["heads"], case["head_dim"], DTYPES[case["dtype"]]
    requests, rows = case["requests"], case["qo_len"]
    q = noise(requests, qo, rows, dim, dtype=dtype)
    k, v = (noise(requests, kv, case["kv_len"], dim, dtype=dtype) for _ in range(2))
    calls = {"gqa": lambda: attention(q, k, v, is_causal=rows > 1, enable_gqa=qo != kv)}
    if rows == 1 and qo != kv:
        as_rows = q.view(requests, kv, qo // kv, dim)
        calls["rows"] = lambda: attention(as_rows, k, v)
        gap = (calls["rows"]().view_as(q) - calls["gqa"]()).abs().max().item()
        if gap > 1e-2:
            raise ValueError(f"{case['name']}: the forms differ by {gap}")
    for call in calls.values():
        call()
    return calls


def timed(call):
    """Seconds of a call after a warm-up call."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait_until_idle():
    """Waits until the threads of this process have stopped spinning."""
    for _ in range(200):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.0005:
            return


def main():
    calls = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "threads" in request:
                torch.set_num_threads(request["threads"])
                response = {"version": torch.__version__, "threads": torch.get_num_threads()}
            elif "cases" in request:
                calls.clear()
                calls.update((case["name"], forms(case)) for case in request["cases"])
                response = {}
            else:
                response = {"seconds": timed(calls[request["run"]][request["form"]])}
        except Exception as why:  # reported by the benchmark
            response = {"error": f"{type(why).__name__}: {why}"}
        wait_until_idle()
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
