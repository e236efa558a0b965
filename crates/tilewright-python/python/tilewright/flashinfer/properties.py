"""Enumerations and properties of devices; served as ``flashinfer.utils``."""

import enum

import torch

from .._core import Unsupported


class GPUArchitectureError(Unsupported):
    """A GPU lacks what was requested."""


class PosEncodingMode(enum.Enum):
    """The positions that attention applies itself."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    """The mask of a request."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    """The axis order of a cache."""

    NHD = 0
    HND = 1


def get_compute_capability(device) -> "tuple[int, int]":
    """Major and minor compute capability of a GPU."""
    return torch.cuda.get_device_capability(device.index if isinstance(device, torch.device) else device)


def _has_major(device, *majors: int) -> bool:
    """Whether the GPU has one of these major compute capabilities."""
    return torch.cuda.is_available() and get_compute_capability(device)[0] in majors


def is_sm90a_supported(device) -> bool:
    """Whether a GPU is Hopper."""
    return _has_major(device, 9)


def is_sm100a_supported(device) -> bool:
    """Whether a GPU is Blackwell of data centers."""
    return _has_major(device, 10)


def is_sm110a_supported(device) -> bool:
    """Whether a GPU is Thor."""
    return _has_major(device, 11)


def is_sm12x_supported(device) -> bool:
    """Whether a GPU is Blackwell of workstations."""
    return _has_major(device, 12)


def device_support_pdl(device) -> bool:
    """Whether a GPU has programmatic dependent launch."""
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9


def has_flashinfer_jit_cache() -> bool:
    """True: no kernel waits for FlashInfer's compiler."""
    return True


def determine_attention_backend(device, *args, **kwargs) -> str:
    """``"fa3"`` on Hopper, else ``"fa2"``: names only, because all backends select the same kernels."""
    return "fa3" if is_sm90a_supported(device) else "fa2"


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least ``x`` and 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def _get_range_buf(seq_len: int, device) -> torch.Tensor:
    """``0 .. seq_len`` int32: engines import the name for the bounds of decode rows."""
    return torch.arange(seq_len, dtype=torch.int32, device=device)


def ceil_div(x: int, y: int) -> int:
    """The quotient, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of ``y`` that is at least ``x``."""
    return ceil_div(x, y) * y


def get_device_sm_count(device) -> int:
    """The number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def determine_gemm_backend(device) -> str:
    """``"sm90"`` on Hopper, else ``"sm80"``: names only."""
    return "sm90" if is_sm90a_supported(device) else "sm80"


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """A size for ``multi_ctas_kv_counter_buffer``, which is not read: plans own their counters."""
    return 4 * max(batch_size * num_qo_heads, sm_count)


class FP4Tensor:
    """FlashInfer's tensor of FP4 with its scales, for GPUs after Hopper. Engines import the name."""

    def __init__(self, *args, **kwargs):
        raise Unsupported("flashinfer.FP4Tensor: FP4 needs SM100, expected tensors of at least 8 bits")
