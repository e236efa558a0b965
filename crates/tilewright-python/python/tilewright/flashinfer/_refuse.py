"""Refusals of arguments that have no meaning here, and conversions of those that have."""

import math

import torch

from .._core import Error, Unsupported
from .._tensors import dtype_name

#: Backends of FlashInfer whose semantics this package has; they all select the same kernels here.
BACKENDS = ("auto", "fa2", "fa3")


def refuse(function: str, expected: str = "None", **arguments) -> None:
    """Rejects each argument that is not ``None``, ``False`` or empty."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise Unsupported(f"flashinfer.{function}: {name} = {shown[:80]}, expected {expected}")


def check_backend(function: str, backend: str, backends=BACKENDS) -> None:
    """Rejects backends with arguments of their own."""
    if backend not in backends:
        raise Unsupported(f"flashinfer.{function}: backend = {backend!r}, expected one of {', '.join(backends)}")


def check_layout(function: str, kv_layout: str) -> None:
    """Rejects unknown layouts."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"flashinfer.{function}: kv_layout = {kv_layout!r}, expected 'NHD' or 'HND'")


def check_choice(function: str, name: str, value, choices) -> None:
    """Rejects a value outside ``choices``."""
    if value not in choices:
        raise Error(f"flashinfer.{function}: {name} = {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_output(function: str, name: str, out, shape, dtype, device) -> None:
    """Rejects an output of another shape, dtype or device."""
    if out.shape != shape:
        raise Error(f"flashinfer.{function}: {name} has shape {tuple(out.shape)}, expected {tuple(shape)}")
    if out.dtype != dtype:
        raise Error(f"flashinfer.{function}: {name} is {out.dtype}, expected {dtype}")
    if out.device != device:
        raise Error(f"flashinfer.{function}: {name} is on {out.device}, expected {device}")


def torch_dtype(dtype):
    """The torch dtype of a dtype or its name."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype_name(dtype))


def number(function: str, name: str, value, default: float = 1.0) -> float:
    """A scale as a number; reading one from a GPU waits for it."""
    if value is None:
        return default
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise Unsupported(f"flashinfer.{function}: {name} has shape {tuple(value.shape)}, expected one number")
        return float(value)
    return float(value)


def positive(function: str, name: str, value) -> float:
    """A scale of at least the smallest positive number."""
    scale = number(function, name, value)
    if not 0.0 < scale < math.inf:
        raise Error(f"flashinfer.{function}: {name} = {scale}, expected a finite number above 0")
    return scale


def output_scale(function: str, name: str, value):
    """A scale of outputs: a number above 0, or a tensor of one element on a GPU, which is not read."""
    if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1:
        return value.detach().float().reshape(())
    return positive(function, name, value)


def one_number(function: str, name: str, value, like):
    """A scale as a tensor float32 ``[1]`` on the device of ``like``, without waiting for a GPU."""
    if not isinstance(value, torch.Tensor):
        return torch.full((1,), value, dtype=torch.float32, device=like.device)
    if value.numel() != 1:
        raise Error(f"flashinfer.{function}: {name} has shape {tuple(value.shape)}, expected one number")
    return value.to(like.device, torch.float32).reshape(1)


def served(*backends):
    """Marks a function with the queries of FlashInfer: the backends that it accepts, which all select the same kernels."""

    def mark(function):
        function.is_compute_capability_supported = lambda capability: capability >= 80
        function.is_backend_supported = lambda backend, capability=None: backend in backends
        function._backends = backends
        return function

    return mark
