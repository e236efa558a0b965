"""The examples of the documentation, in the order of each page."""

import pathlib
import re

import pytest
from conftest import needs_torch

ROOT = pathlib.Path(__file__).parents[3]
PAGES = ["docs/python.md", "crates/tilewright-python/README.md", pytest.param("docs/from-flashinfer.md", marks=needs_torch)]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, capsys):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    names = {}
    try:
        for example in examples:
            exec(compile(example, page, "exec"), names)  # noqa: S102: the project's own pages
    finally:
        if page == "docs/from-flashinfer.md":
            import tilewright.flashinfer

            tilewright.flashinfer.uninstall()
    printed = capsys.readouterr().out
    assert {"docs/python.md": "qo heads = 3 is not a multiple", "docs/from-flashinfer.md": "0.6.18"}.get(page, "") in printed
