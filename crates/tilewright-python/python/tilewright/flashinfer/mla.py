"""Multi-head latent attention over a paged cache."""

import functools
import math
from types import SimpleNamespace

import numpy
import torch

from .._core import Error, Unsupported
from .._tensors import dtype_name
from ..attention import Attention, Batch, BlockTable, Capacity, DeviceBatch, PageTable, Problem
from ..device_batch import pages_on_device
from ._pages import host_array
from ._planned import is_on_gpu, planned_device
from ._refuse import check_backend, check_choice, check_output, output_scale, refuse, torch_dtype
from .stateless import plan_lengths


class BatchMLAPagedAttentionWrapper:
    """Latent attention of DeepSeek in absorbed form. With ``use_cuda_graph`` a plan is rewritten in place, for as many requests
    and pages as the buffers have. If lengths are on a GPU then, it plans the contents of the buffers after the first plan, and
    nothing waits."""

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None,
        backend="auto",
    ):
        check_backend("BatchMLAPagedAttentionWrapper", backend)
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph and any(buffer is None for buffer in self._buffers):
            raise ValueError("use_cuda_graph needs qo_indptr, kv_indptr, kv_indices and kv_len_arr")
        self._operator = self._plan = self._key = None
        #: Attributes that engines read and pass on.
        self._kv_indices_buf, self._pin_memory_int_workspace_buffer = kv_indices, None

    @property
    def _cached_module(self):
        """The place of FlashInfer's compiled module, as of the other wrappers: it plans page indices that engines have filled."""
        return None if self._plan is None else SimpleNamespace(plan=self._plan_lengths)

    def _plan_lengths(
        self, float_workspace_buffer, int_workspace_buffer, pin_memory_int_workspace_buffer, qo_indptr, kv_indptr, kv_len_arr,
        num_heads, head_dim_ckv, causal, *hints,
    ):
        """Plans query rows ``qo_indptr`` over ``kv_len_arr`` ``[batch_size]`` tokens of pages ``kv_indptr``. Workspaces and ``hints``
        have no effect."""
        function = "BatchMLAPagedAttentionWrapper._cached_module.plan"
        found, planned = (num_heads, head_dim_ckv, causal), (*self._key[:2], self._key[4])
        if found != planned:
            raise Error(f"flashinfer.{function}: num_heads, head_dim_ckv and causal are {found}, expected those of the last plan, {planned}")
        self._plan_on_host(function, qo_indptr, kv_indptr, self._kv_indices_buf, kv_len_arr, self._key[3])

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type, use_profiler=False,
    ):
        """Plans a batch: ``kv_indptr`` bounds of pages, ``kv_len_arr`` tokens of each request."""
        function = "BatchMLAPagedAttentionWrapper.plan"
        refuse(function, use_profiler=use_profiler)
        dtypes = dtype_name(q_data_type), dtype_name(kv_data_type)
        if dtypes[0] != dtypes[1] and not dtypes[1].startswith("float8"):
            refuse(function, f"q_data_type = {dtypes[0]} or 8 bits", kv_data_type=kv_data_type)
        key = (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, float(sm_scale), *dtypes)
        if self._use_cuda_graph:
            for buffer, array in zip(self._buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
                if len(array) > len(buffer):
                    raise ValueError(f"a buffer has {len(buffer)} elements, the batch needs {len(array)}")
                buffer[: len(array)].copy_(array, non_blocking=True)
        else:
            self._kv_indices_buf = kv_indices
        if key != self._key:
            shared = {"scale": float(sm_scale), "dtype": dtypes[0], "kv_dtype": dtypes[1], "causal": causal}
            if head_dim_kpe == 0:  # all heads attend to one KV head with equal keys and values
                problem = Problem(num_heads, 1, head_dim_ckv, **shared)
            else:
                problem = Problem.latent(num_heads, head_dim_ckv, head_dim_kpe, **shared)
            self._operator, self._plan = Attention(problem, device=planned_device(self._float_workspace_buffer)), None
            self._key = key
        if not self._plan_on_device((qo_indptr, kv_indptr, kv_len_arr), page_size):
            self._plan_on_host(function, qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale

    def _plan_on_device(self, lengths, page_size) -> bool:
        """Plans the buffers on the GPU if it has any of the lengths. ``False`` if the host has to plan: the first batch, which fixes
        the rows of the capacity, smaller ones, and those that exceed the limits of the GPU."""
        if not self._use_cuda_graph or self._plan is None or not any(is_on_gpu(x) for x in lengths):
            return False
        if len(lengths[2]) != len(self._buffers[3]):
            return False
        bounds, kv_bounds, pages, lens = self._buffers
        indptr, last, request, number = pages_on_device(lens, page_size, len(pages))
        # the GPU rejects a request with fewer pages than tokens
        last = torch.where(indptr.diff() > kv_bounds.diff(), -1, last)
        source = (kv_bounds[request] + number).clamp(0, len(pages) - 1)
        try:
            self._operator.replan(self._plan, DeviceBatch(bounds, PageTable(indptr, pages[source], last, page_size)))
        except Error:
            return False
        return True

    def _plan_on_host(self, function, qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size):
        lens = host_array(kv_len_arr)
        bounds = host_array(kv_indptr)[: len(lens) + 1]  # as FlashInfer, which does not read the others
        counts = (lens + page_size - 1) // page_size
        if len(counts) != len(bounds) - 1 or (counts > bounds[1:] - bounds[:-1]).any():
            raise Error(f"flashinfer.{function}: kv_len_arr needs {counts.tolist()} pages, kv_indptr has "
                        f"{(bounds[1:] - bounds[:-1]).tolist()}")
        last = lens - (counts - 1).clip(min=0) * page_size
        if (counts != bounds[1:] - bounds[:-1]).any():  # pages after the last token are not read
            used = numpy.concatenate([numpy.arange(begin, begin + count, dtype="int64") for begin, count in zip(bounds, counts)])
            pages = kv_indices[torch.from_numpy(used).to(kv_indices.device, non_blocking=True)]
            bounds = numpy.concatenate([[0], counts.cumsum()])
        else:
            pages = kv_indices[: int(bounds[-1])]
        queries = host_array(qo_indptr)
        batch = Batch.paged(queries, PageTable(bounds, pages, last, page_size))
        if self._use_cuda_graph and self._plan is not None:
            self._operator.replan(self._plan, batch)
        else:
            capacity = None
            if self._use_cuda_graph:
                capacity = Capacity(len(self._buffers[3]), int(queries[-1]), len(self._buffers[2]))
            self._plan = self._operator.plan(batch, capacity=capacity)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None,
        page_table=None, return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None, kpe_scale=None, **refused,
    ):
        """Attention of the planned batch: ``q_nope`` ``[num_rows, num_heads, head_dim_ckv]``, ``q_pe`` ``[num_rows, num_heads,
        head_dim_kpe]``, caches ``[num_pages, page_size, dim]``. The LSE is in base 2, or natural with
        ``return_lse_base_on_e``. With ``o_scale``, ``out`` of e4m3 receives the output divided by it. ``ckv_scale`` and
        ``kpe_scale`` multiply caches of 8 bits; if they differ, ``q_pe`` is multiplied by their ratio and rounded. With
        ``head_dim_kpe = 0`` the rotated parts are not read.

        ``ckv_scale_arr`` is refused. It is not in the signature, where a backend of vLLM looks for it that writes page indices to
        ``kv_indices`` after ``plan``: runs do not read them there."""
        function = "BatchMLAPagedAttentionWrapper.run"
        if refused.keys() - {"ckv_scale_arr"}:
            raise TypeError(f"flashinfer.{function}: unexpected keyword arguments {sorted(refused)}")
        refuse(function, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, **refused)
        if self._plan is None:
            raise Error("flashinfer.run: plan() has not been called")
        dtype, narrow = torch_dtype(self._key[6]), None
        if o_scale is not None:
            o_scale, narrow = output_scale("run", "o_scale", o_scale), out
            if out is None:
                raise ValueError("out tensor must be provided when o_scale is used for FP8 output.")
            check_output("run", "out", out, q_nope.shape, torch.float8_e4m3fn, q_nope.device)
        elif out is not None:
            check_output("run", "out", out, q_nope.shape, dtype, q_nope.device)
        if out is narrow:
            out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
        if lse is None and return_lse:
            lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
        if self._key[7] != self._key[6]:
            for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
                if scale is None:
                    raise Error(f"flashinfer.run: {name} = None, expected a number for caches of {self._key[7]}")
        if self._key[2] == 0:
            cache = ckv_cache.unsqueeze(2)
            self._operator.run(self._plan, q_nope, cache, cache, out=out, lse=lse, k_scale=ckv_scale, v_scale=ckv_scale)
        else:
            self._operator.run_latent(self._plan, q_nope, q_pe, ckv_cache, kpe_cache, out=out, lse=lse, ckv_scale=ckv_scale,
                                      kpe_scale=kpe_scale)
        if narrow is not None:
            # not all releases of torch saturate
            out = narrow.copy_(out.float().div_(o_scale).clamp_(-448.0, 448.0))
        if not return_lse:
            return out
        return out, lse.mul_(math.log(2.0)) if return_lse_base_on_e else lse


class BatchDecodeMlaWithPagedKVCacheWrapper:
    """A deprecated wrapper of FlashInfer that runs on SM80 only."""

    def __init__(self, *args, **kwargs):
        raise Unsupported("flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper: FlashInfer runs it on SM80 only, expected "
                          "BatchMLAPagedAttentionWrapper")


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
    sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None,
    enable_pdl=None, backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
    cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None,
    sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None,
):
    """Causal latent attention of the last rows of each request over a paged cache, without ``plan``.

    ``query`` ``[batch_size, q_len, num_heads, kv_lora_rank + qk_rope_head_dim]``, or ``[num_tokens, num_heads, ...]`` with
    ``cum_seq_lens_q`` bounds. ``kv_cache`` ``[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]``, also with an axis of 1
    before the page. Both bfloat16 or float16; the cache, or both, also float8_e4m3fn. ``block_tables``, ``seq_lens`` and
    ``workspace_buffer`` are those of :func:`~tilewright.flashinfer.decode.trtllm_batch_decode_with_kv_cache`. ``bmm1_scale`` is
    the factor of ``q · k``, ``bmm2_scale`` that of outputs; queries are multiplied by a ``bmm1_scale`` on a GPU and rounded to
    their dtype. ``cum_seq_lens_q`` without ``max_q_len`` waits for a GPU. Outputs have the dtype of queries, bfloat16 for those of
    8 bits. Returns the output, with ``kv_lora_rank`` elements per head, or ``(output, lse)`` in base 2 with ``lse`` ``[num_rows, num_heads]``.
    ``qk_nope_head_dim``, ``max_seq_len``, ``enable_pdl``, ``backend``, ``is_var_seq``, ``cute_dsl_impl``, ``kv_scale_format``
    and ``multi_ctas_kv_counter_buffer`` are hints without effect.
    """
    function = "trtllm_batch_decode_with_kv_cache_mla"
    check_choice(function, "backend", backend, ("auto", "xqa", "trtllm-gen", "cute-dsl"))
    refuse(function, "0", sparse_mla_top_k=sparse_mla_top_k or None)
    refuse(function, sinks=sinks, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
           sparse_mla_top_k_lens=sparse_mla_top_k_lens, enable_dcp=enable_dcp, use_fp16_softmax=use_fp16_softmax,
           causal_seqlens_kv_global=causal_seqlens_kv_global)
    refuse(function, "1", cp_world=None if cp_world == 1 else cp_world)
    refuse(function, "0", cp_rank=cp_rank or None)
    refuse(function, "True", uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else "False")
    if seq_lens is None:
        raise Error(f"flashinfer.{function}: seq_lens = None, expected [batch_size]")
    axes, width = 4 if cum_seq_lens_q is None else 3, kv_lora_rank + qk_rope_head_dim
    if query.dim() != axes or query.shape[-1] != width:
        raise Error(f"flashinfer.{function}: query has shape {tuple(query.shape)}, expected {axes} axes, the last of "
                    f"kv_lora_rank + qk_rope_head_dim = {width}")
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(1)
    if kv_cache.dim() != 3 or kv_cache.shape[2] != width:
        raise Error(f"flashinfer.{function}: kv_cache has shape {tuple(kv_cache.shape)}, expected "
                    f"[num_pages, page_size, {width}]")
    shape = (*query.shape[:-1], kv_lora_rank)
    if out is not None and tuple(out.shape) not in (shape, (shape[0], *shape[2:])):
        raise Error(f"flashinfer.{function}: out has shape {tuple(out.shape)}, expected {shape}")
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise Error(f"flashinfer.{function}: max_q_len = {max_q_len}, expected it together with cum_seq_lens_q")
        rows = None, query.shape[1]
    else:
        rows = cum_seq_lens_q, int(cum_seq_lens_q.diff().max()) if max_q_len is None else max_q_len
    heads = query.shape[-2]
    flat = None if out is None else out.view(-1, heads, kv_lora_rank), None if lse is None else lse.view(-1, heads)
    found, states = attend_latent(
        function, (query.reshape(-1, heads, width), kv_cache, workspace_buffer), (block_tables, seq_lens, rows), kv_lora_rank,
        scales=(bmm1_scale, bmm2_scale), outputs=(*flat, return_lse),
    )
    found = found.view(shape) if out is None else out
    return (found, states if lse is None else lse) if return_lse else found


def xqa_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
    out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None,
):
    """:func:`trtllm_batch_decode_with_kv_cache_mla` of its first arguments."""
    return trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl,
    )


@functools.lru_cache(maxsize=64)
def _latent_operator(heads, dims, scale, dtypes, device):
    """The operator of stateless calls."""
    return Attention(Problem.latent(heads, *dims, scale=scale, dtype=dtypes[0], kv_dtype=dtypes[1], causal=True), device=device)


def attend_latent(function, tensors, lengths, head_dim_ckv, *, scales, outputs):
    """Latent attention over block tables: the output and the LSE, or None. ``tensors``: query rows, the joined cache and the
    workspace. ``lengths``: ``block_tables``, ``seq_lens``, and ``(bounds, maximum)`` of query rows, or ``(None, rows)`` per
    request. ``outputs``: ``out``, ``lse`` and ``return_lse``."""
    (query, cache, workspace), (block_tables, seq_lens, (bounds, qo_len)), (out, lse, return_lse) = tensors, lengths, outputs
    query = query.to(torch.bfloat16) if query.dtype == torch.float8_e4m3fn else query  # exact
    dtypes = dtype_name(query.dtype), dtype_name(cache.dtype)
    if dtypes[0] != dtypes[1] and not dtypes[1].startswith("float8"):
        refuse(function, f"kv_cache of {dtypes[0]} or 8 bits", kv_cache=dtypes[1])
    (rows, heads, width), requests, page_size = query.shape, seq_lens.shape[0], cache.shape[1]
    if bounds is None and rows != requests * qo_len:
        raise Error(f"flashinfer.{function}: query has {rows} rows, expected batch_size * q_len = {requests * qo_len}")
    shape, device = (rows, heads, head_dim_ckv), planned_device(query)
    if out is not None:
        check_output(function, "out", out, shape, query.dtype, query.device)
    if lse is not None:
        check_output(function, "lse", lse, shape[:2], torch.float32, query.device)
    scale = output_scale(function, "bmm1_scale", scales[0])
    if isinstance(scale, torch.Tensor):  # one scale of the operator, of which the tensor is a multiple
        query, scale = (query.float() * (scale * math.sqrt(width))).to(query.dtype), 1.0 / math.sqrt(width)
    key = (heads, (head_dim_ckv, width - head_dim_ckv), scale, dtypes)
    operator = _latent_operator(*key, device)
    batch = DeviceBatch(qo_len if bounds is None else bounds, BlockTable(block_tables, seq_lens, page_size))
    key = key, requests, rows, qo_len, page_size, bounds is None
    plan = plan_lengths(operator, batch, key, workspace, Capacity(requests, rows, 0, qo_len=qo_len))
    out = torch.empty(shape, dtype=query.dtype, device=query.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    operator.run_latent(plan, query[..., :head_dim_ckv], query[..., head_dim_ckv:], cache[..., :head_dim_ckv],
                        cache[..., head_dim_ckv:], out=out, lse=lse)
    factor = output_scale(function, "bmm2_scale", scales[1])
    return (out if isinstance(factor, float) and factor == 1.0 else out.mul_(factor)), lse
