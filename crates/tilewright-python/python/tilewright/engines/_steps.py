"""Batches and plans of an engine's step: host lengths, page ids on the device, one plan per problem.

1. The engine passes query and KV lengths on the host, and a table of page ids or slots on the device.
2. :func:`paged_batch` gathers the page ids on the device, without waiting.
3. :class:`StepPlans` plans the batch once per problem. Layers of equal problems share the plan.

A step that a CUDA graph can replay rewrites one plan of fixed capacity, which all graphs of the engine share. Decode steps whose
lengths are on the device only are planned there, with one plan per size of a step.
"""

import numpy
import torch

from .. import variants
from .._core import Error, Unsupported
from .._device import Device
from ..attention import Attention, Batch, BlockTable, Capacity, DeviceBatch, PageTable, Plan, Problem
from ..device_batch import page_bounds

#: Operators kept for reuse.
_LIMIT = 1024
#: Plans on the device kept for eager steps.
_EAGER_LIMIT = 64
#: Bytes for partial states that plans on the device share; one that needs more allocates its own.
_WORKSPACE = 16 << 20
_operators: dict = {}


def operator(problem: Problem, device: Device, soft_cap: float = 0.0, has_sinks: bool = False) -> Attention:
    """The operator of a problem, with a soft cap above 0, and with sinks, whose values its runs bind."""
    key = (problem, id(device), soft_cap, has_sinks)
    found = _operators.get(key)
    if found is None:
        if len(_operators) >= _LIMIT:
            _operators.clear()
        variant = variants.soft_cap(soft_cap) if soft_cap > 0.0 else None
        if has_sinks:
            sink = variants.bound_sinks(problem._fields[0])
            variant = sink if variant is None else variant.then(sink)
        found = _operators[key] = Attention(problem, variant, device)
    return found


class SinkTable:
    """The sinks of a layer as runs bind them: the tensor itself if it is float32 without gaps in the memory of the queries, else a copy,
    which :meth:`refresh` rewrites in place."""

    __slots__ = ("_is_copy", "source", "tables")

    def __init__(self, sinks, like):
        self.source = sinks
        values = sinks.detach().to(like.device, torch.float32).reshape(-1).contiguous()
        self._is_copy = values.data_ptr() != sinks.data_ptr()
        #: The tables of a run.
        self.tables = {"sinks": values}

    @staticmethod
    def refresh(all_tables) -> None:
        """Copies the present values of all sinks that are not bound themselves, on the device. Recorded graphs read them."""
        copies = [one for one in all_tables if one._is_copy]
        if not copies:
            return
        with torch.inference_mode():  # a copy that was made in this mode is written in no other
            torch._foreach_copy_([one.tables["sinks"] for one in copies], [one.source.detach().reshape(-1) for one in copies])


def refuse(place: str, expected: str, **arguments) -> None:
    """Rejects each argument that is not ``None``, ``False`` or empty."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise Unsupported(f"{place}: {name} = {value!r}, expected {expected}")


def host_lengths(x) -> numpy.ndarray:
    """Lengths as int32 on the host; reading them from a GPU waits for it."""
    array = x.cpu().numpy() if isinstance(x, torch.Tensor) else numpy.asarray(x)
    return array.astype(numpy.int32, copy=False)


def table_entries(table, counts: numpy.ndarray, rows=None, stride: int = 1):
    """The entries ``table[rows[r], 0 : stride * counts[r] : stride]`` of all requests, one after another.

    ``table`` ``[num_rows, width]`` of integers on any device, ``counts`` ``[num_requests]`` on the host, ``rows``
    ``[num_requests]`` on the device of the table, by default ``0..num_requests``. Returns ``[sum(counts)]`` on that device.
    """
    total = int(counts.sum())
    each_count = torch.from_numpy(counts.astype(numpy.int64)).to(table.device, non_blocking=True)
    request = torch.repeat_interleave(each_count, output_size=total)
    first = each_count.cumsum(0) - each_count
    column = (torch.arange(total, device=table.device) - first[request]) * stride
    return table[request if rows is None else rows[request], column]


def page_counts(kv_lens: numpy.ndarray, page_size: int) -> numpy.ndarray:
    """The pages of each request."""
    return -(-kv_lens // page_size)


def paged_batch(place: str, qo_indptr: numpy.ndarray, kv_lens: numpy.ndarray, page_size: int, indices) -> Batch:
    """The batch of a step. ``qo_indptr`` ``[num_requests + 1]`` and ``kv_lens`` ``[num_requests]`` are int32 on the host,
    ``indices`` page ids of all requests on the device."""
    if len(qo_indptr) != len(kv_lens) + 1:
        raise Error(f"{place}: query_start_loc has {len(qo_indptr)} elements, expected {len(kv_lens) + 1}")
    indptr, last = page_bounds(kv_lens, page_size)
    return Batch.paged(qo_indptr, PageTable(indptr, indices.to(torch.int32), last, page_size))


class StepPlans:
    """The plans of an engine's steps on one device: eager ones, and those that recorded CUDA graphs read."""

    __slots__ = ("_eager", "_graph", "_stream", "_workspace", "device")

    def __init__(self, device: Device):
        self.device = device
        self._eager: dict = {}
        self._graph: dict = {}
        self._stream = self._workspace = None

    def plan(self, problem: Problem, batch: Batch) -> Plan:
        """A plan of a step without CUDA graphs. It reuses the memory of the previous one on the same stream."""
        attention, plan = operator(problem, self.device), self._eager_plans().get(problem)
        if plan is not None:
            try:
                attention.replan(plan, batch)
                return plan
            except Error:
                pass  # an invalid batch raises again below
        plan = self._eager[problem] = attention.plan(batch)
        return plan

    def _eager_plans(self) -> dict:
        """The plans of the current stream."""
        stream = self.device.current_stream()
        if stream != self._stream:
            self._eager, self._stream = {}, stream
        return self._eager

    def plan_on_device(self, problem: Problem, rows, table: BlockTable, size: tuple, in_graph: bool) -> Plan:
        """A plan of lengths on the device, for ``size`` requests, query rows and rows per request; ``rows`` are bounds or a number per
        request. Recorded graphs read it if ``in_graph``. The call does not wait."""
        batch = DeviceBatch(rows, table)
        plans, key = self._graph if in_graph else self._eager_plans(), (problem, size)
        attention, plan = operator(problem, self.device), plans.get(key)
        if plan is not None:
            attention.replan(plan, batch)
            return plan
        if not in_graph and len(plans) >= _EAGER_LIMIT:
            plans.clear()
        if self.device.name == "cpu":
            plan = attention.plan(batch)
        else:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=table.seq_lens.device)
            plan = attention.plan(batch, capacity=Capacity(size[0], size[1], 0, qo_len=size[2]), workspace=self._workspace)
        plans[key] = plan
        return plan

    def plan_graph(self, problem: Problem, batch: Batch, capacity: Capacity) -> Plan:
        """The plan that recorded graphs read, rewritten in place. The first call fixes its capacity."""
        attention, plan = operator(problem, self.device), self._graph.get(problem)
        if plan is None:
            plan = self._graph[problem] = attention.plan(batch, capacity=capacity)
        else:
            attention.replan(plan, batch)
        return plan
