"""``torch.compile`` over ``tilewright.flashinfer``: whole graphs with the results and the mutations of eager calls."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import tilewright.flashinfer as flashinfer  # noqa: E402


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def agrees(function, *arguments):
    """Compares results and all arguments after an eager and a compiled call, and the registered operators that it has."""
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    expected, found = function(*arguments), compiled(function)(*copies)
    pairs = list(zip(arguments, copies))
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    pairs += [] if expected is None else zip(expected, found, strict=True)
    for eager, other in pairs:
        if isinstance(eager, torch.Tensor):
            assert eager.dtype == other.dtype and torch.equal(eager, other)


def tensor(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype("float32"))


def test_norms_and_activations(host, rng):
    x, residual, weight = tensor(rng, 3, 32), tensor(rng, 3, 32), tensor(rng, 32)
    agrees(flashinfer.rmsnorm, x, weight)
    agrees(lambda x, weight, out: flashinfer.gemma_rmsnorm(x, weight, 1e-5, out=out), x, weight, torch.zeros_like(x))
    agrees(flashinfer.fused_add_rmsnorm, x, residual, weight)
    agrees(flashinfer.gemma_fused_add_rmsnorm, x, residual, weight)
    narrow, scale = torch.zeros(3, 32, dtype=torch.float8_e4m3fn), torch.tensor(0.5)
    agrees(flashinfer.layernorm, x, weight, weight)
    agrees(flashinfer.layernorm_quant, narrow, x, weight, weight, scale)
    agrees(flashinfer.rmsnorm_quant, narrow, x, weight, scale)
    agrees(flashinfer.quantization.per_token_group_quant_8bit, x, 16)
    agrees(flashinfer.fused_add_rmsnorm_quant, narrow, x, residual, weight, scale)
    for gated in (flashinfer.silu_and_mul, flashinfer.gelu_and_mul, flashinfer.gelu_tanh_and_mul):
        agrees(gated, x.view(3, 1, 32))
        agrees(lambda x, out, gated=gated: gated(x, out=out), x, torch.zeros(3, 16))


def test_mutations_reach_later_operators(rng):
    x, residual, weight = tensor(rng, 3, 32), tensor(rng, 3, 32), tensor(rng, 32)

    def layer(x, residual, weight):
        y = x * 2
        flashinfer.fused_add_rmsnorm(y, residual, weight)
        return flashinfer.silu_and_mul(y) + residual[:, :16]

    agrees(layer, x, residual, weight)


def test_rotations(host, rng):
    q, k, qkv = tensor(rng, 5, 2, 16), tensor(rng, 5, 1, 16), tensor(rng, 5, 64)
    positions, bounds, offsets = torch.tensor([3, 4, 0, 1, 2]), torch.tensor([0, 2, 5]), torch.tensor([3, 0])
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    agrees(flashinfer.apply_rope, q, k, bounds, offsets)
    agrees(flashinfer.apply_rope_inplace, q, k, bounds, offsets)
    agrees(lambda q, k, at: flashinfer.apply_rope_pos_ids(q, k, at, rotary_dim=8, interleave=True, rope_scale=2.0), q, k, positions)
    agrees(flashinfer.apply_llama31_rope_pos_ids_inplace, q, k, positions)
    agrees(lambda at, qkv, table: flashinfer.apply_rope_with_cos_sin_cache_inplace(at, qkv[:, :32], qkv[:, 32:48], 16, table),
           positions, qkv, table)
    agrees(lambda at, q, k, table: flashinfer.apply_rope_with_cos_sin_cache(at, q.view(5, -1), k.view(5, -1), 16, table, False),
           positions, q, k, table)


def test_samplers(host, rng):
    logits, probs = tensor(rng, 4, 50), tensor(rng, 4, 50).softmax(-1)
    k, p, seed = torch.tensor([1, 5, 50, 7]).int(), torch.tensor([0.9, 0.5, 1.0, 0.1]), torch.tensor([3])
    known = {"seed": 5, "offset": 8}
    agrees(flashinfer.softmax, logits, p)
    agrees(flashinfer.top_k_renorm_probs, probs, 7)
    agrees(flashinfer.top_p_renorm_probs, probs, p)
    agrees(lambda logits: flashinfer.sampling_from_logits(logits, **known), logits)
    agrees(lambda probs, p: flashinfer.top_p_sampling_from_probs(probs, p, return_valid=True, **known), probs, p)
    agrees(lambda probs, k, p, seed: flashinfer.top_k_top_p_sampling_from_probs(probs, k, p, seed=seed, offset=seed), probs, k, p, seed)
    agrees(lambda logits, k: flashinfer.top_k_top_p_sampling_from_logits(logits, k, 0.5, filter_apply_order="joint", **known),
           logits, k)
    agrees(flashinfer.top_k_mask_logits, logits, k)
    agrees(flashinfer.top_k_mask_logits, logits, 3)
    draft, target = probs.view(2, 2, 50), torch.cat([probs, probs[:2]]).view(2, 3, 50)
    ids, totals = torch.tensor([[3, 1], [7, -1]]), torch.tensor([5, 0]).int()
    agrees(lambda *tensors: flashinfer.chain_speculative_sampling(*tensors, **known), draft, ids, target, totals)
    agrees(lambda *tensors: flashinfer.chain_speculative_sampling(*tensors, seed=seed, offset=seed), draft, ids, target)
    agrees(lambda probs, rows: flashinfer.min_p_sampling_from_probs(probs, 0.1, indices=rows, **known), probs, torch.tensor([3, 0, 3]))


def test_seeds_of_the_generator_differ_between_calls(rng):
    draw = compiled(lambda probs: (flashinfer.sampling_from_probs(probs), flashinfer.sampling_from_probs(probs)))
    probs = torch.full((64, 1000), 1e-3)
    draws = [tuple(tokens.tolist()) for _ in range(2) for tokens in draw(probs)]
    assert len(set(draws)) == 4


def test_single_attention(host, rng):
    q, k, v = tensor(rng, 3, 4, 32), tensor(rng, 7, 2, 32), tensor(rng, 7, 2, 32)
    agrees(lambda q, k, v: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True), q, k, v)
    agrees(lambda q, k, v: flashinfer.single_prefill_with_kv_cache(
        q, k.transpose(0, 1), v.transpose(0, 1), kv_layout="HND", sm_scale=0.3, logits_soft_cap=5.0, window_left=2, k_scale=0.5), q, k, v)
    mask = torch.from_numpy(rng.random((3, 7)) < 0.5)
    agrees(lambda q, k, v, mask: flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask), q, k, v, mask)
    agrees(lambda q, k, v: flashinfer.single_decode_with_kv_cache(q, k, v, return_lse=True), q[0], k, v)
    agrees(lambda q, k, v, scale: flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=0.5, v_scale=scale), q[0], k, v,
           torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_single_attention_of_8_bits(host, rng, dtype):
    tensors = [tensor(rng, *shape).to(dtype) for shape in ((3, 4, 32), (7, 2, 32), (7, 2, 32))]
    scales = [torch.tensor([0.5, 1.0, 2.0, 1.5]), torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.5])]
    out_dtype = torch.float16 if dtype == torch.float8_e5m2 else None
    agrees(lambda *each: flashinfer.single_prefill_with_kv_cache(*each, o_dtype=out_dtype, causal=True, return_lse=True), *tensors, *scales)
    agrees(lambda *each: flashinfer.single_prefill_with_kv_cache(*each, 0.5, None, 2.0, o_dtype=torch.bfloat16, k_scale=0.3), *tensors)
    agrees(lambda q, *each: flashinfer.single_prefill_with_kv_cache(
        q, *each, o_dtype=torch.float16, v_scale=2.0, sm_scale=0.3), *tensors, *scales)


def test_transforms_of_top_k(host, rng):
    scores, pages, lengths = tensor(rng, 2, 9), torch.arange(18).int().view(2, 9), torch.tensor([9, 2]).int()
    agrees(lambda *given: flashinfer.top_k_page_table_transform(*given, 3), scores, pages, lengths)
    out, raw = torch.zeros(2, 3).int(), torch.zeros(2, 3).int()
    agrees(lambda scores, pages, lengths, out, raw: flashinfer.top_k_page_table_transform(
        scores, pages, lengths, 3, out=out, out_raw_indices=raw), scores, pages, lengths, out, raw)
    agrees(lambda *given: flashinfer.top_k_ragged_transform(*given, 3), scores, torch.tensor([5, 7]).int(), lengths)


def test_rotations_to_8_bits(host, rng):
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    table, positions = torch.cat([angle.cos(), angle.sin()], dim=1), torch.tensor([3, 0, 1])
    parts = tensor(rng, 3, 2, 8), tensor(rng, 3, 2, 8), tensor(rng, 3, 2, 16), tensor(rng, 3, 2, 16)
    bits = lambda *tensors: tuple(one.view(torch.uint8) for one in tensors)  # noqa: E731
    agrees(lambda *given: bits(*flashinfer.rope_quantize_fp8(*given, quant_scale_q=2.0)), *parts, table, positions)
    caches = torch.zeros(2, 2, 2, 2, 24, dtype=torch.float8_e4m3fn).unbind(0)
    arrays = torch.tensor([1, 0]).int(), torch.tensor([0, 2]).int(), torch.tensor([0, 0, 0]).int(), torch.tensor([0, 1, 2]).int()
    agrees(lambda v, table, positions, k_cache, v_cache, *arrays: bits(*flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        *parts, v, table, positions, (k_cache, v_cache), *arrays, page_size=2)),
        tensor(rng, 3, 2, 24), table, positions, *caches, *arrays)


def test_appends(host, rng):
    k, v, joined = tensor(rng, 3, 2, 8), tensor(rng, 3, 2, 8), torch.zeros(4, 2, 4, 2, 8)
    requests, positions = torch.tensor([0, 1, 1]).int(), torch.tensor([4, 0, 1]).int()
    indptr, indices, last = torch.tensor([0, 2, 3]).int(), torch.tensor([3, 0, 1]).int(), torch.tensor([1, 2]).int()
    table = indices, indptr, last
    agrees(flashinfer.append_paged_kv_cache, k, v, requests, positions, joined, *table)
    agrees(lambda k, v, requests, positions, one, other, *table: flashinfer.append_paged_kv_cache(
        k, v, requests, positions, (one, other), *table, kv_layout="HND"),
        k, v, requests, positions, torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8), *table)
    agrees(flashinfer.append_paged_mla_kv_cache, k[:, 0], v[:, 0], requests, positions, torch.zeros(4, 4, 8),
           torch.zeros(4, 4, 8), *table)
    agrees(lambda indptr, last: flashinfer.get_seq_lens(indptr, last, 4), indptr, last)
    agrees(lambda bounds, lens: flashinfer.get_batch_indices_positions(bounds, lens, 5), torch.tensor([0, 1, 3]), torch.tensor([5, 2]))
    assert joined.any()


def test_errors_keep_their_text(rng):
    x, weight = tensor(rng, 3, 32), tensor(rng, 31)
    with pytest.raises(Exception, match="generator is not None in compiled code, expected seed and offset"):
        compiled(lambda probs: flashinfer.sampling_from_probs(probs, generator=torch.default_generator))(x)
    with pytest.raises(Exception, match="single_prefill_with_kv_cache: scale_k = 0.5, expected None"):
        compiled(lambda x: flashinfer.single_prefill_with_kv_cache(x, x, x, scale_k=0.5))(x.view(3, 1, 32))
    with pytest.raises(Exception, match=r"weight has shape \[31\], expected \[hidden\] = \[32\]"):
        compiled(flashinfer.rmsnorm)(x, weight)


def test_schemas_are_true(rng):
    """torch's own check: what an operator writes is what its schema marks, and fakes agree with it."""
    x, weight = tensor(rng, 3, 32), tensor(rng, 32)
    operators = torch.ops.tilewright
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operators.rmsnorm.default, (x, weight, 1e-6, False, torch.zeros_like(x)), test_utils=tests)
    torch.library.opcheck(operators.fused_add_rmsnorm.default, (x, x.clone(), weight, 1e-6, True), test_utils=tests)
    torch.library.opcheck(operators.gated_activation.default, ("silu_and_mul", x, torch.zeros(3, 16)), test_utils=tests)
