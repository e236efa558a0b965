"""Sampling: seeds and offsets of torch's generator, or the caller's. Tokens are not those of FlashInfer for the same seed.

All functions read their parameters where they are. On a GPU a call is one launch, which waits for
nothing; a CUDA graph can record it. While a graph is recorded, the seed comes from a launch of the generator, so that each
replay draws other tokens.
"""

import torch

from .. import _core
from .._core import Error, Unsupported
from .._device import _devices, queue_of
from .._tensors import empty_of_torch
from ._compiled import is_compiling, operator
from ._refuse import check_choice

#: The numbers that a token takes from its random stream, as the generator's offset advances.
_STEP = 4
_SCORES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_COUNTERS = frozenset((torch.int64, torch.uint64))
#: A parameter that is not used, which no caller can pass by accident.
_OFF = ...
#: No top-k, top-p and min-p.
_NO_FILTERS = (_OFF, _OFF, _OFF, False)
#: Without the call of torch's wrapper; builds for CPUs have only that.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_INT32 = torch.int32
_PARAMETERS = (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32))


def _random(scores, tokens, compiling, generator, seed, offset):
    """Seed, offset, and the distance of two tokens' offsets. A single offset advances, so that equal rows draw different tokens."""
    if seed is not None or offset is not None:
        if seed is None or offset is None:
            raise ValueError("seed and offset must be given together")
        each = isinstance(offset, torch.Tensor) and offset.numel() == tokens != 1
        return seed, offset, 0 if each else _STEP
    # numbers of a generator, which advances
    if compiling:
        if generator is not None:
            raise Unsupported("flashinfer.sampling: generator is not None in compiled code, expected seed and offset")
        return torch.randint(2**62, (1,), dtype=torch.int64, device=scores.device), 0, _STEP
    if not scores.is_cuda:
        # the CPU's generator has no counter: a fresh seed is drawn from it
        return int(torch.randint(0, 2**62, (1,), generator=generator)), 0, _STEP
    if _is_capturing():
        # the state on the host would be that of the recording in every replay
        return torch.randint(2**62, (1,), dtype=torch.int64, device=scores.device, generator=generator), 0, _STEP
    if generator is None:
        generator = torch.cuda.default_generators[scores.get_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _STEP * tokens)
    return seed, offset, _STEP


def _counter(name, value, tokens, scores):
    """A number modulo 2^64, or a tensor on the device of ``scores``."""
    if not isinstance(value, torch.Tensor):
        return int(value) % 2**64
    if value.numel() not in (1, tokens):
        raise ValueError(f"{name} has {value.numel()} elements, expected 1 or batch_size = {tokens}")
    dtype = value.dtype if value.dtype in _COUNTERS else torch.int64
    return value.reshape(-1).to(scores.device, dtype).contiguous()


def _check_parameter(value, rows):
    """Rejects a tensor that is not one number per row."""
    if value.dim() == 0:
        raise ValueError("Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, "
                         "got a 0-dimensional tensor")
    if value.dim() > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for the sampling parameter, got a {value.dim()}D tensor")
    if value.numel() != rows:
        raise ValueError(f"Sampling parameter tensor batch size mismatch: {value.numel()} numbers, expected batch_size = {rows}")


def _of_tokens(value, dtype, tokens, scores, indices):
    """A number, or one per token on the device of ``scores``; with ``indices`` also one per row."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
        if value.dim() == 0:
            return value.item()
    rows = scores.shape[0]
    _check_parameter(value, tokens if value.shape == (tokens,) else rows)
    value = value.to(scores.device, dtype)
    return (value if value.shape[0] == tokens else value.index_select(0, indices.to(scores.device))).contiguous()


def _converted(scores, params, tokens, indices):
    """Scores and parameters of dtypes and devices that a kernel reads."""
    params = dict(params)
    for name, dtype in _PARAMETERS:
        if name in params:
            params[name] = _of_tokens(params[name], dtype, tokens, scores, indices)
    for name in ("seed", "offset"):
        if name in params:
            params[name] = _counter(name, params[name], tokens, scores)
    return (scores if scores.dtype in _SCORES else scores.float()).contiguous(), params


@operator("sample(Tensor scores, bool probs, Tensor[] tensors, str[] tensor_names, float[] numbers, str[] number_names, "
          "int[] counters, str[] counter_names, bool joint, Tensor(a!) tokens, Tensor(b!)? valid, Tensor? rows, Tensor? indices)")
def _sample(scores, probs, tensors, tensor_names, numbers, number_names, counters, counter_names, joint, tokens, valid, rows,
            indices):
    params = dict(zip((*tensor_names, *number_names, *counter_names), (*tensors, *numbers, *counters)), joint=joint)
    _call(_core.sample_tensors, probs, params, (scores, tokens, valid, rows), indices)


@operator("distribution(Tensor scores, bool probs, Tensor[] tensors, str[] tensor_names, float[] numbers, str[] number_names, "
          "Tensor(a!) out)")
def _compute_distribution(scores, probs, tensors, tensor_names, numbers, number_names, out):
    params = dict(zip((*tensor_names, *number_names), (*tensors, *numbers)))
    _call(_core.distribution_tensors, probs, params, (scores, out))


def _by_type(params):
    """The tensors and their names, then the numbers and theirs, without counters and flags."""
    named = {name: params[name] for name, _ in _PARAMETERS if name in params}
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    numbers = {name: float(value) for name, value in named.items() if name not in tensors}
    return list(tensors.values()), list(tensors), list(numbers.values()), list(numbers)


def _sample_compiled(scores, probs, params, tokens, valid, rows, indices):
    tensors, tensor_names, numbers, number_names = _by_type(params)
    counters = {"offset_step": params["offset_step"]}
    for name in ("seed", "offset"):
        if isinstance(params[name], torch.Tensor):
            tensors.append(params[name])
            tensor_names.append(name)
        else:
            counters[name] = params[name]
    _sample(scores, probs, tensors, tensor_names, numbers, number_names, list(counters.values()), list(counters),
            params.get("joint", False), tokens, valid, rows, indices)


def _call(function, probs, params, tensors, indices=None):
    """Calls a function of scores, the first of the tensors, and parameters, converted if it rejects them: a search for
    conversions would delay every call."""
    queue = queue_of(tensors[0])
    try:
        return function(queue, probs, params, tensors)
    except Error:
        pass
    scores, *others = tensors
    scores, params = _converted(scores, params, scores.shape[0] if indices is None else indices.shape[0], indices)
    return function(queue, probs, params, (scores, *others))


def _distribution(scores, probs, params, dtype):
    """The filtered distribution of each row, in the given dtype."""
    out = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    if is_compiling():
        _compute_distribution(scores, probs, *_by_type(params), out)
    else:
        _call(_core.distribution_tensors, probs, params, (scores, out))
    return out


def _draw(scores, probs, filters, indices, check_nan, generator, seed, offset, return_valid=False):
    """One token per row, or per entry of ``indices``, int32 (the dtype of ``indices``). ``filters``: top-k, top-p and min-p, and
    whether all of them apply to the same distribution."""
    if check_nan and torch.any(torch.isnan(scores)):
        raise ValueError("Input probs contains NaN.")
    rows = None if indices is None else indices.to(scores.device, _INT32).contiguous()
    tokens = (scores if rows is None else rows).shape[0]
    compiling = is_compiling()
    number, step = -1 if compiling else scores.get_device(), 0
    if generator is seed is offset is None and number >= 0:
        # the common case of _random without its call; torch refuses to read the state while a graph is recorded
        default = torch.cuda.default_generators[number]
        try:
            start = default.get_offset()
            default.set_offset(start + _STEP * tokens)
            seed, offset, step = default.initial_seed(), start, _STEP
        except RuntimeError:
            pass
    if not step:
        seed, offset, step = _random(scores, tokens, compiling, generator, seed, offset)
    drawn = scores.new_empty(tokens, dtype=_INT32) if compiling else empty_of_torch((tokens,), _INT32, scores)
    valid = scores.new_empty(tokens, dtype=torch.int8) if return_valid else None
    if compiling:
        _sample_compiled(scores, probs, _params(filters, seed, offset, step), drawn, valid, rows, indices)
    else:
        device = _devices.get(number)  # the lookups of queue_of without its call
        queue = None if device is None else device._queues.get(device.current_stream())
        if queue is None:
            queue = queue_of(scores)
        try:
            # a tuple, because a dict takes a twentieth of the call
            _core.sample_tensors(queue, probs, (_OFF, *filters, seed, offset, step), (scores, drawn, valid, rows))
        except Error:
            _call(_core.sample_tensors, probs, _params(filters, seed, offset, step), (scores, drawn, valid, rows), indices)
    if rows is not None:
        drawn = drawn.to(indices.dtype)
    return (drawn, valid.view(torch.bool)) if return_valid else drawn


def _params(filters, seed, offset, step) -> dict:
    """The parameters of a draw by name."""
    named = {name: value for name, value in zip(("top_k", "top_p", "min_p"), filters) if value is not _OFF}
    return {**named, "joint": filters[3], "seed": seed, "offset": offset, "offset_step": step}


def softmax(logits, temperature=None, enable_pdl=None):
    """The softmax of ``logits / temperature`` in float32. Temperature 0 puts all mass on the largest logit."""
    return _distribution(logits, False, {} if temperature is None else {"temperature": temperature}, torch.float32)


def sampling_from_logits(
    logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None
):
    """Draws from the softmax of each row. ``deterministic`` has no effect: all draws are."""
    return _draw(logits, False, _NO_FILTERS, indices, check_nan, generator, seed, offset)


def sampling_from_probs(
    probs, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None, return_valid=False
):
    """Draws from each row of probabilities; with ``indices``, entry ``i`` draws from row ``indices[i]``."""
    return _draw(probs, True, _NO_FILTERS, indices, check_nan, generator, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs, top_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after top-p."""
    return _draw(probs, True, (_OFF, top_p, _OFF, False), indices, check_nan, generator, seed, offset, return_valid)


def top_k_sampling_from_probs(
    probs, top_k, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after top-k."""
    return _draw(probs, True, (top_k, _OFF, _OFF, False), indices, check_nan, generator, seed, offset, return_valid)


def min_p_sampling_from_probs(
    probs, min_p, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None,
    return_valid=False,
):
    """:func:`sampling_from_probs` after min-p."""
    return _draw(probs, True, (_OFF, _OFF, min_p, False), indices, check_nan, generator, seed, offset, return_valid)


def _is_joint(filter_apply_order) -> bool:
    check_choice("sampling", "filter_apply_order", filter_apply_order, ("top_k_first", "joint"))
    return filter_apply_order == "joint"


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
    seed=None, offset=None,
):
    """Draws from the softmax of each row after top-k and top-p."""
    filters = top_k, top_p, _OFF, filter_apply_order != "top_k_first" and _is_joint(filter_apply_order)
    return _draw(logits, False, filters, indices, check_nan, generator, seed, offset)


def top_k_top_p_sampling_from_probs(
    probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None, check_nan=False,
    seed=None, offset=None, return_valid=False,
):
    """Draws from each row of probabilities after top-k and top-p."""
    filters = top_k, top_p, _OFF, filter_apply_order != "top_k_first" and _is_joint(filter_apply_order)
    return _draw(probs, True, filters, indices, check_nan, generator, seed, offset, return_valid)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    """Keeps the smallest set of the largest probabilities whose share reaches ``top_p``, renormalised, in float32."""
    return _distribution(probs, True, {"top_p": top_p}, torch.float32)


def top_k_renorm_probs(probs, top_k):
    """Keeps the ``top_k`` largest probabilities, ties included, renormalised, in the dtype of ``probs``."""
    return _distribution(probs, True, {"top_k": top_k}, probs.dtype)


@operator("top_k_mask(Tensor logits, Tensor top_k, Tensor(a!) out)")
def _top_k_mask(logits, top_k, out):
    _core.top_k_mask_tensors(queue_of(logits), (logits, top_k, out))


def top_k_mask_logits(logits, top_k):
    """Keeps the ``top_k`` largest logits, ties included; the others become -inf."""
    rows, out = logits.shape[0], torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits = (logits if logits.dtype in _SCORES else logits.float()).contiguous()
    counts = _of_tokens(top_k, torch.int32, rows, logits, None)
    if not isinstance(counts, torch.Tensor):
        if counts < 1:
            raise Error(f"sampling.top_k_mask_logits: top_k = {counts}, expected at least 1")
        counts = torch.full((rows,), min(int(counts), 2**31 - 1), dtype=torch.int32, device=logits.device)
    masked = out if out.dtype == logits.dtype else torch.empty_like(logits)
    if is_compiling():
        _top_k_mask(logits, counts, masked)
    else:
        _core.top_k_mask_tensors(queue_of(logits), (logits, counts, masked))
    return masked if masked is out else out.copy_(masked)


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None, deterministic=True, generator=None, seed=None, offset=None,
):
    """Verifies drafted tokens: ``draft_probs`` ``[batch, n, vocab]``, ``draft_token_ids`` ``[batch, n]``, ``target_probs``
    ``[batch, n + 1, vocab]``. Returns the tokens ``[batch, n + 1]``, padded with -1, and the totals with the counts added. A
    request with probabilities that cannot be sampled has tokens -1 and counts 0."""
    batch, positions = target_probs.shape[:2]
    device = target_probs.device
    compiling = is_compiling()
    seed, offset, step = _random(draft_probs, batch, compiling, generator, seed, offset)
    params = {"seed": _counter("seed", seed, batch, draft_probs), "offset": _counter("offset", offset, batch, draft_probs),
              "offset_step": step}
    ids = draft_token_ids.to(device, torch.int32).contiguous().view(-1)
    draft, target = (x if x.dtype in _SCORES else x.float() for x in (draft_probs, target_probs))
    tokens = torch.empty((batch, positions), dtype=torch.int32, device=device)
    outcomes = torch.empty((batch, 8), dtype=torch.int32, device=device)
    if compiling:
        seed, offset = (_as_tensor(params[name], device) for name in ("seed", "offset"))
        _chain(draft, ids, target, seed, offset, step, tokens, outcomes)
    else:
        _core.chain_tensors(queue_of(target), params, (draft, ids, target, tokens, outcomes))
    totals = []
    for column, total in ((6, maybe_output_accepted_token_num), (7, maybe_output_emitted_draft_token_num)):
        added = outcomes[:, column]
        totals.append(added.clone() if total is None else total.add_(added))
    return (tokens, *totals)


@operator("chain(Tensor draft, Tensor ids, Tensor target, Tensor seed, Tensor offset, int offset_step, Tensor(a!) tokens, "
          "Tensor(b!) outcomes)")
def _chain(draft, ids, target, seed, offset, offset_step, tokens, outcomes):
    params = {"seed": seed, "offset": offset, "offset_step": offset_step}
    _core.chain_tensors(queue_of(target), params, (draft, ids, target, tokens, outcomes))


def _as_tensor(counter, device):
    """A counter as a tensor of one element."""
    if isinstance(counter, torch.Tensor):
        return counter
    return torch.full((1,), counter - 2**64 if counter >= 2**63 else counter, dtype=torch.int64, device=device)
