"""Sampling: seeds and offsets of torch's generator, or the caller's. Tokens are not those of FlashInfer for the same seed."""

import numpy
import torch

from .. import _core, sampling
from .._device import queue_of
from .._tensors import from_bytes, on_host
from ._refuse import check_choice

#: What a row takes from its random stream, as the generator's offset advances.
_STEP = 4


def _seeds(probs, rows, generator, seed, offset):
    """Seeds and offsets of all rows: one seed and consecutive offsets from a generator, which advances."""
    if (seed is None) != (offset is None):
        raise ValueError("seed and offset must be given together")
    if seed is None:
        if generator is None:
            generator = _default_generator(probs.device)
        if probs.device.type == "cuda":
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + _STEP * rows)
        else:
            # the CPU's generator has no counter: a fresh seed is drawn from it
            seed, offset = int(torch.randint(0, 2**62, (1,), generator=generator)), 0
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, torch.Tensor) and value.numel() not in (1, rows):
            raise ValueError(f"{name} has {value.numel()} elements, expected 1 or batch_size = {rows}")
    return _each(seed, rows, 0), _each(offset, rows, _STEP)


def _default_generator(device):
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _each(value, rows, step):
    """One number per row, or one for all: a single one advances by ``step``, so that equal rows draw different tokens."""
    if isinstance(value, torch.Tensor):
        values = [int(one) % 2**64 for one in value.reshape(-1).tolist()]
        if len(values) == rows and rows != 1:
            return values
        value = values[0]
    if step == 0:
        return int(value) % 2**64
    first = numpy.uint64(int(value) % 2**64)
    return numpy.arange(rows, dtype=numpy.uint64) * numpy.uint64(step) + first  # modulo 2^64


def _parameter(value, rows):
    """A number, or one per row; a tensor on a GPU is copied, which waits for it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        raise ValueError("Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, "
                         "got a 0-dimensional tensor")
    if value.dim() > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for the sampling parameter, got a {value.dim()}D tensor")
    if value.numel() != rows:
        raise ValueError(f"Sampling parameter tensor batch size mismatch: {value.numel()} numbers, expected batch_size = {rows}")
    return on_host(value.float() if value.dtype in (torch.float16, torch.bfloat16) else value)


class _Draw:
    """The keywords that all samplers share."""

    __slots__ = ("check_nan", "indices", "random", "return_valid")

    def __init__(self, indices, generator, check_nan, seed, offset, return_valid=False):
        self.indices = indices
        self.random = (generator, seed, offset)
        self.check_nan = check_nan
        self.return_valid = return_valid

    def _parameter_rows(self, scores, value):
        """Parameters are one per row of ``scores``, or with ``indices`` also one per token."""
        tokens = scores.shape[0] if self.indices is None else len(self.indices)
        return tokens if getattr(value, "shape", None) == (tokens,) else scores.shape[0]

    def sample(self, scores, probs, params):
        """One token per row, or per entry of ``indices``, int32 (the dtype of ``indices``)."""
        if self.check_nan and torch.any(torch.isnan(scores)):
            raise ValueError("Input probs contains NaN.")
        source = scores if self.indices is None else scores.index_select(0, self.indices.long())
        source = source.float() if source.dtype != torch.float32 else source
        rows = source.shape[0]
        seed, offset = _seeds(scores, rows, *self.random)
        fields = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "joint": False, "seed": seed, "offset": offset}
        for name, value in params.items():
            fields[name] = _parameter(value, self._parameter_rows(scores, value))
            if self.indices is not None and getattr(fields[name], "ndim", 0) == 1 and len(fields[name]) != rows:
                fields[name] = fields[name][on_host(self.indices.long())]
        tokens, errors = _core.sample(queue_of(source), source.contiguous(), probs, fields)
        drawn = from_bytes(tokens, "int32", scores)
        drawn = drawn if self.indices is None else drawn.to(self.indices.dtype)
        if not self.return_valid:
            return drawn
        valid = torch.ones(rows, dtype=torch.bool)
        valid[[row for row, _ in errors]] = False
        return drawn, valid.to(scores.device)


def softmax(logits, temperature=None, enable_pdl=None):
    """The softmax of ``logits / temperature`` in float32. Temperature 0 puts all mass on the largest logit."""
    temperature = 1.0 if temperature is None else _parameter(temperature, logits.shape[0])
    return sampling.softmax(logits.float(), temperature)


def sampling_from_logits(
    logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None
):
    """Draws from the softmax of each row. ``deterministic`` has no effect: all draws are."""
    return _Draw(indices, generator, check_nan, seed, offset).sample(logits, False, {})


def sampling_from_probs(
    probs, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False
):
    """Draws from each row of probabilities; with ``indices``, entry ``i`` draws from row ``indices[i]``."""
    return _Draw(indices, generator, check_nan, seed, offset, return_valid).sample(probs, True, {})


def top_p_sampling_from_probs(
    probs, top_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after top-p."""
    return _Draw(indices, generator, check_nan, seed, offset, return_valid).sample(probs, True, {"top_p": top_p})


def top_k_sampling_from_probs(
    probs, top_k, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after top-k."""
    return _Draw(indices, generator, check_nan, seed, offset, return_valid).sample(probs, True, {"top_k": top_k})


def min_p_sampling_from_probs(
    probs, min_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after min-p."""
    return _Draw(indices, generator, check_nan, seed, offset, return_valid).sample(probs, True, {"min_p": min_p})


def _orders(filter_apply_order):
    check_choice("sampling", "filter_apply_order", filter_apply_order, ("top_k_first", "joint"))
    return filter_apply_order == "joint"


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
    seed=None, offset=None,
):
    """Draws from the softmax of each row after top-k and top-p."""
    params = {"top_k": top_k, "top_p": top_p, "joint": _orders(filter_apply_order)}
    return _Draw(indices, generator, check_nan, seed, offset).sample(logits, False, params)


def top_k_top_p_sampling_from_probs(
    probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
    seed=None, offset=None, return_valid=False,
):
    """Draws from each row of probabilities after top-k and top-p."""
    params = {"top_k": top_k, "top_p": top_p, "joint": _orders(filter_apply_order)}
    return _Draw(indices, generator, check_nan, seed, offset, return_valid).sample(probs, True, params)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    """Keeps the smallest set of the largest probabilities whose share reaches ``top_p``, renormalised, in float32."""
    return sampling.top_p_renorm_probs(probs.float(), _parameter(top_p, probs.shape[0]))


def top_k_renorm_probs(probs, top_k):
    """Keeps the ``top_k`` largest probabilities, ties included, renormalised, in the dtype of ``probs``."""
    return sampling.top_k_renorm_probs(probs, _parameter(top_k, probs.shape[0]))


def top_k_mask_logits(logits, top_k):
    """Keeps the ``top_k`` largest logits, ties included; the others become -inf."""
    return sampling.top_k_mask_logits(logits, _parameter(top_k, logits.shape[0]))


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None, deterministic=True, generator=None, seed=None, offset=None,
):
    """Verifies drafted tokens: ``draft_probs`` ``[batch, n, vocab]``, ``draft_token_ids`` ``[batch, n]``, ``target_probs``
    ``[batch, n + 1, vocab]``. Returns the tokens ``[batch, n + 1]``, padded with -1, and the totals with the counts added."""
    batch = draft_probs.shape[0]
    seed, offset = _seeds(draft_probs, batch, generator, seed, offset)
    tokens, counts = sampling.chain_speculative_sampling(
        draft_probs.float(), draft_token_ids.to(torch.int32), target_probs.float(), seed=seed, offset=offset
    )
    totals = []
    for at, total in enumerate((maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)):
        added = torch.tensor([count[at] for count in counts], dtype=torch.int32, device=draft_probs.device)
        totals.append(added if total is None else total.add_(added))
    return (tokens, *totals)
