"""The distribution tilewright-as-flashinfer: ``import flashinfer`` in a fresh interpreter."""

import os
import pathlib
import subprocess
import sys

import pytest
import tilewright
from conftest import needs_torch

SOURCE = pathlib.Path(__file__).parents[1] / "as-flashinfer"

PROGRAM = """
import importlib, importlib.metadata, importlib.util, sys
from_metadata = importlib.metadata.version
assert from_metadata("flashinfer-python") == from_metadata("flashinfer_python") == "0.6.18"
assert "torch" not in sys.modules and importlib.util.find_spec("flashinfer") is not None
{first}
import flashinfer
assert flashinfer.__version__ == from_metadata("flashinfer-python") == "0.6.18"
import tilewright.flashinfer as ours
assert flashinfer is ours is sys.modules["flashinfer"]
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
assert BatchDecodeWithPagedKVCacheWrapper is ours.BatchDecodeWithPagedKVCacheWrapper
import flashinfer.prefill, flashinfer.utils, flashinfer.quantization.packbits, flashinfer.xqa
assert flashinfer.xqa.__name__ == "xqa" and callable(flashinfer.xqa) and callable(flashinfer.quantization.packbits)
assert sys.modules["flashinfer.prefill"] is ours.prefill
assert flashinfer.utils.next_positive_power_of_2(5) == 8
assert importlib.util.find_spec("flashinfer.fused_moe") is None
try:
    import flashinfer.fused_moe
except ModuleNotFoundError:
    print(flashinfer.__file__)
"""


@needs_torch
@pytest.mark.parametrize("first", ["", "import flashinfer.decode", "import tilewright.flashinfer",
                                   "import tilewright.flashinfer; tilewright.flashinfer.install()"])
@pytest.mark.parametrize("is_installed", [False, True])
def test_flashinfer_is_this_package(request, is_installed, first, tmp_path):
    folder = package = request.config.getoption("--packages")
    if not is_installed:
        folder, package = SOURCE, pathlib.Path(tilewright.__file__).parents[1]
    elif folder is None:
        pytest.skip("--packages names no folder with both wheels")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (folder, package))), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(first=first)], env=environment, cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()).is_relative_to(package)
