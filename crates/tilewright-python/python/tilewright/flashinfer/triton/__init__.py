"""FlashInfer's Triton functions that this package serves, with its own kernels."""

from . import cascade

__all__ = ["cascade"]
