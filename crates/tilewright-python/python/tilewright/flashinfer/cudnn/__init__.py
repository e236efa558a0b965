"""Attention with the arguments of cuDNN's graphs, through the kernels of this package."""

from . import decode, prefill  # noqa: F401
from .decode import cudnn_batch_decode_with_kv_cache
from .prefill import cudnn_batch_prefill_with_kv_cache

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]
