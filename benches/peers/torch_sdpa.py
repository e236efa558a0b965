"""Times torch's `scaled_dot_product_attention` on the CPU for `cpu_attention --peer`, one call at a time.

Reads one JSON object a line from stdin and answers each with one on stdout:

    {"threads": 2}                                     -> {"version": "2.11.0", "threads": 2}
    {"cases": [{"name", "heads", "head_dim", "dtype", "requests", "qo_len", "kv_len"}, ...]}   -> {}
    {"run": "<name>", "form": "gqa" | "rows"}          -> {"seconds": 0.0123}

`gqa` gives every query head with `enable_gqa=True`, as models call it, causal where there is more than one row. `rows`
gives the query heads of a group as rows of their KV head, for one row a request; it is mostly faster, and checked to
give the same numbers. Each answer times the second of two calls and waits until torch's threads rest, so that they take
nothing from whoever is timed next.
"""

import json
import sys
import time

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
attention = torch.nn.functional.scaled_dot_product_attention


def noise(*shape, dtype):
    """Uniform in -1..1, contiguous, which is the layout that suits torch best."""
    return (torch.rand(*shape) * 2 - 1).to(dtype)


def forms(case):
    """The calls that compute a case, by name, warmed up."""
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
    """Seconds of a call right after another."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rest():
    """Waits until the threads of this process have stopped spinning for more work."""
    for _ in range(200):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.0005:
            return


def main():
    calls = {}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "threads" in asked:
                torch.set_num_threads(asked["threads"])
                answer = {"version": torch.__version__, "threads": torch.get_num_threads()}
            elif "cases" in asked:
                calls.clear()
                calls.update((case["name"], forms(case)) for case in asked["cases"])
                answer = {}
            else:
                answer = {"seconds": timed(calls[asked["run"]][asked["form"]])}
        except Exception as why:  # whatever it is, the bench shall say it
            answer = {"error": f"{type(why).__name__}: {why}"}
        rest()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
