"""Driver calls of operators, counted by the driver double in place of ``libcuda.so.1``. Without it, in an installed wheel, these tests are
skipped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tilewright import _core

DOUBLE = Path(_core.__file__).resolve().with_name("libtilewright_driver_double.so")
pytestmark = pytest.mark.skipif(not DOUBLE.exists(), reason="the driver double is not built")

#: The calls of a launch: the current context, whether the launch is captured, and the launch, whose stream is a line of its own.
LAUNCH = ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuLaunchKernelEx", "launch"]
#: The calls of a copy from staging memory: it takes a slot whose last copy is done, and marks the end of the new one.
UPLOAD = ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuEventQuery",
          "cuThreadExchangeStreamCaptureMode", "cuMemcpyHtoDAsync_v2", "cuEventRecord"]


@pytest.fixture
def on_double(tmp_path):
    """Runs a scenario of ``driver_calls.py`` with the double as the driver; returns the calls of its parts."""
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).symlink_to(DOUBLE)

    def run(scenario: str, **variables) -> dict:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TILEWRIGHT_CACHE": str(tmp_path / "kernels"), **variables}
        command = [sys.executable, Path(__file__).with_name("driver_calls.py"), scenario]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def names(calls: list) -> list:
    return [name for name, *_ in calls]


def test_a_decode_step_launches_and_does_nothing_else(on_double):
    """No allocation, free, synchronization, copy to the host, query of a pointer, or load of a kernel after the first step."""
    parts = on_double("decode_step")
    expected = {"append": 2 * LAUNCH, "rmsnorm": LAUNCH, "apply_rope": LAUNCH, "run": LAUNCH, "sample": LAUNCH, "replan": UPLOAD,
                "replan_large": 2 * UPLOAD}
    assert list(parts) == list(expected)
    for part, steps in parts.items():
        assert [names(step) for step in steps[1:]] == [expected[part]] * 3, part
    # the first step shows that the log has the other calls
    first = names(sum((steps[0] for steps in parts.values()), []))
    assert {"cuModuleLoadDataEx", "cuMemAllocFromPoolAsync", "cuStreamSynchronize"} <= set(first)
