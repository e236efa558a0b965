"""Pipelines from logits to tokens: processors become operators, which are checked and fused.

1. Each processor gives the operators of its input type (``legalize``): logits, probabilities or indices.
2. ``compile`` checks that types fit, that there is one softmax, and that nothing follows indices; rules replace operators by
   fused ones.
3. A call passes the tensor through the operators; their parameters are its keyword arguments.
"""

import enum
import logging
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch

from .._core import Error
from . import sampling

_logger = logging.getLogger(__name__)


class CompileError(Exception):
    """Operators that do not fit."""


class LegalizationError(Exception):
    """A processor without operators for its input type."""


class TensorType(enum.Enum):
    """The meaning of a tensor in a pipeline."""

    LOGITS = enum.auto()
    PROBS = enum.auto()
    INDICES = enum.auto()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor with its meaning."""

    data: torch.Tensor
    type: TensorType

    @staticmethod
    def logits(t) -> "TaggedTensor":
        """A tensor of logits."""
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t) -> "TaggedTensor":
        """A tensor of probabilities."""
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t) -> "TaggedTensor":
        """A tensor of tokens."""
        return TaggedTensor(t, TensorType.INDICES)

    @property
    def shape(self):
        """The shape of the tensor."""
        return self.data.shape

    @property
    def device(self):
        """The device of the tensor."""
        return self.data.device

    @property
    def dtype(self):
        """The dtype of the tensor."""
        return self.data.dtype

    def size(self, dim=None):
        """The size of the tensor, or of one axis."""
        return self.data.size() if dim is None else self.data.size(dim)


class Op:
    """An operator from ``IN`` to ``OUT``. A subclass defines both and ``__call__``."""

    IN: TensorType = None
    OUT: TensorType = None

    def __init__(self):
        if self.IN is None or self.OUT is None:
            raise Error(f"flashinfer.{type(self).__name__}: IN = {self.IN}, OUT = {self.OUT}, expected two types of tensors")

    def __call__(self, tensor: TaggedTensor, **kwargs) -> TaggedTensor:
        """The result; ``kwargs`` are those of the pipeline."""
        raise NotImplementedError

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        if tensor.type != self.IN:
            raise Error(f"flashinfer.{type(self).__name__}: tensor has type {tensor.type}, expected {self.IN}")
        return self.OUT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.IN} -> {self.OUT})"


class ParameterizedOp(Op):
    """An operator with parameters: those of a call, else of its constructor."""

    def __init__(self, **default_params):
        super().__init__()
        self.default_params = default_params

    def _get_param(self, name, kwargs, required=True):
        if name in kwargs:
            return kwargs.pop(name)
        if name in self.default_params:
            return self.default_params[name]
        if required:
            raise Error(f"flashinfer.{type(self).__name__}: {name} is missing, expected it in the call of the pipeline")
        return None


class _Builtin(ParameterizedOp):
    """An operator of this package: :meth:`_compute` with the parameters ``_REQUIRED`` and ``_OPTIONAL``."""

    _REQUIRED: tuple = ()
    _OPTIONAL: tuple = ()

    def __call__(self, tensor, **kwargs):
        """The result of :meth:`_compute` with its type."""
        out = self._validate_input_type(tensor)
        given = {name: self._get_param(name, kwargs) for name in self._REQUIRED}
        optional = {name: self._get_param(name, kwargs, required=False) for name in self._OPTIONAL}
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) and not _is_valid(name, value):
                raise Error(f"flashinfer.{type(self).__name__}: {name} = {value!r}, expected {_EXPECTED[name]} or a tensor")
        return TaggedTensor(self._compute(tensor.data, *given.values(), **optional), out)

    def _compute(self, x, *parameters, **options):
        raise NotImplementedError


_EXPECTED = {"temperature": "a number above 0", "top_k": "an integer of at least 1", "top_p": "a number in (0, 1]",
             "min_p": "a number in (0, 1]"}


def _is_valid(name, value) -> bool:
    if name == "top_k":
        return isinstance(value, int) and value >= 1
    return isinstance(value, (int, float)) and 0.0 < value and (name == "temperature" or value <= 1.0)


def _column(value):
    """Parameters as a column that rows are divided by or compared with."""
    return value.reshape(-1, 1) if isinstance(value, torch.Tensor) and value.dim() > 0 else value


class TemperatureOp(_Builtin):
    """Logits divided by ``temperature``."""

    IN, OUT, _REQUIRED = TensorType.LOGITS, TensorType.LOGITS, ("temperature",)

    def _compute(self, x, temperature):
        return x / _column(temperature)


class SoftmaxOp(_Builtin):
    """The softmax of logits."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def _compute(self, x):
        return sampling.softmax(x)


class FusedTemperatureSoftmaxOp(_Builtin):
    """The softmax of logits over ``temperature``."""

    IN, OUT, _REQUIRED = TensorType.LOGITS, TensorType.PROBS, ("temperature",)

    def _compute(self, x, temperature):
        return sampling.softmax(x, temperature)


class LogitsTopKOp(_Builtin):
    """The ``top_k`` largest logits, the others -inf."""

    IN, OUT, _REQUIRED = TensorType.LOGITS, TensorType.LOGITS, ("top_k",)

    def _compute(self, x, top_k):
        return sampling.top_k_mask_logits(x, top_k)


class ProbsTopKOp(_Builtin):
    """The ``top_k`` largest probabilities, renormalised."""

    IN, OUT, _REQUIRED = TensorType.PROBS, TensorType.PROBS, ("top_k",)

    def _compute(self, x, top_k):
        return sampling.top_k_renorm_probs(x, top_k)


class TopPOp(_Builtin):
    """The largest probabilities whose sum reaches ``top_p``, renormalised. ``is_deterministic`` is a hint without effect."""

    IN, OUT, _REQUIRED, _OPTIONAL = TensorType.PROBS, TensorType.PROBS, ("top_p",), ("is_deterministic",)

    def _compute(self, x, top_p, is_deterministic):
        return sampling.top_p_renorm_probs(x, top_p)


class MinPOp(_Builtin):
    """The probabilities of at least ``min_p`` times the largest, renormalised."""

    IN, OUT, _REQUIRED = TensorType.PROBS, TensorType.PROBS, ("min_p",)

    def _compute(self, x, min_p):
        kept = torch.where(x >= x.amax(-1, keepdim=True) * _column(min_p), x, 0.0)
        return kept.div_(kept.sum(-1, keepdim=True))


class _SampleOp(_Builtin):
    """A sampler with ``indices`` and ``generator``; ``deterministic`` is a hint without effect."""

    OUT, _OPTIONAL = TensorType.INDICES, ("indices", "generator")


class ProbsSampleOp(_SampleOp):
    """A token of each row of probabilities."""

    IN = TensorType.PROBS

    def _compute(self, x, **options):
        return sampling.sampling_from_probs(x, **options)


class LogitsSampleOp(_SampleOp):
    """A token of each row of logits."""

    IN = TensorType.LOGITS

    def _compute(self, x, **options):
        return sampling.sampling_from_logits(x, **options)


class FusedProbsTopKSampleOp(_SampleOp):
    """A token among the ``top_k`` largest probabilities."""

    IN, _REQUIRED = TensorType.PROBS, ("top_k",)

    def _compute(self, x, top_k, **options):
        return sampling.top_k_sampling_from_probs(x, top_k, **options)


class FusedProbsTopPSampleOp(_SampleOp):
    """A token among the largest probabilities whose sum reaches ``top_p``."""

    IN, _REQUIRED = TensorType.PROBS, ("top_p",)

    def _compute(self, x, top_p, **options):
        return sampling.top_p_sampling_from_probs(x, top_p, **options)


class FusedProbsMinPSampleOp(_SampleOp):
    """A token among the probabilities of at least ``min_p`` times the largest."""

    IN, _REQUIRED = TensorType.PROBS, ("min_p",)

    def _compute(self, x, min_p, **options):
        return sampling.min_p_sampling_from_probs(x, min_p, **options)


class FusedProbsTopKTopPSampleOp(_SampleOp):
    """A token that both filters keep, each applied to the given probabilities."""

    IN, _REQUIRED = TensorType.PROBS, ("top_k", "top_p")

    def _compute(self, x, top_k, top_p, **options):
        return sampling.top_k_top_p_sampling_from_probs(x, top_k, top_p, filter_apply_order="joint", **options)


class LogitsProcessor:
    """A step of a pipeline. A subclass defines ``legalize``."""

    #: The operator of each input type, for the processors of this package.
    _OPERATORS: dict = {}

    def __init__(self, **params):
        self.params = params

    def legalize(self, input_type: TensorType) -> list:
        """The operators for an input type."""
        if input_type not in self._OPERATORS:
            raise Error(f"flashinfer.{type(self).__name__}: input_type = {input_type}, expected "
                        f"{' or '.join(map(str, self._OPERATORS))}")
        return [self._OPERATORS[input_type](**self.params)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.params.items())})"


class Temperature(LogitsProcessor):
    """Divides logits by ``temperature``, a number or one per row."""

    _OPERATORS = {TensorType.LOGITS: TemperatureOp}


class Softmax(LogitsProcessor):
    """Probabilities of logits. ``enable_pdl`` is a hint without effect."""

    _OPERATORS = {TensorType.LOGITS: SoftmaxOp}

    def __init__(self, enable_pdl=None, **params):
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(LogitsProcessor):
    """Keeps the ``top_k`` largest logits or probabilities. With ``joint_topk_topp``, compiled with :class:`TopP` and
    :class:`Sample`, both filters apply to the given probabilities."""

    _OPERATORS = {TensorType.LOGITS: LogitsTopKOp, TensorType.PROBS: ProbsTopKOp}

    def __init__(self, joint_topk_topp=False, **params):
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(LogitsProcessor):
    """Keeps the largest probabilities whose sum reaches ``top_p``."""

    _OPERATORS = {TensorType.PROBS: TopPOp}


class MinP(LogitsProcessor):
    """Keeps the probabilities of at least ``min_p`` times the largest."""

    _OPERATORS = {TensorType.PROBS: MinPOp}


class Sample(LogitsProcessor):
    """Samples tokens, with ``indices`` and ``generator``. ``deterministic`` is a hint without effect: samplers always are."""

    _OPERATORS = {TensorType.LOGITS: LogitsSampleOp, TensorType.PROBS: ProbsSampleOp}

    def __init__(self, deterministic=True, **params):
        super().__init__(deterministic=deterministic, **params)


def legalize_processors(processors, initial_type=TensorType.LOGITS) -> list:
    """The operators of processors, each for the type that the one before it gives."""
    if not processors:
        raise LegalizationError("processors is empty, expected at least one")
    ops, current = [], initial_type
    for at, processor in enumerate(processors):
        try:
            found = processor.legalize(current)
        except Exception as why:
            raise LegalizationError(f"processor {at} ({type(processor).__name__}): {why}") from why
        if not found:
            raise LegalizationError(f"processor {at} ({type(processor).__name__}) gave no operators")
        ops.extend(found)
        current = found[-1].OUT
    return ops


def infer_initial_type(processors) -> TensorType:
    """The only input type of the first processor."""
    types = []
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        try:
            processors[0].legalize(kind)
        except (ValueError, LegalizationError):
            continue
        types.append(kind)
    if len(types) != 1:
        found = " and ".join(map(str, types)) or "neither LOGITS nor PROBS"
        raise LegalizationError(f"{type(processors[0]).__name__} takes {found}, expected input_type")
    return types[0]


class FusionRule(NamedTuple):
    """Replaces operators of the types ``pattern`` by ``build(operators)`` if ``guard(operators)``; a larger ``prio`` first."""

    pattern: tuple
    guard: Callable
    build: Callable
    prio: int = 0


def _fused(*pattern, into, prio, guard=lambda window: True) -> FusionRule:
    return FusionRule(pattern, guard, lambda window: into(**window[-1].default_params), prio)


def get_default_fusion_rules() -> list:
    """The rules of every pipeline."""
    return [
        _fused(TemperatureOp, SoftmaxOp, into=FusedTemperatureSoftmaxOp, prio=100),
        _fused(ProbsTopKOp, TopPOp, ProbsSampleOp, into=FusedProbsTopKTopPSampleOp, prio=100,
               guard=lambda window: window[0].default_params.get("joint_topk_topp", False)),
        _fused(ProbsTopKOp, ProbsSampleOp, into=FusedProbsTopKSampleOp, prio=10),
        _fused(TopPOp, ProbsSampleOp, into=FusedProbsTopPSampleOp, prio=10),
        _fused(MinPOp, ProbsSampleOp, into=FusedProbsMinPSampleOp, prio=10),
    ]


def single_softmax_rule(ops) -> None:
    """Rejects two softmaxes."""
    count = sum(isinstance(op, SoftmaxOp) for op in ops)
    if count > 1:
        raise CompileError(f"{count} operators are a softmax, expected at most one")


def indices_terminal_rule(ops) -> None:
    """Rejects operators after tokens."""
    for op, after in zip(ops, ops[1:]):
        if op.OUT == TensorType.INDICES:
            raise CompileError(f"{type(after).__name__} follows {type(op).__name__}, which gives tokens, expected nothing")


def get_default_validity_checks() -> list:
    """The checks of every pipeline."""
    return [single_softmax_rule, indices_terminal_rule]


class Compiler:
    """Checks and fuses operators, with rules and checks of the caller besides the default ones."""

    def __init__(self):
        self.fusion_rules, self.validity_checks = [], get_default_validity_checks()
        for rule in get_default_fusion_rules():
            self.register_fusion_rule(rule)

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Adds a rule, before those of a lower ``prio``."""
        self.fusion_rules = sorted([*self.fusion_rules, rule], key=lambda one: -one.prio)

    def register_validity_check(self, check) -> None:
        """Adds a check, which raises :class:`CompileError`."""
        self.validity_checks.append(check)

    def compile(self, ops) -> list:
        """The fused operators."""
        if not ops:
            raise CompileError("there are no operators, expected at least one")
        current = ops[0].IN
        if current not in (TensorType.LOGITS, TensorType.PROBS):
            raise CompileError(f"{type(ops[0]).__name__} takes {current}, expected LOGITS or PROBS")
        for at, op in enumerate(ops):
            if op.IN != current:
                raise CompileError(f"operator {at} ({type(op).__name__}) takes {op.IN}, the one before it gives {current}")
            current = op.OUT
        for check in self.validity_checks:
            check(ops)
        ops, at = list(ops), 0
        while at < len(ops):
            at = self._fuse(ops, at)
        return ops

    def _fuse(self, ops, at) -> int:
        """Applies the first rule that matches at an operator; the operator to continue with."""
        for rule in self.fusion_rules:
            window = ops[at : at + len(rule.pattern)]
            if len(window) == len(rule.pattern) and all(map(isinstance, window, rule.pattern)) and rule.guard(window):
                ops[at : at + len(window)] = [rule.build(window)]
                return max(at - 1, 0)
        return at + 1


def compile_pipeline(ops, custom_fusion_rules=None, custom_validity_checks=None) -> list:
    """The fused operators, with rules and checks of the caller."""
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)


class LogitsPipe:
    """A pipeline of processors: ``pipe(tensor, temperature=0.8, top_k=40)``.

    ``input_type`` is needed if the first processor takes both logits and probabilities. Without ``compile`` operators are not
    fused. A call returns a tensor, and rejects arguments that no operator reads."""

    def __init__(self, processors, compile=True, input_type=None, custom_fusion_rules=None, custom_validity_checks=None):
        if not processors:
            raise Error("flashinfer.LogitsPipe: processors is empty, expected at least one")
        self.processors, self.compiled_ops = list(processors), None
        try:
            self._initial_type = input_type or infer_initial_type(self.processors)
            self.ops = legalize_processors(self.processors, self._initial_type)
        except LegalizationError as why:
            raise Error(f"flashinfer.LogitsPipe: {why}") from why
        if compile:
            self.compile(custom_fusion_rules, custom_validity_checks)

    @property
    def initial_type(self) -> TensorType:
        """The type of the input."""
        return self._initial_type

    def compile(self, custom_fusion_rules=None, custom_validity_checks=None) -> None:
        """Checks and fuses the operators."""
        try:
            self.compiled_ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)
        except CompileError as why:
            raise Error(f"flashinfer.LogitsPipe: {why}") from why

    def __call__(self, x, **kwargs):
        """The result for a tensor."""
        ops = self.ops if self.compiled_ops is None else self.compiled_ops
        if self.compiled_ops is None:
            _logger.warning("the pipeline is not compiled: its operators run one by one")
        if all(isinstance(op, _Builtin) for op in ops):
            read = {name for op in ops for name in (*op._REQUIRED, *op._OPTIONAL)}
            for name in kwargs.keys() - read:
                raise Error(f"flashinfer.LogitsPipe: {name} is read by no operator, expected "
                            f"{', '.join(sorted(read)) or 'none'}")
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        for at, op in enumerate(ops):
            try:
                tensor = op(tensor, **kwargs)
            except Exception as why:
                raise Error(f"flashinfer.LogitsPipe: operator {at} ({type(op).__name__}): {why}") from why
        return tensor.data

    def __repr__(self) -> str:
        names = (" -> ".join(type(one).__name__ for one in ops) for ops in (self.processors, self.ops, self.compiled_ops or ()))
        return "LogitsPipe([{}], ops=[{}], compiled_ops=[{}])".format(*names)
