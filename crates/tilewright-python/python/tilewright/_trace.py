"""Values of hooks while they are traced: each operation becomes a binding of an expression graph."""

import math
import operator

from ._core import Error


class Expr:
    """A traced number or condition. Arithmetic and comparisons record; ``&``, ``|`` and ``~`` combine conditions."""

    __slots__ = ("_name", "_trace")

    def __init__(self, trace, name):
        self._trace = trace
        self._name = name

    def __add__(self, other):
        return self._trace.apply("add", self, other)

    def __radd__(self, other):
        return self._trace.apply("add", other, self)

    def __sub__(self, other):
        return self._trace.apply("sub", self, other)

    def __rsub__(self, other):
        return self._trace.apply("sub", other, self)

    def __mul__(self, other):
        return self._trace.apply("mul", self, other)

    def __rmul__(self, other):
        return self._trace.apply("mul", other, self)

    def __truediv__(self, other):
        return self._trace.apply("div", self, other)

    def __rtruediv__(self, other):
        return self._trace.apply("div", other, self)

    def __floordiv__(self, other):
        return self._trace.floor_divide(self, other)

    def __rfloordiv__(self, other):
        return self._trace.floor_divide(other, self)

    def __mod__(self, other):
        return self - self._trace.floor_divide(self, other) * other

    def __rmod__(self, other):
        return other - self._trace.floor_divide(other, self) * self

    def __pow__(self, exponent):
        return self._trace.power(self, exponent)

    def __neg__(self):
        return self._trace.apply("neg", self)

    def __abs__(self):
        return self._trace.apply("abs", self)

    def __lt__(self, other):
        return self._trace.apply("lt", self, other)

    def __le__(self, other):
        return self._trace.apply("le", self, other)

    def __gt__(self, other):
        return self._trace.apply("lt", other, self)

    def __ge__(self, other):
        return self._trace.apply("le", other, self)

    def __eq__(self, other):
        return self._trace.apply("eq", self, other)

    def __ne__(self, other):
        return self._trace.apply("not", self._trace.apply("eq", self, other))

    def __and__(self, other):
        return self._trace.apply("and", self, other)

    def __rand__(self, other):
        return self._trace.apply("and", other, self)

    def __or__(self, other):
        return self._trace.apply("or", self, other)

    def __ror__(self, other):
        return self._trace.apply("or", other, self)

    def __invert__(self):
        return self._trace.apply("not", self)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self):
        raise Error("attention.variant: a condition has no value while a hook is traced: use where(condition, a, b), "
                    "and &, | and ~ for and, or and not")

    def __float__(self):
        raise Error("attention.variant: a number has no value while a hook is traced")

    def __array_ufunc__(self, function, method, *operands, **options):
        """Functions of NumPy record as those of :mod:`tilewright.variants`."""
        return _recorded("numpy", function, operands, {} if method == "__call__" else {"method": method}, options)

    def __array_function__(self, function, types, operands, options):
        return _recorded("numpy", function, operands, options)

    @classmethod
    def __torch_function__(cls, function, types, operands=(), options=None):
        return _recorded("torch", function, operands, options or {})


def _unary(op: str):
    def function(x):
        return _trace_of(op, x).apply(op, x)

    function.__name__ = op
    function.__doc__ = f"``{op}`` of a traced number."
    return function


tanh = _unary("tanh")
exp = _unary("exp")
exp2 = _unary("exp2")


def log(x):
    """The natural logarithm of a traced number."""
    return log2(x) * math.log(2.0)


log2 = _unary("log2")
sqrt = _unary("sqrt")
floor = _unary("floor")
sigmoid = _unary("sigmoid")
sin_turns = _unary("sin_turns")
cos_turns = _unary("cos_turns")


def minimum(a, b):
    """The smaller of two numbers."""
    return _trace_of("min", a, b).apply("min", a, b)


def maximum(a, b):
    """The larger of two numbers."""
    return _trace_of("max", a, b).apply("max", a, b)


def where(condition, a, b):
    """``a`` where the condition holds, else ``b``."""
    return _trace_of("where", condition, a, b).apply("select", condition, a, b)


#: Functions by the names of NumPy and torch.
_FUNCTIONS = {
    **{function.__name__: function for function in (exp, exp2, floor, log, log2, maximum, minimum, sigmoid, sqrt, tanh, where)},
    "absolute": operator.abs, "abs": operator.abs, "negative": operator.neg, "neg": operator.neg, "add": operator.add,
    "subtract": operator.sub, "sub": operator.sub, "multiply": operator.mul, "mul": operator.mul, "divide": operator.truediv,
    "true_divide": operator.truediv, "div": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "less": operator.lt, "lt": operator.lt, "less_equal": operator.le, "le": operator.le, "greater": operator.gt, "gt": operator.gt,
    "greater_equal": operator.ge, "ge": operator.ge, "equal": operator.eq, "eq": operator.eq, "not_equal": operator.ne,
    "ne": operator.ne,
}


def _recorded(library: str, function, operands, *options):
    """Records a call of a function of NumPy or torch."""
    name = function.__name__
    known = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.strip("_"))
    if known is None or any(options):
        raise Error(f"attention.variant: {library}.{name} does not record, expected operators and functions of tilewright.variants")
    # numbers of the library would call it again
    operands = [operand if isinstance(operand, Expr) else _number(operand) for operand in operands]
    trace = _trace_of(name, *operands)
    for operand in operands:
        trace.operand(operand)
    return known(*operands)


def _number(value):
    """A number of Python, NumPy or torch, or a boolean, as one of Python; other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _trace_of(name: str, *operands):
    for operand in operands:
        if isinstance(operand, Expr):
            return operand._trace
    raise Error(f"attention.variant: {name} needs a traced value, got {', '.join(type(o).__name__ for o in operands)}")


class Trace:
    """One hook while it is traced: each operation becomes a binding."""

    def __init__(self):
        self.bindings: list = []
        self.stores: list = []

    def operand(self, value):
        if isinstance(value, Expr):
            if value._trace is not self:
                raise Error("attention.variant: a value of another hook, expected values of one hook only")
            return value._name
        value = _number(value)
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            number = float(value)
            if number != number:
                return "nan"
            return number if abs(number) != float("inf") else ("inf" if number > 0 else "-inf")
        raise Error(f"attention.variant: {type(value).__name__} is no operand, expected a traced value or a number")

    def bind(self, expression) -> Expr:
        name = f"%{len(self.bindings)}"
        self.bindings.append([name, expression])
        return Expr(self, name)

    def apply(self, op: str, *operands) -> Expr:
        values = [self.operand(operand) for operand in operands]
        return self.bind({op: values[0] if len(values) == 1 else values})

    def floor_divide(self, a, b) -> Expr:
        """``a // b``, for integers below 2^24 that of Python: operands of ``floor`` are computed exactly."""
        return self.apply("floor", self.apply("div", a, b))

    def power(self, base, exponent) -> Expr:
        """A product of equal factors."""
        exponent = _number(exponent)
        if not isinstance(exponent, int) or not 1 <= exponent <= 16:
            raise Error(f"attention.variant: ** {exponent!r}, expected an integer from 1 to 16; sqrt, exp2 and log2 compute others")
        result = base
        for bit in bin(exponent)[3:]:
            result = result * result * base if bit == "1" else result * result
        return result
