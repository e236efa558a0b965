"""Tensor arguments: their devices and dtypes, host arrays, and outputs in the caller's library."""

import functools
import sys

from ._core import Error, Unsupported

HOST = -1


def _torch():
    """The torch module if it was imported, else None."""
    return sys.modules.get("torch")


def is_torch(x) -> bool:
    """Whether ``x`` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def shape_of(x) -> tuple:
    """The shape of a tensor of any library."""
    shape = getattr(x, "shape", None)
    if shape is None:
        raise Error(f"tensor: {type(x).__name__} is not a tensor, expected a NumPy array, a torch tensor or an object "
                    "with __dlpack__")
    return tuple(shape)


def torch_device_number(x) -> int:
    """The GPU of a torch tensor; -1 for the host."""
    device = x.device
    if device.type == "cpu":
        return HOST
    if device.type == "cuda":
        return device.index or 0
    raise Error(f"tensor: it is on device {device.type!r}, expected \"cpu\" or \"cuda\"")


def device_number(x) -> int:
    """The GPU of a tensor of any library; -1 for the host."""
    if getattr(x, "is_cuda", False):
        return x.get_device()
    if is_torch(x):
        return torch_device_number(x)
    if hasattr(x, "__array_interface__"):
        return HOST
    if hasattr(x, "__dlpack_device__"):
        kind, number = x.__dlpack_device__()
        return int(number) if int(kind) in (2, 13) else HOST
    if hasattr(x, "__cuda_array_interface__"):
        return int(getattr(getattr(x, "device", 0), "id", 0))
    return HOST


def dtype_name(dtype) -> str:
    """The name of a dtype: ``"float16"`` for itself, ``numpy.float16`` and ``torch.float16``."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if name is None:
        raise Error(f"tensor: dtype = {dtype!r}, expected a name or a dtype of NumPy or torch")
    return str(name)


def empty(shape, dtype: str, like):
    """An uninitialized tensor in the library and on the device of ``like``."""
    if is_torch(like):
        return empty_of_torch(tuple(shape), getattr(_torch(), dtype), like)
    if hasattr(like, "__array_interface__"):
        import numpy

        known = like.dtype if like.dtype.name == dtype else _numpy_dtype(dtype)
        return numpy.empty(tuple(shape), dtype=known)
    raise Unsupported(f"tensor: out = None with {type(like).__name__}, expected out for a library other than NumPy and torch")


def empty_of_torch(shape: tuple, dtype, like):
    """``like.new_empty(shape, dtype=dtype)``; on the current GPU without torch's dispatcher, in half the time, so not while a
    function is traced."""
    torch = sys.modules["torch"]
    number = like.get_device()
    if number < 0 or type(like) is not torch.Tensor or number != torch._C._cuda_getDevice():
        # torch parses numbers faster than a tuple
        return like.new_empty(*(shape or ((),)), dtype=dtype)
    if len(shape) == 3:
        strides = (shape[1] * shape[2], shape[2], 1)
    else:
        stride, strides = 1, ()
        for extent in shape[::-1]:
            strides, stride = (stride, *strides), stride * extent
    return _allocation(torch)(shape, strides, dtype)


@functools.cache
def _allocation(torch):
    """The allocation of the code that torch.compile generates; older releases have the slower one only."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(guards, "_empty_strided_cuda", None)
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"))


def _numpy_dtype(name: str):
    """The dtype of NumPy, or of ml_dtypes, which has those that NumPy lacks."""
    import numpy

    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(f"tensor: out = None of {name}, which NumPy lacks, expected out or the package ml_dtypes") from None
    return numpy.dtype(getattr(ml_dtypes, name))


def from_list(values, dtype: str, like, shape=None):
    """A tensor of numbers in the library and on the device of ``like``; NumPy for sequences."""
    if is_torch(like):
        torch = _torch()
        tensor = torch.tensor(values, dtype=getattr(torch, dtype), device=like.device)
        return tensor if shape is None else tensor.reshape(shape)
    import numpy

    array = numpy.asarray(values, dtype=dtype)
    return array if shape is None else array.reshape(shape)


def from_bytes(data: bytes, dtype: str, like):
    """A tensor of numbers in the library and on the device of ``like``; NumPy for sequences."""
    if is_torch(like):
        torch = _torch()
        kind = getattr(torch, dtype)
        tensor = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
        return tensor.to(like.device)
    import numpy

    return numpy.frombuffer(data, dtype=dtype).copy()


def on_host(x):
    """An index or parameter array on the host; copies one from a GPU, which waits for it."""
    if x is None:
        return None
    if is_torch(x):
        return x if x.is_cpu and not x.requires_grad else x.detach().cpu()
    if hasattr(x, "__cuda_array_interface__") and hasattr(x, "get"):
        return x.get()  # CuPy
    return x


def device_indices(x, dtype: str = "int32"):
    """An index array where it is; a torch tensor on a GPU is converted to ``dtype`` there, without waiting."""
    if getattr(x, "is_cuda", False):
        wanted = getattr(_torch(), dtype)
        if x.dtype != wanted:
            x = x.to(wanted)
        return x if x.is_contiguous() else x.contiguous()
    return x


def bindable(operator: str, name: str, x):
    """The elements of a contiguous torch tensor of float32, which runs read where it is; ``None`` for others on the host."""
    if not is_torch(x):
        return None
    if x.dtype is _torch().float32 and x.is_contiguous():
        return x.detach().reshape(-1)
    if x.is_cpu:
        return None
    raise Error(f"{operator}: {name} is {x.dtype} with strides {x.stride()} on {x.device}, expected a contiguous tensor of float32")


def device_bytes(x):
    """An array of bytes or words where it is; one on a GPU has one axis without gaps."""
    return x.reshape(-1).contiguous() if getattr(x, "is_cuda", False) else on_host(x)


def same_memory(a, b) -> bool:
    """Whether two arguments are the same tensor, or views of the same elements."""
    if a is b:
        return True
    if is_torch(a) and is_torch(b):
        return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    one, other = getattr(a, "__array_interface__", None), getattr(b, "__array_interface__", None)
    return one is not None and one == other
