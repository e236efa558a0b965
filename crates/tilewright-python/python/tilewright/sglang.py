"""SGLang's attention backend ``tilewright``, of release 0.5.23: attention of this package over SGLang's token pools.

    python -m sglang.launch_server --model-path MODEL --attention-backend tilewright [--kv-cache-dtype fp8_e4m3]

It has attention sinks, FP8 caches, GQA, sliding windows (also in hybrid pools), soft caps, extends over cached prefixes, mixed
batches, and CUDA graphs of decode steps. docs/python.md lists the limits.
"""

import numpy
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ._core import Error
from ._device import device_of
from .attention import BlockTable, Capacity, Problem
from .engines import _steps
from .engines import register_sglang as register

__all__ = ["TilewrightAttnBackend", "TilewrightMetadata", "register"]


class TilewrightMetadata:
    """A step: plans by problem and pool, and the slots that window layers of a hybrid pool write to."""

    __slots__ = ("batches", "is_graph", "plans", "swa_out_cache_loc")

    def __init__(self, batches: dict, is_graph: bool, swa_out_cache_loc=None):
        #: The batch of the full pool (``False``) and of the window pool (``True``).
        self.batches = batches
        self.is_graph = is_graph
        #: Plans by ``(problem, in_window_pool)``.
        self.plans: dict = {}
        self.swa_out_cache_loc = swa_out_cache_loc


class TilewrightAttnBackend(AttentionBackend):
    """Attention of a model runner. Decode steps in CUDA graphs rewrite one plan per problem in place."""

    def __init__(self, model_runner):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self._page_size = model_runner.page_size
        self._context_len = model_runner.model_config.context_len
        self._dtype, self._kv_dtype = model_runner.dtype, model_runner.kv_cache_dtype
        if getattr(self.kv_index_translator, "is_translating", False):
            _steps.refuse("sglang.attention", "a pool without translated ids", kv_pool=type(self.token_to_kv_pool).__name__)
        self._has_window_pool = hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa")
        self._layers = [layer for layer in model_runner.model.modules() if isinstance(layer, RadixAttention)]
        self._steps = self._new_steps()
        #: Operators by layer and whether it has sinks, and the sinks of each layer.
        self._operators: dict = {}
        self._sinks: dict = {}
        self._capacity = self._graph_swa_loc = None
        #: Block tables that recorded graphs read, by pool, and the requests of these graphs.
        self._graph_tables: dict = {}
        self._device_graphs: set = set()
        self._max_graph_requests = 0
        self.forward_metadata = None

    def _new_steps(self) -> dict:
        """Plans of the full pool (``False``) and of the window pool (``True``)."""
        device = device_of(self.req_to_token)
        return {in_window_pool: _steps.StepPlans(device) for in_window_pool in (False, True)}

    def init_forward_metadata(self, forward_batch) -> None:
        """Plans a step that runs eagerly: decode, extend or mixed."""
        swa_loc = None
        if self._has_window_pool and forward_batch.out_cache_loc is not None:
            swa_loc = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
        self._plan(TilewrightMetadata(self._batches(forward_batch), False, swa_loc))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Fixes the largest decode step of a graph: ``max_bs`` requests. Graphs of an earlier call have to be recorded again."""
        self._steps = self._new_steps()
        self._graph_tables, self._device_graphs, self._max_graph_requests = {}, set(), max_bs
        pages = -(-self._context_len // self._page_size) + 1
        self._capacity = Capacity(max_bs, max_bs, max_bs * pages, qo_len=1)
        if self._has_window_pool:
            self._graph_swa_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.req_to_token.device)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Plans a decode step that a CUDA graph records (``in_capture``) or replays next."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            _steps.refuse("sglang.init_forward_metadata_out_graph", "decode", forward_mode=forward_batch.forward_mode)
        if self._capacity is None:
            raise Error("sglang.init_forward_metadata_out_graph: init_cuda_graph_state() has not been called")
        swa_loc = None
        if self._has_window_pool and forward_batch.out_cache_loc is not None:
            n = forward_batch.out_cache_loc.shape[0]
            swa_loc = self._graph_swa_loc[:n]
            self._graph_swa_loc.zero_()
            if not in_capture:
                swa_loc.copy_(self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW))
        if in_capture and forward_batch.seq_lens_cpu is None:
            self._device_graphs.add(forward_batch.batch_size)
        self._plan(TilewrightMetadata(self._batches(forward_batch, True), True, swa_loc))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The KV length of padded requests."""
        return 1

    def _by_pool(self, slots) -> dict:
        """Slots of the full pool, and of the window pool if there is one."""
        if not self._has_window_pool:
            return {False: slots}
        # keys before the window may have lost their slots: -1 stands for them, and no row reads them
        return {False: slots, True: self.token_to_kv_pool.translate_loc_from_full_to_swa(slots).clamp(min=0)}

    def _tables(self, forward_batch, in_graph: bool) -> dict:
        """The block table of a decode step over each pool, with lengths on the device."""
        bs, tables = forward_batch.batch_size, {}
        slots = self.req_to_token[forward_batch.req_pool_indices[:bs], :: self._page_size]
        for in_window_pool, entries in self._by_pool(slots).items():
            pages = (entries // self._page_size).int()
            if in_graph:
                buffer = self._graph_tables.get(in_window_pool)
                if buffer is None:
                    buffer = self._graph_tables[in_window_pool] = pages.new_zeros(self._max_graph_requests, pages.shape[1])
                pages = buffer[:bs].copy_(pages)
            tables[in_window_pool] = BlockTable(pages, forward_batch.seq_lens[:bs], self._page_size)
        return tables

    def _batches(self, forward_batch, in_graph: bool = False) -> dict:
        """The batch of the step, over each pool; block tables if a decode step has its lengths on the device only."""
        _steps.refuse("sglang.init_forward_metadata", "None", spec_info=forward_batch.spec_info,
                      encoder_lens=forward_batch.encoder_lens)
        bs = forward_batch.batch_size
        is_planned_there = bs in self._device_graphs if in_graph else forward_batch.seq_lens_cpu is None
        if is_planned_there and forward_batch.forward_mode.is_decode_or_idle():
            return self._tables(forward_batch, in_graph)
        known = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
        kv_lens = _steps.host_lengths(known[:bs])
        if forward_batch.forward_mode.is_decode_or_idle():
            qo_indptr = numpy.arange(bs + 1, dtype=numpy.int32)
        else:
            qo_indptr = numpy.zeros(bs + 1, dtype=numpy.int32)
            numpy.cumsum(_steps.host_lengths(forward_batch.extend_seq_lens_cpu)[:bs], out=qo_indptr[1:])
        counts = _steps.page_counts(kv_lens, self._page_size)
        slots = _steps.table_entries(self.req_to_token, counts, forward_batch.req_pool_indices[:bs], self._page_size)
        return {in_window_pool: _steps.paged_batch("sglang.init_forward_metadata", qo_indptr, kv_lens, self._page_size,
                                                   entries // self._page_size)
                for in_window_pool, entries in self._by_pool(slots).items()}

    def _plan(self, metadata: TilewrightMetadata) -> None:
        """Plans the step for the problems of all layers, with the present sinks."""
        _steps.SinkTable.refresh(self._sinks.values())
        for layer in self._layers:
            if not layer.is_cross_attention:
                self._plan_of(layer, metadata)
        self.forward_metadata = metadata

    def _plan_of(self, layer, metadata: TilewrightMetadata):
        problem, in_window_pool = self._problem(layer), self._in_window_pool(layer)
        plan = metadata.plans.get((problem, in_window_pool))
        if plan is None:
            steps, batch = self._steps[in_window_pool], metadata.batches[in_window_pool]
            if isinstance(batch, BlockTable):
                requests = len(batch.seq_lens)
                plan = steps.plan_on_device(problem, 1, batch, (requests, requests, 1), metadata.is_graph)
            else:
                plan = steps.plan_graph(problem, batch, self._capacity) if metadata.is_graph else steps.plan(problem, batch)
            metadata.plans[problem, in_window_pool] = plan
        return plan

    def _in_window_pool(self, layer) -> bool:
        """Whether the keys of a layer are in the window pool of a hybrid pool."""
        return self._has_window_pool and bool(self.token_to_kv_pool.layers_mapping[layer.layer_id][1])

    def _problem(self, layer) -> Problem:
        window = layer.sliding_window_size
        return Problem(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, head_dim_vo=layer.v_head_dim,
                       dtype=self._dtype, kv_dtype=self._kv_dtype, window_left=window if window is not None and window >= 0 else None,
                       scale=layer.scaling)

    def _operator(self, layer, has_sinks: bool):
        """The operator of a layer."""
        key = layer.layer_id, has_sinks
        operator = self._operators.get(key)
        if operator is None:
            device, cap = self._steps[False].device, float(layer.logit_cap or 0.0)
            operator = self._operators[key] = _steps.operator(self._problem(layer), device, cap, has_sinks)
            operator.prepare()
        return operator

    def _tables_of(self, layer, sinks, q) -> "dict | None":
        """The tables of a run. Each plan of a step reads sinks again that are not float32."""
        if sinks is None:
            return None
        known = self._sinks.get(layer.layer_id)
        if known is None or known.source is not sinks:
            known = self._sinks[layer.layer_id] = _steps.SinkTable(sinks, q)
        return known.tables

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        """One query row per request: ``q`` ``[batch_size, num_qo_heads * head_dim]``, ``k`` and ``v`` ``[batch_size,
        num_kv_heads, head_dim]`` or ``None``, ``sinks`` ``[num_qo_heads]``. Returns ``[batch_size, num_qo_heads *
        v_head_dim]``."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        """New tokens after cached prefixes, with the shapes of :meth:`forward_decode` and one row per new token."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, kwargs)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks, others):
        _steps.refuse("sglang.forward", "None", is_cross_attention=layer.is_cross_attention, **others)
        if layer.attn_type != AttentionType.DECODER:
            _steps.refuse("sglang.forward", "decoder", attn_type=layer.attn_type.value)
        metadata = self.forward_metadata
        if k is not None and save_kv_cache:
            location = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        operator, plan = self._operator(layer, sinks is not None), self._plan_of(layer, metadata)
        keys, values = (self._pages(x) for x in self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        # a pool of the type of the queries stores unscaled values
        is_scaled = self._kv_dtype != self._dtype
        k_scale, v_scale = (layer.k_scale_float, layer.v_scale_float) if is_scaled else (None, None)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        rows = plan.num_rows
        if rows < q.shape[0]:
            out[rows:].zero_()  # padding
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        operator.run(plan, q[:rows], keys, values, out=out[:rows],
                     k_scale=k_scale, v_scale=v_scale, tables=self._tables_of(layer, sinks, q))
        return out.view(q.shape[0], -1)

    def _pages(self, buffer):
        """The pages ``[num_pages, page_size, num_kv_heads, head_dim]`` of a buffer of tokens."""
        pages = buffer.shape[0] // self._page_size
        return buffer[: pages * self._page_size].unflatten(0, (pages, self._page_size))
