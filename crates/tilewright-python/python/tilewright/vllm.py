"""vLLM's attention backend ``CUSTOM``, of release 0.33: attention and appends of this package over vLLM's paged cache.

    vllm serve MODEL --attention-backend CUSTOM [--kv-cache-dtype fp8]

It has attention sinks, FP8 caches, GQA, sliding windows, soft caps, mixed batches of prompts and decode steps, and full CUDA
graphs of decode steps. docs/python.md lists the limits.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ._core import Error
from ._device import device_of
from .attention import BlockTable, Capacity, Plan, Problem
from .cache import append_to_slots
from .engines import _steps
from .engines import register_vllm as register

__all__ = ["TilewrightBackend", "TilewrightImpl", "TilewrightMetadata", "TilewrightMetadataBuilder", "register"]

#: The element types of vLLM's cache dtypes; ``auto`` is the type of the queries.
_KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
              "fp8_e5m2": torch.float8_e5m2}


class TilewrightBackend(AttentionBackend):
    """The classes and the limits of this backend. The cache of a layer is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``
    with any strides, keys before values."""

    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", *_KV_DTYPES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The registered name."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TilewrightImpl"]:
        """The implementation of a layer."""
        return TilewrightImpl

    @staticmethod
    def get_builder_cls() -> type["TilewrightMetadataBuilder"]:
        """The builder of a step's metadata."""
        return TilewrightMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        """Blocks of a multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to 256."""
        return head_size % 8 == 0 and 16 <= head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks, one logit per query head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows, which may differ between layers."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans read query lengths on the host."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        """Ampere and newer."""
        return capability.major >= 8


@dataclass
class TilewrightMetadata(AttentionMetadata):
    """A step: one plan per problem of the layers."""

    plans: "dict[Problem, Plan]"


class TilewrightMetadataBuilder(AttentionMetadataBuilder[TilewrightMetadata]):
    """Plans each step for the layers of one cache group. Batches of one query per request, which a full CUDA graph can replay,
    rewrite one plan in place."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._page_size = kv_cache_spec.block_size
        self._num_drafts = vllm_config.num_speculative_tokens or 0
        #: The address of the block table that a graph of so many requests reads; ``None`` for a graph planned on the host.
        self._captured: "dict[int, int | None]" = {}
        self._plans = None
        self._problems: list = []

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TilewrightMetadata:
        """Plans the step of a ``CommonAttentionMetadata``. ``common_prefix_len`` and ``fast_build`` have no effect."""
        return self._build(common_attn_metadata, self._is_captured(common_attn_metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata) -> TilewrightMetadata:
        """Plans the step that a full CUDA graph records."""
        common = common_attn_metadata
        if common.max_query_len != 1:
            raise Error(f"vllm.build_for_cudagraph_capture: max_query_len = {common.max_query_len}, expected 1")
        self._captured[common.num_reqs] = None if self._has_lengths(common) else common.block_table_tensor.data_ptr()
        return self._build(common, True)

    def _is_captured(self, common) -> bool:
        """Whether a recorded graph may replay this step."""
        return common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs in self._captured

    def _build(self, common, in_graph: bool) -> TilewrightMetadata:
        if common.causal is not True:
            _steps.refuse("vllm.build", "True", causal=common.causal if common.causal is not False else "False")
        table = common.block_table_tensor
        if self._plans is None:
            self._plans = _steps.StepPlans(device_of(table))
            self._problems = self._prepare_layers(table)
        has_lengths = self._captured[common.num_reqs] is None if in_graph else self._has_lengths(common)
        if not has_lengths and not self._is_prompt(common):
            return self._build_on_device(common, in_graph)
        qo_indptr, kv_lens = self._lengths(common)
        counts = _steps.page_counts(kv_lens, self._page_size)
        batch = _steps.paged_batch("vllm.build", qo_indptr, kv_lens, self._page_size, _steps.table_entries(table, counts))
        if in_graph:
            capacity = self._capacity()
            plans = {problem: self._plans.plan_graph(problem, batch, capacity) for problem in self._problems}
        else:
            plans = {problem: self._plans.plan(problem, batch) for problem in self._problems}
        return TilewrightMetadata(plans)

    def _has_lengths(self, common) -> bool:
        """Whether KV lengths are on the host: their upper bound, which is exact without speculation."""
        return self._num_drafts == 0 and common.seq_lens_cpu_upper_bound is not None

    def _is_prompt(self, common) -> bool:
        """Whether a request has more rows than a decode step."""
        return common.max_query_len > 1 + self._num_drafts

    def _build_on_device(self, common, in_graph: bool) -> TilewrightMetadata:
        """Plans a decode step from its lengths on the device."""
        requests, table = common.num_reqs, common.block_table_tensor
        if in_graph and (table.data_ptr(), table.dtype) != (self._captured[requests], torch.int32):
            raise Error(f"vllm.build: block_table_tensor is {table.dtype} at {table.data_ptr():#x}, expected torch.int32 at "
                        f"{self._captured[requests]:#x}, which the graph reads")
        table = BlockTable(table[:requests], common.seq_lens[:requests], self._page_size)
        rows, size = common.query_start_loc[: requests + 1], (requests, common.num_actual_tokens, common.max_query_len)
        return TilewrightMetadata({problem: self._plans.plan_on_device(problem, rows, table, size, in_graph)
                                   for problem in self._problems})

    def _lengths(self, common) -> tuple:
        """Query bounds and KV lengths on the host. Padded requests have no rows and no keys."""
        qo_indptr = _steps.host_lengths(common.query_start_loc_cpu[: common.num_reqs + 1])
        known = common.seq_lens_cpu_upper_bound if self._has_lengths(common) else common.seq_lens
        kv_lens = _steps.host_lengths(known[: common.num_reqs])
        return qo_indptr, numpy.where(qo_indptr[1:] > qo_indptr[:-1], kv_lens, 0).astype(numpy.int32)

    def _prepare_layers(self, table) -> list:
        """Prepares the layers, whose queries are in the memory of a block table. Returns their problems, each once."""
        layers = self.vllm_config.compilation_config.static_forward_context
        dtype = self.vllm_config.model_config.dtype
        impls = [layers[name].impl for name in self.layer_names]
        for impl in impls:
            impl.prepare(dtype, table)
        return list(dict.fromkeys(impl.problem(dtype) for impl in impls))

    def _capacity(self) -> Capacity:
        """The largest decode step of a graph."""
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        requests = max([*sizes, *self._captured])
        pages = -(-self.vllm_config.model_config.max_model_len // self._page_size) + 1
        return Capacity(requests, requests, requests * pages, qo_len=1)


class TilewrightImpl(AttentionImpl[TilewrightMetadata]):
    """Attention of one layer."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
    ):
        _steps.refuse("vllm.attention", "None", alibi_slopes=alibi_slopes)
        if attn_type != AttentionType.DECODER:
            _steps.refuse("vllm.attention", "decoder", attn_type=attn_type)
        if kv_cache_dtype != "auto" and kv_cache_dtype not in _KV_DTYPES:
            _steps.refuse("vllm.attention", f"one of auto, {', '.join(_KV_DTYPES)}", kv_cache_dtype=kv_cache_dtype)
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise Error(f"vllm.attention: sinks has shape {tuple(sinks.shape)}, expected ({num_heads},)")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._sinks = None
        self._window_left = None if sliding_window is None else sliding_window - 1
        self._soft_cap = float(logits_soft_cap or 0.0)
        self._is_fp8 = kv_cache_dtype.startswith("fp8")
        self._problem = self._operator = None

    def problem(self, dtype) -> Problem:
        """The problem of this layer for queries of a torch dtype."""
        return Problem(self.num_heads, self.num_kv_heads, self.head_size, dtype=dtype,
                       kv_dtype=_KV_DTYPES.get(self.kv_cache_dtype, dtype), window_left=self._window_left, scale=self.scale)

    def process_weights_after_loading(self, act_dtype) -> None:
        """Has runs and recorded graphs read the loaded sinks."""
        if self._sinks is not None:
            _steps.SinkTable.refresh([self._sinks])

    def prepare(self, dtype, like) -> None:
        """Makes the operator for queries of a torch dtype in the memory of ``like``, and loads its kernels. The first plan calls it,
        before any capture."""
        self._problem = self.problem(dtype)
        if self.sinks is not None:
            self._sinks = _steps.SinkTable(self.sinks, like)
        self._operator = _steps.operator(self._problem, device_of(like), self._soft_cap, self.sinks is not None)
        self._operator.prepare()

    def _cache(self, kv_cache):
        """Keys and values ``[num_blocks, block_size, num_kv_heads, head_size]`` of the cache of a layer."""
        if self._is_fp8 and kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(_KV_DTYPES[self.kv_cache_dtype])
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _scales(self, layer) -> tuple:
        """The scales of an FP8 cache, on the host."""
        return (layer._k_scale_float, layer._v_scale_float) if self._is_fp8 else (None, None)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None,
    ):
        """Attention over the cache, which already has the keys and values of the step.

        ``query`` and ``output`` ``[num_tokens, num_heads, head_size]`` in float16 or bfloat16, rows of padding included;
        ``kv_cache`` ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``. ``key`` and ``value`` are not read. Returns
        ``output``.
        """
        _steps.refuse("vllm.forward", "None", output_scale=output_scale, output_block_scale=output_block_scale)
        if attn_metadata is None:
            return output.fill_(0)  # a profiling run
        if self._operator is None:
            self.prepare(query.dtype, query)
        keys, values = self._cache(kv_cache)
        k_scale, v_scale = self._scales(layer)
        plan = attn_metadata.plans[self._problem]
        rows = plan.num_rows  # rows after these are padding
        self._operator.run(plan, query[:rows], keys, values,
                           out=output.view(-1, self.num_heads, self.head_size)[:rows], k_scale=k_scale, v_scale=v_scale,
                           tables=None if self._sinks is None else self._sinks.tables)
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Writes ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_size]`` to the slots of ``slot_mapping`` int64
        ``[num_slots]``, divided by the scales of an FP8 cache. -1 skips a token. Tokens after ``num_slots`` are padding."""
        tokens = slot_mapping.shape[0]
        keys, values = self._cache(kv_cache)
        k_scale, v_scale = self._scales(layer)
        append_to_slots(key[:tokens], value[:tokens], slot_mapping, keys, values, k_scale=k_scale, v_scale=v_scale)
