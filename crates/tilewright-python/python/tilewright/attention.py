"""Batch attention: a problem once, a plan per step, a run per layer."""

from . import _core
from ._core import Error, Unsupported
from ._device import Device, device_named, host_device, queue_of
from ._tensors import HOST, device_bytes, device_indices, device_number, dtype_name, empty, is_torch, on_host, shape_of
from .device_batch import REFUSALS, BlockTable, DeviceBatch
from .variants import Variant

__all__ = ["Attention", "Batch", "BlockTable", "Capacity", "DeviceBatch", "Level", "PageTable", "Plan", "Problem", "merge_state",
           "merge_states"]


class Problem:
    """The static shape of an attention operator.

    ``num_qo_heads`` is a multiple of ``num_kv_heads``. ``head_dim`` is that of queries and keys; ``head_dim_vo`` that of values
    and outputs, by default the same. ``dtype`` is that of queries and outputs (float32, float16, bfloat16), ``kv_dtype`` that of
    the cache (also float8_e4m3fn, float8_e5m2, int8). ``q_dtype`` float8_e4m3fn is FP8 attention, with a cache of that dtype.
    ``out_dtype`` float8_e4m3fn rounds outputs once, times ``v_scale``; those out of range become the largest. ``layout`` is
    ``"NHD"`` or ``"HND"``.

    Visible keys: ``causal`` is aligned bottom-right; ``window_left`` keeps that many keys before a row's own position, itself
    not counted. ``scale`` is by default ``1 / sqrt(head_dim)``.
    """

    __slots__ = ("_core", "_fields")

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: "int | None" = None,
        head_dim: int = 128,
        *,
        head_dim_vo: "int | None" = None,
        dtype="float32",
        q_dtype=None,
        out_dtype=None,
        kv_dtype=None,
        layout: str = "NHD",
        causal: bool = True,
        window_left: "int | None" = None,
        window_right: "int | None" = None,
        scale: "float | None" = None,
    ):
        dtype = dtype_name(dtype)
        self._set(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_qo_heads if num_kv_heads is None else num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim if head_dim_vo is None else head_dim_vo,
            dtype=dtype,
            q_dtype=None if q_dtype is None else dtype_name(q_dtype),
            out_dtype=dtype if out_dtype is None else dtype_name(out_dtype),
            kv_dtype=dtype if kv_dtype is None else dtype_name(kv_dtype),
            layout=layout,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            scale=scale,
            latent=False,
        )

    @classmethod
    def latent(
        cls, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, *, scale: float, dtype="bfloat16", kv_dtype=None,
        out_dtype=None, causal: bool = True,
    ) -> "Problem":
        """Multi-head latent attention (DeepSeek) in absorbed form: one latent row and one rotary row per token. The cache has
        ``dtype``, unless ``kv_dtype`` differs. ``out_dtype`` may be float8_e4m3fn.

        ``scale`` is that of the heads before absorption, ``1 / sqrt(128 + 64)`` in DeepSeek-V3.
        """
        problem = cls.__new__(cls)
        dtype = dtype_name(dtype)
        problem._set(
            num_qo_heads=num_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim_ckv + head_dim_kpe,
            head_dim_vo=head_dim_ckv,
            dtype=dtype,
            q_dtype=None,
            out_dtype=dtype if out_dtype is None else dtype_name(out_dtype),
            kv_dtype=dtype if kv_dtype is None else dtype_name(kv_dtype),
            layout="NHD",
            causal=causal,
            window_left=None,
            window_right=None,
            scale=scale,
            latent=True,
        )
        return problem

    def _set(self, **fields):
        self._fields = tuple(fields.values())
        self._core = _core.Problem(fields)

    @property
    def scale(self) -> float:
        """The factor of ``q · k``."""
        return self._core.scale

    def __eq__(self, other) -> bool:
        return isinstance(other, Problem) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)

    def __repr__(self) -> str:
        return f"Problem({self._core!r})"


class PageTable:
    """The pages of each request: ``indptr`` ``[num_requests + 1]``, ``indices`` ``[indptr[-1]]`` page ids, ``last_page_len``
    ``[num_requests]`` tokens of the last page; int32 or int64, or sequences of integers.

    A plan on a GPU takes ``indices`` on that GPU, copied within it and unchecked, unless it detects shared prefixes. Other
    arrays on a GPU are copied to the host, which waits for it; a :class:`DeviceBatch` takes all arrays there."""

    __slots__ = ("indices", "indptr", "last_page_len", "page_size")

    def __init__(self, indptr, indices, last_page_len, page_size: int):
        self.indptr = indptr
        self.indices = indices
        self.last_page_len = last_page_len
        self.page_size = page_size

    def _arrays(self, indices_on_device: bool = False) -> tuple:
        indices = device_indices(self.indices) if indices_on_device else on_host(self.indices)
        return on_host(self.indptr), indices, on_host(self.last_page_len), self.page_size


class Level:
    """A cascade level: group ``g`` is the requests of query rows ``qo_indptr[g]..qo_indptr[g + 1]``, with the keys of row ``g``
    of ``table``."""

    __slots__ = ("qo_indptr", "table")

    def __init__(self, qo_indptr, table: PageTable):
        self.qo_indptr = qo_indptr
        self.table = table


class Batch:
    """The requests of one step. ``qo_indptr`` ``[num_requests + 1]``: request ``r`` has query rows
    ``qo_indptr[r]..qo_indptr[r + 1]``."""

    __slots__ = ("_core",)

    def __init__(self, *, qo_indptr=None, table=None, kv_indptr=None, blocks=None, variable_blocks=None, mask=None,
                 mask_columns=None, levels=(), shared_prefixes=False, shard=None):
        self._core = _core.Batch({
            "qo_indptr": on_host(qo_indptr),
            "table": None if table is None else table._arrays(not shared_prefixes),
            "kv_indptr": on_host(kv_indptr),
            "blocks": blocks,
            "variable_blocks": variable_blocks,
            "mask": device_bytes(mask),
            "mask_columns": on_host(mask_columns),
            "levels": [{"qo_indptr": on_host(one.qo_indptr), "table": one.table._arrays(True)} for one in levels],
            "shared_prefixes": shared_prefixes,
            "shard_offsets": None if shard is None else on_host(shard[0]),
            "shard_lens": None if shard is None else on_host(shard[1]),
        })

    @classmethod
    def paged(cls, qo_indptr, table: PageTable, *, mask=None, mask_columns=None, levels=(), shared_prefixes: bool = False,
              shard=None) -> "Batch":
        """Queries over a paged cache.

        ``mask``: packed little-endian bits (uint8), row-major per request, each request from a new byte; a key is visible if the
        mask and the problem show it. A plan on a GPU copies bits that are there within it. ``mask_columns`` ``[num_requests]``:
        the bits are of that many last keys. ``levels``: shared keys before those of ``table``, outermost first.
        ``shared_prefixes`` detects levels in equal page lists. ``shard``: ``(kv_offsets, kv_lens)`` of context parallelism, each
        ``[num_requests]``.
        """
        return cls(qo_indptr=qo_indptr, table=table, mask=mask, mask_columns=mask_columns, levels=levels,
                   shared_prefixes=shared_prefixes, shard=shard)

    @classmethod
    def _unconverted(cls, qo_indptr, table: tuple) -> "Batch":
        """:meth:`paged` for the arrays of a page table: bounds and lengths on the host, int32 or int64, and pages there or int32 on
        a GPU; else an error."""
        batch = cls.__new__(cls)
        batch._core = _core.Batch.paged(qo_indptr, table)
        return batch

    @classmethod
    def ragged(cls, qo_indptr, kv_indptr, *, mask=None, mask_columns=None, shard=None) -> "Batch":
        """Queries over ragged keys: request ``r`` has keys ``kv_indptr[r]..kv_indptr[r + 1]``."""
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, mask=mask, mask_columns=mask_columns, shard=shard)

    @classmethod
    def block_sparse(cls, indptr, indices, block: "tuple[int, int]", kv_len: int, mask=None) -> "Batch":
        """One request whose block rows attend to some blocks of keys (BSR). ``block`` is ``(rows, keys)``; ``mask`` bool
        ``[num_blocks, rows, keys]``."""
        flags = None if mask is None else on_host(mask.reshape(-1))
        return cls(blocks={"indptr": on_host(indptr), "indices": on_host(indices), "block_rows": block[0],
                           "block_columns": block[1], "kv_len": kv_len, "mask": flags})

    @classmethod
    def variable_block_sparse(cls, blocks, row_sizes, column_sizes) -> "Batch":
        """One request with blocks of variable size: bool ``[num_kv_heads, block_rows, block_columns]``, and their sizes
        ``[num_kv_heads, block_rows]`` and ``[num_kv_heads, block_columns]``."""
        return cls(variable_blocks={"blocks": on_host(blocks.reshape(-1)), "row_sizes": on_host(row_sizes.reshape(-1)),
                                    "column_sizes": on_host(column_sizes.reshape(-1))})


class Capacity:
    """The limits of a plan that :meth:`Attention.replan` rewrites in place: requests, query rows, and page indices per batch;
    ``qo_len`` and ``kv_len`` per request; cascade levels; bytes of masks."""

    __slots__ = ("_fields",)

    def __init__(self, requests: int, rows: int, pages: int, *, qo_len: "int | None" = None, kv_len: "int | None" = None,
                 levels: int = 0, mask_bytes: int = 0):
        self._fields = {"requests": requests, "rows": rows, "pages": pages, "qo_len": qo_len, "kv_len": kv_len,
                        "levels": levels, "mask_bytes": mask_bytes}


class Plan:
    """The schedule of a batch. It prints a report, and a notebook shows it as a picture.

    Its memory is freed with the object, or by :meth:`free`."""

    __slots__ = ("_core", "_machine")

    def __init__(self, core, machine: str):
        self._core = core
        self._machine = machine

    def free(self) -> None:
        """Frees the memory, on a GPU after the work in flight. Later uses of the plan raise :class:`Error`; a CUDA graph that
        recorded a run of it may not be replayed. A second call does nothing."""
        try:
            del self._core
        except AttributeError:
            pass  # it was freed

    def __getattr__(self, name: str):
        if name == "_core":
            raise Error("attention: the plan was freed, expected a plan that Attention.plan has returned")
        raise AttributeError(f"'Plan' object has no attribute {name!r}")

    def explain(self) -> str:
        """Requests, work items, balance and traffic."""
        return self._core.explain()

    def svg(self) -> str:
        """The schedule as an SVG: one lane per worker, one rectangle per work item, and the merges."""
        return self._core.svg(self._machine)

    def statistics(self) -> "dict[str, int]":
        """The numbers of :meth:`explain`."""
        return self._core.statistics()

    @property
    def num_rows(self) -> int:
        """Query rows of the batch."""
        return self._core.num_rows

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partial states and scratch, which the plan owns."""
        return self._core.workspace_bytes

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return self.explain()


def _core_of(plan, function: str):
    """The plan of the extension."""
    try:
        return plan._core
    except AttributeError:
        raise Error(f"attention.{function}: plan is of type {type(plan).__name__}, expected a Plan") from None


class Attention:
    """An attention operator: a problem and a variant on a device.

    Construction loads the kernels of decode steps, :meth:`plan` those of its batch, and :meth:`prepare` all. One plan serves all
    operators of the same problem and device, with any variant and scale, and with a mask within the planned one.
    """

    def __init__(self, problem: Problem, variant: "Variant | None" = None, device: "Device | str | None" = None):
        self.problem = problem
        self.variant = variant
        self._tables = () if variant is None else variant._tables
        self.device = device_named(device) if isinstance(device, str) else device or host_device()
        self._operators: dict = {}
        self._operator()

    def _operator(self) -> "_core.Attention":
        stream = self.device.current_stream()
        return self._operators.get(stream) or self._operator_of(stream)

    def _operator_of(self, stream: int) -> "_core.Attention":
        """Adds the operator of a stream."""
        if len(self._operators) >= 64:
            self._operators.clear()
        recorded = None if self.variant is None else self.variant._core
        operator = self._operators[stream] = _core.Attention(self.device.queue_of(stream), self.problem._core, recorded)
        return operator

    def prepare(self) -> None:
        """Loads every kernel that a run can need, for any batch, mask and alignment. Call it before a capture on the same GPU: the
        streams of a GPU share loaded kernels, so a run in the capture loads none."""
        self._operator().prepare()

    def describe(self) -> str:
        """The problem, the variant and the kernel, with the reasons why no faster one was chosen."""
        return self._operator().describe()

    def plan(self, batch: "Batch | DeviceBatch", *, split: "str | int" = "balanced", capacity: "Capacity | None" = None,
             workspace=None) -> Plan:
        """Schedules a batch. ``split`` is ``"balanced"``, or for batch-invariant bits ``"never"`` or keys per piece.
        ``workspace`` is memory of a GPU for the partial states of a :class:`DeviceBatch`; a plan allocates its own if it needs
        more."""
        limits = None if capacity is None else capacity._fields
        if isinstance(batch, DeviceBatch) and self.device.name != "cpu":
            if split != "balanced":
                raise Unsupported(f"attention.plan: split = {split!r} of a batch on the device, expected 'balanced'")
            core = self._operator().plan_on_device(batch._fields(), limits or batch._limits(), workspace)
        else:
            core = self._operator().plan(_on_host(batch)._core, split, limits)
        return Plan(core, self.device.describe())

    def replan(self, plan: Plan, batch: "Batch | DeviceBatch") -> None:
        """Rewrites ``plan`` in place for another batch; recorded CUDA graphs of its runs then execute that batch. A
        :class:`DeviceBatch` needs a plan with a capacity; a CUDA graph can record the call."""
        if isinstance(batch, DeviceBatch) and self.device.name != "cpu":
            self._operator().replan_on_device(_core_of(plan, "replan"), batch._fields())
        else:
            self._operator().replan(_core_of(plan, "replan"), _on_host(batch)._core)

    def check_plan(self, plan: Plan) -> None:
        """Raises :class:`Error` if the device has rejected the lengths of the last :class:`DeviceBatch`; waits for it."""
        bits = self._operator().refusals(_core_of(plan, "check_plan"))
        if bits:
            raise Error("attention.plan: " + "; ".join(text for bit, text in REFUSALS.items() if bits & bit))

    def run(self, plan: Plan, q, k, v, *, out=None, lse=None, return_lse: bool = False, k_scale=None, v_scale=None, tables=None):
        """Executes a plan.

        ``q`` ``[num_rows, num_qo_heads, head_dim]``. ``k``, ``v``: paged ``[num_pages, page_size, num_kv_heads, head_dim]``
        (NHD) or ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND); ragged ``[num_tokens, num_kv_heads, head_dim]`` or
        ``[num_kv_heads, num_tokens, head_dim]``. ``out`` ``[num_rows, num_qo_heads, head_dim_vo]``; ``lse`` ``[num_rows,
        num_qo_heads]`` float32, base 2. A scale is a number, ``[num_kv_heads]`` numbers, or a tensor float32 ``[1]``,
        ``[num_kv_heads]`` or ``[num_pages, num_kv_heads]``, which is read where it is. If ``v`` is ``None``, axis 1 of ``k`` has keys
        and values. ``tables`` maps names to tensors float32, for tables of a variant that have no values. Returns ``out``, or
        ``(out, lse)``.
        """
        k_scale = None if k_scale is None else _scale(k_scale, q)
        v_scale = None if v_scale is None else _scale(v_scale, q)
        return self._run(plan, q, None, k, v, k_scale, v_scale, out, lse, return_lse, tables)

    def _run(self, plan: Plan, q, q_pe, k, v, k_scale, v_scale, out, lse, return_lse, tables=None):
        """Executes a plan with scales as the extension takes them."""
        tables = self._tables if tables is None else (*self._tables, *tables.items())
        if out is None or (lse is None and return_lse):
            fields = self.problem._fields
            shape = (*shape_of(q)[:1], fields[0], fields[3])
            out = empty(shape, fields[6], q) if out is None else out
            lse = empty(shape[:2], "float32", q) if lse is None and return_lse else lse
        try:
            core = plan._core
        except AttributeError:
            core = _core_of(plan, "run")
        stream = self.device.current_stream()  # `_operator`, without a call of Python
        operator = self._operators.get(stream) or self._operator_of(stream)
        operator.run(core, (q, q_pe, k, v, k_scale, v_scale, out, lse, tables or None))
        return (out, lse) if return_lse else out

    def run_latent(
        self, plan: Plan, q_nope, q_pe, ckv, kpe, *, out=None, lse=None, return_lse: bool = False, ckv_scale=None, kpe_scale=None
    ):
        """Executes a plan of :meth:`Problem.latent`.

        ``q_nope`` ``[num_rows, num_heads, head_dim_ckv]``, ``q_pe`` ``[num_rows, num_heads, head_dim_kpe]``; ``ckv`` and ``kpe``
        paged ``[num_pages, page_size, dim]`` or ragged ``[num_tokens, dim]``. The scales are numbers, 1 by default, for caches of 8
        bits, or tensors of one element; if they differ, ``q_pe`` is multiplied by their ratio and rounded to its dtype.
        """
        q_pe, scale = _latent_scale(q_pe, ckv_scale, kpe_scale)
        return self._run(plan, q_nope, q_pe, ckv, kpe, scale, None, out, lse, return_lse)

    def __repr__(self) -> str:
        return f"Attention({self.describe()})"


def _on_host(batch) -> Batch:
    """The batch with its arrays on the host."""
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, DeviceBatch):
        raise Error(f"attention.plan: batch is of type {type(batch).__name__}, expected a Batch or a DeviceBatch")
    rows, arrays = batch._host_arrays()
    return Batch.paged(rows, PageTable(*arrays))


def _latent_scale(q_pe, ckv_scale, kpe_scale):
    """``q_pe`` times the ratio of the scales, and the scale of both tensors. Nothing waits for a scale on a GPU."""
    if ckv_scale is None and kpe_scale is None:
        return q_pe, None
    scale, other = (1.0 if one is None else one for one in (ckv_scale, kpe_scale))
    # a tensor without axes does not change the dtype of its product
    scale, other = (one.detach().reshape(()) if is_torch(one) and not _is_converted(one, q_pe) else float(one)
                    for one in (scale, other))
    if is_torch(scale) or is_torch(other):
        q_pe = q_pe if kpe_scale is ckv_scale else q_pe * (other / scale)
        return q_pe, scale.float().reshape(1) if is_torch(scale) else scale
    return q_pe if other == scale else q_pe * (other / scale), scale


def _is_converted(scale, q) -> bool:
    """Whether a tensor of scales is read on the host: it is there, of another dtype than float32 or not beside the queries."""
    return device_number(scale) == HOST and (dtype_name(scale.dtype) != "float32" or device_number(q) != HOST)


def _scale(scale, q):
    """A number, numbers per head, or a tensor in the memory of ``q``."""
    if isinstance(scale, (int, float)):
        return scale
    shape = getattr(scale, "shape", None)
    if shape is None:
        return list(scale)
    scale = scale.detach() if is_torch(scale) else scale
    if len(shape) == 0:
        return scale.reshape(1) if device_number(scale) != HOST else float(scale)
    return scale.tolist() if len(shape) == 1 and _is_converted(scale, q) else scale


def merge_states(o, lse, *, out=None, out_lse=None):
    """Merges attention states over disjoint keys: ``o`` ``[rows, num_states, heads, dim]``, ``lse`` ``[rows, num_states,
    heads]`` float32, base 2. Returns ``(out, out_lse)`` of shapes ``[rows, heads, dim]`` and ``[rows, heads]``."""
    shape = shape_of(o)
    if out is None:
        out = empty((*shape[:1], *shape[2:]), dtype_name(o.dtype), o)
    if out_lse is None:
        out_lse = empty((*shape[:1], *shape[2:3]), "float32", o)
    fields = {"o": o, "lse": lse, "out": out, "out_lse": out_lse, "in_place": False, "mask": None}
    _core.merge_states(queue_of(o), fields)
    return out, out_lse


def merge_state(o, lse, other, other_lse, *, mask=None) -> None:
    """Merges a second state into the first, in place: ``o``, ``other`` ``[rows, heads, dim]``; ``lse``, ``other_lse`` ``[rows,
    heads]`` float32, base 2. Rows whose ``mask`` ``[rows]``, bool or 8 bits, is 0 keep their state."""
    fields = {"o": other, "lse": other_lse, "out": o, "out_lse": lse, "in_place": True, "mask": mask}
    _core.merge_states(queue_of(o), fields)
