"""``install``: ``import flashinfer`` finds this package, version checks included."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys

from .._core import Error

#: The release whose names and meanings this package has.
VERSION = "0.6.18"
_PACKAGE = "flashinfer"
_OURS = "tilewright.flashinfer"
#: Modules with another name here.
_RENAMED = {"utils": "properties", "version": "_install", "attention._core": "attention", "mla._core": "mla",
            "gemm.gemm_base": "gemm", "gemm.routergemm": "gemm", "grouped_mm.core": "grouped_mm",
            "quantization.fp8_quantization": "quantization", "quantization.packbits": "quantization", "topk_varlen": "topk",
            "topk_varlen.topk_varlen": "topk",
            **{f"logits_processor.{name}": "logits_processor" for name in (
                "compiler", "fusion_rules", "legalization", "op", "operators", "pipeline", "processors", "types",
                "validators")}}
#: Modules with the name of a function. An import that loads a module would replace the function in its package.
_FUNCTIONS = (f"{_PACKAGE}.xqa", f"{_PACKAGE}.quantization.packbits")
_DISTRIBUTIONS = ("flashinfer", "flashinfer-python", "flashinfer_python")

__version__ = VERSION
__git_version__ = __git_commit__ = "tilewright"


class _Distribution(importlib.metadata.Distribution):
    """The metadata of the distribution whose place this package takes."""

    def read_text(self, filename):
        """The metadata file."""
        return f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        """No file of the distribution exists."""
        raise FileNotFoundError(path)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``flashinfer`` and its modules in this package."""

    def find_spec(self, fullname, path=None, target=None):
        """The spec of one of our modules under FlashInfer's name."""
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        ours = _ours(fullname)
        if importlib.util.find_spec(ours) is None:
            return None
        below = fullname.removeprefix(_PACKAGE + ".") + "."
        is_package = fullname == _PACKAGE or any(name.startswith(below) for name in _RENAMED)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec):
        """Our module itself."""
        return importlib.import_module(_ours(spec.name))

    def exec_module(self, module):
        """Does nothing: the module is loaded."""

    def find_distributions(self, context=None):
        """FlashInfer's metadata."""
        name = getattr(context, "name", None)
        return iter([_Distribution()] if name in _DISTRIBUTIONS else [])


def _ours(fullname: str) -> str:
    rest = fullname.removeprefix(_PACKAGE).removeprefix(".")
    return _OURS + ("." + _RENAMED.get(rest, rest) if rest else "")


def install() -> None:
    """Makes ``import flashinfer`` find this package, before an engine imports it.

    Raises an error if FlashInfer itself was imported. A second call does nothing.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    known = sys.modules.get(_PACKAGE)
    if known is not None and known.__name__ != _OURS:
        raise Error("flashinfer.install: flashinfer was imported already, expected install() before it")
    sys.meta_path.insert(0, _Finder())
    for name in _FUNCTIONS:
        sys.modules[name] = sys.modules[_ours(name)]


def uninstall() -> None:
    """Undoes :func:`install`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(_PACKAGE + ".")]:
        if sys.modules[name].__name__.startswith(_OURS):
            del sys.modules[name]
