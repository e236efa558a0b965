"""Valid calls of every entry point, and random changes of their arguments."""

import random

import numpy
import tilewright as tw
from conftest import HAS_TORCH, OnDevice

SIZES = (0, 1, 2, 3, 4, 7, 8, 16)
DTYPES = ("float32", "float32", "float16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool",
          "complex64", ">f4", ">i4", "object", "U3", "M8[s]")
TORCH_DTYPES = ("float32", "float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32",
                "int64", "uint8", "bool", "complex64")
OTHERS = (None, 0, 1, -1, 2, 3, 8, 2**31, 2**40, 2**63, -(2**63), 2**70, 0.0, 1.5, -1.5, 1e-300, 1e300, float("nan"), float("inf"),
          True, False, "", "x", "NHD", "HND", "float32", "float16", "int8", b"x", (), [], [0], [1], [-1], [0, 1], [0, 2], [0, 2, 1],
          [0, 2**31], [0, 2**40], [1.5], ["a"], [None], [[0], [1]], {}, {"a": 1}, object(), int, len, numpy.float32(1.5),
          numpy.int64(2), numpy.ones(()), OnDevice, ...)


class Calls:
    """Calls by name: a function, and a function that makes its valid arguments anew."""

    def __init__(self):
        self.valid = []
        self._add_core()
        if HAS_TORCH:
            self._add_torch()

    def _add(self, function, *makers, **keywords):
        self.valid.append((function, makers, keywords))

    def _add_core(self):
        problem = tw.Problem(2, 1, 8)
        operator = tw.Attention(problem)
        latent = tw.Attention(tw.Problem.latent(2, 8, 4, scale=1.0, dtype="float32"))
        table = tw.PageTable([0, 1, 3], [2, 0, 1], [1, 4], 4)
        limits = tw.Capacity(4, 8, 8)
        ragged, paged = tw.Batch.ragged([0, 1], [0, 2]), tw.Batch.paged([0, 1, 3], table)
        plan, paged_plan = operator.plan(ragged), operator.plan(paged)
        fixed = operator.plan(paged, capacity=limits)
        latent_plan = latent.plan(paged)
        rope, cache = tw.Rope(8), tw.CosSinCache(numpy.ones((8, 8), "float32"))
        q, kv, pages = floats(1, 2, 8), floats(2, 1, 8), floats(3, 4, 1, 8)
        add = self._add
        add(tw.Problem, 2, 1, 8, dtype="float32", kv_dtype="float32", layout="NHD", causal=True, window_left=2, scale=1.0)
        add(tw.Problem.latent, 2, 8, 4, scale=1.0, dtype="float32")
        add(tw.Attention, problem)
        add(tw.Device, "cpu", threads=1)
        add(tw.PageTable, ints([0, 2]), ints([1, 0]), ints([3]), 4)
        add(tw.Batch.paged, [0, 1, 3], table, shared_prefixes=False)
        add(lambda *a: operator.plan(tw.Batch.paged([0, 2], tw.PageTable(*a))), ints([0, 2]), ints([1, 0]), ints([3]), 4)
        add(lambda *a, **k: operator.plan(tw.Batch.ragged(*a, **k)), ints([0, 1]), ints([0, 2]), mask=bits(1))
        add(lambda *a: operator.plan(tw.Batch.paged([0, 1, 3], table, levels=[tw.Level(*a)])), ints([0, 1, 3]),
            tw.PageTable([0, 1, 3], [2, 0, 1], [4, 4], 4))
        add(lambda *a, **k: operator.plan(tw.Batch.block_sparse(*a, **k)), ints([0, 1, 3]), ints([1, 0, 1]), (4, 4), 8,
            mask=flags(3, 4, 4))
        add(lambda *a: operator.plan(tw.Batch.variable_block_sparse(*a)), flags(1, 2, 2), ints([[4, 4]]), ints([[4, 4]]))
        add(lambda *a: operator.plan(paged, capacity=tw.Capacity(*a)), 4, 8, 8)
        add(operator.plan, ragged, split="balanced", capacity=limits)
        add(operator.replan, fixed, paged)
        add(operator.check_plan, fixed)
        add(lambda *a: operator.plan(tw.DeviceBatch(1, tw.BlockTable(*a))), ints([[2, 0], [0, 1]]), ints([1, 5]), 4)
        add(operator.run, plan, q, kv, kv, out=q, lse=floats(1, 2), return_lse=True, k_scale=1.0, v_scale=1.0)
        add(operator.run, paged_plan, floats(3, 2, 8), pages, pages, k_scale=floats(1), v_scale=floats(3, 1))
        add(latent.run_latent, latent_plan, floats(3, 2, 8), floats(3, 2, 4), floats(3, 4, 8), floats(3, 4, 4))
        add(tw.merge_states, floats(2, 3, 2, 8), floats(2, 3, 2), out=floats(2, 2, 8), out_lse=floats(2, 2))
        add(tw.merge_state, floats(2, 2, 8), floats(2, 2), floats(2, 2, 8), floats(2, 2), mask=numpy.array([True, False]))
        add(tw.rmsnorm, floats(2, 8), floats(8), 1e-6, gemma=False, out=floats(2, 8))
        add(tw.rmsnorm, floats(2, 8), floats(8), scale=floats(1), out=lambda: numpy.zeros((2, 8), "int8"))
        add(tw.fused_add_rmsnorm, floats(2, 8), floats(2, 8), floats(8), 1e-6, gemma=True)
        add(tw.layer_norm, floats(2, 8), floats(8), floats(8), 1e-5)
        for function in (tw.silu_and_mul, tw.gelu_and_mul, tw.gelu_tanh_and_mul):
            add(function, floats(2, 8), out=floats(2, 4))
        add(tw.linear, floats(2, 8), floats(3, 8), floats(3), out=floats(2, 3))
        add(tw.segment_gemm, floats(2, 8), floats(2, 3, 8), ints([0, 1, 2]), ints([1, 0]))
        add(tw.packbits, flags(11), "little")
        add(tw.segment_packbits, flags(11), ints([0, 4, 11]), "big")
        add(tw.Rope, 8, 1e4, interleaved=False, scaling=("linear", [2.0]))
        add(tw.CosSinCache, floats(8, 8), interleaved=True)
        add(tw.apply_rope, floats(2, 2, 8), floats(2, 1, 8), ints([0, 5]), rope)
        add(tw.apply_rope, floats(2, 2, 8), floats(2, 1, 8), ints([0, 5]), cache)
        add(tw.apply_rope_quantized, floats(2, 2, 8), floats(2, 1, 8), ints([0, 5]), cache,
            lambda: (numpy.zeros((2, 2, 8), "int8"), numpy.zeros((2, 1, 8), "int8")), scales=(1.0, 1.0))
        add(tw.append_paged_kv_cache, floats(2, 1, 8), floats(2, 1, 8), ints([0, 1]), ints([0, 4]), pages, pages, table)
        add(tw.append_to_slots, floats(2, 1, 8), floats(2, 1, 8), ints([5, -1]), pages, pages, layout="NHD", k_scale=1.0)
        add(tw.append_paged_mla_kv_cache, floats(2, 8), floats(2, 4), ints([0, 1]), ints([0, 4]), floats(3, 4, 8),
            floats(3, 4, 4), table)
        add(tw.append_mla_to_slots, floats(2, 8), floats(2, 4), ints([5, -1]), floats(3, 4, 8), floats(3, 4, 4))
        add(tw.get_batch_indices_positions, ints([0, 1, 3]), ints([4, 5]))
        add(tw.get_seq_lens, table)
        scores = floats(3, 16)
        one = tw.sampling
        add(one.sample, scores, temperature=floats(3), top_k=ints([1, 2, 3]), top_p=0.9, min_p=0.1, joint=True, seed=1, offset=0,
            return_valid=True)
        add(one.sampling_from_probs, scores, top_p=floats(3), seed=ints([1, 2, 3]))
        add(one.distribution, scores, top_k=3, out=scores)
        add(one.softmax, scores, floats(3), out=scores)
        add(one.top_p_renorm_probs, scores, 0.5)
        add(one.top_k_renorm_probs, scores, ints([1, 2, 3]))
        add(one.top_k_mask_logits, scores, 2)
        add(one.top_k, scores, 2)
        add(one.apply_token_bitmask, scores, lambda: numpy.ones((3, 1), "int32"))
        add(one.chain_speculative_sampling, floats(2, 3, 16), ints([[1, 2, 3], [4, 5, 6]]), floats(2, 4, 16))
        add(tw.variants.soft_cap, 3.0)
        add(tw.Variant.from_json, tw.variants.soft_cap(3.0).to_json())
        add(tw.variants.alibi, 2)
        add(tw.variants.sinks, [0.5, 1.0])
        add(tw.variants.rotary, rope)
        add(lambda *a: tw.variants.rotary(tw.Rope(*a)), 8, 1e4)
        add(tw.variants.flash_sigmoid, 0.5)
        add(tw.variants.prefix_lm, [1, 2])
        add(tw.variants.document_mask, [[1, 2], [3]])
        add(tw.variants.multi_item, [1, 2], [[0, 1], [2]])

    def _add_torch(self):
        import tilewright.flashinfer as fi
        import torch

        def t(maker):
            return lambda: torch.from_numpy(maker())

        workspace = torch.empty(16, dtype=torch.uint8)
        decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace)
        prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace)
        ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace)
        latent = fi.BatchMLAPagedAttentionWrapper(workspace)
        sparse = fi.BlockSparseAttentionWrapper(workspace)
        mixed = fi.BatchAttention()
        indptr, indices, last, lens = t(ints([0, 1, 3])), t(ints([2, 0, 1])), t(ints([1, 4])), t(ints([1, 8]))
        rows, both, scores = t(ints([0, 1, 3])), t(floats(3, 2, 4, 1, 8)), t(floats(3, 16))
        pair = lambda: (t(floats(3, 4, 1, 8))(), t(floats(3, 4, 1, 8))())  # noqa: E731
        add = self._add

        def planned(plan, run, count):
            """One call: a plan of the first arguments, and a run of the others."""
            return lambda *a, **k: (plan(*a[:count], **k), run(*a[count:]))

        add(planned(decode.plan, decode.run, 7), indptr, indices, last, 2, 1, 8, 4, t(floats(2, 2, 8)), both,
            q_data_type="float32", window_left=-1, logits_soft_cap=0.0, sm_scale=1.0)
        add(planned(prefill.plan, prefill.run, 8), rows, indptr, indices, last, 2, 1, 8, 4, t(floats(3, 2, 8)), pair,
            causal=True, q_data_type="float32", custom_mask=None)
        add(planned(ragged.plan, ragged.run, 5), rows, t(ints([0, 2, 5])), 2, 1, 8, t(floats(3, 2, 8)), t(floats(5, 1, 8)),
            t(floats(5, 1, 8)), q_data_type="float32", pos_encoding_mode="NONE")
        add(planned(latent.plan, latent.run, 12), rows, indptr, indices, lens, 2, 8, 4, 4, True, 1.0, torch.float32,
            torch.float32, t(floats(3, 2, 8)), t(floats(3, 2, 4)), t(floats(3, 4, 8)), t(floats(3, 4, 4)))
        add(planned(sparse.plan, sparse.run, 9), t(ints([0, 1, 3])), t(ints([1, 0, 1])), 8, 8, 4, 4, 2, 2, 8,
            *[t(floats(8, 2, 8))] * 3, q_data_type="float32")
        add(planned(mixed.plan, mixed.run, 9), rows, indptr, indices, lens, 2, 1, 8, 8, 4, t(floats(3, 2, 8)), both,
            q_data_type=torch.float32, kv_data_type=torch.float32, causal=True)
        add(fi.single_decode_with_kv_cache, t(floats(2, 8)), t(floats(5, 1, 8)), t(floats(5, 1, 8)), sm_scale=1.0, return_lse=True)
        add(fi.single_prefill_with_kv_cache, t(floats(3, 2, 8)), t(floats(5, 1, 8)), t(floats(5, 1, 8)), causal=True,
            custom_mask=None, window_left=-1)
        add(fi.append_paged_kv_cache, t(floats(2, 1, 8)), t(floats(2, 1, 8)), t(ints([0, 1])), t(ints([0, 4])), pair, indices,
            indptr, last, "NHD")
        add(fi.append_paged_mla_kv_cache, t(floats(2, 8)), t(floats(2, 4)), t(ints([0, 1])), t(ints([0, 4])), t(floats(3, 4, 8)),
            t(floats(3, 4, 4)), indices, indptr, last)
        add(fi.get_batch_indices_positions, rows, lens, 3)
        add(fi.get_seq_lens, indptr, last, 4)
        add(fi.merge_state, t(floats(2, 2, 8)), t(floats(2, 2)), t(floats(2, 2, 8)), t(floats(2, 2)))
        add(fi.merge_state_in_place, t(floats(2, 2, 8)), t(floats(2, 2)), t(floats(2, 2, 8)), t(floats(2, 2)), mask=None)
        add(fi.merge_states, t(floats(2, 3, 2, 8)), t(floats(2, 3, 2)))
        for function in (fi.rmsnorm, fi.gemma_rmsnorm):
            add(function, t(floats(2, 8)), t(floats(8)), 1e-6, out=t(floats(2, 8)))
        for function in (fi.fused_add_rmsnorm, fi.gemma_fused_add_rmsnorm):
            add(function, t(floats(2, 8)), t(floats(2, 8)), t(floats(8)), 1e-6)
        add(fi.layernorm, t(floats(2, 8)), t(floats(8)), t(floats(8)))
        for function in (fi.silu_and_mul, fi.gelu_and_mul, fi.gelu_tanh_and_mul):
            add(function, t(floats(2, 8)), out=t(floats(2, 4)))
        add(fi.apply_rope, t(floats(3, 2, 8)), t(floats(3, 1, 8)), t(ints([0, 1, 3])), t(ints([0, 4])), rotary_dim=8)
        add(fi.apply_rope_pos_ids_inplace, t(floats(3, 2, 8)), t(floats(3, 1, 8)), t(ints([0, 4, 2])), interleave=True)
        add(fi.apply_llama31_rope_pos_ids, t(floats(3, 2, 8)), t(floats(3, 1, 8)), t(ints([0, 4, 2])))
        add(fi.apply_rope_with_cos_sin_cache, t(ints([0, 4, 2])), t(floats(3, 16)), t(floats(3, 8)), 8, t(floats(8, 8)), True)
        add(fi.packbits, t(flags(11)), "little")
        add(fi.segment_packbits, t(flags(11)), t(ints([0, 4, 11])), "big")
        add(fi.softmax, scores, temperature=t(floats(3)))
        add(fi.sampling_from_logits, scores, indices=t(ints([2, 0, 1])), seed=1, offset=0)
        add(fi.sampling_from_probs, scores, return_valid=True)
        add(fi.top_p_sampling_from_probs, scores, 0.5, indices=None, seed=t(ints([1])), offset=t(ints([0])))
        add(fi.top_k_sampling_from_probs, scores, t(ints([1, 2, 3])))
        add(fi.min_p_sampling_from_probs, scores, t(floats(3)))
        for function in (fi.top_k_top_p_sampling_from_logits, fi.top_k_top_p_sampling_from_probs):
            add(function, scores, t(ints([1, 2, 3])), 0.5, filter_apply_order="joint", check_nan=True)
        add(fi.top_p_renorm_probs, scores, 0.5)
        add(fi.top_k_renorm_probs, scores, 2)
        add(fi.top_k_mask_logits, scores, t(ints([1, 2, 3])))
        add(fi.chain_speculative_sampling, t(floats(2, 3, 16)), t(ints([[1, 2, 3], [4, 5, 6]])), t(floats(2, 4, 16)))
        add(fi.top_k, scores, 2, sorted=True)
        add(fi.top_k_page_table_transform, scores, t(ints([[0, 1, 2]] * 3)), t(ints([3, 2, 1])), 2)
        add(fi.top_k_ragged_transform, scores, t(ints([0, 3, 5])), t(ints([3, 2, 1])), 2)

    def unchanged(self):
        """Each call with its valid arguments."""
        for function, makers, named in self.valid:
            yield function, [made(maker) for maker in makers], {name: made(maker) for name, maker in named.items()}

    def one(self, seed: int):
        """A call with few or many random changes: the function, its arguments and its keywords."""
        r = random.Random(seed)
        function, makers, named = self.valid[r.randrange(len(self.valid))]
        arguments = [made(maker) for maker in makers]
        keywords = {name: made(maker) for name, maker in named.items() if r.random() < 0.7}
        for _ in range(r.choice((0, 1, 1, 1, 2, 2, 3, 6))):
            at = r.randrange(len(arguments) + len(keywords) + 1)
            if at < len(arguments):
                arguments[at] = attempted(r, arguments[at], arguments)
            elif at < len(arguments) + len(keywords):
                name = list(keywords)[at - len(arguments)]
                keywords[name] = attempted(r, keywords[name], arguments)
            elif r.random() < 0.3:
                arguments = arguments[: r.randrange(len(arguments) + 1)]
            elif r.random() < 0.3:
                arguments.append(attempted(r, None, arguments))
        return function, arguments, keywords


def floats(*shape):
    """Makes floats of this shape in (0, 1]."""
    count = int(numpy.prod(shape))
    return lambda: (numpy.arange(count, dtype="float32") % 17 / 17 + 1 / 17).reshape(shape)


def ints(values):
    """Makes int32 of these values."""
    return lambda: numpy.array(values, "int32")


def flags(*shape):
    """Makes booleans."""
    return lambda: numpy.ones(shape, "bool")


def bits(count):
    """Makes bytes of set bits."""
    return lambda: numpy.full(count, 255, "uint8")


def made(maker):
    """A new argument, or a shared one that has no maker."""
    is_maker = callable(maker) and getattr(maker, "__name__", "") == "<lambda>"
    return maker() if is_maker else maker


def attempted(r, value, arguments):
    """:func:`changed`, or the value itself if its library cannot change it so."""
    try:
        return changed(r, value, arguments)
    except Exception:  # noqa: BLE001: any error of NumPy or torch
        return value


def changed(r, value, arguments):
    """Another value that resembles ``value``, or has nothing of it."""
    kind = r.randrange(10)
    if kind == 0:
        return r.choice(arguments or [None])
    if kind == 1 or not hasattr(value, "shape"):
        return random_value(r)
    if kind == 2:
        return random_tensor(r, r.random() < 0.5)
    if kind == 3 and HAS_TORCH and isinstance(value, numpy.ndarray):
        import torch

        return torch.from_numpy(value)
    if kind == 4:
        return value.tolist()
    if kind in (5, 6):
        return with_layout(r, value)
    if kind == 7:
        return with_dtype(r, value)
    return with_values(r, value) if kind == 8 else with_shape(r, value)


def random_value(r):
    value = r.choice(OTHERS) if r.random() < 0.6 else random_tensor(r, r.random() < 0.5)
    return OnDevice(r.choice(("<i4", "<f4", ">f4"))) if value is OnDevice else value


def random_tensor(r, is_torch):
    shape = tuple(r.choice(SIZES) for _ in range(r.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6))))
    count = 1
    for extent in shape:
        count *= extent
    while count > 4096:
        shape, count = shape[1:], count // shape[0]
    value = numpy.zeros(shape, "float32")
    if is_torch and HAS_TORCH:
        import torch

        value = torch.from_numpy(value)
    value = with_dtype(r, with_values(r, value))
    return with_layout(r, value) if r.random() < 0.3 else value


def with_dtype(r, value):
    if isinstance(value, numpy.ndarray):
        with numpy.errstate(all="ignore"):
            return value.astype(r.choice(DTYPES))
    import torch

    dtype = getattr(torch, r.choice(TORCH_DTYPES))
    return value.to(dtype)


def with_values(r, value):
    number = r.choice((0, 1, -1, 2, 5, 100, 127, -(2**31), 2**31 - 1, float("nan"), float("inf"), 1e30, -1e30))
    is_numpy = isinstance(value, numpy.ndarray)
    dtype = str(value.dtype).removeprefix("torch.")
    if not dtype.startswith(("float", "bfloat")):
        number = int(number) % 128 if number == number and abs(number) < 1e20 else 0
        number = r.choice((number, -number)) if not dtype.startswith(("uint", "bool")) else number
        number = r.choice((number, 2**31 - 1)) if dtype in ("int32", "int64") else number
    value = value.copy() if is_numpy else value.clone()
    if value.ndim and len(value) and r.random() < 0.7:
        value[r.randrange(len(value))] = number
    elif dtype not in ("<U3", "datetime64[s]"):
        value[...] = number
    return value


def with_layout(r, value):
    if isinstance(value, numpy.ndarray):
        kind = r.randrange(7)
        if kind == 0:
            value = value.T
        elif kind == 1 and value.ndim:
            value = value[..., ::2]
        elif kind == 2 and value.ndim:
            value = value[::-1]
        elif kind == 3:
            value = numpy.broadcast_to(value, (2, *value.shape))
        elif kind == 4:
            value = value.copy()
            value.flags.writeable = False
        elif kind == 5 and value.size:
            raw = numpy.zeros(value.nbytes + 1, "uint8")[1:]
            value = raw.view(value.dtype).reshape(value.shape) if value.dtype != object else value
        else:
            value = numpy.asfortranarray(value)
        return value
    import torch

    kind = r.randrange(9)
    if kind == 0:
        return value.permute(tuple(range(value.ndim - 1, -1, -1)))
    if kind == 1 and value.ndim:
        return value[..., ::2]
    if kind == 2:
        return value.expand(2, *value.shape)
    if kind == 3:
        return value.to("meta")
    if kind == 4 and value.dtype.is_floating_point:
        return value.clone().requires_grad_()
    if kind == 5 and value.dtype in (torch.float32, torch.float64):
        return torch.complex(value, value).conj().imag
    if kind == 6 and value.ndim == 2:
        return value.to_sparse() if value.dtype == torch.float32 else value
    if kind == 7:
        return torch.nn.Parameter(value, requires_grad=False)
    return value.numpy() if value.dtype in (torch.float32, torch.int32) and not value.requires_grad else value


def with_shape(r, value):
    shape = list(value.shape)
    kind = r.randrange(4)
    if kind == 0 and shape:
        shape[r.randrange(len(shape))] = r.choice(SIZES)
    elif kind == 1 and shape:
        del shape[r.randrange(len(shape))]
    elif kind == 2:
        shape.insert(r.randrange(len(shape) + 1), r.choice((0, 1, 2)))
    else:
        r.shuffle(shape)
    if isinstance(value, numpy.ndarray):
        return numpy.resize(value, shape) if value.size else numpy.zeros(shape, value.dtype)
    return value.new_zeros(shape)
