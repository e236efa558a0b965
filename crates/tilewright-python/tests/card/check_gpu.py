"""A check of ``tilewright.flashinfer`` on a GPU with torch: results, CUDA graphs and host time per call.

    python crates/tilewright-python/tests/card/check_gpu.py [--against-flashinfer] [--json FILE]

Results are compared with attention in float32 from its definition. It prints one line per check and ends with 1 if one fails.
Host times are medians of processes of their own. With ``--against-flashinfer`` those of an installed FlashInfer take turns with them.
"""

import argparse
import concurrent.futures
import importlib
import itertools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
import weakref

import numpy
import torch

import tilewright
import tilewright.flashinfer as ours

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import jit_variants  # noqa: E402

DEVICE = "cuda:0"
results: list = []


def check(name):
    """Runs a check at once and records whether it passes."""

    def run(function):
        try:
            detail = function()
            results.append({"check": name, "ok": True, "detail": detail})
        except Exception as why:  # noqa: BLE001: a check reports every failure
            traceback.print_exc()
            results.append({"check": name, "ok": False, "detail": f"{type(why).__name__}: {why}"})
        last = results[-1]
        print(f"{'ok  ' if last['ok'] else 'FAIL'} {name}: {last['detail']}", flush=True)

    return run


def attention(q, k, v, is_causal=True):
    """Outputs of one request in float32, from the definition."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    s = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if is_causal:
        rows, keys = s.shape[1:]
        visible = torch.ones(rows, keys, dtype=torch.bool, device=s.device).tril(keys - rows)
        s = s.masked_fill(~visible, -math.inf)
    return (s.softmax(-1) @ v).transpose(0, 1)


def attention_of(rows, data):
    """:func:`attention` of 19 keys in two pages."""
    k, v = (data[:, at].reshape(-1, *data.shape[3:])[:19] for at in (0, 1))
    return attention(rows, k, v)


class Cache:
    """A paged cache of requests with these lengths, bfloat16, K and V in one tensor."""

    def __init__(self, kv_lens, page_size=16, heads=8, dim=128, spare=64):
        torch.manual_seed(len(kv_lens))
        pages = [-(-n // page_size) for n in kv_lens]
        total = sum(pages) + spare
        self.data = torch.randn(total, 2, page_size, heads, dim, device=DEVICE, dtype=torch.bfloat16)
        self.indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
        self.indices = torch.randperm(total)[: sum(pages)].int().to(DEVICE)
        self.last = torch.tensor([n - (p - 1) * page_size for n, p in zip(kv_lens, pages)], dtype=torch.int32)
        self.kv_lens, self.page_size, self.shape = kv_lens, page_size, (heads, dim)

    def rows(self, request):
        """K and V of a request."""
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
        kv = self.data[pages].transpose(0, 1).reshape(2, -1, *self.shape)
        return kv[0, : self.kv_lens[request]], kv[1, : self.kv_lens[request]]


def workspace():
    return torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)


def planned_decode(module, cache, wrapper=None):
    wrapper = wrapper or module.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
    wrapper.plan(cache.indptr, cache.indices, cache.last, 32, 8, 128, 16, q_data_type=torch.bfloat16,
                 kv_data_type=torch.bfloat16)
    return wrapper


def step_on(device, cache, q):
    """Outputs, norms and tokens of a decode step on a GPU."""
    data, rows = cache.data.to(device), q.to(device)
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    wrapper.plan(cache.indptr, cache.indices.to(device), cache.last, 32, 8, 128, 16, q_data_type=torch.bfloat16,
                 kv_data_type=torch.bfloat16)
    outputs = wrapper.run(rows, data)
    normed = ours.rmsnorm(outputs.view(-1, 128), torch.ones(128, device=device, dtype=torch.bfloat16))
    tokens = ours.top_k_top_p_sampling_from_logits(normed.view(len(q), -1).float(), 40, 0.9, seed=5, offset=0)
    torch.cuda.synchronize(device)
    return outputs, normed, tokens


def worst(actual, expected):
    """The largest error, relative to outputs above 1: bfloat16 has 8 bits."""
    error = ((actual.float() - expected).abs() / expected.abs().clamp(min=1)).max().item()
    assert error < 2e-2, f"error {error}"
    return f"error {error:.2e}"


def waits_for_nothing(calls):
    """Checks that each call returns before the work that was submitted before it."""
    for call in calls:
        call()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2 * 10**9)
        done = torch.cuda.Event()
        done.record()
        for call in calls:
            call()
        assert not done.query(), "a call returned after the work before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return f"{len(calls)} calls behind a kernel of a second"


def run_checks():
    cache = Cache([1, 17, 500, 4096])
    q = torch.randn(4, 32, 128, device=DEVICE, dtype=torch.bfloat16)

    def expected(queries, of):
        return torch.cat([attention(queries[r : r + 1], *of.rows(r)) for r in range(len(of.kv_lens))])

    def expected_of(queries, of, indices):
        kept, of.indices = of.indices, indices
        try:
            return expected(queries, of)
        finally:
            of.indices = kept

    @check("decode")
    def _():
        return worst(planned_decode(ours, cache).run(q, cache.data), expected(q, cache))

    @check("prefill, paged and ragged")
    def _():
        rows = torch.randn(520, 32, 128, device=DEVICE, dtype=torch.bfloat16)
        bounds = torch.tensor([0, 1, 18, 200, 520], dtype=torch.int32)
        wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(workspace())
        wrapper.plan(bounds, cache.indptr, cache.indices, cache.last, 32, 8, 128, 16, causal=True, q_data_type=torch.bfloat16)
        o = wrapper.run(rows, cache.data)
        ragged = ours.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        kv_bounds = torch.tensor([0, *torch.tensor(cache.kv_lens).cumsum(0).tolist()], dtype=torch.int32)
        ragged.plan(bounds, kv_bounds, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
        k, v = (torch.cat([cache.rows(r)[at] for r in range(4)]) for at in range(2))
        other = ragged.run(rows, k, v)
        parts = [slice(int(a), int(b)) for a, b in zip(bounds[:-1], bounds[1:])]
        truth = torch.cat([attention(rows[part], *cache.rows(r)) for r, part in enumerate(parts)])
        return worst(o, truth) + ", " + worst(other, truth)

    @check("append")
    def _():
        k, v = (torch.randn(4, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        positions = torch.tensor(cache.kv_lens, dtype=torch.int32) - 1
        ours.append_paged_kv_cache(k, v, torch.arange(4, dtype=torch.int32), positions, cache.data, cache.indices, cache.indptr,
                                   cache.last)
        for r in range(4):
            assert torch.equal(cache.rows(r)[0][-1], k[r]) and torch.equal(cache.rows(r)[1][-1], v[r])
        return "4 tokens"

    @check("append from arrays on the GPU, recorded, with tables changed between replays")
    def _():
        k, v = (torch.randn(4, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        latent = [torch.zeros(64, 16, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64)]
        rows = [torch.randn(4, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64)]
        indptr, indices, last = cache.indptr.to(DEVICE), cache.indices.clone(), cache.last.to(DEVICE)
        bounds, lens = torch.arange(5, device=DEVICE, dtype=torch.int32), torch.tensor(cache.kv_lens, device=DEVICE)
        slots, pages = torch.arange(4, device=DEVICE), torch.arange(40, device=DEVICE, dtype=torch.int32)
        five = torch.arange(0, 45, 10, device=DEVICE, dtype=torch.int32)
        data = torch.zeros_like(cache.data)
        pair = [torch.zeros_like(data[:, 0]) for _ in range(2)]

        def step():
            requests, positions = ours.get_batch_indices_positions(bounds, lens, 4)
            ours.append_paged_kv_cache(k, v, requests, positions, data, indices, indptr, last)
            tilewright.append_to_slots(k, v, slots, *pair)
            ours.append_paged_mla_kv_cache(*rows, requests, positions.clamp(max=100), *latent, pages, five, last)
            return requests, positions

        step()  # loads the kernels
        torch.cuda.synchronize()
        waits_for_nothing([step, lambda: ours.apply_rope(k, k, bounds, lens)])
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # loads the kernels of this stream
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            requests, positions = step()
        for turn in range(20):
            lens.copy_(torch.tensor(cache.kv_lens) - torch.tensor([0, turn % 17, turn, 7 * turn]))
            indices.copy_(cache.indices[torch.randperm(len(cache.indices), device=DEVICE)])
            slots.copy_(torch.tensor([turn, -1, 16 * len(data), 16 * turn + 30]))
            for one in (data, *pair, *latent):
                one.zero_()
            graph.replay()
            expected, expected_k = torch.zeros_like(data), torch.zeros_like(pair[0])
            places = [(r, int(p)) for r, p in enumerate(lens.tolist()) for p in [p - 1]]
            assert requests.tolist() == [0, 1, 2, 3] and positions.tolist() == [p for _, p in places], turn
            for r, p in places:
                if p >= 0:
                    page = indices[cache.indptr[r] + p // 16]
                    expected[page, 0, p % 16], expected[page, 1, p % 16] = k[r], v[r]
            for token, slot in ((0, turn), (3, 16 * turn + 30)):
                expected_k[slot // 16, slot % 16] = k[token]
            assert torch.equal(data, expected) and torch.equal(pair[0], expected_k), turn
            at = min(max(places[3][1], 0), 100)
            assert torch.equal(latent[0][30 + at // 16, at % 16], rows[0][3]), turn
        return "20 replays"

    @check("norm, activation, rope")
    def _():
        x = torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
        first = worst(ours.rmsnorm(x, weight), torch.nn.functional.rms_norm(x.float(), (4096,), eps=1e-6))
        second = worst(ours.silu_and_mul(x), torch.nn.functional.silu(x[:, :2048].float()) * x[:, 2048:].float())
        query, key = (torch.randn(64, n * 128, device=DEVICE, dtype=torch.bfloat16) for n in (32, 8))
        positions = torch.arange(64, device=DEVICE)
        angle = positions[:, None].float() * 10000.0 ** (-torch.arange(64, device=DEVICE) / 64)
        table = torch.cat([angle.cos(), angle.sin()], 1)
        a, b = query.view(64, 32, 128).float().chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        truth = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(64, -1)
        ours.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 128, table)
        error = (query.float() - truth).abs().max().item()
        assert error < 4e-2, error
        return f"{first}, {second}, rope error {error:.2e}"

    @check("sampling")
    def _():
        logits = torch.randn(64, 32000, device=DEVICE)
        probs = ours.softmax(logits, temperature=torch.ones(64, device=DEVICE))
        assert (probs - logits.softmax(-1)).abs().max() < 1e-5
        assert torch.equal(ours.top_k_sampling_from_probs(probs, 1).long(), logits.argmax(-1))
        tokens = ours.top_k_top_p_sampling_from_probs(probs, torch.full((64,), 40, device=DEVICE), 0.9)
        ranks = (probs > probs.gather(1, tokens.long()[:, None])).sum(1)
        assert (ranks < 40).all()
        return f"ranks up to {int(ranks.max())}"

    @check("tokens of long rows are those of the CPU")
    def _():
        generator = torch.Generator().manual_seed(5)
        normal = torch.randn(6, 128256, generator=generator)
        rows = {"N(0, 1)": normal, "N(0, 3)": 3 * normal, "steps": (2 * normal).round() / 4, "equal": 0 * normal}
        rows["peaked"] = torch.where(torch.arange(128256) % 997 == 3, 3 * normal + 12, normal - 3)
        rows["half hidden"] = (3 * normal).masked_fill(normal < 0, -math.inf)
        rows["float16, 151,936"] = (3 * torch.randn(6, 151936, generator=generator)).half()
        filters = [{}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1000, "top_p": 1.0},
                   {"top_k": 20000, "top_p": 0.95}, {"top_k": 50, "top_p": 0.9, "filter_apply_order": "joint"}]
        compared, different = 0, []
        for (name, logits), which in ((row, which) for row in rows.items() for which in filters):
            def draw(logits, which=which):
                if not which:
                    return ours.sampling.sampling_from_logits(logits, seed=7, offset=compared)
                if "top_k" in which:
                    return ours.sampling.top_k_top_p_sampling_from_logits(logits, seed=7, offset=compared, **which)
                return ours.sampling.top_k_top_p_sampling_from_logits(logits, logits.shape[1], seed=7, offset=compared, **which)
            tokens = [draw(logits.to(device)).cpu() for device in (DEVICE, "cpu")]
            compared += len(logits)
            if not torch.equal(*tokens):
                different.append((name, which))
        assert not different, different
        return f"{compared} tokens"

    @check("sampling with parameters on the GPU")
    def _():
        logits = torch.randn(64, 32000, device=DEVICE)
        probs = logits.softmax(-1)
        k = torch.randint(1, 200, (64,), device=DEVICE, dtype=torch.int32)
        p = torch.rand(64, device=DEVICE) * 0.9 + 0.1
        seed, offset = torch.arange(64, device=DEVICE), torch.arange(64, device=DEVICE) * 12
        for draw, scores in ((ours.top_k_top_p_sampling_from_probs, probs), (ours.top_k_top_p_sampling_from_logits, logits)):
            for order in ("top_k_first", "joint"):
                tokens = draw(scores, k, p, filter_apply_order=order, seed=seed, offset=offset)
                on_host = tilewright.sampling.sample if scores is logits else tilewright.sampling.sampling_from_probs
                expected = on_host(scores, top_k=k.cpu(), top_p=p.cpu(), joint=order == "joint", seed=seed.cpu(), offset=offset.cpu())
                assert tokens.is_cuda and torch.equal(tokens, expected), order
        rows = torch.randint(0, 64, (100,), device=DEVICE)
        tokens = ours.min_p_sampling_from_probs(probs, 0.1, indices=rows, seed=1, offset=0)
        assert torch.equal(tokens.int(), ours.min_p_sampling_from_probs(probs[rows], 0.1, seed=1, offset=0))
        probs[7], probs[9] = 0.0, float("nan")
        off = torch.tensor([0, -1, 32000, 2**31 - 1] * 16, device=DEVICE, dtype=torch.int32)
        tokens, valid = ours.top_k_top_p_sampling_from_probs(probs, off, 1.0, seed=3, offset=0, return_valid=True)
        assert (~valid).nonzero().flatten().tolist() == [7, 9] and tokens[7] == 0 and tokens[9] == 0
        assert torch.equal(tokens, ours.sampling_from_probs(probs, seed=3, offset=0))
        return "tokens of host parameters"

    @check("sampling waits for nothing")
    def _():
        probs = torch.randn(8, 32000, device=DEVICE).softmax(-1)
        k, p = torch.full((8,), 40, device=DEVICE, dtype=torch.int32), torch.full((8,), 0.9, device=DEVICE)
        calls = [lambda: ours.top_k_top_p_sampling_from_probs(probs, k, p), lambda: ours.sampling_from_logits(probs.log()),
                 lambda: ours.min_p_sampling_from_probs(probs, 0.1, return_valid=True),
                 lambda: ours.top_k_top_p_sampling_from_logits(probs.log(), k.long(), 0.9),
                 lambda: ours.softmax(probs.log(), temperature=p), lambda: ours.top_p_renorm_probs(probs, p),
                 lambda: ours.top_k_renorm_probs(probs, k), lambda: ours.top_k(probs, 8, sorted=True),
                 lambda: ours.top_k_mask_logits(probs, k),
                 lambda: ours.chain_speculative_sampling(probs.view(4, 2, -1), k.view(4, 2), probs[:, None].expand(8, 3, -1)[:4])]
        return waits_for_nothing(calls)

    @check("masks and chains in torch.cuda.graph with arrays changed between replays")
    def _():
        logits, draft = torch.randn(4, 32000, device=DEVICE), torch.randn(4, 3, 32000, device=DEVICE).softmax(-1)
        target, counts = torch.randn(4, 4, 32000, device=DEVICE).softmax(-1), torch.ones(4, device=DEVICE, dtype=torch.int32)
        ids, seed, totals = torch.zeros(4, 3, device=DEVICE).int(), torch.zeros(1, device=DEVICE).long(), torch.zeros(4, device=DEVICE).int()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def both(totals=None):
            return (ours.top_k_mask_logits(logits, counts),
                    *ours.chain_speculative_sampling(draft, ids, target, totals, seed=seed, offset=seed))

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()  # loads the kernels
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            found = both(totals)
        sum_of_accepted = torch.zeros_like(totals)
        for turn in range(20):
            counts.copy_(torch.tensor([turn, -1, 32000, 7 * turn + 1]))
            ids.copy_(draft.topk(3).indices[:, 0])
            ids[turn % 4, turn % 3:] = -1
            seed.fill_(turn)
            graph.replay()
            expected = both()
            sum_of_accepted += expected[2]
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), turn
            kept = found[0].isfinite().sum(1).tolist()
            assert kept == [turn or 32000, 32000, 32000, 7 * turn + 1], kept
        assert torch.equal(totals, sum_of_accepted)
        return f"{int(totals.sum())} accepted"

    @check("sampling in torch.cuda.graph with parameters changed between replays")
    def _():
        logits = torch.randn(16, 32000, device=DEVICE)
        k, p = torch.full((16,), 40, device=DEVICE, dtype=torch.int32), torch.full((16,), 0.9, device=DEVICE)
        seed, offset = torch.zeros(1, device=DEVICE, dtype=torch.int64), torch.zeros(1, device=DEVICE, dtype=torch.int64)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def draw():
            return ours.top_k_top_p_sampling_from_logits(logits, k, p, seed=seed, offset=offset)

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            draw()  # loads the kernel
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            tokens = draw()
            drawn = ours.top_k_top_p_sampling_from_logits(logits, k, p)
        different = set()
        for turn in range(20):
            k.fill_(1 + 13 * turn)
            p.fill_(1.0 - 0.04 * turn)
            offset.fill_(64 * turn)
            graph.replay()
            assert torch.equal(tokens, draw()), turn
            different.add(tuple(drawn.tolist()))
        assert len(different) > 10, "the generator gives each replay a seed"
        return f"{len(different)} different draws of 20 replays"

    @check("capture in torch.cuda.graph on a side stream with a pool, 1,000 replays with replans, autocast on and off")
    def _():
        buffers = [torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.zeros(2048, dtype=torch.int32, device=DEVICE),
                   torch.zeros(4, dtype=torch.int32, device=DEVICE)]
        batches = [cache, Cache([33, 1000, 7, 2222])]
        wrapper = ours.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers, "NHD", True)
        shared = torch.empty(max(len(one.data) for one in batches), *cache.data.shape[1:], device=DEVICE, dtype=torch.bfloat16)
        out, side, graph = torch.empty_like(q), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        planned_decode(ours, cache, wrapper)
        shared[: len(cache.data)].copy_(cache.data)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            wrapper.run(q, shared, out=out)  # loads the kernels
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=side):
            wrapper.run(q, shared, out=out)
        errors = []
        for turn in range(1000):
            one = batches[turn % 2]
            with torch.autocast("cuda", enabled=turn % 4 < 2):
                planned_decode(ours, one, wrapper)
            shared[: len(one.data)].copy_(one.data)
            graph.replay()
            if turn % 250 < 4:
                errors.append(worst(out, expected(q, one)))
        return f"{len(errors)} compared"

    @check("plan and run wait for nothing with lengths on the host")
    def _():
        buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (5, 2048, 4)]
        graph = ours.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers, "NHD", True)
        wrappers = [planned_decode(ours, cache), planned_decode(ours, cache, graph)]
        rows, bounds = torch.randn(520, 32, 128, device=DEVICE, dtype=torch.bfloat16), torch.tensor([0, 1, 18, 200, 520]).int()
        prefill = ours.BatchPrefillWithPagedKVCacheWrapper(workspace())

        def prompt():
            prefill.plan(bounds, cache.indptr, cache.indices, cache.last, 32, 8, 128, 16, causal=True,
                         q_data_type=torch.bfloat16)
            return prefill.run(rows, cache.data)

        mla = ours.BatchMLAPagedAttentionWrapper(workspace())
        latent = [torch.randn(64, 16, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64)]
        queries = [torch.randn(2, 16, dim, device=DEVICE, dtype=torch.bfloat16) for dim in (512, 64)]
        pages, unused = torch.randperm(64, device=DEVICE).int(), torch.tensor([0, 4, 9]).int()

        def latent_step(bounds=torch.tensor([0, 3, 8]).int(), pages=pages):
            mla.plan(torch.tensor([0, 1, 2]).int(), bounds, pages, torch.tensor([40, 70]).int(), 16, 512, 64, 16, True, 0.1,
                     torch.bfloat16, torch.bfloat16)
            return mla.run(*queries, *latent)

        # a page after the last token of request 0 is not read
        assert torch.equal(latent_step(), latent_step(unused, torch.cat([pages[:3], pages[:1], pages[3:]])))
        calls = [lambda one=one: planned_decode(ours, cache, one).run(q, cache.data) for one in wrappers]
        waited = waits_for_nothing([*calls, prompt, latent_step, lambda: latent_step(unused)])
        errors = [worst(call(), expected(q, cache)) for call in calls]
        # the indices of the call are those of the plan, whatever the caller writes afterwards
        kept = cache.indices.clone()
        wrapper = planned_decode(ours, cache, wrappers[0])
        cache.indices.zero_()
        errors.append(worst(wrapper.run(q, cache.data), expected_of(q, cache, kept)))
        cache.indices.copy_(kept)
        return f"{waited}, {errors}"

    @check("after prepare, a first run in a capture on another stream loads no kernel")
    def _():
        one = tilewright.Attention(tilewright.Problem(16, 4, 96, dtype="bfloat16"), device=DEVICE)
        start = time.perf_counter()
        one.prepare()
        prepared = time.perf_counter() - start
        table = tilewright.PageTable([0, 2], torch.arange(2, device=DEVICE, dtype=torch.int32), [3], 16)
        plan = one.plan(tilewright.Batch.paged([0, 1], table))
        rows, data = torch.randn(1, 16, 96, device=DEVICE).bfloat16(), torch.randn(2, 2, 16, 4, 96, device=DEVICE).bfloat16()
        out, graph = torch.empty_like(rows), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            start = time.perf_counter()
            one.run(plan, rows, data[:, 0], data[:, 1], out=out)
            took = time.perf_counter() - start
        graph.replay()
        error = worst(out, attention_of(rows, data))
        assert took < 0.02, f"the first run took {took:.3f} s"
        return f"{error}, prepare {prepared:.2f} s, first run {took * 1e3:.2f} ms"

    @check("torch.compile over a layer and a sampler")
    def _():
        x, residual = (torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        weight, table = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), torch.randn(128, 128, device=DEVICE)
        positions, k = torch.arange(64, device=DEVICE), torch.full((64,), 40, device=DEVICE, dtype=torch.int32)

        def layer(x, residual):
            ours.fused_add_rmsnorm(x, residual, weight)
            rows, keys = x.clone(), x[:, :1024].clone()
            ours.apply_rope_with_cos_sin_cache_inplace(positions, rows, keys, 128, table)
            probs = ours.softmax(ours.silu_and_mul(rows).float())
            return rows, keys, ours.top_k_top_p_sampling_from_probs(probs, k, 0.9, seed=3, offset=0)

        expected_inputs = x.clone(), residual.clone()
        truth = layer(*expected_inputs)
        for backend in ("aot_eager", "inductor"):
            found_inputs = x.clone(), residual.clone()
            found = torch.compile(layer, fullgraph=True, backend=backend)(*found_inputs)
            for one, other in zip((*truth, *expected_inputs), (*found, *found_inputs)):
                assert torch.equal(one, other), backend
        return "aot_eager and inductor"

    @check("tables, sinks, scales, masks and bitmasks in tensors, without waiting")
    def _():
        def rand(*shape):
            return torch.rand(shape, device=DEVICE) + 0.5

        # tables of cosines and sines
        positions, table = torch.arange(64, device=DEVICE), torch.randn(64, 128, device=DEVICE)
        rows, keys = (torch.randn(64, n * 128, device=DEVICE, dtype=torch.bfloat16) for n in (32, 8))
        first = ours.apply_rope_with_cos_sin_cache(positions, rows, keys, 128, table)[0]
        on_host = [x.cpu() for x in (positions, rows, keys)]
        truth = ours.apply_rope_with_cos_sin_cache(*on_host, 128, table.cpu())[0]
        errors = [worst(first.cpu(), truth.float())]
        # sinks, scales and tables of variants
        data = cache.data.to(torch.float8_e4m3fn)
        wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        wrapper.plan(cache.indptr, cache.indices, cache.last, 32, 8, 128, 16, q_data_type=torch.bfloat16,
                     kv_data_type=torch.float8_e4m3fn)
        sinks, q_scale, k_scale, v_scale, bias = rand(32), rand(1), rand(8), rand(8), rand(32)

        def decode(device=None):
            of = (lambda x: x) if device is None else (lambda x: x.cpu().tolist() if x.numel() == 1 else x.cpu())
            return wrapper.run(q, data, sinks=sinks, q_scale=q_scale if device is None else float(q_scale), k_scale=of(k_scale),
                               v_scale=of(v_scale))

        errors.append(worst(decode(), decode("cpu").float()))

        @tilewright.variant(bias=bias)
        def biased(at, logit):
            return logit + at.bias[at.qo_head] * (at.kv - at.qo) * 0.01

        problem = tilewright.Problem(32, 8, 128, dtype="bfloat16")
        pages = tilewright.PageTable(cache.indptr, cache.indices, cache.last, 16)
        batch = tilewright.Batch.paged(list(range(5)), pages)
        attend = tilewright.Attention(problem, biased, device=DEVICE)
        plan = attend.plan(batch)
        copied = tilewright.Variant("copied", params={"bias": bias.tolist()},
                                    logits=lambda at, logit: logit + at.bias[at.qo_head] * (at.kv - at.qo) * 0.01)
        of_copy = tilewright.Attention(problem, copied, device=DEVICE).run(plan, q, *cache.data.unbind(1))
        errors.append(worst(attend.run(plan, q, *cache.data.unbind(1)), of_copy.float()))
        # masks
        bounds = torch.tensor([0, 1, 18, 40, 90], dtype=torch.int32)
        lens = [(int(b) - int(a)) * n for a, b, n in zip(bounds[:-1], bounds[1:], cache.kv_lens)]
        flags = torch.rand(sum(lens), device=DEVICE) < 0.7
        packed, _ = ours.segment_packbits(flags.cpu(), torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()]), "little")
        queries, prefill = torch.randn(90, 32, 128, device=DEVICE, dtype=torch.bfloat16), ours.BatchPrefillWithPagedKVCacheWrapper(workspace())

        def masked(**mask):
            prefill.plan(bounds, cache.indptr, cache.indices, cache.last, 32, 8, 128, 16, q_data_type=torch.bfloat16, **mask)
            return prefill.run(queries, cache.data)

        masks = {"packed_custom_mask": packed.to(DEVICE)}, {"custom_mask": flags}
        truth = masked(packed_custom_mask=packed)
        for mask in masks:
            assert torch.equal(masked(**mask), truth), list(mask)
        # bitmasks
        logits = torch.randn(4, 32000, device=DEVICE)
        words = torch.randint(-(2**31), 2**31 - 1, (4, 1000), device=DEVICE, dtype=torch.int32)
        edited, edited_host = logits.clone(), logits.cpu()
        tilewright.sampling.apply_token_bitmask(edited, words)
        tilewright.sampling.apply_token_bitmask(edited_host, words.cpu())
        assert torch.equal(edited.cpu(), edited_host)
        calls = [lambda: ours.apply_rope_with_cos_sin_cache(positions, rows, keys, 128, table), decode,
                 lambda: attend.run(plan, q, *cache.data.unbind(1)), *(lambda mask=mask: masked(**mask) for mask in masks),
                 lambda: tilewright.sampling.apply_token_bitmask(edited, words)]
        return f"{waits_for_nothing(calls)}, {', '.join(errors)}"

    @check("expandable segments")
    def _():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            # larger than any segment that is free
            big = torch.empty(1 << 30, dtype=torch.bfloat16, device=DEVICE)
            first = [one for one in torch.cuda.memory_snapshot() if one["address"] <= big.data_ptr() < one["address"] + one["total_size"]]
            assert first[0]["is_expandable"], "the allocator does not expand segments"
            x = big[-64 * 4096 :].view(64, 4096).normal_()
            error = worst(ours.rmsnorm(x, torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)),
                          torch.nn.functional.rms_norm(x.float(), (4096,), eps=1e-6))
            outputs, *_ = step_on(DEVICE, cache, q)  # its tensors are in expandable segments, too
            return f"{error}, {worst(outputs, expected(q, cache))}"
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")

    @check("stateless calls borrow their workspace")
    def _():
        tables = torch.arange(64, device=DEVICE, dtype=torch.int32).view(4, 16)
        lengths = torch.tensor([200, 7, 256, 30], device=DEVICE, dtype=torch.int32)
        rows, data = torch.randn(4, 32, 128, device=DEVICE).bfloat16(), torch.randn(64, 2, 16, 8, 128, device=DEVICE).bfloat16()
        outputs = []
        for _ in range(3):
            scratch = torch.full((64 << 20,), 255, dtype=torch.uint8, device=DEVICE)
            known = weakref.ref(scratch)
            outputs.append(ours.xqa_batch_decode_with_kv_cache(rows, data, scratch, tables, lengths, 256, bmm1_scale=128**-0.5))
            del scratch
            assert known() is None, "the plan keeps the workspace"
        assert all(torch.equal(one, outputs[0]) for one in outputs)
        keys, values = (data[:16, at].reshape(256, 8, 128)[:200] for at in (0, 1))
        return worst(outputs[0][:1], attention(rows[:1], keys, values, False))

    @check("variants of Python functions, first calls included")
    def _():
        return variants_of_functions()

    @check("products in 8 bits with scales per block, recorded too")
    def _():
        return products_with_block_scales()

    @check("two threads on two streams")
    def _():
        steps = 20
        expected = step_on(DEVICE, cache, q)

        def steps_on_a_stream():
            with torch.cuda.stream(torch.cuda.Stream()):
                return [step_on(DEVICE, cache, q) for _ in range(steps)]

        torch.cuda.synchronize()
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for thread in [threads.submit(steps_on_a_stream) for _ in range(2)]:
                for step in thread.result():
                    assert all(torch.equal(a, b) for a, b in zip(step, expected)), "other values"
        return f"{2 * steps} steps with equal bits"

    @check("two GPUs in four threads, with the first one current")
    def _():
        if torch.cuda.device_count() < 2:
            return "there is one"
        expected = step_on(DEVICE, cache, q)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for device in (DEVICE, "cuda:1"):
                step_on(device, cache, q)  # loads the kernels
            steps = [threads.submit(step_on, device, cache, q) for _ in range(20) for device in (DEVICE, "cuda:1")]
            for step in steps:
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(step.result(), expected)), "other values"
        try:
            ours.rmsnorm(q[0].to("cuda:1"), torch.ones(128, device=DEVICE, dtype=torch.bfloat16))
        except tilewright.Error as why:
            return f"equal bits; {why}"
        raise AssertionError("tensors of two GPUs were accepted")

    @check("a tensor on the host where a GPU computes")
    def _():
        try:
            planned_decode(ours, cache).run(q, cache.data.cpu())
        except tilewright.Error as why:
            return str(why)
        raise AssertionError("it was accepted")


def first_call(case):
    """The time in seconds from a variant to its first output, and that output."""
    q, k, v = (torch.from_numpy(x).to(DEVICE) for x in (case.q, case.k, case.v))
    torch.cuda.synchronize()
    start = time.perf_counter()
    operator = case.operator(DEVICE)
    out = operator.run(operator.plan(case.batch), q, k, v)
    torch.cuda.synchronize()
    return time.perf_counter() - start, out


def variants_of_functions():
    """FlashInfer's variants, each first call with nothing in a cache, and one of a prompt, for which `wgmma` is assembled."""
    rng = numpy.random.default_rng(0)
    lines = []
    for make in (*jit_variants.ALL, jit_variants.prefill_with_distance):
        case = make(rng)
        seconds, out = first_call(case)
        lines.append(f"{case.name} {seconds:.2f} s, {worst(out, torch.from_numpy(case.o).to(DEVICE))}")
        if case.logits is not None:
            dumped = torch.tensor(case.variant.buffer("logits")).view(case.logits.shape)
            lines.append(f"its logits {worst(dumped, torch.from_numpy(case.logits))}")
    return "first calls: " + "; ".join(lines)


def recorded(call):
    """The output of a call in a CUDA graph after a replay, and the time of a replay in microseconds."""
    call()  # creates the handle of cuBLAS and its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(100):
        graph.replay()
    end.record()
    end.synchronize()
    return out, begin.elapsed_time(end) * 10


def products_with_block_scales():
    """``fp8_blockscale_gemm_sm90`` against float32 of the dequantized operands, and its time next to that with a dequantized weight."""
    gemm, e4m3, k = ours.gemm, torch.float8_e4m3fn, 7168
    in_8_bits = gemm._has_blockwise_scaled_mm
    if not in_8_bits(torch.device(DEVICE)):
        return "weights are dequantized here"

    def in_float32(x, scales):
        return x.float() * scales.repeat_interleave(128, 1)

    def relative(actual, truth):
        error = ((actual.float() - truth).norm() / truth.norm()).item()
        assert error < 4e-3, f"relative error {error}"
        return error

    lines, errors, calls = [], [], []
    for m, n, dtype in itertools.product((1, 5, 8, 64), (2112, 4096), (torch.bfloat16, e4m3)):
        x, weight = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(e4m3)
        columns = None if dtype != e4m3 else torch.rand(k // 128, m, device=DEVICE) + 0.5
        of_weight = torch.rand(-(-n // 128), k // 128, device=DEVICE) + 0.5
        b = in_float32(weight, of_weight.repeat_interleave(128, 0)[:n])
        if columns is None:
            quantized, of_rows = ours.quantization.per_token_group_quant_8bit(x, 128)
            truth = in_float32(quantized, of_rows) @ b.t()
        else:
            truth = in_float32(x, columns.t()) @ b.t()

        def call(out=None, x=x, weight=weight, columns=columns, of_weight=of_weight):
            return gemm.fp8_blockscale_gemm_sm90(x, weight, columns, of_weight, out)

        out = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
        assert call(out) is out
        replayed, took = recorded(call)
        errors += [relative(y, truth) for y in (out, call(), replayed)]
        gemm._has_blockwise_scaled_mm = lambda device: False
        try:
            dequantizing = recorded(call)[1]
        finally:
            gemm._has_blockwise_scaled_mm = in_8_bits
        lines.append(f"m = {m}, n = {n}, {str(dtype)[6:]}: {took:.1f} µs, {dequantizing:.1f} dequantizing")
        calls.append(call)
    return f"error {max(errors):.2e}; {waits_for_nothing(calls)}; " + "; ".join(lines)


def host_times(calls, passes=5, rounds=100):
    """The median host time of each call in microseconds; the device is idle before each. A process is slower in its first tenths of
    a second, so all calls are timed in several passes, and the median pass counts."""
    medians = {name: [] for name in calls}
    for _ in range(passes):
        for name, call in calls.items():
            call()
            times = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
            medians[name].append(statistics.median(times))
    return {name: round(statistics.median(of_call), 2) for name, of_call in medians.items()}


def measure(module):
    """Host times of ``plan`` (64 requests), ``run`` and sampling."""
    cache = Cache([4096] * 64)
    q = torch.randn(64, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    wrapper = planned_decode(module, cache)
    out = torch.empty_like(q)
    probs = torch.randn(64, 32000, device=DEVICE).softmax(-1)
    k, p = torch.full((64,), 40, device=DEVICE, dtype=torch.int32), torch.full((64,), 0.9, device=DEVICE)
    x, weight = torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16), torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    normed = torch.empty_like(x)
    return host_times({
        "plan of 64 requests": lambda: planned_decode(module, cache, wrapper),
        "run": lambda: wrapper.run(q, cache.data, out=out),
        "rmsnorm": lambda: module.rmsnorm(x, weight, out=normed),
        "top_k_top_p_sampling_from_probs": lambda: module.top_k_top_p_sampling_from_probs(probs, k, p),
        "top_k_top_p_sampling_from_logits": lambda: module.top_k_top_p_sampling_from_logits(probs, k, p),
        "the same with numbers": lambda: module.top_k_top_p_sampling_from_probs(probs, 40, 0.9),
    })


def measure_in_turns(libraries, rounds=3):
    """Medians of :func:`measure` in processes of their own, in turn: what the checks leave behind changes host times."""
    samples = {library: [] for library in libraries}
    for _ in range(rounds):
        for library, of_library in samples.items():
            process = subprocess.run([sys.executable, __file__, "--host-times", library], check=True, stdout=subprocess.PIPE)
            of_library.append(json.loads(process.stdout.splitlines()[-1]))
    return samples, {library: {call: statistics.median(sample[call] for sample in of_library) for call in of_library[0]}
                     for library, of_library in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against-flashinfer", action="store_true", help="time an installed FlashInfer too")
    parser.add_argument("--json", metavar="FILE", help="write the results to a file")
    parser.add_argument("--host-times", metavar="LIBRARY", help="print the host times of this module only, as JSON")
    arguments = parser.parse_args()
    if arguments.host_times:
        print(json.dumps(measure(importlib.import_module(arguments.host_times))))
        return
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, "tilewright", tilewright.__version__)
    samples, times = measure_in_turns(["tilewright.flashinfer", *(["flashinfer"] if arguments.against_flashinfer else [])])
    for name, each in times.items():
        least = {call: min(sample[call] for sample in samples[name]) for call in each}
        print(f"host time of {name} in µs, median and least of {len(samples[name])} processes:",
              ", ".join(f"{call} {value} {least[call]}" for call, value in each.items()))
    run_checks()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"checks": results, "host_microseconds": times, "host_samples": samples}, file, indent=1)
    sys.exit(any(not result["ok"] for result in results))


if __name__ == "__main__":
    main()
