"""Keys of DeepSeek from their parts."""

from .._core import Error


def concat_mla_k(k, k_nope, k_rope):
    """Writes ``k_nope`` ``[num_tokens, num_heads, nope_dim]`` and ``k_rope`` ``[num_tokens, 1, rope_dim]`` of every head to
    ``k`` ``[num_tokens, num_heads, nope_dim + rope_dim]``. All have one dtype, of 16 or 8 bits, and any strides."""
    split = k_nope.shape[-1]
    expected = (*k_nope.shape[:2], split + k_rope.shape[-1])
    for name, x, shape in (("k", k, expected), ("k_rope", k_rope, (k_nope.shape[0], 1, k_rope.shape[-1]))):
        if tuple(x.shape) != shape or x.dtype != k_nope.dtype:
            raise Error(f"flashinfer.concat_mla_k: {name} is {x.dtype} of shape {tuple(x.shape)}, expected {k_nope.dtype} of "
                        f"{shape}")
    k[..., :split].copy_(k_nope)
    k[..., split:].copy_(k_rope.expand(-1, k_nope.shape[1], -1))
