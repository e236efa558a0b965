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


def is_sm90a_supported(device) -> bool:
    """Whether a GPU is Hopper."""
    return torch.cuda.is_available() and get_compute_capability(device)[0] == 9


def determine_attention_backend(device, *args, **kwargs) -> str:
    """``"fa3"`` on Hopper, else ``"fa2"``: names only, because all backends select the same kernels."""
    return "fa3" if is_sm90a_supported(device) else "fa2"


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least ``x`` and 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()
