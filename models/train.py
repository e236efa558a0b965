#!/usr/bin/env python3
"""Train a small Llama-architecture language model on a text file and export it as a Hugging Face folder.

    python models/train.py books.txt --out models/tilewright-small

The text file holds plain-text books separated by `<|endoftext|>`. The script

1. cleans the text and holds out its last 1 %;
2. trains a byte-level BPE tokenizer on the rest;
3. trains the model on windows of `--context` tokens, each of which begins with `<|endoftext|>` and a paragraph,
   just as a prompt does when the tokenizer encodes it;
4. exports the weights of the best held-out loss in bfloat16, with the configuration and the tokenizer;
5. loads the folder with `transformers`, compares its logits with those of the trained model, reports the
   held-out loss of the exported weights, and prints a few continuations.

It needs torch, transformers, tokenizers and safetensors. The defaults are the recipe of `tilewright-small` and want a
GPU. Without one, use small sizes:

    python models/train.py books.txt --out tiny --limit-chars 2000000 --vocab-size 1024 --layers 2 --hidden 64 \\
        --heads 2 --kv-heads 1 --head-dim 32 --ffn 128 --context 128 --batch 8 --steps 100 --warmup 10 \\
        --eval-every 50 --no-compile
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_FRACTION = 0.01
RMS_EPSILON = 1e-5
ROPE_THETA = 10000.0
IGNORED = -100  # the target that cross_entropy skips
PROMPTS = ["It was a dark night, and", "The old captain looked at the sea", '"My dear Watson," said Holmes,']


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="plain-text books, separated by <|endoftext|>")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--limit-chars", type=int, help="use only this many leading characters of the text")
    model = parser.add_argument_group("model")
    for name, size in [("vocab-size", 4096), ("layers", 8), ("hidden", 256), ("heads", 4), ("kv-heads", 2),
                       ("head-dim", 64), ("ffn", 512), ("context", 2048)]:
        model.add_argument(f"--{name}", type=int, default=size)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=13000)
    training.add_argument("--minutes", type=float, default=math.inf,
                          help="end the schedule after this many minutes of training, if the steps have not ended before")
    training.add_argument("--batch", type=int, default=64, help="windows in a step")
    training.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    training.add_argument("--warmup", type=int, default=500, help="steps of linear warm-up")
    training.add_argument("--weight-decay", type=float, default=0.2)
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--eval-every", type=int, default=500)
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


class Log:
    """Prints each line and keeps it in a file."""

    def __init__(self, path):
        self.file = path.open("w", encoding="utf-8")

    def __call__(self, line):
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def clean_book(book):
    book = re.sub(r"\A\s*Title:.*?\n-{5,}\n", "", book, count=1, flags=re.DOTALL)
    book = re.sub(r" -- ", "--", book)  # most of the books use dashes without spaces
    book = re.sub(r"[ \t]+", " ", book)
    book = re.sub(r" ?\n ?", "\n", book)
    return re.sub(r"\n{3,}", "\n\n", book).strip()


def load_books(path, limit_chars):
    """Returns the cleaned books to train on, and the held-out end of the last one(s) as one string."""
    raw = path.read_text(encoding="utf-8")[:limit_chars]
    text = END_OF_TEXT.join(clean_book(book) for book in raw.split(END_OF_TEXT))
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT_FRACTION)))
    return text[:cut].split(END_OF_TEXT), text[cut:].strip()


def train_tokenizer(books, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(books, trainer)
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, end_id)])
    return tokenizer


class TrainingWindows:
    """Random windows of the training tokens; each starts at a paragraph, after an `<|endoftext|>`."""

    def __init__(self, tokenizer, books, context, device):
        self.end_id = tokenizer.token_to_id(END_OF_TEXT)
        self.context = context
        encoded = tokenizer.encode_batch(books)
        # Every encoded book starts with the end token, which separates the books.
        tokens = torch.tensor([token for book in encoded for token in book.ids])
        newline = tokens == tokenizer.encode("\n", add_special_tokens=False).ids[0]
        paragraph = (torch.roll(newline, 1) & torch.roll(newline, 2)) | torch.roll(tokens == self.end_id, 1)
        starts = paragraph.nonzero().squeeze(1)
        self.starts = starts[starts < len(tokens) - context].to(device)
        self.tokens = tokens.to(device)

    def sample(self, batch):
        # Paragraphs are sampled in proportion to their length, so that every token is about equally likely.
        where = torch.randint(int(self.starts[-1]) + 1, (batch,), device=self.starts.device)
        first = self.starts[torch.searchsorted(self.starts, where)]
        targets = self.tokens[first[:, None] + torch.arange(self.context, device=first.device)]
        return shift_after_end_token(targets, self.end_id), targets


def shift_after_end_token(targets, end_id):
    """The inputs for the targets: the end token, then every target except the last."""
    return F.pad(targets[:, :-1], (1, 0), value=end_id)


def held_out_windows(tokenizer, text, context, device):
    """Cuts the held-out text into windows such that each of its tokens is a target once."""
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    targets = F.pad(tokens, (0, -len(tokens) % context), value=IGNORED).view(-1, context).to(device)
    # The padding is at the end, where no token attends to it: any id in range is a valid input.
    return shift_after_end_token(targets, end_id).clamp(min=0), targets


# Model: attribute names give the parameters their names in a Hugging Face Llama.


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rope_table(head_dim, context):
    """Cosines and sines, [context, head_dim]; the second half of a head repeats the angles of the first."""
    frequency = ROPE_THETA ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(context).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding in the rotate-half convention: element i pairs with element i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head_dim = args.head_dim
        self.q_proj = linear(args.hidden, args.heads * args.head_dim)
        self.k_proj = linear(args.hidden, args.kv_heads * args.head_dim)
        self.v_proj = linear(args.hidden, args.kv_heads * args.head_dim)
        self.o_proj = linear(args.heads * args.head_dim, args.hidden)

    def forward(self, x, cos, sin):
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.gate_proj = linear(args.hidden, args.ffn)
        self.up_proj = linear(args.hidden, args.ffn)
        self.down_proj = linear(args.ffn, args.hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(args.hidden, eps=RMS_EPSILON)
        self.self_attn = Attention(args)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden, eps=RMS_EPSILON)
        self.mlp = FeedForward(args)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden, eps=RMS_EPSILON)
        self.dropout = nn.Dropout(args.dropout)
        cos, sin = rope_table(args.head_dim, args.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens):
        x = self.dropout(self.embed_tokens(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """The output projection is the embedding, so there is no `lm_head`."""

    def __init__(self, args):
        super().__init__()
        self.model = Decoder(args)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each layer adds to the residual stream twice; smaller output weights limit the growth of its variance.
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) if writes_residual else 0.02)

    def forward(self, tokens):
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)

    def loss(self, tokens, targets, reduction="mean"):
        logits = self(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


@torch.no_grad()
def held_out_loss(model, inputs, targets, batch):
    """Mean loss of a held-out token, in nats."""
    model.eval()
    total = sum(model.loss(x, y, reduction="sum") for x, y in zip(inputs.split(batch), targets.split(batch)))
    model.train()
    return total.item() / (targets != IGNORED).sum().item()


def make_optimizer(model, args, device):
    matrices, gains = ([weight for weight in model.parameters() if weight.dim() == dim] for dim in (2, 1))
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")


def learning_rate(args, step, progress):
    """Linear warm-up, then a cosine down to zero."""
    return args.lr * min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(args, model, windows, held_out, bytes_per_token, log):
    """Trains the model and restores the weights of the best held-out loss."""
    device = windows.tokens.device
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    optimizer = make_optimizer(model, args, device)
    step_loss = torch.compile(model.loss) if args.compile else model.loss
    best_loss, best_weights = math.inf, None
    progress, step, running = 0.0, 0, torch.zeros((), device=device)
    started = time.monotonic()
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, progress)
        with autocast:
            loss = step_loss(*windows.sample(args.batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
        step += 1
        if step == 1:
            running.item()  # waits for the device: the clock starts after the compilation
            started = time.monotonic()
        elapsed = time.monotonic() - started
        progress = max(step / args.steps, elapsed / 60 / args.minutes)
        if step % args.eval_every == 0 or progress >= 1.0:
            since_report = (step - 1) % args.eval_every + 1
            with autocast:
                loss = held_out_loss(model, *held_out, args.batch)
            if loss < best_loss:
                best_loss = loss
                best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            seen = step * args.batch * args.context
            log(f"step {step:6}  {elapsed:6.1f} s  epoch {seen / len(windows.tokens):6.2f}"
                f"  training {running.item() / since_report:.4f}  held-out {loss:.4f}"
                f"  bits/byte {loss / bytes_per_token / math.log(2):.4f}")
            running.zero_()
    model.load_state_dict(best_weights)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(args, model, tokenizer):
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    weights = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(args.out / "tokenizer.json"))
    ends = {"bos_token_id": end_id, "eos_token_id": end_id}
    write_json(args.out / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": args.vocab_size, "tie_word_embeddings": True, **ends,
        "num_hidden_layers": args.layers, "hidden_size": args.hidden, "rms_norm_eps": RMS_EPSILON,
        "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim,
        "max_position_embeddings": args.context, "rope_theta": ROPE_THETA, "attention_bias": False,
        "intermediate_size": args.ffn, "hidden_act": "silu", "mlp_bias": False,
    })
    write_json(args.out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT,
        "add_bos_token": True, "clean_up_tokenization_spaces": False, "model_max_length": args.context,
    })
    write_json(args.out / "generation_config.json", {**ends, "do_sample": True, "temperature": 0.8, "top_p": 0.95})


@torch.no_grad()
def check_export(args, model, held_out, bytes_per_token, log):
    """Compares the exported folder, loaded with `transformers`, with the trained model."""
    device = held_out[0].device
    exported = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())  # the exported weights
    loss = held_out_loss(model, *held_out, args.batch)
    sample = held_out[0][:1]
    model.eval()
    difference = (exported(sample).logits - model(sample)).abs().max().item()
    log(f"exported weights, in float32: held-out {loss:.4f}, bits/byte {loss / bytes_per_token / math.log(2):.4f}")
    log(f"largest difference from the logits of transformers: {difference:.1e}")
    assert difference < 1e-3, "the exported folder does not compute what was trained"
    return exported


def print_samples(args, exported, log):
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    greedy = {"do_sample": False, "temperature": None, "top_p": None}
    nucleus = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(exported.device)
        for label, choice in [("temperature 0", greedy), ("temperature 0.8, top-p 0.95", nucleus)]:
            output = exported.generate(**inputs, max_new_tokens=min(120, args.context // 2), **choice)
            log(f"\n[{label}] {tokenizer.decode(output[0], skip_special_tokens=True)}")


def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "training.log")

    books, held_out_text = load_books(args.text, args.limit_chars)
    tokenizer = train_tokenizer(books, args.vocab_size)
    windows = TrainingWindows(tokenizer, books, args.context, device)
    held_out = held_out_windows(tokenizer, held_out_text, args.context, device)
    held_out_tokens = (held_out[1] != IGNORED).sum().item()
    bytes_per_token = len(held_out_text.encode()) / held_out_tokens
    log(f"{len(books)} books, {len(windows.tokens)} training tokens, {held_out_tokens} held-out tokens,"
        f" {bytes_per_token:.3f} bytes a token")

    model = Llama(args).to(device)
    log(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    train(args, model, windows, held_out, bytes_per_token, log)

    torch.set_float32_matmul_precision("highest")
    export(args, model, tokenizer)
    exported = check_export(args, model, held_out, bytes_per_token, log)
    print_samples(args, exported, log)


if __name__ == "__main__":
    main()
