"""The examples of the documentation, in the order of each page."""

import pathlib
import re

import pytest
from conftest import HAS_TORCH

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [("docs/python.md", False), ("crates/tilewright-python/README.md", False), ("docs/from-flashinfer.md", True)]


@pytest.mark.parametrize("page, needs_torch", PAGES, ids=[page for page, _ in PAGES])
def test_examples_run(page, needs_torch, capsys):
    if needs_torch and not HAS_TORCH:
        pytest.skip("torch is not installed")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    names = {}
    try:
        for example in examples:
            exec(compile(example, page, "exec"), names)  # noqa: S102: the project's own pages
    finally:
        if needs_torch:
            import tilewright.flashinfer

            tilewright.flashinfer.uninstall()
    printed = capsys.readouterr().out
    assert {"docs/python.md": "qo heads = 3 is not a multiple", "docs/from-flashinfer.md": "0.6.18"}.get(page, "") in printed
