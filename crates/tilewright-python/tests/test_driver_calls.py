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


def order(calls: list, streams: dict) -> list:
    """The launches, copies, frees and waits on streams, by their names."""
    recorded, steps = {}, []
    for name, *args in calls:
        if name == "cuEventRecord":
            recorded[args[0]] = streams[args[1]]
        elif name == "cuStreamWaitEvent":
            steps.append(f"{streams[args[0]]} waits for {recorded[args[1]]}")
        elif name in ("launch", "cuMemcpyHtoDAsync_v2", "cuMemFreeAsync"):
            steps.append(f"{name} on {streams[args[-1]]}")
        elif name in ("cuMemFree_v2", "cuCtxSynchronize", "cuStreamSynchronize"):
            steps.append(name)
    return steps


def test_work_on_a_plan_follows_that_of_other_streams(on_double):
    """Runs, replans and frees wait for the previous work on the plan's memory, and on its workspace."""
    parts = on_double("streams")
    streams = {parts.pop(name): name for name in ("one", "other")}
    steps = {part: order(calls, streams) for part, calls in parts.items()}
    copy, free = "cuMemcpyHtoDAsync_v2 on one", "cuMemFreeAsync on one"
    wait, synchronize = "one waits for other", "cuCtxSynchronize"
    assert steps["run"] == ["launch on one"]
    assert steps["run_on_other"] == ["other waits for one", "other waits for one", "launch on other"]
    assert steps["run_on_other_again"] == ["launch on other"]
    assert (steps["replan"], steps["replan_again"]) == ([wait, copy], [copy])
    # the workspace was last used by the run
    assert steps["free"] == [free, wait, free]
    assert steps["free_after_other"] == [wait, free] * 2
    # the plan, its flags, its number of requests and its bounds of rows; a run has the workspace too
    assert steps["device_plan_on_other"] == ["other waits for one"] * 5 + ["launch on other"]
    assert steps["device_replan"] == [wait] * 4 + ["launch on one"]
    assert steps["free_in_capture"] == []
    assert steps["plan_after_capture"] == [wait, free] * 2 + [copy, free, free]
    assert steps["free_after_destroyed"] == [synchronize, free] * 2
    assert steps["free_on_destroyed"] == [free, synchronize, "cuMemFree_v2"] * 2
