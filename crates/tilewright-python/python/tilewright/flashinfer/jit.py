"""The place of FlashInfer's compiler of CUDA source: a function of it raises an error when it is called."""

from .._core import Unsupported


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def unsupported(*args, **kwargs):
        raise Unsupported(f"flashinfer.jit.{name}: no compiler of CUDA source exists here, expected a variant written in "
                          "Python (tilewright.Variant)")

    return unsupported
