"""Decode and prefill of transformers on torch CPU, with random weights of a config.json.

    python benches/peers/cpu_decode.py benches/models/qwen3-0.6b.json --dtype bfloat16 --threads 2

Prints the median tokens per second with the 10th and 90th percentile, in the cases of `tilewright bench`.
"""

import argparse
import json
import time

import torch
import transformers


def percentiles(samples):
    samples = sorted(samples)
    return [samples[round((len(samples) - 1) * share)] for share in (0.1, 0.5, 0.9)]


def report(case, tokens, seconds):
    low, median, high = (tokens / s for s in reversed(percentiles(seconds)))
    print(f"{case:24} {median:10.1f}  ({low:.1f} .. {high:.1f})", flush=True)


def decode(model, vocab, batch, context, steps):
    ids = torch.randint(0, vocab, (batch, context))
    output = model(ids, use_cache=True)
    cache, seconds = output.past_key_values, []
    for step in range(steps + 4):
        next_ids = output.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        output = model(next_ids, past_key_values=cache, use_cache=True)
        if step >= 4:
            seconds.append(time.perf_counter() - start)
    report(f"decode {batch} x {context}", batch, seconds)


def prefill(model, vocab, tokens, repeats):
    seconds = []
    for repeat in range(repeats + 1):
        ids = torch.randint(0, vocab, (1, tokens))
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        if repeat:
            seconds.append(time.perf_counter() - start)
    report(f"prefill {tokens}", tokens, seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open(args.config, encoding="utf-8") as file:
        values = json.load(file)
    config = transformers.AutoConfig.for_model(**values)
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.dtype}, {args.threads} threads")
    with torch.inference_mode():
        for batch in (int(number) for number in args.batch.split(",")):
            decode(model, config.vocab_size, batch, args.context, args.steps)
        prefill(model, config.vocab_size, args.prefill, args.repeats)


if __name__ == "__main__":
    main()
