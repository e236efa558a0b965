"""mini-sglang, unmodified, on a GPU with Tilewright in place of FlashInfer: tokens, logits and throughput of both.

    python run_mini_sglang.py checkpoint FOLDER                     # random weights in the shape of Qwen3-0.6B
    python run_mini_sglang.py run FOLDER --library tilewright --out ours.pt [--timed]
    python run_mini_sglang.py run FOLDER --library flashinfer --out theirs.pt [--timed]
    python run_mini_sglang.py compare ours.pt theirs.pt

``minisgl`` has to be importable, with its dependencies. Each run is a process of its own, because both libraries have the
name ``flashinfer``. ``compare`` requires equal greedy tokens; where two runs part, the logits of both tokens may differ by no more
than twice the bound on a difference between logits of the runs. It ends with 1 if a request fails.
"""

import argparse
import json
import pathlib
import random
import sys
import time

import torch

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 28, 16, 8, 128, 151936
REQUESTS, NEW_TOKENS, MAX_PROMPT = 64, 128, 250
#: The bound on a difference between logits of two runs, in standard deviations of a row. A value of bf16 is rounded by up to 2^-9;
#: about 170 roundings in 28 layers, independent of each other, add up to an error of sqrt(170) · 2^-9 = 0.025. The difference of two
#: runs has sqrt(2) times that, and the largest of 10^7 differences (64 rows of the vocabulary) is 5.3 standard errors.
BOUND = 2**0.5 * 5.3 * 0.025
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0,
}


def write_checkpoint(folder: pathlib.Path) -> None:
    """Writes ``config.json``, one file of weights from a fixed seed, and a tokenizer that spells numbers."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator("cuda").manual_seed(7)

    def matrix(rows, columns):
        values = torch.randn(rows, columns, generator=generator, device="cuda") * columns**-0.5
        return values.to(torch.bfloat16).cpu()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones.clone()}
    shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
              "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
              "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
              "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part, shape in shapes.items():
            weights[f"{name}{part}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = ones.clone()
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{name}{norm}.weight"] = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"))
    words = Tokenizer(WordLevel({str(number): number for number in range(1000)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)


def prompts_of(seed: int, count: int, shortest: int, longest: int) -> list:
    """Prompts of random tokens; every fourth one begins with the same 96, so that the radix cache has something to share."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(1, 10000) for _ in range(96)]
    prompts = []
    for index in range(count):
        tokens = [numbers.randrange(1, 10000) for _ in range(numbers.randint(shortest, longest))]
        prompts.append((shared + tokens)[:longest] if index % 4 == 0 else tokens)
    return prompts


class Recorder:
    """Records the largest logits of each request and step. It wraps two methods of the engine object while it is active."""

    def __init__(self, engine):
        self.engine, self.steps, self.first = engine, [], {}

    def __enter__(self):
        self.forward, self.sample = self.engine.forward_batch, self.engine.sampler.sample
        self.engine.forward_batch, self.engine.sampler.sample = self._forward_batch, self._sample
        return self

    def __exit__(self, *_):
        self.engine.forward_batch, self.engine.sampler.sample = self.forward, self.sample

    def _forward_batch(self, batch, args):
        # a chunk of a prompt has no token of its own
        self.uids = [request.uid if request.can_decode else None for request in batch.reqs]
        return self.forward(batch, args)

    def _sample(self, logits, args):
        values, tokens = logits.float().topk(8)
        self.steps.append((self.uids, values, tokens))
        for row, uid in enumerate(self.uids):
            if uid is not None and uid not in self.first:
                self.first[uid] = logits[row].float().cpu()
        return self.sample(logits, args)

    def largest(self) -> dict:
        """The 8 largest logits and their tokens per step, for each request."""
        found: dict = {}
        for uids, values, tokens in self.steps:
            for uid, row, ids in zip(uids, values.tolist(), tokens.tolist(), strict=True):
                if uid is not None:
                    found.setdefault(uid, []).append((row, ids))
        return found


def run(folder: pathlib.Path, library: str, out: pathlib.Path, timed: bool) -> None:
    """Generates greedy tokens of 64 requests, writes them with their logits, and measures throughput."""
    if library == "tilewright":
        import tilewright.flashinfer

        tilewright.flashinfer.install()
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    start = time.perf_counter()
    llm = LLM(str(folder), attention_backend="fi", max_seq_len_override=4096, max_extend_tokens=16384, cuda_graph_max_bs=256,
              max_running_req=256, num_page_override=400_000)
    ready = time.perf_counter() - start
    used = sys.modules["flashinfer"].__name__  # FlashInfer itself may not be imported before the engine: it initializes CUDA
    if used.split(".")[0] != library:
        raise SystemExit(f"flashinfer is {used}, expected {library}")
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NEW_TOKENS)
    with Recorder(llm.engine) as recorder:
        results = llm.generate(prompts_of(1, REQUESTS, 20, MAX_PROMPT), greedy)
    record = {"library": library, "tokens": [result["token_ids"] for result in results], "largest": recorder.largest(),
              "first": recorder.first, "ready": ready, "throughput": {}}
    print(f"{library}: ready after {ready:.1f} s, {sum(map(len, record['tokens']))} greedy tokens", flush=True)
    if timed:
        record["throughput"] = throughput(llm, SamplingParams)
    torch.save(record, out)


def throughput(llm, sampling) -> dict:
    """Generated tokens per second of three loads, two repetitions each with other prompts."""
    numbers = random.Random(3)
    lengths = [numbers.randint(100, 1024) for _ in range(256)]

    def same(count, tokens):
        return [sampling(temperature=0.0, ignore_eos=True, max_tokens=tokens)] * count

    loads = {
        "64 greedy, 512 in, 256 out": (64, 512, 512, same(64, 256)),
        "256 at temperature 0.6, 100-1,024 in and out": (256, 100, 1024, [
            sampling(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]),
        "64 with top-k 50 and top-p 0.9, 128 in, 256 out": (64, 128, 128, [
            sampling(temperature=0.8, top_k=50, top_p=0.9, ignore_eos=True, max_tokens=256)] * 64),
    }
    rates: dict = {}
    for name, (count, shortest, longest, params) in loads.items():
        rates[name] = []
        for repetition in range(3):
            prompts = prompts_of(100 + repetition, count, shortest, longest)
            torch.cuda.synchronize()
            start = time.perf_counter()
            llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            if repetition > 0:  # the first loads kernels
                rates[name].append(sum(one.max_tokens for one in params) / seconds)
        print(f"  {name}: {', '.join(f'{rate:.0f}' for rate in rates[name])} tokens/s", flush=True)
    return rates


def compare(ours: dict, theirs: dict) -> int:
    """Compares tokens and logits; returns the number of requests that fail."""
    bound, distance = 0.0, 0.0
    for uid, logits in ours["first"].items():
        deviation = theirs["first"][uid].std().item()
        bound = max(bound, BOUND * deviation)
        distance = max(distance, (logits - theirs["first"][uid]).abs().max().item())
    print(f"logits of {len(ours['first'])} prompts: at most {distance:.4f} apart, bound {bound:.4f}")
    failed, equal, gaps = int(not distance <= bound), 0, []
    for uid, (mine, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        step = next((step for step, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if step is None:
            equal += 1
            continue
        values, tokens = theirs["largest"][uid][step]
        logits = dict(zip(tokens, values, strict=True))
        gap = logits[other[step]] - logits[mine[step]] if mine[step] in logits else float("inf")
        gaps.append(gap)
        if gap > 2 * bound:
            failed += 1
            print(f"FAIL request {uid}, step {step}: tokens {mine[step]} and {other[step]}, logits {gap:.4f} apart")
    tokens = sum(map(len, ours["tokens"]))
    print(f"{equal} of {len(ours['tokens'])} requests have equal tokens ({tokens} in all); {len(gaps)} part at a gap of logits of "
          f"at most {max(gaps, default=0.0):.4f}, allowed {2 * bound:.4f}; {failed} fail")
    return failed


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("checkpoint").add_argument("folder", type=pathlib.Path)
    runner = commands.add_parser("run")
    runner.add_argument("folder", type=pathlib.Path)
    runner.add_argument("--library", choices=("tilewright", "flashinfer"), required=True)
    runner.add_argument("--out", type=pathlib.Path, required=True)
    runner.add_argument("--timed", action="store_true")
    both = commands.add_parser("compare")
    both.add_argument("ours", type=pathlib.Path)
    both.add_argument("theirs", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "checkpoint":
        write_checkpoint(options.folder)
    elif options.command == "run":
        run(options.folder, options.library, options.out, options.timed)
    else:
        sys.exit(1 if compare(torch.load(options.ours), torch.load(options.theirs)) else 0)


if __name__ == "__main__":
    main()
