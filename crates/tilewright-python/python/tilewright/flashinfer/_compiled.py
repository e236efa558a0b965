"""Operators of ``torch.compile``: each is opaque to the compiler and writes the tensors that its schema marks.

A function of this package calls them while it is traced (:func:`is_compiling`); otherwise it calls the extension directly, which
takes less time. Outputs are allocated by the traced code, so no operator returns a tensor.
"""

import torch

is_compiling = torch.compiler.is_compiling

_library = torch.library.Library("tilewright", "DEF")


def operator(schema: str):
    """Registers the function as the operator ``tilewright::name`` with the arguments and mutations of ``schema``."""

    def register(function):
        name = schema.partition("(")[0]
        _library.define(f"{schema} -> ()")
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewright::{name}", lambda *args, **kwargs: None, lib=_library)
        return getattr(torch.ops.tilewright, name)

    return register
