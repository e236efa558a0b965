"""Values of hooks while they are traced: each operation becomes a binding of an expression graph."""

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
        raise Error("attention.variant: a condition has no value while a hook is traced: use where(condition, a, b)")

    def __float__(self):
        raise Error("attention.variant: a number has no value while a hook is traced")


def _unary(op: str):
    def function(x):
        return _trace_of(op, x).apply(op, x)

    function.__name__ = op
    function.__doc__ = f"``{op}`` of a traced number."
    return function


tanh = _unary("tanh")
exp = _unary("exp")
exp2 = _unary("exp2")
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
