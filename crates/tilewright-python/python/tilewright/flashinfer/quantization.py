"""Packing of flags into bits."""

from .. import operators


def packbits(x, bitorder="big"):
    """Packs flags ``[n]`` into ``[ceil(n / 8)]`` bytes."""
    return operators.packbits(x, bitorder)


def segment_packbits(x, indptr, bitorder="big"):
    """Packs each segment ``x[indptr[s]:indptr[s + 1]]`` into bytes of its own. Returns the bytes and their bounds."""
    return operators.segment_packbits(x, indptr, bitorder)
