"""The machinery of all wrappers: attention settings to operators, plans in fixed memory, and runs."""

import math
from types import SimpleNamespace

import torch

from .. import _core, variants
from .._core import Error, Unsupported
from .._device import device_of
from .._tensors import dtype_name
from ..attention import Attention, Batch, Capacity, DeviceBatch, PageTable, Problem
from ..operators import Rope
from ._drafts import drafts_variant
from ._pages import is_on_gpu, last_page_lens, page_table
from ._refuse import BACKENDS, check_backend, check_choice, check_layout, check_output, number, refuse, torch_dtype

#: The dtype of FP8 attention.
FP8 = "float8_e4m3fn"
#: Queries of this dtype are converted to 16 bits, exactly.
E5M2 = "float8_e5m2"
_WIDE = ("float16", "bfloat16")
#: Settings that callers may change after ``plan``, as attributes of a wrapper or arguments of a run.
_CHANGEABLE = ("sm_scale", "soft_cap", "window_left", "pos_encoding_mode", "causal", "sinks")
#: Operators kept for reuse; each is a few kilobytes.
_LIMIT = 256
_operators: dict = {}


class Settings:
    """Everything that selects an operator. Equal settings share one operator per device."""

    __slots__ = ("causal", "chunk", "dims", "drafts", "dtypes", "heads", "layout", "pos_encoding_mode", "q_scales", "rope_scale",
                 "rope_theta", "sm_scale", "sinks", "soft_cap", "window_left")

    def __init__(self, *, heads, dims, dtypes, layout, causal, window_left=-1, soft_cap=None, sm_scale=None,
                 pos_encoding_mode="NONE", rope_scale=None, rope_theta=None, sinks=False, chunk=0):
        self.heads = heads
        self.dims = dims
        self.dtypes = dtypes
        self.layout = layout
        self.causal = causal
        #: The length of chunks beyond which rows see no keys, or 0. A window of a chunk contains these keys.
        self.chunk = chunk
        self.window_left = chunk - 1 if chunk else window_left
        self.soft_cap = soft_cap or 0.0
        self.sm_scale = sm_scale
        self.pos_encoding_mode = pos_encoding_mode
        self.rope_scale = rope_scale or 1.0
        self.rope_theta = rope_theta or 10000.0
        self.sinks = bool(sinks)
        #: Whether runs bind a scale per query head, and the sizes of a draft mask that they bind.
        self.q_scales, self.drafts = False, None

    def plan_key(self) -> tuple:
        """What a plan depends on."""
        return (self.heads, self.dims, self.dtypes, self.layout, self.causal, self.window_left)

    def variant_key(self) -> tuple:
        """What a variant depends on."""
        rope = (self.rope_scale, self.rope_theta) if self.pos_encoding_mode == "ROPE_LLAMA" else None
        return (self.soft_cap, self.pos_encoding_mode, rope, self.sinks, self.chunk, self.q_scales, self.drafts)

    def scale(self) -> float:
        """The factor of ``q · k``."""
        return 1.0 / math.sqrt(self.dims[0]) if self.sm_scale is None else float(self.sm_scale)

    def factors(self, function: str, q_scale, k_scale, v_scale, device=None) -> tuple:
        """The scales of keys and values, with those of queries and logits; ``None`` for 1. Those in tensors become tensors on
        ``device``, that of the queries."""
        k_factor = self.scale() * math.sqrt(self.dims[0])
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
            k_factor = k_factor * _factor(function, name, scale, device)
        return _unless_one(k_factor), _unless_one(_factor(function, "v_scale", v_scale, device))

    def problem(self) -> Problem:
        """The problem with the default scale; runs multiply by the ratio to theirs, so that one plan serves all scales."""
        left = None if self.window_left < 0 else self.window_left
        out, _, q = self.dtypes
        # the dtype of products
        dtype = out if out != FP8 else "float16" if q == FP8 else q
        return Problem(self.heads[0], self.heads[1], self.dims[0], head_dim_vo=self.dims[1], dtype=dtype, out_dtype=out,
                       q_dtype=self.dtypes[2], kv_dtype=self.dtypes[1], layout=self.layout, causal=self.causal, window_left=left)

    def variant(self):
        """The composed variant, or None."""
        parts = []
        if self.q_scales:  # before all other changes of logits
            parts.append(_scaled_heads(self.heads[0]))
        if self.pos_encoding_mode == "ROPE_LLAMA":
            scaling = None if self.rope_scale == 1.0 else ("linear", [self.rope_scale])
            parts.append(variants.rotary(Rope(self.dims[0], self.rope_theta, scaling=scaling)))
        elif self.pos_encoding_mode == "ALIBI":
            parts.append(variants.alibi(self.heads[0]))
        if self.soft_cap > 0.0:
            parts.append(variants.soft_cap(self.soft_cap))
        if self.sinks:  # runs bind their values
            parts.append(variants.bound_sinks(self.heads[0]))
        if self.chunk:
            parts.append(variants.chunked(self.chunk))
        if self.drafts:
            parts.append(drafts_variant(*self.drafts))
        composed = None
        for part in parts:
            composed = part if composed is None else composed.then(part)
        return composed

    def operator(self, device) -> Attention:
        """The operator on a device."""
        key = (self.plan_key(), self.variant_key(), id(device))
        operator = _operators.get(key)
        if operator is None:
            check_choice("plan", "pos_encoding_mode", self.pos_encoding_mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
            if len(_operators) >= _LIMIT:
                _operators.clear()
            operator = _operators[key] = Attention(self.problem(), self.variant(), device)
        return operator

    def replace(self, **changes) -> "Settings":
        """A copy with other values."""
        copy = Settings.__new__(Settings)
        for name in Settings.__slots__:
            setattr(copy, name, changes.get(name, getattr(self, name)))
        return copy


def dtype_names(q, kv, out=None) -> tuple:
    """The names of the dtypes of outputs, keys and queries. Missing ones are that of queries. Queries of e5m2 get 16 bits."""
    q_name = dtype_name(q)
    out_name, kv_name = (q_name if out is None else dtype_name(out)), (q_name if kv is None else dtype_name(kv))
    if q_name == E5M2 and out_name in (FP8, *_WIDE):
        q_name = out_name if out_name in _WIDE else "float16"
    return out_name, kv_name, q_name


def check_output_dtype(function: str, dtypes: tuple, name: str = "o_data_type") -> None:
    """Rejects outputs that are neither of e4m3 nor of the dtype of queries; those of queries of e4m3 may have 16 bits."""
    out, _, q = dtypes
    others = (q,) if q not in (FP8, E5M2) else _WIDE
    if out not in (FP8, *others):
        refuse(function, " or ".join((*others, FP8)), **{name: out})


def split_of(function: str, fixed_split_size, disable_split_kv: bool, page_size: int):
    """The KV split of FlashInfer's arguments; its sizes are in pages."""
    if disable_split_kv:
        return "never"
    if fixed_split_size is None or fixed_split_size < 0:
        return "balanced"
    if fixed_split_size == 0:
        raise Error(f"flashinfer.{function}: fixed_split_size = 0, expected at least 1 page")
    return int(fixed_split_size) * page_size


class BatchWrapper:
    """Options and workspaces of a batch wrapper. Plans own their memory, so the workspaces only select the device."""

    _name = "BatchWrapper"
    _backends = BACKENDS

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend):
        check_layout(self._name, kv_layout)
        check_backend(self._name, backend, self._backends)
        self._kv_layout = kv_layout
        self._backend = backend
        self._use_cuda_graph = use_cuda_graph
        self.device = float_workspace_buffer.device
        int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
        self.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        #: Attributes that engines read and pass on.
        self._pin_memory_int_workspace_buffer = self._max_total_num_rows = None
        self._attention = self._settings = None
        #: Whether the planned queries have 8 bits.
        self._has_8_bits = False
        #: The arguments of the last plan that its settings follow from.
        self._planned_with = None
        #: The planned settings and the values of the last run, with its settings.
        self._last_run = (None, None, None)

    def _scales_of(self, args, scales):
        """The scales of queries, keys and values, by keyword or, with queries of 8 bits, as three further arguments; and the
        other arguments."""
        if len(args) != 3 or not self._has_8_bits:
            return scales, args
        if any(scale is not None for scale in scales):
            raise Error(f"flashinfer.{self._name}.run: scales are passed twice, expected them by keyword or as arguments")
        return args, ()

    @property
    def is_cuda_graph_enabled(self):
        """Whether plans are rewritten in place."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        """Keeps other buffers, which are unused."""
        for name, buffer in (("float_workspace_buffer", float_workspace_buffer),
                             ("int_workspace_buffer", int_workspace_buffer)):
            if buffer.data_ptr() % 16 != 0:
                raise Error(f"flashinfer.{self._name}: {name} must be 16-byte aligned, its address is {buffer.data_ptr():#x}")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def workspace_size(self, *arguments, **options):
        """The bytes of the two buffers that any batch needs: the least, because plans own their memory."""
        return 16, 16

    @property
    def _plan_info(self):
        """The last plan, or None. Engines assign the result of ``_cached_module.plan``, which is this one."""
        return None if self._attention is None else self._attention.batch

    @_plan_info.setter
    def _plan_info(self, plan):
        pass

    @property
    def _cached_module(self):
        """The place of FlashInfer's compiled module, or None before the first plan. Engines call its ``plan`` in place of that of the
        wrapper, whose buffers they have filled, with lengths on the host."""
        return None if self._settings is None else SimpleNamespace(plan=self._plan_lengths)

    def _plan_lengths(
        self, float_workspace_buffer, int_workspace_buffer, pin_memory_int_workspace_buffer, qo_indptr, kv_indptr, kv_lens,
        num_rows, batch_size, num_qo_heads, num_kv_heads, page_size, use_cuda_graph, head_dim_qk, head_dim_vo, causal, window_left,
        fixed_split_size=-1, disable_split_kv=False, *hints,
    ):
        """Plans query rows ``qo_indptr`` over ``kv_lens`` ``[batch_size]`` tokens of pages ``kv_indptr``. The mask is that of the
        last plan. Workspaces, ``num_rows`` and ``hints`` have no effect."""
        settings, pages = self._settings, getattr(self, "_paged_kv_indices_buf", None)
        function = f"{self._name}._cached_module.plan"
        if pages is None or getattr(self, "_masked", False):
            raise Unsupported(f"flashinfer.{function}: {'keys are ragged' if pages is None else 'the plan has a mask'}, expected a call "
                              f"of {self._name}.plan")
        found = (num_qo_heads, num_kv_heads), (head_dim_qk, head_dim_vo), len(kv_lens)
        if found != (settings.heads, settings.dims, batch_size):
            raise Error(f"flashinfer.{function}: heads, dims and kv_lens are {found}, expected those of the last plan "
                        f"{settings.heads}, {settings.dims} and batch_size = {batch_size}")
        split = split_of(function, fixed_split_size, disable_split_kv, page_size)
        last = last_page_lens(function, kv_indptr, kv_lens, page_size)
        self._begin_plan(None)
        self._attention.plan_pages(settings, qo_indptr, (kv_indptr, pages, last, page_size), split)
        return self._plan_info

    def end_forward(self):
        """Does nothing, as in FlashInfer."""

    def _begin_plan(self, capacity):
        """Forgets the last batch. Its plan is kept, for recorded graphs or if its memory is on the device of the next one."""
        device = planned_device(self._float_workspace_buffer)
        if self._attention is None or not (self._use_cuda_graph or self._attention.device is device):
            self._attention = PlannedAttention(device, capacity)
        elif not self._use_cuda_graph:
            self._attention.batch = None

    def _settings_with(self, values) -> Settings:
        """The planned settings with the values of a run for ``_CHANGEABLE``. Equal values give the settings of the last run, whose
        operator is known."""
        planned, last, settings = self._last_run
        if planned is not self._settings or values != last:
            planned = self._settings
            changes = {name: value for name, value in zip(_CHANGEABLE, values) if value != getattr(planned, name)}
            settings = planned.replace(**changes) if changes else planned
            self._last_run = (planned, values, settings)
        return settings

    def _override_rope(self, scale, theta):
        """Replaces the rotary settings of the plan if they differ."""
        rope = (scale or 1.0, theta or 10000.0)
        if rope != (self._settings.rope_scale, self._settings.rope_theta):
            self._settings = self._settings.replace(rope_scale=rope[0], rope_theta=rope[1])
            self._planned_with = None

    def _plan_on_device(self, lengths, rows, page_size, split) -> bool:
        """Plans the buffers of a recorded graph on the GPU if it has any of the lengths. ``False`` if the host has to plan them:
        they are there, or exceed the limits of the GPU, or are wrong, for which the host has exact errors."""
        if not self._use_cuda_graph or split != "balanced" or not any(is_on_gpu(x) for x in lengths):
            return False
        table = PageTable(self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, page_size)
        try:
            self._attention.plan(self._settings, DeviceBatch(rows, table), split)
        except Error:
            return False
        return True


class PlannedAttention:
    """A batch and its plans: one, or one per mask if runs change it."""

    __slots__ = ("_capacity", "_head_scaled", "_k_scale", "_key", "_last", "_operator", "_planned", "_settings", "_stream", "batch",
                 "device", "split")

    def __init__(self, device, capacity: "Capacity | None" = None):
        self.device = device
        self._capacity = capacity
        self._planned: dict = {}
        #: The settings of the last run with their plan, operator and scale.
        self._last = (None, None, None, None)
        #: The settings of the last run with scales of query heads: without them, and with them.
        self._head_scaled = (None, None)
        self.batch = None
        self.split = "balanced"
        #: The last planned settings, with their operator, key and scale of keys.
        self._settings = self._operator = self._key = self._k_scale = None
        self._stream = None

    def plan(self, settings: Settings, batch: Batch, split="balanced") -> None:
        """Plans a batch. It rewrites the last plan in place: for recorded graphs, and to reuse its memory on the same stream."""
        self._last = (None, None, None, None)
        if settings is not self._settings:
            self._operator, self._key, self._settings = settings.operator(self.device), settings.plan_key(), settings
            self._k_scale, _ = settings.factors("plan", None, None, None)
        operator, key, stream = self._operator, self._key, self.device.current_stream()
        in_place = split == self.split and (self._capacity is not None or stream == self._stream)
        plan = self._planned.get(key) if in_place else None
        if plan is not None:
            try:
                operator.replan(plan, batch)
            except Error:
                if self._capacity is not None:
                    raise
                plan = None  # the error below is that of a plan
        if plan is None:
            plan = operator.plan(batch, split=split, capacity=self._capacity)
        self._planned, self.batch, self.split, self._stream = {key: plan}, batch, split, stream
        self._last = (settings, plan, operator, self._k_scale)

    def plan_pages(self, settings: Settings, rows, table: tuple, split) -> None:
        """Plans query rows over the arrays of a page table. Lengths on a GPU, and arrays as engines pad them, are converted if the
        planner rejects them."""
        try:
            self.plan(settings, Batch._unconverted(rows, table), split)
        except Error:
            self.plan(settings, Batch.paged(rows, page_table(*table)), split)

    def plan_for(self, settings: Settings):
        """The plan of the batch for these settings."""
        if self.batch is None:
            raise Error("flashinfer.run: plan() has not been called")
        key = settings.plan_key()
        plan = self._planned.get(key)
        if plan is None:
            plan = settings.operator(self.device).plan(self.batch, split=self.split, capacity=self._capacity)
            self._planned[key] = plan
        return plan

    def run(self, settings: Settings, q, kv, out, lse=None, return_lse=False, scales=(None, None, None), tables=None):
        """Runs the batch. ``scales``: of queries, keys and values. ``tables``: those of :func:`sinks_of`."""
        function = "run"
        q_factor, k_factor, v_factor = scales
        if q_factor is not None and has_head_scales(function, q_factor, settings.heads):
            tables = {**(tables or {}), "q_scale": q_factor.detach().to(q.device, torch.float32).contiguous()}
            settings, q_factor = self._with_head_scales(settings), None
        last, plan, operator, k_scale = self._last
        if last is not settings:
            plan, operator = self.plan_for(settings), settings.operator(self.device)
            k_scale, _ = settings.factors(function, None, None, None)
            self._last = (settings, plan, operator, k_scale)
        v_scale = None
        if q_factor is not None or k_factor is not None or v_factor is not None:
            k_scale, v_scale = settings.factors(function, q_factor, k_factor, v_factor, q.device)
        try:
            return operator._run(plan, q, None, kv[0], kv[1], k_scale, v_scale, out, lse, return_lse, tables)
        except Error:
            # here, so that other runs do not read the dtype
            if q.dtype is torch.float8_e5m2 and settings.dtypes[2] in _WIDE:
                q = q.to(torch_dtype(settings.dtypes[2]))
                return self.run(settings, q, kv, out, lse, return_lse, (q_factor, k_factor, v_factor), tables)
            self._check_tensors(function, settings, q, out, lse)
            raise

    def _with_head_scales(self, settings: Settings) -> Settings:
        """The settings whose variant multiplies logits by the scales of query heads."""
        if self._head_scaled[0] is not settings:
            self._head_scaled = settings, settings.replace(q_scales=True)
        return self._head_scaled[1]

    @staticmethod
    def _check_tensors(function, settings, q, out, lse):
        """Rejects tensors of a run with the names and dtypes of FlashInfer."""
        dtype = torch_dtype(settings.dtypes[2])
        if q.dtype != dtype:
            raise Error(f"flashinfer.{function}: q is {q.dtype}, plan() was given q_data_type = {dtype}")
        rows = (q.shape[0], settings.heads[0])
        if out is not None:
            check_output(function, "out", out, (*rows, settings.dims[1]), torch_dtype(settings.dtypes[0]), q.device)
        if lse is not None:
            check_output(function, "lse", lse, rows, torch.float32, q.device)


def sinks_of(sinks, q) -> "dict | None":
    """The tables of a run with attention sinks ``[num_qo_heads]``, or ``None``. A tensor of float32 beside ``q`` is not copied."""
    return None if sinks is None else {"sinks": sinks.detach().to(q.device, torch.float32).reshape(-1).contiguous()}


def _factor(function: str, name: str, scale, device):
    """A scale as a number, or as a tensor float32 on ``device`` of one element or one per KV head, which the kernel reads."""
    if not isinstance(scale, torch.Tensor) or (scale.numel() == 1 and scale.device != device and not scale.is_cuda):
        return number(function, name, scale)
    if scale.numel() != 1 and scale.dim() != 1:
        raise Unsupported(f"flashinfer.{function}: {name} has shape {tuple(scale.shape)}, expected [num_kv_heads]")
    return scale.detach().reshape(-1).to(device, torch.float32)


def has_head_scales(function: str, scale, heads) -> bool:
    """Whether the scale of queries is a tensor of one per query head, of which a KV head has several. It is a factor of logits."""
    if not isinstance(scale, torch.Tensor) or scale.numel() <= 1:
        return False
    if tuple(scale.shape) != heads[:1]:
        raise Error(f"flashinfer.{function}: q_scale has shape {tuple(scale.shape)}, expected ({heads[0]},)")
    if not is_on_gpu(scale) and not ((scale > 0.0) & (scale < math.inf)).all():
        raise Error(f"flashinfer.{function}: q_scale = {scale.tolist()}, expected finite numbers above 0")
    return heads[0] != heads[1]


def _scaled_heads(num_qo_heads: int):
    """Logits times a scale per query head, which runs bind."""
    scales = torch.empty(num_qo_heads, dtype=torch.float32)
    scaled = variants.Variant("q_scale", params={"q_scale": scales}, logits=lambda at, logit: logit * at.q_scale[at.qo_head])
    return variants.Variant._of(scaled._core)


def _unless_one(factor):
    """No scale instead of one; the square root of the default scale is exact to a few ulps only."""
    return None if isinstance(factor, float) and abs(factor - 1.0) < 1e-6 else factor


def planned_device(tensor):
    """The device that computes with tensors like this one."""
    return device_of(tensor)
