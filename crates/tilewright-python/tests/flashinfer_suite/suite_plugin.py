"""A pytest plugin that runs FlashInfer's own tests against ``tilewright.flashinfer``, on the CPU or with ``--gpu``.

It takes the place of their conftest.py (``--noconftest``): ``flashinfer`` is this package, tensors of ``cuda`` are on the CPU
without ``--gpu``, and the warm-up of their compiler does nothing. A seeded sample of small cases is run; outcomes by node id go to
a file.
"""

import contextlib
import gc
import importlib.util
import json
import pathlib
import random
import re
import sys
import time
import types

import parameters
import pytest
import torch
from torch.overrides import TorchFunctionMode

import tilewright.flashinfer
from tilewright.flashinfer import activation, cudnn, gemm, properties, topk


def pytest_addoption(parser):
    """The sample and the file of outcomes."""
    parser.addoption("--gpu", action="store_true", help="leave tensors of CUDA on the GPU")
    parser.addoption("--capability", default="9.0", metavar="MAJOR.MINOR",
                     help="the compute capability that tests see on the CPU")
    parser.addoption("--per-file", type=int, default=40, help="cases of each file")
    parser.addoption("--per-function", type=int, default=None, metavar="N",
                     help="collect about N random cases of each function: all of them take half a minute to collect")
    parser.addoption("--sample-seed", type=int, default=1, help="seed of the sample")
    parser.addoption("--largest", type=int, default=600, help="the largest number in the parameters of a case")
    parser.addoption("--shard", default="0/1", metavar="I/N", help="every N-th case of the sample, from case I on")
    parser.addoption("--seconds", type=float, default=float("inf"), help="begin no case after this time since the collection")
    parser.addoption("--outcomes", default=None, help="a JSON file of outcomes by node id")
    parser.addoption("--skip-outcomes", default=[], action="append", metavar="FILE",
                     help="cases with outcomes in this file have run")
    parser.addoption("--expected", default=str(pathlib.Path(__file__).with_name("expected.json")),
                     help="a JSON file of expected failures: reason to parts of node ids")


def _on_cpu(value):
    """The same argument with CUDA devices replaced by the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        return "cpu"
    return value


class _CpuMode(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        args = tuple(_on_cpu(value) for value in args)
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, device=_on_cpu(device))


#: Modules that their tests import and whose functions the sampled cases do not need.
_COMPILER = (
    "flashinfer.jit", "flashinfer.jit.core", "flashinfer.jit.env", "flashinfer.jit.utils", "flashinfer.jit.attention",
    "flashinfer.jit.attention.variants", "flashinfer.fp4_quantization", "flashinfer.quantization.nvfp4_quantization_utils",
    "flashinfer.trace", "flashinfer.cutile", "flashinfer.cutile.cutile_common",
    "flashinfer.jit.attention.pytorch", "tests.test_helpers.jit_utils", "jit_utils", "conftest", "flashinfer.jit.gemm",
    "flashinfer.gemm.kernels", "flashinfer.gemm.kernels.cutile",
    "flashinfer.gemm.kernels.cutile.bmm_bf16_cutile", "flashinfer.topk_varlen.kernels", "flashinfer.topk_varlen.kernels.config",
    "flashinfer.cute_dsl", "flashinfer.cute_dsl.utils",
)


class _Compiled(types.ModuleType):
    """A module of FlashInfer's compiler: every function of it returns nothing to build."""

    def __getattr__(self, name):
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {}) if name[0].isupper() else lambda *args, **kwargs: []


class _Helpers(types.ModuleType):
    """The helpers of their tests, from the checkout, which is the current folder. The first use loads them."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        spec = importlib.util.spec_from_file_location(self.__name__, "flashinfer/testing/utils.py")
        module = sys.modules[self.__name__] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def _check_8_bits(expected, found, max_mismatch_pct, **_) -> bool:
    """Whether at most this share of elements differs by more than a step of 8 bits."""
    differs = [~torch.isclose(a.float(), b.float(), rtol=0.1, atol=0.1) for a, b in zip(found, expected, strict=True)]
    return all(100 * one.float().mean() <= max_mismatch_pct for one in differs)


def _pretend_a_gpu(capability) -> _CpuMode:
    """Replaces the properties of a GPU by those of a small one; returns the mode that moves its tensors to the CPU."""
    properties.get_compute_capability = lambda device: capability
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.get_device_capability = lambda *args: capability
    torch.cuda.empty_cache = lambda: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        multi_processor_count=4, total_memory=8 << 30, major=capability[0], minor=capability[1], name="cpu")
    torch.cuda.mem_get_info = lambda *args: (0, 0)  # cases that need gigabytes are skipped
    torch.Generator = _Generator
    return _CpuMode()


def pytest_configure(config):
    """Installs the package and the replacements, if functions have the parameters of the checkout's."""
    config._device_mode, config._outcomes = contextlib.nullcontext(), {}
    tilewright.flashinfer.install()
    source = pathlib.Path("flashinfer")
    if source.exists() and pathlib.Path("version.txt").read_text(encoding="utf-8").strip() == tilewright.flashinfer.__version__:
        wrong = parameters.differences(source.parent)
        if wrong:
            raise pytest.UsageError("\n".join(["functions with other parameters than in FlashInfer:", *wrong]))
    for name in _COMPILER:
        sys.modules[name] = _Compiled(name)
    declared = {"fa2": "AttentionSink", "fa3": "AttentionSink"}
    sys.modules["flashinfer.testing"] = types.ModuleType("flashinfer.testing")
    sys.modules["flashinfer.testing.utils"] = _Helpers("flashinfer.testing.utils")
    sys.modules["flashinfer.jit.attention.variants"].attention_sink_decl = declared
    sys.modules["flashinfer.jit.utils"].filename_safe_dtype_map = dict.fromkeys((torch.float16, torch.bfloat16), "dtype")
    sys.modules["flashinfer.trace"].default_check = _check_8_bits
    tilewright.flashinfer.jit = sys.modules["flashinfer.jit"]
    for module, name in ((activation, "gen_act_and_mul_module"), (gemm, "gen_gemm_module"), (gemm, "gen_gemm_sm90_module")):
        setattr(module, name, lambda *args: types.SimpleNamespace(build_and_load=list))
    tilewright.flashinfer.SfLayout = types.SimpleNamespace
    topk.can_implement_filtered_topk = lambda: True
    gemm.CUDNN_AVAILABLE, gemm.is_cuda_tile_available = True, lambda: False
    # a cuDNN that is too old for FP8 and for bounds that its kernels read
    sys.modules["cudnn"] = types.SimpleNamespace(backend_version=lambda: 0)
    cudnn.prefill.CUDNN_AVAILABLE, cudnn.prefill._cudnn_supports_direct_seqlens = True, lambda dtype, mixed=False: False
    gpu = config.getoption("--gpu")
    capability = tuple(int(part) for part in config.getoption("--capability").split("."))
    config._device_mode = contextlib.nullcontext() if gpu else _pretend_a_gpu(capability)
    config._device_mode.__enter__()
    config._expected = json.loads(pathlib.Path(config.getoption("--expected")).read_text(encoding="utf-8"))
    if gpu:
        for reason in ("CUDA graphs and streams need a GPU", "top_p = 0 is an error"):  # on a GPU top_p = 0 gives invalid rows
            config._expected.pop(reason, None)
    else:
        config._expected = {reason: parts for reason, parts in config._expected.items() if not reason.startswith("on a GPU")}


def pytest_unconfigure(config):
    """Writes the outcomes."""
    config._device_mode.__exit__(None, None, None)
    path = config.getoption("--outcomes")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dict(sorted(config._outcomes.items())), file, indent=0)


def _largest(callspec) -> int:
    """The largest number in the parameters of a case; ``None`` is a case without parameters."""
    numbers = [value for value in getattr(callspec, "params", {}).values() if type(value) is int]
    return max(numbers, default=0)


def _is_small(config, callspec) -> bool:
    """Whether a case may be in the sample; that of ``--per-function`` has no CUDA graphs on the CPU."""
    records = getattr(callspec, "params", {}).get("use_cuda_graph") is True
    can_run = config.getoption("--gpu") or config.getoption("--per-function") is None or not records
    return can_run and _largest(callspec) <= config.getoption("--largest")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """With ``--per-function``, keeps random small cases after each ``parametrize``, before the next multiplies them."""
    most = metafunc.config.getoption("--per-function")
    if most is None:
        return
    pick = random.Random(f"{metafunc.config.getoption('--sample-seed')} {metafunc.function.__qualname__}")
    parametrize = metafunc.parametrize

    def parametrize_some(*args, **kwargs):
        parametrize(*args, **kwargs)
        cases = metafunc._calls
        small = [case for case in cases if _is_small(metafunc.config, case)] or cases
        chosen = sorted(pick.sample(range(len(small)), min(most, len(small))))
        metafunc._calls = [small[at] for at in chosen]

    metafunc.parametrize = parametrize_some


def pytest_collection_modifyitems(config, items):
    """Keeps a sample of the small cases of each file, then the shard of those that have not run, in random order."""
    chosen, rest = [], []
    files: dict = {}
    for item in items:
        is_small = _is_small(config, getattr(item, "callspec", None))
        (files.setdefault(item.path, []) if is_small else rest).append(item)
    for path, cases in sorted(files.items()):
        pick = random.Random(f"{config.getoption('--sample-seed')} {path.name}")
        order = sorted(pick.sample(range(len(cases)), min(config.getoption("--per-file"), len(cases))))
        chosen += [cases[at] for at in order]
        rest += [case for at, case in enumerate(cases) if at not in set(order)]
    done = set()
    for path in config.getoption("--skip-outcomes"):
        done |= json.loads(pathlib.Path(path).read_text(encoding="utf-8")).keys()
    shard, shards = map(int, config.getoption("--shard").split("/"))
    if shards > 1:
        random.Random(config.getoption("--sample-seed")).shuffle(chosen)
    items[:] = [case for case in chosen if case.nodeid not in done][shard::shards]
    config.hook.pytest_deselected(items=rest)
    config._end = time.monotonic() + config.getoption("--seconds")


def pytest_runtest_teardown(item):
    """Returns cached memory to the GPU, which other processes share."""
    if item.config.getoption("--gpu") and torch.cuda.memory_reserved() > 4 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Ends the run after the time limit."""
    if time.monotonic() > item.config._end:
        item.session.shouldstop = "the time limit"


def _expected(config, nodeid: str):
    """The reason why a case fails as expected, or None."""
    for reason, parts in config._expected.items():
        if any(part in nodeid for part in parts):
            return reason
    return None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Records outcomes. An expected failure does not count, and a pass of one is a failure."""
    report = (yield).get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    why = ""
    if report.failed and call.excinfo is not None:
        text = str(call.excinfo.value).splitlines()
        why = f"{call.excinfo.typename}: {text[0] if text else ''}"[:160]
    item.config._outcomes[item.nodeid] = [report.outcome, why]
    reason = _expected(item.config, item.nodeid)
    if reason is not None and report.failed:
        report.outcome, report.wasxfail = "skipped", reason
    elif reason is not None and report.when == "call" and report.passed:
        report.outcome, report.longrepr = "failed", f"it passes, expected a failure: {reason}"
