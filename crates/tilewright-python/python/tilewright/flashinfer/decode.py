"""Decode: ``single_decode_with_kv_cache`` and the batch wrappers over paged caches."""

import functools

import torch

from .._core import Error
from .._tensors import dtype_name
from ..attention import Capacity
from ._pages import run_cache
from ._planned import E5M2, FP8, BatchWrapper, Settings, check_output_dtype, dtype_names, sinks_of, split_of
from ._refuse import refuse
from .cudnn import cudnn_batch_decode_with_kv_cache  # noqa: F401
from .jit import single_decode_with_kv_cache_with_jit_module  # noqa: F401
from .page import get_seq_lens  # noqa: F401
from .mla import (  # noqa: F401
    BatchDecodeMlaWithPagedKVCacheWrapper,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from .prefill import single_prefill_with_kv_cache
from .properties import _get_range_buf  # noqa: F401
from .stateless import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache  # noqa: F401


def single_decode_with_kv_cache(
    q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, q_scale=None, k_scale=None, v_scale=None,
    window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False,
):
    """One query row ``[num_qo_heads, head_dim]`` over keys ``[kv_len, num_kv_heads, head_dim]`` (NHD). Returns the output, or
    ``(output, lse)`` with ``lse`` ``[num_qo_heads]`` in base 2. ``use_tensor_cores`` is a hint without effect."""
    result = single_prefill_with_kv_cache(
        q.unsqueeze(0), k, v, causal=True, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        return_lse=return_lse, k_scale=k_scale, v_scale=v_scale, _q_scale=q_scale,
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if return_lse else result.squeeze(0)


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper):
    """Batch decode over a paged cache: ``plan`` per step, ``run`` per layer.

    ``use_tensor_cores`` is a hint without effect. With ``use_cuda_graph`` a plan is rewritten in place, for the batch size of
    ``paged_kv_last_page_len_buffer`` and as many pages as ``paged_kv_indices_buffer`` has. If lengths are on a GPU then, it plans
    the contents of the buffers, and nothing waits.
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        refuse(self._name, "a variant written in Python (tilewright.Variant)", jit_args=jit_args)
        self._use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._fixed_batch_size = 0
        if use_cuda_graph:
            for name, buffer in (("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
                                 ("paged_kv_indices_buffer", paged_kv_indices_buffer),
                                 ("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer)):
                if not isinstance(buffer, torch.Tensor):
                    raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    @property
    def use_tensor_cores(self):
        """The hint of the constructor."""
        return self._use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None,
        sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, *, window_right=0,
    ):
        """Plans a batch of ``len(last_page_len)`` requests with ``q_len_per_req`` query rows each, causal among themselves."""
        function = "BatchDecodeWithPagedKVCacheWrapper.plan"
        batch_size = len(last_page_len)
        if window_right != 0:
            refuse(function, "0", window_right=window_right)
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req must be >= 1, got {q_len_per_req}")
        if self._use_cuda_graph:
            self._check_graph(batch_size, indices, q_len_per_req)
            self._paged_kv_indptr_buf.copy_(_tensor(indptr), non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(_tensor(last_page_len), non_blocking=non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(_tensor(indices), non_blocking=non_blocking)
        else:
            self._paged_kv_indptr_buf = indptr
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len
        arguments = (num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, o_data_type, data_type, pos_encoding_mode,
                     window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        if arguments != self._planned_with:
            self._set(*arguments)
            self._planned_with = arguments
        self._window_left, self._logits_soft_cap = window_left, logits_soft_cap or 0.0
        self._sm_scale, self._pos_encoding_mode = sm_scale, pos_encoding_mode
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._q_len_per_req = q_len_per_req
        self._begin_plan(self._capacity(batch_size))
        split = split_of(function, fixed_split_size, disable_split_kv, page_size)
        if not self._plan_on_device((indptr, last_page_len), q_len_per_req, page_size, split):
            rows = _qo_indptr(batch_size, q_len_per_req)
            self._attention.plan_pages(self._settings, rows, (indptr, indices, last_page_len, page_size), split)

    begin_forward = plan

    def _set(self, num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, o_data_type, data_type, pos_encoding_mode,
             window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta):
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        dtypes = dtype_names("float16" if q_data_type is None else q_data_type, kv_data_type, o_data_type)
        self._has_8_bits = q_data_type is not None and dtype_name(q_data_type) in (FP8, E5M2)
        check_output_dtype("BatchDecodeWithPagedKVCacheWrapper.plan", dtypes)
        self._settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim, head_dim), dtypes=dtypes, layout=self._kv_layout, causal=True,
            window_left=window_left, soft_cap=logits_soft_cap, sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )

    def _check_graph(self, batch_size, indices, q_len_per_req):
        frozen = getattr(self, "_q_len_per_req", None)
        if frozen is not None and frozen != q_len_per_req:
            raise ValueError(f"q_len_per_req is part of the frozen cudagraph shape: planned with {frozen}, got {q_len_per_req}")
        if batch_size != self._fixed_batch_size:
            raise ValueError("The batch size should be fixed in cudagraph mode, the runtime batch size "
                             f"{batch_size} mismatches the batch size set during initialization {self._fixed_batch_size}")
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def _capacity(self, batch_size):
        if not self._use_cuda_graph:
            return None
        rows, pages = batch_size * self._q_len_per_req, len(self._paged_kv_indices_buf)
        return Capacity(batch_size, rows, pages, qo_len=self._q_len_per_req)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        """Attention of the planned batch: ``q`` ``[batch_size · q_len_per_req, num_qo_heads, head_dim]``. Returns the output, or
        ``(output, lse)`` with the LSE in base 2. Scales of 8-bit queries, keys and values may be passed as three arguments.
        ``enable_pdl`` is a hint without effect."""
        if args:
            (q_scale, k_scale, v_scale), args = self._scales_of(args, (q_scale, k_scale, v_scale))
        if args or kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            refuse("run", args=args or None, kv_cache_sf=kv_cache_sf,
                   skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        if window_left is not None and window_left != self._window_left:
            raise AssertionError(f"window_left = {window_left}, plan() was given {self._window_left}")
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(f"q_len_per_req = {q_len_per_req}, plan() was given {self._q_len_per_req}")
        settings = self._settings_with((self._sm_scale, self._logits_soft_cap, self._window_left, self._pos_encoding_mode, True,
                                        sinks is not None))
        kv = run_cache(paged_kv_cache, self._kv_layout)
        tables = None if sinks is None else sinks_of(sinks, q)
        return self._attention.run(settings, q, kv, out, lse, return_lse, (q_scale, k_scale, v_scale), tables)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own, which replace those of the plan."""
        self._override(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``forward`` that returns ``(output, lse)``."""
        self._override(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def _override(self, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta):
        if self._settings is None:
            raise Error("flashinfer.forward: plan() has not been called")
        self._pos_encoding_mode, self._window_left = pos_encoding_mode, window_left
        self._logits_soft_cap, self._sm_scale = logits_soft_cap or 0.0, sm_scale
        self._override_rope(rope_scale, rope_theta)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """:class:`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph``."""

    def __init__(
        self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout="NHD", use_tensor_cores=False
    ):
        super().__init__(workspace_buffer, kv_layout, use_cuda_graph=True, use_tensor_cores=use_tensor_cores,
                         paged_kv_indptr_buffer=indptr_buffer, paged_kv_indices_buffer=indices_buffer,
                         paged_kv_last_page_len_buffer=last_page_len_buffer)


@functools.lru_cache(maxsize=256)
def _qo_indptr(batch_size, q_len_per_req):
    """The bounds of equal requests, on the host."""
    return torch.arange(0, batch_size * q_len_per_req + 1, q_len_per_req, dtype=torch.int32)


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
    window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
    rope_theta=None, non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    global_override_indptr_cpu=None,
):
    """``plan`` of a decode wrapper with bounds that the caller has on the host."""
    bounds = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    # engines bind this function to the wrapper as its `plan`
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, bounds, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode=pos_encoding_mode,
        window_left=window_left, logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type, data_type=data_type, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        non_blocking=non_blocking, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
