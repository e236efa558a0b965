"""A check of the attention backends of vLLM and SGLang on a GPU with torch, without the engines.

    python crates/tilewright-python/tests/card/check_engines.py [--json FILE]

The drivers of ``tests/engine_driver.py`` make the engines' calls with CUDA tensors. They record decode steps in CUDA graphs and
replay them with other requests, lengths and pages. It prints one line per check and ends with 1 if one fails.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
import traceback

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from engine_driver import Case, SglangDriver, VllmDriver  # noqa: E402

FP8 = torch.float8_e4m3fn
LLAMA = Case(heads=(32, 8), dim=128, max_len=2048)
GPT_OSS = Case(heads=(64, 8), dim=64, windows=(127, None), has_sinks=True, max_len=2048)
CASES = {
    "Llama 3 8B": LLAMA,
    "Llama 3 8B, float16, HND": dataclasses.replace(LLAMA, dtype=torch.float16, layout="HND"),
    "Llama 3 8B, e4m3 cache": dataclasses.replace(LLAMA, kv_dtype=FP8, scales=(0.5, 0.25)),
    "gpt-oss": GPT_OSS,
    "gpt-oss, hybrid pool": dataclasses.replace(GPT_OSS, hybrid_pool=True),
    "gpt-oss, e4m3 cache": dataclasses.replace(GPT_OSS, kv_dtype=FP8, scales=(0.5, 0.25)),
    "Gemma 2": Case(heads=(8, 4), dim=256, windows=(511, None), soft_cap=50.0, max_len=2048),
    "multi-head, pages of 64": Case(heads=(8, 8), dim=96, page_size=64, max_len=2048),
}
CASES["SGLang pages of 1"] = dataclasses.replace(LLAMA, page_size=1)
results: list = []


def check(name, case, function):
    """Runs a check, and records its largest error and whether it passes."""
    begin = time.perf_counter()
    limit = 2e-2 if case.dtype == torch.bfloat16 else 4e-3
    try:
        error = function()
        result = {"check": name, "ok": error < limit, "error": error}
        detail = f"error {error:.2e}"
    except Exception as why:  # noqa: BLE001: a check reports every failure
        traceback.print_exc()
        detail = f"{type(why).__name__}: {why}"
        result = {"check": name, "ok": False, "error": detail}
    results.append({**result, "seconds": round(time.perf_counter() - begin, 2)})
    print(f"{'ok  ' if result['ok'] else 'FAIL'} {name}: {detail}", flush=True)


def eager(driver, case):
    """Prompts, chunks, decode steps and both in one batch."""
    engine = driver(case, "cuda:0")
    steps = [[(0, 700), (1, 5)], [(0, 1), (1, 1)], [(2, 512), (0, 1)], [(2, 300), (3, 129), (1, 1)], [(3, 1), (2, 1), (0, 1)]]
    return max(engine.step(new) for new in steps)


def graphs(driver, case):
    """Graphs of 8, 4 and 2 requests, replayed with other requests between eager steps."""
    engine = driver(case, "cuda:0")
    errors = [engine.step([(0, 900), (1, 16), (2, 2), (3, 100)])]
    for requests in (8, 4, 2):
        engine.capture(requests)
    decode = [[(0, 1), (3, 1)], [(1, 1), (2, 1), (3, 1)], [(2, 1)], [(0, 1), (1, 1), (2, 1), (3, 1)]]
    for new, size in zip(decode, (2, 4, 2, 8)):
        errors.append(engine.step(new, graph=size))
    errors.append(engine.step([(1, 300), (0, 1), (4, 1)]))
    for _ in range(20):
        errors.append(engine.step([(0, 1), (4, 1), (1, 1)], graph=4))
    return max(errors)


def main():
    """Runs all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also writes the results to this file")
    arguments = parser.parse_args()
    for engine, driver in (("vLLM", VllmDriver), ("SGLang", SglangDriver)):
        for name, case in CASES.items():
            if (case.hybrid_pool or case.page_size == 1) and engine == "vLLM":
                continue
            for function in (eager, graphs):
                check(f"{engine}, {name}, {function.__name__}", case, lambda run=function, d=driver, c=case: run(d, c))
    if arguments.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    failed = sum(not result["ok"] for result in results)
    print(f"{len(results) - failed} of {len(results)} checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
