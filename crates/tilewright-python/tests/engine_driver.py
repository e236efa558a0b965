"""Replay drivers of vLLM 0.33.0 and SGLang 0.5.23: the calls that the engines make to an attention backend, step by step.

The order of calls and the shapes, dtypes and devices of their arguments were read from the engines' model runners and attention
layers. Each step has random queries, keys and values; outputs are compared with attention from its definition.
"""

import dataclasses
import math
import types

import dense
import numpy
import torch


@dataclasses.dataclass
class Case:
    """A model and its cache."""

    heads: tuple = (8, 2)
    dim: int = 64
    page_size: int = 16
    #: One layer each; keys before a row's own position, or None.
    windows: tuple = (None,)
    soft_cap: float = 0.0
    has_sinks: bool = False
    sinks_dtype: object = torch.float32
    kv_dtype: object = None
    scales: tuple = (1.0, 1.0)
    dtype: object = torch.bfloat16
    max_len: int = 512
    max_requests: int = 8
    #: The layout of a block in vLLM: NHD or HND. Whether SGLang has a hybrid pool.
    layout: str = "NHD"
    hybrid_pool: bool = False

    @property
    def scale(self) -> float:
        """The factor of logits."""
        return 1.0 / math.sqrt(self.dim) * 1.25

    @property
    def cache_dtype(self):
        """The element type of the cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype


class Driver:
    """Requests with block tables, and the expected outputs of each step."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 7):
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)
        self.blocks_per_request = -(-case.max_len // case.page_size)
        self.num_blocks = case.max_requests * self.blocks_per_request + 1
        self._free = (torch.randperm(self.num_blocks - 1, generator=self.generator) + 1).tolist()
        self.blocks: dict = {}
        #: Keys and values by request and layer, as the cache rounds them.
        self.history: dict = {}
        self.kv_lens: dict = {}
        heads = case.heads[0]
        self.sinks = [self._random(heads, dtype=case.sinks_dtype) if case.has_sinks else None for _ in case.windows]

    def _random(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.generator).to(dtype or self.case.dtype).to(self.device)

    def slots(self, request: int, begin: int, end: int) -> list:
        """The slots of positions of a request, with blocks allocated as needed."""
        blocks, size = self.blocks.setdefault(request, []), self.case.page_size
        while len(blocks) * size < end:
            blocks.append(self._free.pop())
        return [blocks[position // size] * size + position % size for position in range(begin, end)]

    def step(self, new, **how) -> float:
        """Runs ``new``: pairs of a request and its number of tokens. Returns the largest error of all layers."""
        slots, tokens = [], sum(count for _, count in new)
        for request, count in new:
            before = self.kv_lens.get(request, 0)
            slots += self.slots(request, before, before + count)
            self.kv_lens[request] = before + count
        (heads, kv_heads), dim = self.case.heads, self.case.dim
        inputs = [(self._random(tokens, heads, dim), self._random(tokens, kv_heads, dim), self._random(tokens, kv_heads, dim))
                  for _ in self.case.windows]
        outputs = self.execute(new, slots, [tuple(x.clone() for x in layer) for layer in inputs], **how)
        return max(self._error(layer, new, inputs[layer], outputs[layer]) for layer in range(len(inputs)))

    def _error(self, layer, new, inputs, output) -> float:
        """The largest error of a layer, relative to outputs above 1."""
        at, errors = 0, []
        q, k, v = inputs
        for request, count in new:
            rows = slice(at, at + count)
            added = [self._rounded(x[rows], scale) for x, scale in zip((k, v), self.case.scales)]
            past = self.history.get((request, layer))
            both = added if past is None else [torch.cat(parts) for parts in zip(past, added)]
            self.history[request, layer] = both
            expected = self.expected(layer, q[rows].double(), *both)
            actual = output[rows].double().reshape(expected.shape)
            errors.append(((actual - expected).abs() / expected.abs().clamp(min=1.0)).max())
            at += count
        worst = float(torch.stack(errors).max())  # NaN if one is
        return math.inf if math.isnan(worst) else worst

    def _rounded(self, x, scale):
        """Keys or values as the cache has them, in float64."""
        return x.double() if self.case.kv_dtype is None else ((x.float() / scale).to(self.case.kv_dtype).float() * scale).double()

    def expected(self, layer, q, keys, values):
        """Attention from its definition, in float64 on the device: on a CPU, references take most of the time of large cases.
        ``q`` ``[rows, heads, dim]``, ``keys`` and ``values`` ``[kv_len, kv_heads, dim]``."""
        (rows, heads, dim), (kv_len, kv_heads, _) = q.shape, keys.shape
        per_kv_head = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        s = torch.bmm(per_kv_head, keys.permute(1, 2, 0)).view(heads, rows, kv_len) * self.case.scale
        if self.case.soft_cap:
            s = self.case.soft_cap * torch.tanh(s / self.case.soft_cap)
        visible = torch.from_numpy(dense.causal(rows, kv_len, self.case.windows[layer])).to(s.device)
        s.masked_fill_(~visible, -math.inf)
        if self.sinks[layer] is not None:  # one more logit per row, without a value
            s = torch.cat([s, self.sinks[layer].double().view(heads, 1, 1).expand(heads, rows, 1)], dim=2)
        weights = torch.softmax(s, dim=2)[..., :kv_len]
        o = torch.bmm(weights.reshape(kv_heads, -1, kv_len), values.transpose(0, 1))
        return o.view(heads, rows, -1).transpose(0, 1)


class VllmDriver(Driver):
    """vLLM's calls: ``build`` per step, then ``do_kv_cache_update`` and ``forward`` per layer; ``build_for_cudagraph_capture`` and
    a recorded ``forward`` per captured size."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 7, num_drafts: int = 0):
        import engine_standins

        engine_standins.ensure_vllm()
        super().__init__(case, device, seed)
        from tilewright import vllm

        (heads, kv_heads), dtypes = case.heads, {None: "auto", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}
        impl = vllm.TilewrightBackend.get_impl_cls()
        self.layers, context = [], {}
        for index, window in enumerate(case.windows):
            extra = {"sinks": self.sinks[index]} if case.has_sinks else {}
            layer = types.SimpleNamespace(_k_scale_float=case.scales[0], _v_scale_float=case.scales[1], name=f"layers.{index}")
            layer.impl = impl(heads, case.dim, case.scale, kv_heads, None, None if window is None else window + 1,
                              dtypes[case.kv_dtype], case.soft_cap or None, "decoder", None, **extra)
            layer.impl.process_weights_after_loading(case.dtype)
            layer.kv_cache = self._cache()
            self.layers.append(layer)
            context[layer.name] = layer
        compilation = types.SimpleNamespace(static_forward_context=context, cudagraph_capture_sizes=[1, 2, 4, case.max_requests])
        config = types.SimpleNamespace(compilation_config=compilation, num_speculative_tokens=num_drafts,
                                       model_config=types.SimpleNamespace(dtype=case.dtype, max_model_len=case.max_len))
        self.builder = vllm.TilewrightBackend.get_builder_cls()(
            types.SimpleNamespace(block_size=case.page_size), list(context), config, torch.device(device))
        self.table = torch.zeros(case.max_requests, self.blocks_per_request, dtype=torch.int32, device=device)
        self.graphs: dict = {}

    def _cache(self):
        case = self.case
        dtype = torch.uint8 if case.kv_dtype is not None else case.dtype
        shape = (self.num_blocks, case.heads[1], case.page_size, 2 * case.dim)
        if case.layout == "HND":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=dtype, device=self.device).transpose(1, 2)

    def common(self, new, num_reqs, num_tokens, slots, kv_lens):
        """A ``CommonAttentionMetadata``, padded to ``num_reqs`` requests and ``num_tokens`` rows."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = numpy.zeros(num_reqs + 1, dtype=numpy.int32)
        starts[1 : len(new) + 1] = numpy.cumsum([count for _, count in new])
        starts[len(new) + 1 :] = starts[len(new)]
        lengths = torch.zeros(num_reqs, dtype=torch.int32)
        lengths[: len(new)] = torch.tensor(kv_lens, dtype=torch.int32)
        self.table[len(new) : num_reqs] = 0
        for row, (request, _) in enumerate(new):
            blocks = self.blocks.get(request, [])
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        mapping = torch.tensor(slots + [-1] * (num_tokens - len(slots)), dtype=torch.int64, device=self.device)
        return CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts).to(self.device), query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=lengths.to(self.device), seq_lens_cpu_upper_bound=lengths, num_reqs=num_reqs, num_actual_tokens=num_tokens,
            max_query_len=max(count for _, count in new), max_seq_len=int(lengths.max()),
            block_table_tensor=self.table[:num_reqs], slot_mapping=mapping)

    def execute(self, new, slots, inputs, pad: int = 0, graph: int = 0):
        """A step with ``pad`` rows of padding, or the replay of the graph of ``graph`` requests."""
        tokens = len(slots)
        rows, requests = (graph, graph) if graph else (tokens + pad, len(new))
        common = self.common(new, requests, rows if graph else tokens, slots, [self.kv_lens[request] for request, _ in new])
        metadata = self.builder.build(0, common)
        if graph:
            return self._replay(graph, tokens, inputs, common.slot_mapping)
        outputs, padding = [], torch.full((pad,), -1, dtype=torch.int64, device=self.device)
        mapping = torch.cat([common.slot_mapping, padding])
        for layer, (q, k, v) in zip(self.layers, inputs):
            padded = [torch.cat([x, torch.full((pad, *x.shape[1:]), 3.0, dtype=x.dtype, device=x.device)]) for x in (q, k, v)]
            outputs.append(self._layer(layer, *padded, mapping, metadata, torch.empty_like(padded[0]))[:tokens])
        return outputs

    def _layer(self, layer, q, k, v, mapping, metadata, output):
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, mapping)
        return layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=output)

    def capture(self, requests: int) -> None:
        """Records a decode step of this many requests, as vLLM's dummy runs do: a warm-up, then the capture."""
        new = [(-1, 1)] * requests
        buffers = [tuple(self._random(requests, heads, self.case.dim) for heads in (*self.case.heads, self.case.heads[1]))
                   for _ in self.layers]
        outputs = [torch.zeros_like(q) for q, _, _ in buffers]
        common = self.common(new, requests, requests, [-1] * requests, [self.case.max_len] * requests)

        def forward(metadata):
            for layer, (q, k, v), output in zip(self.layers, buffers, outputs):
                self._layer(layer, q, k, v, common.slot_mapping, metadata, output)

        def warm_up():
            forward(self.builder.build(0, common))
            metadata = self.builder.build_for_cudagraph_capture(common)
            return lambda: forward(metadata)

        recorded = _record(warm_up, self.device)
        self.graphs[requests] = (recorded, buffers, outputs, common.slot_mapping)

    def _replay(self, requests, tokens, inputs, mapping):
        recorded, buffers, outputs, slot_buffer = self.graphs[requests]
        slot_buffer.copy_(mapping)
        for layer, new in zip(buffers, inputs):
            for buffer, x in zip(layer, new):
                buffer[:tokens].copy_(x)
        recorded()
        return [output[:tokens] for output in outputs]


class SglangDriver(Driver):
    """SGLang's calls: ``init_forward_metadata`` per step, then ``forward`` per layer; ``init_cuda_graph_state`` once, and
    ``init_forward_metadata_out_graph`` before each capture and replay."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 7):
        import engine_standins

        engine_standins.ensure_sglang()
        super().__init__(case, device, seed)
        from engine_pool import Pool
        from sglang.srt.layers.radix_attention import RadixAttention

        from tilewright.sglang import TilewrightAttnBackend

        self.layers = [RadixAttention(case.heads[0], case.dim, case.scale, case.heads[1], index, logit_cap=case.soft_cap,
                                      sliding_window_size=-1 if window is None else window)
                       for index, window in enumerate(case.windows)]
        for layer in self.layers:
            if case.scales != (1.0, 1.0):
                layer.k_scale, layer.v_scale = (torch.tensor(scale, device=device) for scale in case.scales)
                layer.k_scale_float, layer.v_scale_float = case.scales
        self.pool = Pool(self)
        self.rows = torch.zeros(case.max_requests + 1, case.max_len, dtype=torch.int32, device=device)
        runner = types.SimpleNamespace(
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.rows), token_to_kv_pool=self.pool,
            kv_index_translator=self.pool.translator, page_size=case.page_size, dtype=case.dtype, kv_cache_dtype=case.cache_dtype,
            model_config=types.SimpleNamespace(context_len=case.max_len), model=torch.nn.ModuleList(self.layers))
        self.backend = TilewrightAttnBackend(runner)
        #: Whether decode steps have their lengths on the device only.
        self.hides_lengths = False
        self.graphs: dict = {}

    def batch(self, new, slots, mode, requests: int):
        """A ``ForwardBatch``, padded to this many requests."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lengths = torch.full((requests,), fill, dtype=torch.int64)
        lengths[: len(new)] = torch.tensor([self.kv_lens.get(request, fill) for request, _ in new])
        for request, _ in new:
            if request in self.kv_lens:
                count = self.kv_lens[request]
                self.rows[request + 1, :count] = torch.tensor(self.slots(request, 0, count), dtype=torch.int32)
        ids = [request + 1 for request, _ in new] + [0] * (requests - len(new))
        counts = [count for _, count in new]
        locations = slots + [0] * (requests - len(new))
        return types.SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=requests, seq_lens=lengths.to(self.device),
            seq_lens_cpu=None if self.hides_lengths and mode == "DECODE" else lengths, seq_lens_sum=int(lengths.sum()), req_pool_indices=torch.tensor(ids, device=self.device), spec_info=None,
            encoder_lens=None, extend_seq_lens_cpu=counts, out_cache_loc=torch.tensor(locations, device=self.device),
            out_cache_loc_is_physical=True, extend_prefix_lens_cpu=[int(n) - c for n, c in zip(lengths, counts)])

    def execute(self, new, slots, inputs, pad: int = 0, graph: int = 0):
        """A step, or the replay of the graph of ``graph`` requests."""
        mode = "DECODE" if all(count == 1 for _, count in new) and not pad else "EXTEND"
        batch = self.batch(new, slots, mode, graph or len(new))
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
            return self._replay(graph, len(slots), inputs, batch)
        self.backend.init_forward_metadata(batch)
        outputs = []
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(pad, dtype=torch.int64, device=self.device)])
        for index, layer in enumerate(inputs):
            q, k, v = (torch.cat([x, torch.ones(pad, *x.shape[1:], dtype=x.dtype, device=x.device)]) for x in layer)
            outputs.append(self._layer(index, q, k, v, batch))
            assert not outputs[-1][len(slots) :].any(), "rows of padding are not 0"
        return [output[: len(slots)] for output in outputs]

    def _layer(self, index, q, k, v, batch):
        extra = {} if self.sinks[index] is None else {"sinks": self.sinks[index]}
        return self.backend.forward(q.flatten(1), k, v, self.layers[index], batch, save_kv_cache=True, **extra)

    def capture(self, requests: int) -> None:
        """Records a decode step of this many requests: two warm-ups, then the capture."""
        if not self.graphs:
            self.backend.init_cuda_graph_state(self.case.max_requests, self.case.max_requests)
        batch = self.batch([], [], "DECODE", requests)
        buffers = [tuple(self._random(requests, heads, self.case.dim) for heads in (*self.case.heads, self.case.heads[1]))
                   for _ in self.layers]
        outputs: list = []

        def warm_up():
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            captured = self.backend.forward_metadata

            def forward():
                self.backend.forward_metadata = captured
                # a pool divides k and v in place if the cache has another dtype
                outputs[:] = [self._layer(index, q, k.clone(), v.clone(), batch) for index, (q, k, v) in enumerate(buffers)]

            forward()
            forward()
            return forward

        self.graphs[requests] = (_record(warm_up, self.device), buffers, outputs, batch)

    def _replay(self, requests, tokens, inputs, live):
        recorded, buffers, outputs, batch = self.graphs[requests]
        batch.out_cache_loc.copy_(live.out_cache_loc)
        for layer, new in zip(buffers, inputs):
            for buffer, x in zip(layer, new):
                buffer[:tokens].copy_(x)
        recorded()
        return [output[:tokens] for output in outputs]


def _record(warm_up, device):
    """A CUDA graph of the forward that ``warm_up`` returns, both on one stream of their own, as in the engines; on the host the
    forward itself, with the metadata of the capture."""
    if device == "cpu":
        return warm_up()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward = warm_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay
