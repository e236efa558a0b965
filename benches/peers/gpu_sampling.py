"""Contenders of `--bench sampling`: torch and, if installed, FlashInfer. `contenders.py` precedes this script.

Calls rotate over the sets of logits of a case. torch draws by the exponential race, which a CUDA graph can record.
"""

import sys

import torch


def logits_of(case):
    torch.manual_seed(7)
    made = []
    for _ in range(case["sets"]):
        x = torch.randn(case["rows"], case["vocab"], device=DEVICE) * case["deviation"]
        if case["peaked"]:
            x[:, ::4096] += 12
        made.append(x)
    return made


def race(probs):
    return probs.div(torch.empty_like(probs).exponential_()).argmax(-1)


def torch_call(case, x):
    """Without sorting where the filters allow it."""
    k, p, min_p = case["top_k"], case["top_p"], case["min_p"]

    def nucleus(probs):
        before = probs.cumsum(-1) - probs
        return torch.where(before < p, probs, 0)

    def call():
        if case["greedy"]:
            return x.argmax(-1)
        if k is not None:
            values, indices = x.topk(k)
            if case["joint"]:
                probs = (values - x.logsumexp(-1, keepdim=True)).exp()
            else:
                probs = values.softmax(-1)
            probs = nucleus(probs) if p < 1 else probs
            return indices.gather(-1, race(probs)[:, None])
        if p < 1:
            values, indices = x.sort(dim=-1, descending=True)
            return indices.gather(-1, race(nucleus(values.softmax(-1)))[:, None])
        probs = x.softmax(-1)
        if min_p > 0:
            probs = torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0)
        return race(probs)

    return call


def flashinfer_call(case, x):
    from flashinfer import sampling

    k, p, min_p = case["top_k"], case["top_p"], case["min_p"]
    if case["greedy"]:
        return None
    if k is not None and p < 1:
        order = "joint" if case["joint"] else "top_k_first"
        return lambda: sampling.top_k_top_p_sampling_from_logits(x, k, p, filter_apply_order=order)
    if k is not None:
        return lambda: sampling.top_k_sampling_from_probs(sampling.softmax(x), k)
    if p < 1:
        return lambda: sampling.top_p_sampling_from_probs(sampling.softmax(x), p)
    if min_p > 0:
        return lambda: sampling.min_p_sampling_from_probs(sampling.softmax(x), min_p)
    return lambda: sampling.sampling_from_logits(x)


def build(case):
    graphs.clear()
    torch.cuda.empty_cache()
    sets = logits_of(case)
    made = {"torch": torch_call}
    if flashinfer:
        made["flashinfer"] = flashinfer_call
    for name, of in made.items():
        calls = [of(case, x) for x in sets]
        if calls[0] is None:
            continue
        try:
            graphs[name] = graphed(calls)
        except Exception as why:  # skip contenders that do not support the case
            print(f"{name}: {str(why)[:200]}", file=sys.stderr)
    return {"names": list(graphs)}


serve(build)
