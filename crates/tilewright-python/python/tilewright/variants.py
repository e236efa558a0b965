"""Attention variants as Python functions: traced once into the expression graph that all devices execute.

    @tilewright.variant(cap=30.0)
    def soft_cap(at, logit):
        return at.cap * tanh(logit / at.cap)
"""

import json

from . import _core
from ._core import Error
from ._tensors import bindable, same_memory
from ._trace import (  # noqa: F401
    Expr,
    Trace,
    cos_turns,
    exp,
    exp2,
    floor,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin_turns,
    sqrt,
    tanh,
    where,
)
from .operators import Rope

HOOKS = ("query", "key", "value", "logits", "mask", "update", "output")
_ARGUMENTS = {"query": ("first", "second"), "key": ("first", "second"), "value": ("x",), "logits": ("logit",), "mask": (),
              "update": ("max", "sum"), "output": ("o",)}
_INDICES = ("request", "qo", "kv", "qo_head", "kv_head", "dim", "num_qo_heads", "num_kv_heads")


class Table:
    """A table of a variant: ``at.bias[index]`` reads it, with the index rounded down and clamped by the hook itself."""

    __slots__ = ("_name", "_trace")

    def __init__(self, trace: Trace, name: str):
        self._trace = trace
        self._name = name

    def __getitem__(self, index):
        return self._trace.bind({"read": [self._name, self._trace.operand(index)]})


class At:
    """What a hook may read: the indices ``request``, ``qo``, ``kv`` (positions), ``qo_head``, ``kv_head``, ``dim``,
    ``num_qo_heads``, ``num_kv_heads``, and the variant's parameters and tables by name."""

    def __init__(self, trace: Trace, variant_name: str, scalars, tables, buffers):
        self._trace = trace
        self._names = (variant_name, scalars, tables, buffers)

    def __getattr__(self, name: str):
        variant_name, scalars, tables, _ = self.__dict__["_names"]
        if name in tables:
            return Table(self._trace, name)
        if name in scalars or name in _INDICES:
            return Expr(self._trace, name)
        known = ", ".join([*_INDICES, *scalars, *tables])
        raise AttributeError(f"attention.variant: {variant_name} has no {name!r}, expected one of {known}")

    def store(self, buffer: str, index, value) -> None:
        """Writes ``value`` to ``buffer[index]``; only the logits hook may."""
        self._trace.stores.append([buffer, self._trace.operand(index), self._trace.operand(value)])


def _trace_hook(name: str, hook, function, named) -> dict:
    trace = Trace()
    result = function(At(trace, name, *named), *(Expr(trace, argument) for argument in _ARGUMENTS[hook]))
    if hook in ("query", "key", "update"):
        if not isinstance(result, tuple) or len(result) != 2:
            raise Error(f"attention.variant: {name}.{hook} returns {type(result).__name__}, expected a pair")
        value = [trace.operand(part) for part in result]
    else:
        value = trace.operand(result)
    return {"let": trace.bindings, "store": trace.stores, "in": value}


class Variant:
    """An attention variant: hooks that change queries, keys, values, logits, the mask, the softmax state or outputs.

    Each hook is a function of :class:`At` and its arguments: ``query(at, first, second)`` and ``key`` of a pair of elements,
    ``value(at, x)``, ``logits(at, logit)``, ``mask(at)``, ``update(at, max, sum)`` of a row, ``output(at, o)``. Numbers in
    ``params`` are parameters, sequences are tables. A contiguous torch tensor of float32 is not copied: each run reads its present
    values, which must be in the memory of the queries. Without ``softmax`` the logits hook returns the weight itself. ``buffers``
    maps names to numbers of elements that the logits hook stores to. ``mask_tail``: the mask hook shows all keys before the last
    ``mask_tail`` ones of a request, so that GPUs call it in the tiles that have those only.
    """

    __slots__ = ("_core", "_tables")

    def __init__(self, name: str, *, softmax: bool = True, params: "dict | None" = None, buffers: "dict | None" = None,
                 mask_tail: "int | None" = None, **hooks):
        unknown = sorted(set(hooks) - set(HOOKS))
        if unknown:
            raise Error(f"attention.variant: unknown hook {unknown[0]!r}, expected one of {', '.join(HOOKS)}")
        scalars, tables, bound = {}, {}, {}
        for key, value in (params or {}).items():
            if isinstance(value, (int, float)):
                scalars[key] = float(value)
            elif (tensor := bindable("attention.variant", key, value)) is not None:
                tables[key], bound[key] = tensor.shape[0], tensor
            else:
                flat = value.reshape(-1).tolist() if hasattr(value, "reshape") else value
                tables[key] = [float(number) for number in flat]
        named = (scalars, tables, buffers or {})
        document = {"name": name, "softmax": softmax, "scalars": _numbers(scalars), "buffers": buffers or {},
                    "tables": {key: table if key in bound else [_number(number) for number in table]
                               for key, table in tables.items()}}
        if mask_tail is not None:
            document["mask_tail"] = mask_tail
        for hook, function in hooks.items():
            document[hook] = _trace_hook(name, hook, function, named)
        self._core = _core.Variant.from_json(json.dumps(document))
        self._tables = tuple((key, bound[key]) for key in self._core.bound_tables())

    @classmethod
    def from_json(cls, text: str) -> "Variant":
        """A variant in the JSON form of docs/add-a-variant.md. Runs bind its tables without values by ``tables``."""
        return cls._of(_core.Variant.from_json(text))

    @classmethod
    def _of(cls, core, tables=()) -> "Variant":
        variant = cls.__new__(cls)
        variant._core, variant._tables = core, tables
        return variant

    @property
    def name(self) -> str:
        """The name in errors and reports."""
        return self._core.name

    def then(self, other: "Variant") -> "Variant":
        """The composition: this variant, then ``other``, for every hook."""
        tables = dict(self._tables)
        for name, tensor in other._tables:
            if not same_memory(tables.setdefault(name, tensor), tensor):
                raise Error(f"attention.variant: {name!r} is given twice, differently")
        return Variant._of(self._core.then(other._core), tuple(tables.items()))

    def to_json(self) -> str:
        """The JSON form, for services and configuration files."""
        return self._core.to_json()

    def buffer(self, name: str) -> "list[float]":
        """The values that the logits hook has stored; NaN where it has not."""
        return self._core.buffer(name)

    def __repr__(self) -> str:
        return f"Variant({self.name!r})"


def _number(number: float):
    return number if abs(number) < float("inf") else ("nan" if number != number else ("inf" if number > 0 else "-inf"))


def _numbers(scalars: dict) -> dict:
    return {key: _number(value) for key, value in scalars.items()}


def variant(**params):
    """Makes a variant of a logits hook, with its name and these parameters and tables."""

    def decorate(function) -> Variant:
        return Variant(function.__name__, params=params, logits=function)

    return decorate


def soft_cap(cap: float) -> Variant:
    """``cap · tanh(logit / cap)`` (Gemma 2)."""
    return Variant._of(_core.Variant.soft_cap(cap))


def alibi(num_qo_heads: int, *, slopes=None) -> Variant:
    """Linear biases by head (ALiBi). ``slopes``: by default those of the paper, or a contiguous torch tensor float32
    ``[num_qo_heads]``, whose present values each run reads."""
    if slopes is None:
        return Variant._of(_core.Variant.alibi(num_qo_heads))
    tensor = bindable("attention.variant", "slopes", slopes)
    if tensor is None:
        raise Error("attention.variant: slopes is no contiguous torch tensor of float32")
    return Variant._of(_core.Variant.alibi(num_qo_heads, True), (("slopes", tensor),))


def sinks(values) -> Variant:
    """One more logit per query head, without a value (attention sinks). Each run reads the present values of a contiguous torch
    tensor of float32."""
    tensor = bindable("attention.variant", "sinks", values)
    if tensor is not None:
        return Variant._of(_core.Variant.bound_sinks(tensor.shape[0]), (("sinks", tensor),))
    return Variant._of(_core.Variant.sinks(values.tolist() if hasattr(values, "tolist") else list(values)))


def bound_sinks(num_qo_heads: int) -> Variant:
    """:func:`sinks` whose values each run takes as ``tables={"sinks": ...}``."""
    return Variant._of(_core.Variant.bound_sinks(num_qo_heads))


def rotary(rope: Rope) -> Variant:
    """RoPE of queries and keys inside attention, for caches of keys before rotation."""
    return Variant._of(_core.Variant.rotary(rope._fields))


def flash_sigmoid(bias: float = 0.0) -> Variant:
    """``sigmoid(logit + bias)`` instead of the softmax."""
    return Variant._of(_core.Variant.flash_sigmoid(bias))


def prefix_lm(prefix_lens) -> Variant:
    """Bidirectional attention within the first ``prefix_lens[r]`` keys of request ``r``; with a full mask."""
    return Variant._of(_core.Variant.prefix_lm(list(prefix_lens)))


def chunked(size: int) -> Variant:
    """Rows see the keys of their chunk of ``size`` positions, with a causal mask those before them."""
    if size != int(size) or size < 1:
        raise Error(f"attention.variant chunked: size = {size}, expected a count above 0")
    # half a position, so that a quotient that is rounded does not fall below the number of its chunk
    return Variant("chunked", params={"size": size}, mask=lambda at: at.kv >= floor((at.qo + 0.5) / at.size) * at.size)


def document_mask(documents) -> Variant:
    """Attention within documents: per request, the document of each position."""
    return Variant._of(_core.Variant.document_mask([list(one) for one in documents]))


def multi_item(prefix_lens, positions) -> Variant:
    """Multi-item scoring: items see the prefix and themselves; per request, the position in its item of each token."""
    return Variant._of(_core.Variant.multi_item(list(prefix_lens), [list(one) for one in positions]))
