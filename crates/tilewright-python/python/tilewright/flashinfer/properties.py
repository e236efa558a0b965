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
