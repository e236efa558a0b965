"""Prefill and append: ``single_prefill_with_kv_cache`` and the batch wrappers over paged and ragged keys."""

import functools
import math

import numpy
import torch

from .._core import Error
from .._core import segment_packbits as pack_segments
from .._core import segment_packbits_on_device as pack_on_device
from .._device import queue_of
from .._tensors import dtype_name
from ..attention import Batch, Capacity
from ._compiled import is_compiling, operator
from ._items import item_flags
from ._pages import host_array, is_on_gpu, page_table, run_cache
from ._planned import (
    E5M2,
    FP8,
    BatchWrapper,
    PlannedAttention,
    Settings,
    check_output_dtype,
    dtype_names,
    planned_device,
    sinks_of,
    split_of,
)
from ._refuse import BACKENDS, check_backend, check_layout, output_scale, refuse, torch_dtype
from .cudnn import cudnn_batch_prefill_with_kv_cache  # noqa: F401
from .fused_prefill import fmha_v2_prefill_deepseek, fmha_v2_prefill_sm120, trtllm_fmha_v2_prefill  # noqa: F401
from .jit import single_prefill_with_kv_cache_with_jit_module  # noqa: F401
from .ragged import trtllm_ragged_attention_deepseek  # noqa: F401
from .stateless import trtllm_batch_context_with_kv_cache  # noqa: F401


def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, causal=False,
    kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
    logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None, k_scale=None,
    v_scale=None, _q_scale=None,
):
    """Query rows ``[qo_len, num_qo_heads, head_dim_qk]`` of one request over keys ``[kv_len, num_kv_heads, head_dim]`` (NHD) or
    ``[num_kv_heads, kv_len, head_dim]`` (HND). A custom mask, bool ``[qo_len, kv_len]`` or packed little-endian bits, replaces
    ``causal``. Scales of 8-bit queries, keys and values, ``scale_q`` to ``scale_v``, are numbers or tensors of one per head;
    ``k_scale`` and ``v_scale`` are further factors of keys and values. Returns the output, or ``(output, lse)`` with ``lse``
    ``[qo_len, num_qo_heads]`` in base 2."""
    function = "single_prefill_with_kv_cache"
    check_layout(function, kv_layout)
    check_backend(function, backend)
    refuse(function, kv_cache_sf=kv_cache_sf, use_fp16_qk_reduction=use_fp16_qk_reduction)
    is_narrow = q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if not is_narrow:
        refuse(function, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        if o_dtype is not None and o_dtype != q.dtype:
            refuse(function, f"q.dtype = {q.dtype}", o_dtype=o_dtype)
    dtypes = dtype_names(q.dtype, k.dtype, o_dtype)
    if is_narrow:
        check_output_dtype(function, dtypes, "o_dtype")
    scales = [_product(*pair) for pair in ((scale_q, _q_scale), (scale_k, k_scale), (scale_v, v_scale))]
    arguments = (q, k, v, custom_mask, packed_custom_mask, causal, kv_layout, pos_encoding_mode, sm_scale, window_left,
                 logits_soft_cap, rope_scale, rope_theta)
    if not is_compiling():
        return _attend_single(arguments, dtypes, scales, None, None, return_lse)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=torch_dtype(dtypes[0]), device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    are_tensors = [isinstance(scale, torch.Tensor) for scale in scales]
    _single_prefill(*arguments, [scale if is_tensor else None for scale, is_tensor in zip(scales, are_tensors)],
                    [1.0 if scale is None or is_tensor else scale for scale, is_tensor in zip(scales, are_tensors)], out, lse)
    return (out, lse) if return_lse else out


def _product(scale, other):
    """The product of two scales, of which any may be ``None``."""
    return other if scale is None else scale if other is None else scale * other


def _attend_single(arguments, dtypes, scales, out, lse, return_lse):
    """Attention of one request. ``scales`` of queries, keys and values are numbers, tensors or ``None``."""
    settings, batch = _single(*arguments, dtypes)
    planned = PlannedAttention(planned_device(arguments[0]))
    planned.plan(settings, batch)
    return planned.run(settings, arguments[0], arguments[1:3], out, lse=lse, return_lse=return_lse, scales=scales)


def _single(q, k, v, custom_mask, packed_custom_mask, causal, kv_layout, pos_encoding_mode, sm_scale, window_left,
            logits_soft_cap, rope_scale, rope_theta, dtypes):
    """The settings and the batch of one request."""
    function = "single_prefill_with_kv_cache"
    axis = 0 if kv_layout == "NHD" else 1
    qo_len, kv_len = q.shape[0], k.shape[axis]
    mask = None
    if packed_custom_mask is not None:
        mask = packed_bytes(packed_custom_mask)
    elif custom_mask is not None:
        shape, length = tuple(custom_mask.shape), qo_len * kv_len
        if shape not in ((qo_len, kv_len), (length,)):
            raise Error(f"flashinfer.{function}: custom_mask has shape {shape}, expected ({qo_len}, {kv_len}) or ({length},)")
        mask = pack_mask(custom_mask, [0, length])
    settings = Settings(
        heads=(q.shape[1], k.shape[1 - axis]), dims=(q.shape[2], v.shape[2]), dtypes=dtypes, layout=kv_layout,
        causal=causal and mask is None, window_left=window_left, soft_cap=logits_soft_cap, sm_scale=sm_scale,
        pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
    )
    return settings, Batch.ragged([0, qo_len], [0, kv_len], mask=mask)


@operator("single_prefill(Tensor q, Tensor k, Tensor v, Tensor? custom_mask, Tensor? packed_custom_mask, bool causal, "
          "str kv_layout, str pos_encoding_mode, float? sm_scale, int window_left, float? logits_soft_cap, float? rope_scale, "
          "float? rope_theta, Tensor?[] scales, float[] numbers, Tensor(a!) out, Tensor(b!)? lse)")
def _single_prefill(*arguments):
    *arguments, scales, numbers, out, lse = arguments
    dtypes = dtype_names(arguments[0].dtype, arguments[1].dtype, out.dtype)
    scales = [number if scale is None else scale for scale, number in zip(scales, numbers)]
    _attend_single(arguments, dtypes, scales, out, lse, lse is not None)


def single_prefill_with_kv_cache_return_lse(*args, **kwargs):
    """:func:`single_prefill_with_kv_cache` that returns ``(output, lse)``."""
    return single_prefill_with_kv_cache(*args, **{**kwargs, "return_lse": True})


#: The most flags of a segment that a GPU packs.
_MOST_FLAGS = 0xFFFF * 1024


def packed_bytes(packed):
    """Packed bits where they are."""
    return packed.reshape(-1) if packed.is_cuda else host_array(packed)


def pack_mask(flags, bounds):
    """Packs flags, bool or numbers, into little-endian bits, each segment from a new byte, where they are."""
    sizes, flags = numpy.diff(bounds), flags.reshape(-1).bool()
    if flags.is_cuda and flags.numel() < 1 << 31 and sizes.max(initial=0) <= _MOST_FLAGS:
        packed = torch.empty(int(((sizes + 7) // 8).sum()), dtype=torch.uint8, device=flags.device)
        pack_on_device(queue_of(flags), flags.contiguous(), list(map(int, bounds)), packed)
        return packed
    packed, _ = pack_segments(host_array(flags), bounds, "little")
    return numpy.frombuffer(packed, dtype=numpy.uint8)


class _PrefillWrapper(BatchWrapper):
    """What the paged and the ragged wrapper share: buffers, settings, masks and runs."""

    _name = "BatchPrefill"
    _backends = (*BACKENDS, "cudnn")

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        # bounds are in elements, and paged caches are [num_pages, num_kv_heads, page_size, head_dim]
        self._is_cudnn = backend == "cudnn"
        if self._is_cudnn and kv_layout != "NHD":
            raise Error(f"flashinfer.{self._name}: kv_layout = {kv_layout!r} with backend = 'cudnn', expected 'NHD'")
        # the source of one variant is known by its name: attention sinks
        self._has_sinks = jit_args is not None and "AttentionSink" in jit_args
        if not self._has_sinks:
            refuse(self._name, "a variant written in Python (tilewright.Variant)", jit_args=jit_args, jit_kwargs=jit_kwargs)

    def _buffers(self, **buffers):
        """The caller's buffers of a recorded graph; ``plan`` copies its arrays to them, as FlashInfer does."""
        for name, buffer in buffers.items():
            if self._use_cuda_graph and not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            setattr(self, f"_{name}", buffer)

    def _keep(self, non_blocking, **arrays):
        for name, array in arrays.items():
            if self._use_cuda_graph:
                buffer = getattr(self, f"_{name}")
                if len(array) > len(buffer):
                    raise ValueError(f"{name} has {len(buffer)} elements, the batch needs {len(array)}")
                buffer[: len(array)].copy_(array, non_blocking=non_blocking)
            else:
                setattr(self, f"_{name}", array)

    def _rows(self, **bounds):
        """The bounds of cuDNN in rows: of each name, the bounds in elements and the elements of a row."""
        rows = []
        for name, (elements, row) in bounds.items():
            elements = elements if isinstance(elements, torch.Tensor) else torch.as_tensor(elements)
            if not elements.is_cuda and bool((elements % row != 0).any()):
                raise Error(f"flashinfer.{self._name}.plan: {name} = {elements.tolist()[:8]}, expected multiples of {row} elements "
                            "with backend = 'cudnn'")
            rows.append(torch.div(elements, row, rounding_mode="floor").int())
        return rows

    def _set(self, settings, causal, q_data_type):
        self._settings, self._causal = settings, causal
        self._has_8_bits = dtype_name(q_data_type) in (FP8, E5M2)
        self._window_left, self._logits_soft_cap, self._sm_scale = settings.window_left, settings.soft_cap, settings.sm_scale
        self._pos_encoding_mode = settings.pos_encoding_mode
        self._rope_scale, self._rope_theta = settings.rope_scale, settings.rope_theta

    def _mask(self, custom_mask, packed_custom_mask, items, qo_indptr, kv_lens):
        """The packed bits of all requests, or None. ``items``: the arguments of multi-item scoring."""
        function = f"{self._name}.plan"
        if items[0] is None:
            refuse(function, "None without prefix_len_ptr", token_pos_in_items_len=items[2] or None, max_item_len_ptr=items[3])
        flags = item_flags(function, qo_indptr, kv_lens, *items[:3])
        if flags is not None:
            refuse(function, "None with prefix_len_ptr", custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
            custom_mask = flags
        if packed_custom_mask is not None:
            return packed_bytes(packed_custom_mask)
        if custom_mask is None:
            return None
        sizes = (qo_indptr[1:] - qo_indptr[:-1]).astype(numpy.int64) * kv_lens
        bounds = numpy.concatenate([[0], numpy.cumsum(sizes)])
        if custom_mask.numel() != bounds[-1]:
            raise Error(f"flashinfer.{function}: custom_mask has {custom_mask.numel()} flags, expected {int(bounds[-1])}")
        return pack_mask(custom_mask, bounds)

    def _mask_bytes(self, mask):
        """The bytes of masks in a fixed plan: those of the caller's buffer, or of the first mask if it has more."""
        return max(0 if one is None else len(one) for one in (mask, self._custom_mask_buf))

    def _schedule(self, batch, split, capacity):
        self._begin_plan(capacity)
        self._masked = batch[1]
        self._attention.plan(self._settings, batch[0], split)

    def _sinks(self, args, sinks):
        """The sinks, by keyword or as the first of the arguments of the known variant, which the scale follows."""
        if args and not self._has_sinks:
            refuse("run", args=args)
        if len(args) > 2 or (args and sinks is not None):
            raise Error(f"flashinfer.{self._name}.run: {len(args)} more arguments, expected the sinks and sm_scale")
        if len(args) == 2:
            self._sm_scale = args[1].detach().reshape(1).float() if is_on_gpu(args[1]) else float(args[1])
        return args[0] if args else sinks

    def _run(self, q, kv, *, scales, out, lse, return_lse, sinks=None):
        if self._settings is None:
            raise Error("flashinfer.run: plan() has not been called")
        sm_scale = self._sm_scale
        if isinstance(sm_scale, torch.Tensor):
            sm_scale, scales = None, _with_scale_of_logits(scales, sm_scale * math.sqrt(self._settings.dims[0]))
        settings = self._settings_with((sm_scale, self._logits_soft_cap or 0.0, self._window_left, self._pos_encoding_mode,
                                        self._causal and not self._masked, sinks is not None))
        return self._attention.run(settings, q, kv, out, lse, return_lse, scales, sinks_of(sinks, q))

    def _override(self, causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope):
        if self._settings is None:
            raise Error("flashinfer.forward: plan() has not been called")
        refuse(f"{self._name}.forward", use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._causal, self._pos_encoding_mode, self._window_left = causal, pos_encoding_mode, window_left
        self._logits_soft_cap, self._sm_scale = logits_soft_cap, sm_scale
        self._override_rope(*rope)


def _with_scale_of_logits(scales, factor):
    """The scales of a run, of which that of keys also has ``factor`` of the default one: a tensor on a GPU, which is not read."""
    q_scale, k_scale, v_scale = scales
    if k_scale is not None:
        factor = factor * (k_scale.to(factor.device, torch.float32) if isinstance(k_scale, torch.Tensor) else k_scale)
    return q_scale, factor, v_scale


class BatchPrefillWithPagedKVCacheWrapper(_PrefillWrapper):
    """Batch prefill and append over a paged cache. With ``use_cuda_graph`` a plan is rewritten in place, for as many requests
    and pages as the buffers have."""

    _name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._buffers(qo_indptr_buf=qo_indptr_buf, paged_kv_indptr_buf=paged_kv_indptr_buf,
                      paged_kv_indices_buf=paged_kv_indices_buf, paged_kv_last_page_len_buf=paged_kv_last_page_len_buf)
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._fixed_batch_size = len(paged_kv_last_page_len_buf) if use_cuda_graph else 0
        self._cache_layout = "HND" if self._is_cudnn else kv_layout

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
        token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):
        """Plans a batch. A custom mask, bool flags or packed bits of each request's ``qo_len × kv_len``, replaces ``causal``.
        Multi-item scoring: with ``prefix_len_ptr`` ``[num_requests]`` and ``token_pos_in_items_ptr``, rows of
        ``token_pos_in_items_len`` integers, a token after the prefix sees the prefix and its item up to itself. With the backend of
        cuDNN ``qo_indptr`` is in elements of queries. ``max_item_len_ptr``, ``seq_lens``, ``seq_lens_q``, ``block_tables`` and the
        maxima repeat what the other arrays say and are not read."""
        function = f"{self._name}.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction)
        items = prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        dtypes = dtype_names(q_data_type, kv_data_type, o_data_type)
        check_output_dtype(function, dtypes)
        has_mask = any(x is not None for x in (custom_mask, packed_custom_mask, *items[:2], items[2] or None, items[3]))
        if self._is_cudnn:
            [qo_indptr] = self._rows(qo_indptr=(qo_indptr, num_qo_heads * head_dim_qk))
        self._keep(non_blocking, qo_indptr_buf=qo_indptr, paged_kv_indptr_buf=paged_kv_indptr,
                   paged_kv_indices_buf=paged_kv_indices, paged_kv_last_page_len_buf=paged_kv_last_page_len)
        settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim_qk, head_dim_vo or head_dim_qk), dtypes=dtypes,
            layout=self._cache_layout, causal=causal and not has_mask, window_left=window_left, soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        self._set(settings, causal, q_data_type)
        split = split_of(function, fixed_split_size, disable_split_kv, page_size)
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        # the first plan fixes the rows of the capacity
        if self._attention is not None and not has_mask and len(paged_kv_last_page_len) == self._fixed_batch_size:
            self._masked = False
            if self._plan_on_device(lengths, self._qo_indptr_buf, page_size, split):
                return
        table = page_table(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        bounds = host_array(qo_indptr)
        pages = numpy.diff(host_array(table.indptr))
        kv_lens = numpy.where(pages > 0, (pages - 1) * page_size + host_array(table.last_page_len), 0)
        mask = self._mask(custom_mask, packed_custom_mask, items, bounds, kv_lens)
        self._schedule((Batch.paged(bounds, table, mask=mask), mask is not None), split, self._capacity(bounds, mask))

    begin_forward = plan

    def _capacity(self, bounds, mask):
        if not self._use_cuda_graph:
            return None
        # the rows of the recorded tensors
        return Capacity(self._fixed_batch_size, int(bounds[-1]), len(self._paged_kv_indices_buf), mask_bytes=self._mask_bytes(mask))

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None, uses_spcompress=None,
    ):
        """Attention of the planned batch: ``q`` ``[qo_indptr[-1], num_qo_heads, head_dim]``. Returns the output, or ``(output,
        lse)`` with the LSE in base 2. ``enable_pdl`` is a hint without effect."""
        refuse("run", kv_cache_sf=kv_cache_sf, use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
               skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        scales, args = self._scales_of(args, (q_scale, k_scale, v_scale))
        sinks = self._sinks(args, sinks)
        if window_left is not None and self._settings is not None and window_left != self._window_left:
            raise AssertionError(f"window_left = {window_left}, plan() was given {self._window_left}")
        kv = run_cache(paged_kv_cache, self._cache_layout)
        return self._run(q, kv, scales=scales, out=out, lse=lse, return_lse=return_lse, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None,
        v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own, which replace those of the plan."""
        self._override(causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale,
                       (rope_scale, rope_theta))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None,
        v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``forward`` that returns ``(output, lse)``."""
        self._override(causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale,
                       (rope_scale, rope_theta))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_PrefillWrapper):
    """Batch prefill over ragged keys and values. ``kv_layout`` is that of the ragged tensors."""

    _name = "BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._buffers(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._fixed_batch_size = len(qo_indptr_buf) - 1 if use_cuda_graph else 0

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None,
        max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
    ):
        """Plans a batch. A custom mask, bool flags or packed bits of each request's ``qo_len × kv_len``, replaces ``causal``.
        ``fixed_split_size`` is in tokens here. Multi-item scoring is that of the paged wrapper. With the backend of cuDNN all
        bounds are in elements of their tensors. ``seq_lens``, ``seq_lens_q`` and the maxima repeat what the bounds say."""
        function = f"{self._name}.plan"
        refuse(function, use_fp16_qk_reduction=use_fp16_qk_reduction)
        if self._is_cudnn:
            qo_indptr, kv_indptr = self._ragged_rows(qo_indptr, kv_indptr, v_indptr, o_indptr, (num_qo_heads, num_kv_heads),
                                                     (head_dim_qk, head_dim_vo or head_dim_qk))
        else:
            refuse(function, v_indptr=v_indptr, o_indptr=o_indptr)
        items = prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        dtypes = dtype_names(q_data_type, kv_data_type, o_data_type)
        check_output_dtype(function, dtypes)
        self._keep(non_blocking, qo_indptr_buf=qo_indptr, kv_indptr_buf=kv_indptr)
        bounds, kv_bounds = host_array(qo_indptr), host_array(kv_indptr)
        mask = self._mask(custom_mask, packed_custom_mask, items, bounds, kv_bounds[1:] - kv_bounds[:-1])
        settings = Settings(
            heads=(num_qo_heads, num_kv_heads), dims=(head_dim_qk, head_dim_vo or head_dim_qk), dtypes=dtypes,
            layout=self._kv_layout, causal=causal and mask is None, window_left=window_left, soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        self._set(settings, causal, q_data_type)
        split = split_of(function, fixed_split_size, disable_split_kv, 1)
        capacity = None
        if self._use_cuda_graph:
            capacity = Capacity(self._fixed_batch_size, int(bounds[-1]), 0, mask_bytes=self._mask_bytes(mask))
        self._schedule((Batch.ragged(bounds, kv_bounds, mask=mask), mask is not None), split, capacity)
        self._kv_rows = int(kv_bounds[-1])

    begin_forward = plan

    def _ragged_rows(self, qo_indptr, kv_indptr, v_indptr, o_indptr, heads, dims):
        """The bounds of queries and keys in rows; those of values and outputs have to be the same."""
        of_queries, of_keys = self._rows(qo_indptr=(qo_indptr, heads[0] * dims[0]), kv_indptr=(kv_indptr, heads[1] * dims[0]))
        for name, bounds, row, rows in (("v_indptr", v_indptr, heads[1] * dims[1], of_keys),
                                        ("o_indptr", o_indptr, heads[0] * dims[1], of_queries)):
            if bounds is not None and not torch.equal(self._rows(**{name: (bounds, row)})[0], rows):
                raise Error(f"flashinfer.{self._name}.plan: {name} has other rows than those of "
                            f"{'keys' if name == 'v_indptr' else 'queries'}")
        return of_queries, of_keys

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, kv_cache_sf=None,
    ):
        """Attention of the planned batch: ``q`` ``[qo_indptr[-1], num_qo_heads, head_dim]``, ``k``, ``v`` ``[kv_indptr[-1],
        num_kv_heads, head_dim]``; later keys are not read. Returns the output divided by ``o_scale``, or ``(output, lse)`` with
        the LSE in base 2."""
        refuse("run", kv_cache_sf=kv_cache_sf)
        scales, args = self._scales_of(args, (q_scale, k_scale, v_scale))
        if o_scale is not None:
            scales = (*scales[:2], (1.0 if scales[2] is None else scales[2]) / output_scale("run", "o_scale", o_scale))
        axis = 0 if self._kv_layout == "NHD" else 1
        if self._settings is not None:
            k, v = (x.narrow(axis, 0, self._kv_rows) if x.shape[axis] > self._kv_rows else x for x in (k, v))
        return self._run(q, (k, v), scales=scales, out=out, lse=lse, return_lse=return_lse, sinks=self._sinks(args, None))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``run`` with settings of its own, which replace those of the plan."""
        self._override(causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale,
                       (rope_scale, rope_theta))
        return self.run(q, k, v)

    def forward_return_lse(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """``forward`` that returns ``(output, lse)``."""
        self._override(causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale,
                       (rope_scale, rope_theta))
        return self.run(q, k, v, return_lse=True)
