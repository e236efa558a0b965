"""Decode and prefill on a CPU: Tilewright, transformers, llama.cpp and candle in alternating rounds of one run.

    pip install gguf llama-cpp-python transformers torch
    cargo build --release
    python benches/peers/cpu_serving.py benches/models/qwen3-0.6b.json --threads 2 --rounds 7 --csv serving.csv

All models have random weights of the shapes of a Qwen3 config.json. The GGUF files for llama.cpp are written once to --files. Their
quantized files store every matrix, the embedding included, in the type of the file, as `tilewright bench --weights` does.

Each contender is a process that loads its model once. It is stopped (SIGSTOP) while another one is measured, so idle threads take
no time. A round measures every contender once, in an order that rotates. The sample of a case is the median of its steps. The table
has the median over rounds and, in parentheses, the smallest and largest sample.
"""

import argparse
import csv
import ctypes
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

WARMUP = 4
LLAMA_TYPES = {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
CONTENDERS = ["tilewright:bf16", "tilewright:int8", "tilewright:int4", "transformers:bf16", "transformers:f32"]
CONTENDERS += [f"llama.cpp:{name}" for name in LLAMA_TYPES]


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cases(args):
    """Name, tokens per step, batch (None: prefill)."""
    decode = [(f"decode {batch} x {args.context}", batch, batch) for batch in args.batch]
    return decode + [(f"prefill {args.prefill}", args.prefill, None)]


class Transformers:
    def __init__(self, args, dtype):
        import torch
        import transformers

        torch.set_num_threads(args.threads)
        self.torch, self.args = torch, args
        config = transformers.AutoConfig.for_model(**json.loads(args.config.read_text(encoding="utf-8")))
        config._attn_implementation = "sdpa"
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.vocab = config.vocab_size
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def measure(self, batch):
        with self.torch.inference_mode():
            return self.prefill() if batch is None else self.decode(batch)

    def prefill(self):
        ids = self.torch.randint(0, self.vocab, (1, self.args.prefill))
        work = lambda: self.model(ids, use_cache=True, logits_to_keep=1)
        return [timed(work) for _ in range(self.args.repeats + 1)][1:]

    def decode(self, batch):
        ids = self.torch.randint(0, self.vocab, (batch, self.args.context))
        state = self.model(ids, use_cache=True, logits_to_keep=1)
        seconds = []
        for _ in range(self.args.steps + WARMUP):
            start = time.perf_counter()
            ids = state.logits[:, -1:].argmax(-1)
            state = self.model(ids, past_key_values=state.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - start)
        return seconds[WARMUP:]


class LlamaCpp:
    def __init__(self, args, kind):
        import llama_cpp
        import numpy

        self.api, self.numpy, self.args = llama_cpp, numpy, args
        # the log of a load has hundreds of lines
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        path = str(gguf_path(args, kind)).encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path.decode()}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.about = f"llama-cpp-python {llama_cpp.__version__}"

    def context(self, sequences, tokens):
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens, sequences
        params.n_batch = params.n_ubatch = max(512, self.args.prefill)
        params.n_threads = params.n_threads_batch = self.args.threads
        return self.api.llama_init_from_model(self.model, params)

    def fill(self, batch, tokens):
        """Tokens as (token, position, sequence, needs logits)."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, logits

    def run(self, context, batch):
        if self.api.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def measure(self, batch):
        sequences = 1 if batch is None else batch
        tokens = self.args.prefill if batch is None else self.args.context + self.args.steps + WARMUP
        context = self.context(sequences, -(-tokens // 256) * 256)
        space = self.api.llama_batch_init(max(512, self.args.prefill), 0, 1)
        try:
            return self.prefill(context, space) if batch is None else self.decode(context, space, batch)
        finally:
            self.api.llama_batch_free(space)
            self.api.llama_free(context)

    def prefill(self, context, space):
        count, seconds = self.args.prefill, []
        for _ in range(self.args.repeats + 1):
            self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
            self.fill(space, [(i * 7 % self.vocab, i, 0, i == count - 1) for i in range(count)])
            seconds.append(timed(lambda: self.run(context, space)))
        return seconds[1:]

    def decode(self, context, space, batch):
        for sequence in range(batch):
            self.fill(space, [(i * 7 % self.vocab, i, sequence, False) for i in range(self.args.context)])
            self.run(context, space)
        next_tokens, seconds = list(range(batch)), []
        for step in range(self.args.steps + WARMUP):
            start = time.perf_counter()
            position = self.args.context + step
            self.fill(space, [(next_tokens[s], position, s, True) for s in range(batch)])
            self.run(context, space)
            rows = [self.api.llama_get_logits_ith(context, s) for s in range(batch)]
            next_tokens = [int(self.numpy.ctypeslib.as_array(row, (self.vocab,)).argmax()) for row in rows]
            seconds.append(time.perf_counter() - start)
        return seconds[WARMUP:]


def gguf_path(args, kind):
    return args.files / f"{args.config.stem}-{kind}.gguf"


def write_gguf(args, kind):
    """Random weights of the configuration: norms of 1, matrices with variance 1 / inputs."""
    import gguf
    import numpy

    path = gguf_path(args, kind)
    if path.exists():
        return
    values = json.loads(args.config.read_text(encoding="utf-8"))
    hidden, inner, dim = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    q, kv = values["num_attention_heads"] * dim, values["num_key_value_heads"] * dim
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_vocab_size(values["vocab_size"])
    writer.add_tokenizer_model("none")
    random, stored = numpy.random.default_rng(0), gguf.GGMLQuantizationType[LLAMA_TYPES[kind]]

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns), dtype=numpy.float32) / numpy.float32(columns**0.5)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)

    def norm(name, width):
        writer.add_tensor(f"{name}.weight", numpy.ones(width, dtype=numpy.float32))

    matrix("token_embd", values["vocab_size"], hidden)
    if not values.get("tie_word_embeddings"):
        matrix("output", values["vocab_size"], hidden)
    norm("output_norm", hidden)
    for layer in range(values["num_hidden_layers"]):
        shapes = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
        shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}", *shape)
        for name, width in {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": dim, "attn_k_norm": dim}.items():
            norm(f"blk.{layer}.{name}", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def serve(args, name):
    """The process of a contender: answers each batch on standard input with the seconds of its steps."""
    peer, kind = name.split(":")
    contender = {"transformers": Transformers, "llama.cpp": LlamaCpp}[peer](args, kind)
    print(json.dumps(contender.about), flush=True)
    for line in sys.stdin:
        print(json.dumps(contender.measure(json.loads(line))), flush=True)


class Worker:
    """A contender in a process of its own, stopped unless it is measured."""

    def __init__(self, args, name):
        command = [args.candle, args.config, *map(str, [args.context, args.prefill, args.steps, args.repeats])]
        if not name.startswith("candle"):
            command = [sys.executable, __file__, *sys.argv[1:], "--serve", name]
        threads = {"OMP_NUM_THREADS": str(args.threads), "RAYON_NUM_THREADS": str(args.threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | threads
        )
        self.about = json.loads(self.answer())
        self.process.send_signal(signal.SIGSTOP)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")
        return line

    def sample(self, args):
        self.process.send_signal(signal.SIGCONT)
        rates = {}
        for case, tokens, batch in cases(args):
            print(json.dumps(batch), file=self.process.stdin, flush=True)
            rates[case] = tokens / statistics.median(json.loads(self.answer()))
        self.process.send_signal(signal.SIGSTOP)
        return rates

    def close(self):
        self.process.kill()
        self.process.wait()


class Tilewright:
    """`tilewright bench`, a process per round."""

    def __init__(self, args, kind):
        self.program, self.kind = args.program, kind
        version = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True)
        self.about = version.stdout.strip()

    def sample(self, args):
        with tempfile.TemporaryDirectory() as folder:
            rates = pathlib.Path(folder) / "rates.csv"
            model = gguf_path(args, self.kind) if self.kind in LLAMA_TYPES and self.kind != "bf16" else args.config
            command = [self.program, "bench", "--model", model, "--threads", args.threads, "--csv", rates]
            command += ["--batch", ",".join(map(str, args.batch)), "--context", args.context]
            command += ["--prefill", args.prefill, "--steps", args.steps, "--repeats", args.repeats]
            if self.kind.startswith("int"):
                command += ["--weights", self.kind]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            rows = csv.DictReader(rates.read_text(encoding="utf-8").split("\n\n")[0].splitlines())
            return {row["case"]: float(row["tokens_per_second"]) for row in rows}

    def close(self):
        pass


def report(args, samples):
    names = [case for case, _, _ in cases(args)]
    print("\n" + "tokens/s".ljust(20) + "".join(name.rjust(30) for name in names))
    for name, rounds in samples.items():
        cells = []
        for case in names:
            rates = [rates[case] for rates in rounds]
            cells.append(f"{statistics.median(rates):.1f} ({min(rates):.1f} .. {max(rates):.1f})".rjust(30))
        print(name.ljust(20) + "".join(cells))
    if args.csv:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["contender", "case", "round", "tokens_per_second"])
            for name, rounds in samples.items():
                for number, rates in enumerate(rounds):
                    rows.writerows([name, case, number, f"{rate:.2f}"] for case, rate in rates.items())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("config", type=pathlib.Path, help="config.json of a Qwen3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=16, help="decode steps per sample")
    parser.add_argument("--repeats", type=int, default=3, help="prefills per sample")
    parser.add_argument("--program", default="target/release/tilewright")
    parser.add_argument("--candle", help="program of examples/candle-qwen3, which adds candle:f32")
    parser.add_argument("--files", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "tilewright-gguf")
    known = f"{', '.join(CONTENDERS)}; tilewright:q8_0 and tilewright:q4_0 read the files of llama.cpp"
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {known}")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    if args.serve:
        serve(args, args.serve)
        return
    # a stopped process outlives its parent, so SIGTERM must end the contenders too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.files.mkdir(parents=True, exist_ok=True)
    names = args.only or CONTENDERS + (["candle:f32"] if args.candle else [])
    for kind in LLAMA_TYPES:
        if any(name in (f"llama.cpp:{kind}", f"tilewright:{kind}") for name in names):
            write_gguf(args, kind)
    contenders = {}
    try:
        for name in names:
            peer, kind = name.split(":")
            contenders[name] = Tilewright(args, kind) if peer == "tilewright" else Worker(args, name)
            print(f"{name:20} {contenders[name].about}", flush=True)
        samples = {name: [] for name in names}
        for number in range(args.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(contenders[name].sample(args))
                print(f"round {number} {name:20} {samples[name][-1]}", file=sys.stderr, flush=True)
        report(args, samples)
    finally:
        for contender in contenders.values():
            contender.close()


if __name__ == "__main__":
    main()
