"""Driver calls of operators, counted by the driver double in place of ``libcuda.so.1``. Without it, in an installed wheel, these tests are
skipped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tilewright
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
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(DOUBLE)

    def run(scenario: str, **variables) -> dict:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TILEWRIGHT_CACHE": str(tmp_path / "kernels"), **variables}
        command = [sys.executable, Path(__file__).with_name("driver_calls.py"), scenario]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def with_bundle(tmp_path):
    """A copy of the package with a bundle beside its extension, made by the command line with the double as the assembler."""
    program = DOUBLE.with_name("tilewright")
    if not program.exists():
        pytest.skip("the command line is not built")
    package = tmp_path / "installed" / "tilewright"
    shutil.copytree(Path(tilewright.__file__).parent, package, ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    shutil.copy(Path(_core.__file__).resolve(), package / Path(_core.__file__).name)
    bundle = package / "tilewright-kernels"
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "TILEWRIGHT_CACHE": "jit", "PATH": ""}
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(DOUBLE)
    patterns = ["attention_f16_f16_d128_128*", "attention_scalar_f16_f16_d128_128", "append*", "rmsnorm*", "rope*", "sample*"]
    subprocess.run([program, "kernels", "bundle", bundle, *patterns], env=environment, check=True, capture_output=True)
    return package.parent


def test_an_installed_package_loads_kernels_from_its_bundle(with_bundle, on_double, tmp_path):
    """Without a setting. Other kernels are compiled, and kept in the cache."""
    found = on_double("sources", PYTHONPATH=str(with_bundle))
    sources = found["sources"]
    assert sources["bundle"] == str(with_bundle / "tilewright" / "tilewright-kernels")
    assert sources["folder"] == str(tmp_path / "kernels")
    assert sources["refusal"] is None
    # nine of attention; append, norm and RoPE. Those of bound sinks and of a small vocabulary are no common ones
    assert (sources["bundled"], sources["cached"]) == (12, 0)
    others = len(list((tmp_path / "kernels").glob("*.kernel")))
    assert sources["assembled"] == others == 10
    # kernels with setmaxnreg are loaded as text
    assert names(found["calls"]).count("cuLinkCreate_v2") == others - 3

    again = on_double("sources", PYTHONPATH=str(with_bundle))
    assert "cuLinkCreate_v2" not in names(again["calls"])
    assert (again["sources"]["bundled"], again["sources"]["cached"]) == (12, others)

    compiled = on_double("sources", PYTHONPATH=str(with_bundle), TILEWRIGHT_CACHE="jit")["sources"]
    assert (compiled["bundle"], compiled["folder"], compiled["bundled"], compiled["cached"]) == (None, None, 0, 0)
    assert compiled["assembled"] == 12 + others


def test_a_damaged_bundle_costs_time_only(with_bundle, on_double):
    for kernel in (with_bundle / "tilewright" / "tilewright-kernels").iterdir():
        kernel.write_bytes(kernel.read_bytes()[:-1])
    sources = on_double("sources", PYTHONPATH=str(with_bundle))["sources"]
    assert (sources["bundled"], sources["cached"]) == (0, 0)
    assert sources["assembled"] == 22
    assert sources["refusal"].endswith("its checksum is wrong")


def test_devices_of_the_host_compile_nothing():
    assert tilewright.Device("cpu").kernel_sources() is None


def names(calls: list) -> list:
    return [name for name, *_ in calls]


def test_a_decode_step_launches_and_does_nothing_else(on_double):
    """No allocation, free, synchronization, copy to the host, query of a pointer, or load of a kernel after the first step."""
    parts = on_double("decode_step")
    # the tensor maps of keys and values are encoded by the host
    run = LAUNCH[:-2] + 2 * ["cuTensorMapEncodeTiled"] + LAUNCH[-2:]
    expected = {"append": 2 * LAUNCH, "rmsnorm": LAUNCH, "apply_rope": LAUNCH, "run": run, "run_sinks": run, "sample": LAUNCH,
                "replan": UPLOAD, "replan_large": 2 * UPLOAD}
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
    wait = "one waits for other"
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


def test_the_checked_mode_verifies_tensors_and_index_arrays(on_double):
    parts = on_double("checked", TILEWRIGHT_CHECK="1")
    calls = names(parts["rmsnorm"])
    # the first and the last byte of three tensors, then the work before the operator and its own
    assert calls.count("cuPointerGetAttributes") == 6
    assert [name for name in calls if name in ("cuStreamSynchronize", "cuLaunchKernelEx")] == [
        "cuStreamSynchronize", "cuLaunchKernelEx", "cuStreamSynchronize"]
    captured = names(parts["rmsnorm_in_capture"])
    assert captured.count("cuPointerGetAttributes") == 6
    assert captured.count("cuLaunchKernelEx") == 1
    assert "cuStreamSynchronize" not in captured
    # four arrays for each of K and V
    assert names(parts["append"]).count("cuMemcpyDtoHAsync_v2") == 8

    errors, addresses = parts["errors"], parts["addresses"]
    assert errors["mapped"] == errors["skipped"] == errors["block_tables"] == ""
    assert errors["host"] == (f"norm.rmsnorm: weight: pointer {addresses['host']:#x} is not memory of GPU 0: the driver does not know it "
                              "(memory of the host?)")
    last = f"pointer {addresses['short'] + 1023:#x} is not memory of GPU 0"
    assert errors["short"].startswith(f"norm.rmsnorm: weight, last of 1024 bytes: {last}")
    assert errors["batch_indices"] == "kv.append_to_slots: token 2: batch_index = 4 is not in 0..4, nor -1 to skip the token"
    assert errors["positions"] == "kv.append_to_slots: token 3: position = 1000 is not in 0..128 of request 3"
    assert errors["no_page"] == "attention.run: page indices: entry 0 = 32 is not in 0..32, the pages of the cache"


def test_the_checked_mode_is_on_or_off(on_double):
    with pytest.raises(AssertionError, match='gpu.checks: TILEWRIGHT_CHECK = "yes", expected 1 or 0'):
        on_double("checked", TILEWRIGHT_CHECK="yes")
