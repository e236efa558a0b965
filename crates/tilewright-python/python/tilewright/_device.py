"""Devices, and the queue on which an operator of given tensors runs."""

import functools
import sys

from . import _core
from ._tensors import HOST, device_number


class Device:
    """A device: ``"cpu"``, ``"simulator"`` (the GPU kernels, executed on the CPU), ``"cuda"`` or ``"cuda:N"``.

    ``threads`` is for the CPU; by default one per hardware thread. A device of CUDA runs on torch's current stream if torch was
    imported, else on the default stream.
    """

    def __init__(self, name: str = "cpu", threads: "int | None" = None):
        self._core = _core.Device(name, threads)
        self._queues: dict = {}
        self._ordinal = _ordinal(name)
        #: Returns torch's current stream as a number: 0 without torch, and for devices without streams.
        self.current_stream = self._first_stream

    @property
    def name(self) -> str:
        """The name, as it was passed."""
        return self._core.name

    def describe(self) -> str:
        """The hardware."""
        return self._core.describe()

    def kernel_sources(self) -> "dict | None":
        """The sources of the kernels loaded so far: the folders ``bundle`` and ``folder``, or None, the numbers of kernels that were
        ``bundled``, ``cached`` and ``assembled`` by the driver, and ``refusal``, the reason why a bundled kernel was not used. None for
        devices of the host."""
        return self._core.kernel_sources()

    def queue(self) -> "_core.Queue":
        """The queue of the current stream."""
        stream = self.current_stream()
        return self._queues.get(stream) or self.queue_of(stream)

    def queue_of(self, stream: int) -> "_core.Queue":
        """The queue of a stream by its number (``cudaStream_t``); 0 is the default one."""
        queue = self._queues.get(stream) if isinstance(stream, int) else None
        if queue is None:
            _check_stream(stream)
            if len(self._queues) >= 256:
                self._queues.clear()
            queue = self._queues[stream] = self._core.queue(stream)
        return queue

    def _first_stream(self) -> int:
        """The current stream. Calls after torch has initialized CUDA go to torch's own function."""
        torch = sys.modules.get("torch")
        if self._ordinal == HOST or torch is None or not torch.cuda.is_initialized():
            return 0
        self.current_stream = functools.partial(torch._C._cuda_getCurrentRawStream, self._ordinal)
        return self.current_stream()

    def __repr__(self) -> str:
        return f"Device({self.name!r})"


def _check_stream(stream) -> None:
    """Rejects what is not the number of a stream."""
    if not isinstance(stream, int):
        raise _core.Error(f"device.queue_of: stream is of type {type(stream).__name__}, expected the number of a stream "
                          "(cudaStream_t), such as cuda_stream of torch's")
    if not 0 <= stream < 1 << 64:
        raise _core.Error(f"device.queue_of: stream = {stream}, expected a number of 64 bits from 0")


def _ordinal(name: str) -> int:
    """The GPU of a device's name; -1 for the host."""
    if not name.startswith("cuda"):
        return HOST
    return int(name.partition(":")[2] or 0)


_devices: dict = {}
_host: "Device | None" = None


def host_device() -> Device:
    """The device that computes with tensors in host memory; by default the CPU."""
    global _host
    if _host is None:
        _host = Device("cpu")
    return _host


def set_host_device(device: "Device | str") -> Device:
    """Chooses the device for tensors in host memory: ``"cpu"`` or ``"simulator"``. Returns the previous one."""
    global _host
    previous = host_device()
    device = Device(device) if isinstance(device, str) else device
    if device._ordinal != HOST:
        raise _core.Error(f"device: {device.name!r} has memory of its own, expected \"cpu\" or \"simulator\"")
    _host = device
    return previous


def device_of(x) -> Device:
    """The device that computes with tensors like ``x``."""
    number = device_number(x)
    if number == HOST:
        return host_device()
    device = _devices.get(number)
    if device is None:
        device = _devices[number] = Device(f"cuda:{number}")
    return device


_named: dict = {}


def device_named(name: str) -> Device:
    """The device of a name, which all operators share: one runs the plans of the other, and they share loaded kernels."""
    if host_device().name == name:
        return host_device()
    device = _named.get(name)
    if device is None:
        device = Device(name)
        if device._ordinal != HOST:
            device = _devices.setdefault(device._ordinal, device)
        _named[name] = device
    return device


def queue_of(x) -> "_core.Queue":
    """The queue for tensors like ``x``."""
    if getattr(x, "is_cuda", False):
        # the lookups of device_of and Device.queue without their calls
        try:
            device = _devices[x.get_device()]
            return device._queues[device.current_stream()]
        except KeyError:
            pass
    return device_of(x).queue()
