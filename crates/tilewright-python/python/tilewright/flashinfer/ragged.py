"""Stateless attention over ragged keys: the prefill of DeepSeek, without ``plan``."""

import math

import torch

from .._core import Error
from ..attention import Batch
from ._pages import host_array
from ._planned import PlannedAttention, Settings, check_output_dtype, dtype_names, planned_device, sinks_of
from ._refuse import check_choice, refuse

#: The plans kept, one per workspace and stream. Those of recorded graphs are kept for good.
_LIMIT = 64
_plans: dict = {}
_recorded: dict = {}


def trtllm_ragged_attention_deepseek(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size,
    window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
    skip_softmax_threshold_scale_factor=None, out=None, lse=None, sage_attn_sfs=(None, None, None, None),
    num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend="trtllm-gen", q_seq_lens_cpu=None, kv_seq_lens_cpu=None,
    use_fp16_softmax=None, uses_spcompress=None, skip_all_rows_active_check=False,
):
    """Attention of ragged requests: ``query`` ``[num_rows, num_qo_heads, head_dim_qk]``, ``key`` ``[num_tokens, num_kv_heads,
    head_dim_qk]``, ``value`` ``[num_tokens, num_kv_heads, head_dim_vo]``, bounds ``[batch_size + 1]`` in ``cum_seq_lens_q`` and
    ``cum_seq_lens_kv``, and causal bottom-right if ``is_causal``.

    ``bmm1_scale`` is the factor of ``q · k``, ``bmm2_scale`` that of outputs: numbers, or tensors of one element. Outputs have
    the dtype of ``out``, else that of queries, bfloat16 for those of float8_e4m3fn. Returns the output, or ``(output, lse)`` in
    base 2 with ``lse`` ``[num_rows, num_qo_heads]``. A request without keys gives 0 and -inf. The batch is planned on the host:
    bounds on a GPU are copied, which waits, unless ``q_seq_lens_cpu`` and ``kv_seq_lens_cpu`` ``[batch_size]`` are there; equal
    bounds in the next call are not planned again. ``seq_lens``, ``max_q_len`` and ``max_kv_len`` repeat the bounds,
    ``o_sf_scale`` belongs to outputs of FP4, and ``enable_pdl``, ``backend`` and ``skip_all_rows_active_check`` are hints
    without effect.
    """
    function = "trtllm_ragged_attention_deepseek"
    check_choice(function, "backend", backend, ("auto", "trtllm-gen", "cute-dsl"))
    refuse(function, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, use_fp16_softmax=use_fp16_softmax,
           uses_spcompress=uses_spcompress)
    refuse(function, "four times None", sage_attn_sfs=None if all(one is None for one in sage_attn_sfs) else sage_attn_sfs)
    refuse(function, "four times 0",
           num_elts_per_sage_attn_blk=num_elts_per_sage_attn_blk if any(num_elts_per_sage_attn_blk) else None)
    if (q_seq_lens_cpu is None) != (kv_seq_lens_cpu is None):
        raise Error(f"flashinfer.{function}: one of q_seq_lens_cpu and kv_seq_lens_cpu is None, expected both or none")
    if query.is_cuda and q_seq_lens_cpu is None and torch.cuda.is_current_stream_capturing():
        raise Error(f"flashinfer.{function}: q_seq_lens_cpu = None in a capture, expected the lengths on the host")
    is_narrow = query.dtype == torch.float8_e4m3fn
    dtype = out.dtype if out is not None else torch.bfloat16 if is_narrow else query.dtype
    if dtype not in ((torch.float16, torch.bfloat16) if is_narrow else (query.dtype,)):
        refuse(function, "float16 or bfloat16" if is_narrow else f"one of {query.dtype}", out=str(dtype))
    bounds = (("cum_seq_lens_q", cum_seq_lens_q, "q_seq_lens_cpu", q_seq_lens_cpu),
              ("cum_seq_lens_kv", cum_seq_lens_kv, "kv_seq_lens_cpu", kv_seq_lens_cpu))
    return attend_ragged(function, (query, key, value, workspace_buffer), bounds, batch_size, scales=(bmm1_scale, bmm2_scale),
                         outputs=(out, lse, return_lse, dtype), causal=is_causal, window_left=window_left, sinks=attention_sinks)


def attend_ragged(function, tensors, bounds, batch_size, *, scales, outputs, causal, window_left, sinks, soft_cap=None,
                  pos_encoding_mode="NONE", chunk=0):
    """Attention of ragged requests. ``tensors``: queries, keys, values and workspace. ``bounds`` of rows and of keys: a name and
    the bounds, and optionally a name and lengths on the host. ``scales`` of logits and outputs. ``outputs``: ``out``, ``lse``,
    ``return_lse`` and ``out_dtype``."""
    (query, key, value, workspace), (out, lse, return_lse, out_dtype) = tensors, outputs
    bounds = [_bounds(function, batch_size, *one) for one in bounds]
    dtypes = dtype_names(query.dtype, key.dtype, out_dtype if out is None else out.dtype)
    check_output_dtype(function, dtypes, "out_dtype" if out is None else "out")
    device = planned_device(query)
    settings = Settings(
        heads=(query.shape[1], key.shape[1]), dims=(query.shape[2], value.shape[2]), dtypes=dtypes, layout="NHD", causal=causal,
        window_left=window_left, soft_cap=soft_cap, chunk=chunk, pos_encoding_mode=pos_encoding_mode, sinks=sinks is not None,
    )
    planned = _planned(settings, bounds, device, workspace)
    # logits have the factor 1 / sqrt(head_dim_qk) without scales
    return planned.run(settings, query, (key, value), out, lse=lse, return_lse=return_lse,
                       scales=(None, scales[0] * math.sqrt(query.shape[2]), scales[1]), tables=sinks_of(sinks, query))


def _bounds(function, batch_size, bounds_name, bounds, lens_name=None, lens=None):
    """The bounds of the requests on the host, a list."""
    if lens is not None:
        if lens.device.type != "cpu" or tuple(lens.shape) != (batch_size,):
            raise Error(f"flashinfer.{function}: {lens_name} is on {lens.device} with shape {tuple(lens.shape)}, expected "
                        f"({batch_size},) on the host")
        return [0, *lens.cumsum(0).tolist()]
    if len(bounds) != batch_size + 1:
        raise Error(f"flashinfer.{function}: {bounds_name} has {len(bounds)} bounds, expected batch_size + 1 = "
                    f"{batch_size + 1}")
    return host_array(bounds).tolist()


def _planned(settings, bounds, device, workspace):
    """The planned batch, which an earlier call may have planned: the last one with this workspace and stream, or in a capture
    one that is recorded, which is never rewritten."""
    key, batch = (workspace.data_ptr(), id(device), device.current_stream()), (settings.plan_key(), *map(tuple, bounds))
    if workspace.is_cuda and torch.cuda.is_current_stream_capturing():
        plans, key = _recorded, (*key, batch)
    else:
        plans = _plans
    planned, last = plans.get(key, (None, None))
    if last != batch:
        planned = PlannedAttention(device) if planned is None else planned
        if len(_plans) >= _LIMIT:
            del _plans[next(iter(_plans))]
        plans.pop(key, None)  # a failed plan is not kept
        planned.plan(settings, Batch.ragged(*bounds))
        plans[key] = planned, batch
    return planned
