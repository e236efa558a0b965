"""Fixtures of all tests: devices that need no GPU, seeded numbers, and torch where it is installed."""

import importlib.util
import sys
from pathlib import Path

import numpy
import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
#: Selects the tests that need torch, which are skipped without it: ``-m torch``.
needs_torch = pytest.mark.torch


def pytest_addoption(parser):
    parser.addoption("--packages", help="a folder in which both wheels are installed")
    parser.addoption("--fuzz-calls", type=int, default=100_000, help="the number of random calls")
    parser.addoption("--fuzz-first", type=int, default=0, help="the number of the first random call")


def pytest_runtest_setup(item):
    if not HAS_TORCH and item.get_closest_marker("torch"):
        pytest.skip("torch is not installed")


class OnDevice:
    """Integers that claim to be in the memory of GPU 0."""

    def __init__(self, dtype="<i4", length=2):
        self.shape = (length,)
        self.__cuda_array_interface__ = {"data": (1 << 20, False), "shape": self.shape, "typestr": dtype, "version": 3}


@pytest.fixture
def rng():
    """Random numbers, equal in every run."""
    return numpy.random.default_rng(7)


@pytest.fixture(params=["cpu", "simulator"])
def host(request):
    """Computes with tensors on the host on the CPU, then by the GPU kernels in the simulator."""
    import tilewright

    previous = tilewright.set_host_device(request.param)
    yield request.param
    tilewright.set_host_device(previous)


@pytest.fixture
def no_host_reads(monkeypatch):
    """Fails if the package reads the value of a torch tensor on the host, which would wait for a GPU."""
    import tilewright
    import torch

    package = Path(tilewright.__file__).parent
    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):

        def read(tensor, *args, _name=name, _original=getattr(torch.Tensor, name), **options):
            if package in Path(sys._getframe(1).f_code.co_filename).parents:
                pytest.fail(f"{_name}() of a tensor of shape {tuple(tensor.shape)}")
            return _original(tensor, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, read)
