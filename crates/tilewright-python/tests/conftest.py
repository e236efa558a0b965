"""Fixtures of all tests: devices that need no GPU, seeded numbers, and torch where it is installed."""

import importlib.util

import numpy
import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


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
