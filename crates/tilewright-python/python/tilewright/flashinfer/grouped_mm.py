"""Products of the experts of a mixture."""

from .gemm import grouped_mm_bf16, grouped_mm_fp8

__all__ = ["grouped_mm_bf16", "grouped_mm_fp8"]
