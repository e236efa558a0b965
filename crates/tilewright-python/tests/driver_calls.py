"""A GPU of the driver double, in a process of its own: ``python driver_calls.py SCENARIO`` prints the driver calls of its parts as JSON.

The double is loaded as ``libcuda.so.1``. Its device memory is host memory, and it logs each call with its arguments as numbers.
"""

import ctypes
import json
import sys

import numpy
import tilewright as tw
from tilewright import _core, _device

driver = ctypes.CDLL("libcuda.so.1")
driver.driver_double_log.restype = ctypes.c_size_t
driver.driver_double_split.argtypes = [ctypes.c_uint64]


def calls(work) -> list:
    """The driver calls of ``work()``: lists of a name and its arguments."""
    driver.driver_double_clear()
    work()
    text = ctypes.create_string_buffer(driver.driver_double_log(None, 0))
    driver.driver_double_log(text, len(text))
    return [[line.split()[0], *map(int, line.split()[1:])] for line in text.raw.decode().splitlines()]


def handle(function: str, *args) -> int:
    """A new handle or address of a driver function that returns it in its first argument."""
    result = ctypes.c_uint64()
    assert getattr(driver, function)(ctypes.byref(result), *args) == 0, function
    return result.value


class Array:
    """An array in device memory, of a library with ``__cuda_array_interface__``."""

    def __init__(self, values, address=None):
        values = numpy.ascontiguousarray(values)
        self.address = handle("cuMemAlloc_v2", ctypes.c_size_t(values.nbytes)) if address is None else address
        self.shape, self.dtype, self.device, self.id = values.shape, values.dtype, self, 0
        self.__cuda_array_interface__ = {"data": (self.address, False), "shape": self.shape, "typestr": values.dtype.str, "version": 3}
        if address is None:
            self.write(values)

    def __len__(self):
        return self.shape[0]

    def reshape(self, *shape):
        return Array(numpy.empty(self.shape, self.dtype).reshape(shape), self.address)

    def write(self, values):
        values = numpy.ascontiguousarray(values, self.dtype)
        ctypes.memmove(self.address, values.ctypes.data, values.nbytes)


def enter_context():
    """Makes the context current, as it is in the threads of torch."""
    context = handle("cuDevicePrimaryCtxRetain", 0)
    assert driver.cuCtxPushCurrent_v2(ctypes.c_uint64(context)) == 0


def zeros(*shape, dtype="float16") -> Array:
    return Array(numpy.zeros(shape, dtype))


class Step:
    """The operators of a decode step of 4 requests with 8 pages of 16 tokens each."""

    def __init__(self, stream=0):
        requests, pages, heads, kv_heads, dim, vocab = 4, 8, 8, 2, 128, 1024
        self.kv_len = pages * 16 - 1
        self.indptr = numpy.arange(requests + 1, dtype="int32") * pages
        self.pages = numpy.arange(requests * pages, dtype="int32")
        device = tw.Device("cuda")
        device.current_stream = lambda: stream
        self.attention = tw.Attention(tw.Problem(heads, kv_heads, dim, dtype="float16"), device=device)
        self.attention.prepare()
        self.with_sinks = tw.Attention(self.attention.problem, tw.variants.bound_sinks(heads), device)
        self.with_sinks.prepare()
        self.sinks = zeros(heads, dtype="float32")
        self.plan, self.large_plan = (self.attention.plan(self.batch(), capacity=tw.Capacity(rows, rows, len(self.pages)))
                                      for rows in (requests, 4096))
        self.k_cache, self.v_cache = (zeros(len(self.pages), 16, kv_heads, dim) for _ in range(2))
        self.hidden, self.weight, self.normed = zeros(requests, 512), zeros(512), zeros(requests, 512)
        self.q, self.k, self.v, self.out = (zeros(requests, n, dim) for n in (heads, kv_heads, kv_heads, heads))
        self.batch_indices = Array(numpy.arange(requests, dtype="int32"))
        self.positions = Array(numpy.full(requests, self.kv_len - 1, "int32"))
        self.table = tw.PageTable(Array(self.indptr), Array(self.pages), zeros(requests, dtype="int32"), 16)
        self.rope = tw.Rope(dim)
        self.logits, self.tokens = zeros(requests, vocab, dtype="float32"), zeros(requests, dtype="int32")
        self.top_k, self.top_p = Array(numpy.full(requests, 50, "int32")), Array(numpy.full(requests, 0.9, "float32"))

    def batch(self):
        last = numpy.full(len(self.indptr) - 1, (self.kv_len - 1) % 16 + 1, dtype="int32")
        return tw.Batch.paged(numpy.arange(len(self.indptr)), tw.PageTable(self.indptr, self.pages, last, 16))

    def append(self):
        tw.append_paged_kv_cache(self.k, self.v, self.batch_indices, self.positions, self.k_cache, self.v_cache, self.table)

    def rmsnorm(self):
        tw.rmsnorm(self.hidden, self.weight, out=self.normed)

    def apply_rope(self):
        tw.apply_rope(self.q, self.k, self.positions, self.rope)

    def run(self):
        self.attention.run(self.plan, self.q, self.k_cache, self.v_cache, out=self.out)

    def run_sinks(self):
        self.with_sinks.run(self.plan, self.q, self.k_cache, self.v_cache, out=self.out, tables={"sinks": self.sinks})

    def sample(self):
        params = {"top_k": self.top_k, "top_p": self.top_p, "seed": 1, "offset": 2}
        queue = self.attention.device.queue()
        _core.sample_tensors(queue, False, params, (self.logits, self.tokens, None, None))

    def replan(self):
        self.attention.replan(self.plan, self.batch())

    def device_batch(self):
        tables = Array(self.pages.reshape(len(self.indptr) - 1, -1))
        lens = Array(numpy.full(len(self.indptr) - 1, self.kv_len, "int32"))
        return tw.DeviceBatch(1, tw.BlockTable(tables, lens, 16))

    def replan_large(self):
        self.attention.replan(self.large_plan, self.batch())


def decode_step() -> dict:
    """The calls of each operator, in the first step and in three further ones."""
    enter_context()
    step = Step()
    parts = ("append", "rmsnorm", "apply_rope", "run", "run_sinks", "sample", "replan", "replan_large")
    return {part: [calls(getattr(step, part)) for _ in range(4)] for part in parts}


def on_stream(step: Step, stream: int, work: str) -> list:
    """The calls of an operator on a stream."""
    step.attention.device.current_stream = lambda: stream
    return calls(getattr(step, work))


def streams() -> dict:
    """Runs and frees of a plan on the stream that made it and on another one."""
    enter_context()
    one, other = (handle("cuStreamCreate", 1) for _ in range(2))
    step = Step(one)
    first = {"one": one, "other": other}
    parts = {
        "run": on_stream(step, one, "run"),
        "run_on_other": on_stream(step, other, "run"),
        "run_on_other_again": on_stream(step, other, "run"),
        "replan": on_stream(step, one, "replan"),
        "replan_again": on_stream(step, one, "replan"),
        "free": calls(step.plan.free),
    }

    def planned(*work):
        """The calls of freeing a plan that other work has used."""
        step.attention.device.current_stream = lambda: one
        step.plan = step.attention.plan(step.batch())
        for part in work:
            part()
        return calls(step.plan.free)

    def run(stream):
        return lambda: on_stream(step, stream, "run")

    parts["free_after_other"] = planned(run(other))
    step.attention.device.current_stream = lambda: one
    batch = step.device_batch()
    step.plan = step.attention.plan(batch)
    parts["device_plan_on_other"] = on_stream(step, other, "run")
    step.attention.device.current_stream = lambda: one
    parts["device_replan"] = calls(lambda: step.attention.replan(step.plan, batch))
    captured = ctypes.c_uint64(other)
    parts["free_in_capture"] = planned(run(other), lambda: driver.cuStreamBeginCapture_v2(captured, 1), run(other))
    driver.cuStreamEndCapture(captured, ctypes.byref(ctypes.c_uint64()))
    step.attention.device.current_stream = lambda: one
    parts["plan_after_capture"] = calls(lambda: step.attention.plan(step.batch()).free())
    return {**first, **parts}


def error_of(work) -> str:
    """The error that ``work()`` raises; empty if it raises none."""
    try:
        work()
    except tw.Error as error:
        return str(error)
    return ""


def checked() -> dict:
    """Calls and errors of the checked mode."""
    enter_context()
    stream = handle("cuStreamCreate", 1)
    step = Step(stream)
    _device._devices[0] = step.attention.device  # the operators around attention use the stream too
    for part in ("append", "rmsnorm", "apply_rope", "run", "sample"):
        getattr(step, part)()
    parts = {part: calls(getattr(step, part)) for part in ("rmsnorm", "append")}
    capture = ctypes.c_uint64(stream)
    driver.cuStreamBeginCapture_v2(capture, 1)
    parts["rmsnorm_in_capture"] = calls(step.rmsnorm)
    driver.cuStreamEndCapture(capture, ctypes.byref(ctypes.c_uint64()))

    def norm(weight):
        return error_of(lambda: tw.rmsnorm(step.hidden, weight, out=step.normed))

    on_host = numpy.zeros(512, "float16")
    # a tensor in two of three mappings, and one that is longer than its allocation
    mapped, short = zeros(768), zeros(256)
    driver.driver_double_split(mapped.address + 512)
    driver.driver_double_split(mapped.address + 1024)
    parts["errors"] = {
        "mapped": norm(Array(on_host, mapped.address)),
        "host": norm(Array(on_host, on_host.ctypes.data)),
        "short": norm(Array(on_host, short.address)),
    }
    step.batch_indices.write([0, 1, 4, 3])
    parts["errors"]["batch_indices"] = error_of(step.append)
    step.batch_indices.write([0, 1, -1, 3])
    parts["errors"]["skipped"] = error_of(step.append)
    step.positions.write([0, 0, 0, 1000])
    parts["errors"]["positions"] = error_of(step.append)
    batch = step.device_batch()
    step.plan = step.attention.plan(batch)
    parts["errors"]["block_tables"] = error_of(step.run)
    batch._table.block_tables.write(numpy.full((4, 8), 32))
    parts["errors"]["no_page"] = error_of(step.run)
    return {"stream": stream, "addresses": {"short": short.address, "host": on_host.ctypes.data}, **parts}


def sources() -> dict:
    """The sources of the kernels of a first step, and its calls."""
    enter_context()
    device = None

    def first():
        nonlocal device
        step = Step()
        device = step.attention.device
        _device._devices[0] = device  # one cache for all operators
        for part in ("append", "rmsnorm", "apply_rope", "run", "sample"):
            getattr(step, part)()

    return {"calls": calls(first), "sources": device.kernel_sources()}


SCENARIOS = {"sources": sources, "checked": checked, "decode_step": decode_step, "streams": streams}

if __name__ == "__main__":
    json.dump(SCENARIOS[sys.argv[1]](), sys.stdout)
