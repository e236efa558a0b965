"""Minimal stand-ins of vLLM 0.33.0 and SGLang 0.5.23, for machines without them.

They have the names that ``tilewright.vllm``, ``tilewright.sglang`` and ``tilewright.engines`` import, with the base classes' behavior
that the drivers use. An installed engine is used instead.
"""

import abc
import dataclasses
import enum
import importlib.util
import sys
import types
import typing

import torch

M = typing.TypeVar("M")


def has_engine(name: str) -> bool:
    """Whether the engine itself is installed."""
    if name in sys.modules:
        return not getattr(sys.modules[name], "is_standin", False)
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder without code has no origin


def ensure_vllm() -> None:
    """Installs the stand-in of vLLM unless vLLM is installed."""
    if "vllm" in sys.modules or has_engine("vllm"):
        return
    overrides = {}
    registry = {"AttentionBackendEnum": enum.Enum("AttentionBackendEnum", {"CUSTOM": 1}), "OVERRIDES": overrides,
                "register_backend": lambda backend, class_path=None, is_mamba=False: overrides.update({backend: class_path})}
    _install("vllm.v1.attention.backend", _vllm_backend())
    _install("vllm.v1.attention.backends.registry", registry)


def _vllm_backend() -> dict:
    class AttentionBackend(abc.ABC):
        pass

    class AttentionMetadata:
        pass

    class AttentionImpl(abc.ABC, typing.Generic[M]):
        pass

    class AttentionMetadataBuilder(abc.ABC, typing.Generic[M]):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    class AttentionType(str, enum.Enum):
        DECODER, ENCODER, ENCODER_ONLY = "decoder", "encoder", "encoder_only"

    class AttentionCGSupport(enum.Enum):
        ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE, NEVER = 3, 2, 1, 0

    @dataclasses.dataclass(frozen=True)
    class MultipleOf:
        base: int

    @dataclasses.dataclass
    class CommonAttentionMetadata:
        query_start_loc: torch.Tensor
        query_start_loc_cpu: torch.Tensor
        seq_lens: torch.Tensor
        num_reqs: int
        num_actual_tokens: int
        max_query_len: int
        max_seq_len: int
        block_table_tensor: torch.Tensor
        slot_mapping: torch.Tensor
        causal: object = True
        seq_lens_cpu_upper_bound: object = None

    return dict(locals())


def ensure_sglang() -> None:
    """Installs the stand-in of SGLang unless SGLang is installed."""
    if "sglang" in sys.modules or has_engine("sglang"):
        return
    choices, backends = ["triton", "fa3", "flashinfer"], {}

    def register_attention_backend(name):
        return lambda function: backends.update({name: function})

    _install("sglang.srt.arg_groups.choices",
             {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend})
    _install("sglang.srt.layers.attention.attention_registry",
             {"ATTENTION_BACKENDS": backends, "register_attention_backend": register_attention_backend})
    for module, names in _sglang_classes().items():
        _install(f"sglang.srt.{module}", names)


def _sglang_classes() -> dict:
    class AttentionType(enum.Enum):
        DECODER, ENCODER_ONLY = "decoder", "encoder_only"

    class RadixAttention(torch.nn.Module):
        def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
                     sliding_window_size=-1, is_cross_attention=False, attn_type=AttentionType.DECODER):
            super().__init__()
            self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
            self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
            self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
            self.sliding_window_size, self.is_cross_attention = sliding_window_size, is_cross_attention
            self.attn_type, self.k_scale, self.v_scale, self.k_scale_float, self.v_scale_float = attn_type, None, None, None, None

    class AttentionBackend(abc.ABC):
        def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            mode = forward_batch.forward_mode
            function = self.forward_decode if mode.is_decode() else self.forward_extend
            return function(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    class ForwardMode(enum.IntEnum):
        EXTEND, DECODE, MIXED = 1, 2, 3

        def is_decode(self):
            return self == ForwardMode.DECODE

        is_decode_or_idle = is_decode

    @dataclasses.dataclass
    class KVWriteLoc:
        loc: torch.Tensor
        swa_loc: object = None

        @classmethod
        def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
            return cls(forward_batch.out_cache_loc, swa_loc)

    return {"layers.radix_attention": {"AttentionType": AttentionType, "RadixAttention": RadixAttention},
            "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
            "model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
            "mem_cache.kv_loc_plan": {"IdSpaceKind": enum.Enum("IdSpaceKind", "FULL SLIDING_WINDOW")},
            "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc}}


def _install(name: str, names: dict) -> None:
    """A module and its packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            module = sys.modules[path] = types.ModuleType(path)
            module.__path__, module.is_standin = [], True
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[name]).update(names)
