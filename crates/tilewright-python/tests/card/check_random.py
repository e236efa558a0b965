"""Attention of random batches, compared with its definition in float64: random shapes, dtypes, pages, masks, variants, splits and levels.

    python crates/tilewright-python/tests/card/check_random.py [--device cuda] [--seconds 60] [--seed 1] [--first 0] [--most-keys 60000]

It needs torch. Case N depends on the seed and N only. Each failure is printed with its case, and the last line has the counts; it ends with
1 if one fails. On the CPU, choose few keys.
"""

import argparse
import collections
import itertools
import math
import random
import sys
import time
import traceback

import numpy
import torch

import tilewright as tw

FACTOR = 0.5  # of 8-bit caches: their scale
NARROW = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8": torch.int8}
#: Bounds on the error of a row, relative to its norm: a few roundings of weights and outputs.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
#: The error of tanh.approx is 2^-11, which the cap multiplies.
CAPS = (20.0, 50.0)


def lengths(pick, most_keys):
    """Query rows and keys of each request."""
    few = lambda: pick.choice((1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16))  # noqa: E731
    kind = pick.choice(("even", "skewed", "mixed", "long", "prompts", "short"))
    if kind == "even":
        count, rows, keys = pick.randint(1, 70), few(), pick.choice((1, 16, 129, 500, 1024, 2048, 4096))
        return [(rows, max(rows, keys))] * min(count, max(1, 8 * most_keys // keys))
    if kind == "skewed":
        return [(1, pick.randint(1, 600)) for _ in range(pick.randint(1, 63))] + [(few(), pick.randint(2000, most_keys))]
    if kind == "mixed":
        decodes = [(1, pick.randint(1, 3000)) for _ in range(pick.randint(1, 40))]
        chunks = [(rows, rows + pick.choice((0, 1, 63, pick.randint(0, 5000)))) for rows in
                  (pick.randint(17, 900) for _ in range(pick.randint(1, 3)))]
        both = decodes + chunks
        pick.shuffle(both)
        return both
    if kind == "long":
        return [(few(), pick.randint(most_keys // 2, most_keys)) for _ in range(pick.randint(1, 2))]
    if kind == "prompts":
        return [(n, n) for n in (pick.randint(1, 1500) for _ in range(pick.randint(1, 6)))]
    return [(few(), pick.randint(0, 40)) for _ in range(pick.randint(1, 100))]


def sums(counts):
    """The sums of the first 0, 1, .. counts."""
    return list(itertools.accumulate(counts, initial=0))


class Cache:
    """K and V in shuffled pages, or ragged, with those of each request in float64."""

    def __init__(self, generator, kv_lens, page_size, shapes, dtype, device, layout, prefix=0):
        self.page_size, self.layout = page_size, layout
        draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
        shared = prefix // page_size if prefix else 0
        counts = [-(-n // page_size) for n in kv_lens] if page_size else kv_lens
        total = sum(counts) + shared + 2 if page_size else sum(kv_lens)
        lead = (total, page_size) if page_size else (total,)
        wide = [draw(*lead, *shape) for shape in shapes]
        if dtype == torch.int8:
            self.tensors = [(x * 30).round().clamp(-127, 127).to(torch.int8) for x in wide]
        else:
            self.tensors = [x.to(dtype) for x in wide]
        # a page that no request has may hold anything
        order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
        self.lists, at = [], 0
        for count in counts:
            self.lists.append(order[at : at + count] if page_size else list(range(at, at + count)))
            at += count
        #: The pages of the keys that all requests share, before their own.
        self.prefix = order[at : at + shared]
        if page_size and dtype in (torch.float16, torch.bfloat16):
            for tensor in self.tensors:
                tensor[order[at + shared]] = math.nan
        self.kv_lens = kv_lens

    def table(self):
        bounds = sums(map(len, self.lists))
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in self.kv_lens]
        return tw.PageTable(bounds, list(itertools.chain(*self.lists)), last, self.page_size)

    def keys_of(self, request):
        """K and V of a request, those of the prefix before them."""
        found = []
        for tensor in self.tensors:
            rows = tensor[torch.tensor(self.prefix + self.lists[request], dtype=torch.long, device=tensor.device)]
            if self.page_size:
                rows = rows.reshape(-1, *tensor.shape[2:])[: len(self.prefix) * self.page_size + self.kv_lens[request]]
            found.append(rows.double())
        return found

    def arguments(self):
        """K and V in the layout of the problem."""
        if self.layout == "NHD":
            return self.tensors
        return [x.transpose(-3, -2).contiguous() for x in self.tensors]


def expected(q, k, v, scale, visible, logits, sinks):
    """Outputs and base-2 LSE of a request, one KV head after the other."""
    group, outputs, norms = q.shape[1] // k.shape[1], [], []
    for head in range(k.shape[1]):
        s = torch.einsum("qhd,kd->hqk", q[:, head * group : (head + 1) * group], k[:, head]) * scale
        s = logits(s, head * group).masked_fill(~visible, -math.inf)
        if sinks is not None:
            extra = sinks[head * group : (head + 1) * group].double()[:, None, None].expand(*s.shape[:2], 1)
            s = torch.cat([s, extra], -1)
        norm = torch.logsumexp(s, -1)
        weights = torch.exp(s - norm[..., None]).nan_to_num(0.0)[..., : k.shape[0]]
        outputs.append(torch.einsum("hqk,kd->qhd", weights, v[:, head]))
        norms.append(norm.T / math.log(2.0))
    return torch.cat(outputs, 1), torch.cat(norms, 1)


def packed(masks):
    """Bits of each request from a byte on."""
    return numpy.concatenate([numpy.packbits(mask.cpu().numpy(), bitorder="little") for mask in masks])


class Case:
    """A random problem with its batch."""

    def __init__(self, number, seed, device, most_keys):
        pick = self.pick = random.Random(f"{seed} {number}")
        self.device = device
        self.generator = torch.Generator(device).manual_seed(number)
        self.is_latent = pick.random() < 0.25
        self.dtype = pick.choice((torch.bfloat16, torch.float16))
        self.rows = lengths(pick, most_keys)
        self.split = pick.choice(("balanced", "balanced", "balanced", "never", 512, 2048))
        self.page_size = pick.choice((1, 2, 5, 16, 16, 16, 17, 32, 64, 64, 128))
        self.kv = None
        self.variant, self.cap, self.has_mask, self.window, self.prefix, self.layout = None, 0.0, False, None, 0, "NHD"
        self.causal = pick.random() < 0.8
        if self.is_latent:
            self.heads, self.dims = (pick.choice((1, 2, 5, 8, 16, 16, 32, 64, 128, 128)), 1), (576, 512)
            self.kv = pick.choice((None, None, "float8_e4m3fn"))
            self.rows = [(min(rows, 40), keys) for rows, keys in self.rows]
        else:
            self.heads = pick.choice(((32, 8), (32, 8), (8, 1), (28, 4), (16, 16), (16, 2), (12, 4), (64, 8), (40, 8), (5, 5), (24, 3)))
            self.dims = (pick.choice((32, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256)),) * 2
            if pick.random() < 0.06:
                self.dims, self.heads = (192, 128), (16, 16)
            self.kv = pick.choice((None, None, None, None, "float8_e4m3fn", "float8_e5m2", "int8"))
            self.layout = pick.choice(("NHD", "NHD", "HND"))
            self.page_size = 0 if pick.random() < 0.2 else self.page_size
            self.variant = pick.choice((None, None, None, "soft_cap", "alibi", "sinks"))
            self.window = pick.choice((None, None, None, 0, 1, 100, 1000)) if self.causal else None
            small = sum(rows * keys for rows, keys in self.rows) < 1 << 24
            self.has_mask = small and pick.random() < 0.12
            if self.page_size and not self.has_mask and self.window is None and pick.random() < 0.2:
                self.prefix = self.page_size * pick.choice((1, 7, 60, 300))

    def __str__(self):
        shown = self.rows if len(self.rows) <= 6 else f"{len(self.rows)} requests, rows to {max(self.rows)[0]}, keys to " \
            f"{max(keys for _, keys in self.rows)}"
        return f"heads {self.heads}, dims {self.dims}, {self.dtype}, KV {self.kv}, {self.layout}, pages {self.page_size}, causal " \
            f"{self.causal}, window {self.window}, {self.variant}, mask {self.has_mask}, prefix {self.prefix}, split {self.split}, {shown}"

    def problem(self):
        name = str(self.dtype).removeprefix("torch.")
        if self.is_latent:
            return tw.Problem.latent(self.heads[0], 512, 64, scale=192**-0.5, dtype=name, kv_dtype=self.kv, causal=self.causal)
        return tw.Problem(*self.heads, self.dims[0], head_dim_vo=self.dims[1], dtype=name, kv_dtype=self.kv, layout=self.layout,
                          causal=self.causal, window_left=self.window)

    def variant_and_logits(self):
        """The variant, the function of logits of heads from a head on, and the sinks."""
        if self.variant == "soft_cap":
            self.cap = cap = self.pick.choice(CAPS)
            return tw.variants.soft_cap(cap), lambda s, head: cap * torch.tanh(s / cap), None
        if self.variant == "alibi":
            slopes = torch.rand(self.heads[0], generator=self.generator, device=self.device) * 0.1

            def logits(s, head):
                rows, keys = s.shape[1:]
                distance = torch.arange(keys, device=s.device)[None] - (torch.arange(rows, device=s.device)[:, None] + keys - rows)
                return s + slopes[head : head + s.shape[0], None, None].double() * distance

            return tw.variants.alibi(self.heads[0], slopes=slopes), logits, None
        if self.variant == "sinks":
            values = torch.randn(self.heads[0], generator=self.generator, device=self.device)
            return tw.variants.sinks(values), lambda s, head: s, values
        return None, lambda s, head: s, None

    def run(self):
        """The largest error of a row beside its bound."""
        problem = self.problem()
        variant, logits, sinks = self.variant_and_logits()
        attention = tw.Attention(problem, variant, self.device)
        kv_lens, dtype = [keys for _, keys in self.rows], NARROW.get(self.kv, self.dtype)
        kv_heads = () if self.is_latent else (self.heads[1],)
        shapes = [(512,), (64,)] if self.is_latent else [(*kv_heads, self.dims[0]), (*kv_heads, self.dims[1])]
        cache = Cache(self.generator, kv_lens, self.page_size, shapes, dtype, self.device, self.layout, self.prefix)
        bounds = sums(rows for rows, _ in self.rows)
        q = torch.randn(bounds[-1], self.heads[0], self.dims[0], generator=self.generator, device=self.device).to(self.dtype)
        masks = self.masks()
        options = {} if masks is None else {"mask": packed(masks)}
        if self.page_size:
            if self.prefix:
                pages = tw.PageTable([0, len(cache.prefix)], cache.prefix, [self.page_size], self.page_size)
                options["levels"] = [tw.attention.Level([0, bounds[-1]], pages)]
            batch = tw.Batch.paged(bounds, cache.table(), **options)
        else:
            batch = tw.Batch.ragged(bounds, sums(kv_lens), **options)
        plan = attention.plan(batch, split=self.split)
        k, v = cache.arguments()
        scales = [FACTOR if self.kv != "int8" else FACTOR / 30] * 2 if self.kv else [None, None]
        if self.is_latent:
            run = lambda: attention.run_latent(plan, q[..., :512].contiguous(), q[..., 512:].contiguous(), k, v, return_lse=True,  # noqa: E731
                                               ckv_scale=scales[0], kpe_scale=scales[0])
        else:
            run = lambda: attention.run(plan, q, k, v, return_lse=True, k_scale=scales[0], v_scale=scales[1])  # noqa: E731
        out, lse = run()
        again, _ = run()
        if not torch.equal(out, again):
            raise AssertionError("a second run has other bits")
        return self.compare(q, cache, bounds, masks, logits, sinks, scales[0] or 1.0, (out, lse))

    def masks(self):
        if not self.has_mask:
            return None
        return [torch.rand(rows, keys, generator=self.generator, device=self.device) < 0.7 for rows, keys in self.rows]

    def compare(self, q, cache, bounds, masks, logits, sinks, factor, found):
        out, lse = found
        scale = 192**-0.5 if self.is_latent else self.dims[0] ** -0.5
        worst, tolerance = 0.0, TOLERANCE[self.dtype] + self.cap * 2.0**-11
        for request, (rows, _) in enumerate(self.rows):
            k, v = (factor * x for x in cache.keys_of(request))
            if self.is_latent:
                k, v = torch.cat([k, v], -1)[:, None], k[:, None]
            keys = k.shape[0]
            position = torch.arange(rows, device=self.device)[:, None] + keys - rows
            key = torch.arange(keys, device=self.device)[None]
            visible = key <= position if self.causal else torch.ones(rows, keys, dtype=torch.bool, device=self.device)
            if self.window is not None:
                visible = visible & (key >= position - self.window)
            if masks is not None:
                visible = visible & masks[request]
            of_request = slice(bounds[request], bounds[request + 1])
            want, norm = expected(q[of_request].double(), k, v, scale, visible, logits, sinks)
            got = out[of_request].double()
            if not torch.isfinite(got).all():
                raise AssertionError(f"request {request}: outputs that are not finite")
            error = (got - want).norm(dim=-1) / (want.norm(dim=-1) + 1e-6)
            if error.max() > tolerance:
                at = [int(x) for x in torch.nonzero(error == error.max())[0]]
                raise AssertionError(f"request {request} of {self.rows[request]}, row and head {at}: error {error.max():.4f}, bound "
                                     f"{tolerance:.4f}; {int((error > tolerance).sum())} of {error.numel()} rows")
            differs = (lse[of_request].double() - norm).abs().nan_to_num(0.0)
            if differs.max() > tolerance + 0.01:
                raise AssertionError(f"request {request} of {self.rows[request]}: LSE differs by {differs.max():.4f}")
            worst = max(worst, float(error.max()) / tolerance)
        return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first case")
    parser.add_argument("--step", type=int, default=1, help="the distance of cases, for several processes")
    parser.add_argument("--cases", type=int, default=1 << 30)
    parser.add_argument("--most-keys", type=int, default=60_000)
    options = parser.parse_args()
    end, number, counts, worst = time.monotonic() + options.seconds, options.first, collections.Counter(), 0.0
    while time.monotonic() < end and number < options.first + options.cases * options.step:
        case = Case(number, options.seed, options.device, options.most_keys)
        try:
            worst = max(worst, case.run())
            counts["ok"] += 1
        except tw.Unsupported:
            counts["unsupported"] += 1
        except (AssertionError, tw.Error) as why:
            counts["failed"] += 1
            print(f"FAIL case {number}: {case}\n     {type(why).__name__}: {why}", flush=True)
        except torch.OutOfMemoryError:
            counts["memory"] += 1
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
            raise SystemExit(f"case {number}: {case}") from None
        number += options.step
    print(f"{counts['ok']} cases agree, {counts['unsupported']} are not supported, {counts['memory']} had no memory, "
          f"{counts['failed']} fail; the largest error is {worst:.2f} of its bound")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
