"""Contenders of `--bench attention`: torch and, if installed, FlashInfer. `contenders.py` precedes this script.

Calls rotate over three sets of inputs. Contenders whose outputs differ from those of cuDNN, or of the first contender, are
reported to stderr and left out.
"""

import sys

import torch

WORKSPACE = 512 << 20
SETS = 3
TOLERANCE = 2e-2
# of products of 8 bits, whose weights have 4 significant bits
FP8_TOLERANCE = 1e-1


def noise(*shape, dtype=torch.bfloat16):
    return (torch.rand(*shape, device=DEVICE) - 0.5).to(dtype)


def workspace():
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def indptr(lens):
    return torch.tensor([0] + list(lens)).cumsum(0).int()


def dense(case):
    """Contenders for requests of equal length over contiguous tensors: cuDNN and torch's flash."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (qo, kv), dim, vo = case["heads"], case["head_dim"], case["head_dim_vo"]
    lens, causal = case["qo_lens"], case["causal"]
    if case["kv_lens"] != lens or len(set(lens)) > 1 or case["window"] is not None or case["sinks"]:
        return {}
    if case["fp8"]:
        return cudnn_fp8(case)
    batch, length = len(lens), lens[0]

    def of(backend, set):
        q, k, v = (x.view(batch, length, -1, x.shape[-1]).transpose(1, 2) for x in set[:3])

        def call():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=qo != kv)

        return call, lambda o: o.transpose(1, 2).reshape(batch * length, qo, vo)

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION}
    if dim == vo:
        backends["torch flash"] = SDPBackend.FLASH_ATTENTION
    return {name: lambda set, backend=backend: of(backend, set) for name, backend in backends.items()}


def cudnn_fp8(case):
    """cuDNN with queries, keys, values and outputs of e4m3, if its Python frontend is installed."""
    try:
        import cudnn
    except ImportError as why:
        print(f"cudnn fp8: {why}", file=sys.stderr)
        return {}
    (qo, kv), dim, batch, length = case["heads"], case["head_dim"], len(case["qo_lens"]), case["qo_lens"][0]

    def of(set):
        e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        handle = cudnn.create_handle()
        graph = cudnn.pygraph(handle=handle, io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32)
        views = [x.view(batch, length, -1, dim).transpose(1, 2) for x in set[:3]]
        q, k, v = (graph.tensor(dim=x.shape, stride=x.stride(), data_type=e4m3) for x in views)
        names = ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"]
        scales = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=f32) for name in names}
        o, _, *maxima = graph.sdpa_fp8(
            q=q, k=k, v=v, **scales, generate_stats=False, attn_scale=dim**-0.5, use_causal_mask=case["causal"]
        )
        out = torch.empty(batch, length, qo, dim, device=DEVICE, dtype=torch.float8_e4m3fn).transpose(1, 2)
        o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(e4m3)
        for maximum in maxima:
            maximum.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        one = torch.ones(1, 1, 1, 1, device=DEVICE)
        space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=DEVICE)
        pack = dict(zip((q, k, v), views)) | {tensor: one for tensor in scales.values()} | {o: out}
        pack |= {maximum: torch.empty(1, 1, 1, 1, device=DEVICE) for maximum in maxima}
        # S of e4m3 uses the range of the dtype
        pack[scales["scale_s"]], pack[scales["descale_s"]] = 256 * one, one / 256

        def call():
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(pack, space, handle=handle)
            return out

        return call, lambda o: o.transpose(1, 2).reshape(batch * length, qo, dim)

    return {"cudnn": of}


def plan_of(case):
    window, queries = case["window"], torch.float8_e4m3fn if case["fp8"] else torch.bfloat16
    plan = {"causal": case["causal"], "q_data_type": queries, "window_left": -1 if window is None else window}
    if case["fp8"]:
        plan["o_data_type"] = torch.bfloat16
    return plan | {"kv_data_type": DTYPES[case["kv"]]}


DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def identity(o):
    return o


def ragged(case):
    (qo, kv), dim, vo = case["heads"], case["head_dim"], case["head_dim_vo"]
    made = {}
    for backend in ("fa3",) if case["fp8"] else ("fa2", "fa3"):
        if case["sinks"]:
            continue
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend=backend)
        wrapper.plan(indptr(case["qo_lens"]), indptr(case["kv_lens"]), qo, kv, dim, head_dim_vo=vo, **plan_of(case))
        made[f"flashinfer {backend}"] = lambda set, w=wrapper: (lambda: w.run(*set[:3], *scales(case)), identity)
    if case["sinks"]:
        made |= sinks(case, None)
    return made


def scales(case):
    """Scales of queries, keys and values, which FlashInfer expects with queries of e4m3."""
    qo, kv = case["heads"]
    return [torch.ones(heads, device=DEVICE) for heads in (qo, kv, kv)] if case["fp8"] else []


def sinks(case, page):
    (qo, kv), dim = case["heads"], case["head_dim"]
    made = {}
    for backend in ("fa2", "fa3"):
        wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace(), "NHD", backend=backend, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            head_dim_qk=dim, head_dim_vo=dim, window_left=case["window"] if case["window"] is not None else -1,
        )
        pages = list(case["kv_lens"]) if page is None else [-(-n // page) for n in case["kv_lens"]]
        size = 1 if page is None else page
        last = torch.tensor([(n - 1) % size + 1 for n in case["kv_lens"]]).int()
        indices = torch.arange(sum(pages), device=DEVICE).int()
        wrapper.plan(indptr(case["qo_lens"]), indptr(pages), indices, last, qo, kv, dim, size, **plan_of(case))

        def of(set, w=wrapper):
            q, k, v = (x for x in set[:3])
            cache = tuple(x.view(-1, size, kv, dim) for x in (k, v))
            return (lambda: w.run(q, cache, set[3], dim**-0.5)), identity

        made[f"flashinfer {backend}"] = of
    return made


def num_pages(case):
    page = case["page_size"]
    return sum(-(-n // page) for n in case["kv_lens"]) - case["shared"] // page * (len(case["kv_lens"]) - 1)


def paged(case):
    (qo, kv), dim, page = case["heads"], case["head_dim"], case["page_size"]
    pages = [-(-length // page) for length in case["kv_lens"]]
    last = torch.tensor([(length - 1) % page + 1 for length in case["kv_lens"]]).int()
    torch.manual_seed(7)
    indices = torch.randperm(num_pages(case), device=DEVICE).int()
    made = {}
    if case["shared"]:
        made |= cascade(case, pages, indices, last)
        first, own = indices[: case["shared"] // page], indices[case["shared"] // page :]
        own = own.split([count - len(first) for count in pages])
        indices = torch.cat([part for of in own for part in (first, of)])
    for backend in ("fa2", "fa3"):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
        try:
            wrapper.plan(
                indptr(case["qo_lens"]), indptr(pages), indices, last, qo, kv, dim, page, **plan_of(case)
            )
        except Exception as why:
            print(f"flashinfer {backend}: {str(why)[-200:]}", file=sys.stderr)
            continue
        made[f"flashinfer {backend}"] = lambda set, w=wrapper: (
            lambda: w.run(set[0], (set[1], set[2]), *scales(case)),
            identity,
        )
    if min(case["qo_lens"]) > 1:
        return made
    if max(case["qo_lens"]) > 1:
        return made | persistent(case, pages, indices) | pod(case, pages, indices, last)
    for tensor_cores in (True, False):
        name = "flashinfer decode tc" if tensor_cores else "flashinfer decode"
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=tensor_cores)
        plan = {key: value for key, value in plan_of(case).items() if key != "causal"}
        try:
            wrapper.plan(indptr(pages), indices, last, qo, kv, dim, page, **plan)
        except Exception as why:  # without tensor cores it does not support groups of 5 or 16
            print(f"{name}: {str(why)[-200:]}", file=sys.stderr)
            continue
        made[name] = lambda set, w=wrapper: (lambda: w.run(set[0], (set[1], set[2])), identity)
    return made | persistent(case, pages, indices)


def persistent(case, pages, indices):
    (qo, kv), dim, page = case["heads"], case["head_dim"], case["page_size"]
    try:
        wrapper = flashinfer.BatchAttention(kv_layout="NHD")
        lens = torch.tensor(case["kv_lens"]).int()
        wrapper.plan(
            indptr(case["qo_lens"]).cuda(), indptr(pages).cuda(), indices, lens.cuda(), qo, kv, dim, dim, page,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=DTYPES[case["kv"]],
        )
        return {"flashinfer persistent": lambda set: (lambda: wrapper.run(set[0], (set[1], set[2]))[0], identity)}
    except Exception as why:
        print(f"flashinfer persistent: {str(why)[-200:]}", file=sys.stderr)
        return {}


def cascade(case, pages, indices, last):
    """FlashInfer's levels: the shared pages, then the others."""
    (qo, kv), dim, page, count = case["heads"], case["head_dim"], case["page_size"], len(pages)
    shared = case["shared"] // page
    rows = indptr(case["qo_lens"])
    try:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
        wrapper.plan(
            [torch.tensor([0, int(rows[-1])]).int().cuda(), rows.cuda()],
            [torch.tensor([0, shared]).int().cuda(), indptr([n - shared for n in pages]).cuda()],
            [indices[:shared], indices[shared:]],
            [torch.tensor([page]).int().cuda(), last.cuda()],
            qo, kv, dim, page, q_data_type=torch.bfloat16, kv_data_type=DTYPES[case["kv"]],
        )
    except Exception as why:
        print(f"flashinfer cascade: {str(why)[-200:]}", file=sys.stderr)
        return {}
    return {"flashinfer cascade": lambda set: (lambda: wrapper.run(set[0], (set[1], set[2])), identity)}


def pod(case, pages, indices, last):
    """FlashInfer's kernel for prompts, which come first, beside decode steps."""
    (qo, kv), dim, page, lens = case["heads"], case["head_dim"], case["page_size"], case["qo_lens"]
    prompts = sum(length > 1 for length in lens)
    rows, cut = sum(lens[:prompts]), sum(pages[:prompts])
    part = lambda at, of: [indptr(lens[at]), indptr(pages[at]), indices[of], last[at]]
    try:
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(
            *part(slice(prompts), slice(cut)), *part(slice(prompts, None), slice(cut, None)), qo, kv, dim, page,
            q_data_type=torch.bfloat16, kv_data_type=DTYPES[case["kv"]],
        )
    except Exception as why:
        print(f"flashinfer pod: {str(why)[-200:]}", file=sys.stderr)
        return {}

    def of(set):
        q, cache = set[0], (set[1], set[2])
        return lambda: wrapper.run(q[:rows], cache, q[rows:], cache, causal_p=True), torch.cat

    return {"flashinfer pod": of}


def latent(case):
    """Contenders for latent attention over pages: FlashInfer's MLA."""
    heads, dim, beside, page = case["heads"][0], case["head_dim"], case["latent"], case["page_size"]
    pages = [-(-length // page) for length in case["kv_lens"]]
    lens = torch.tensor(case["kv_lens"]).int()
    torch.manual_seed(7)
    indices = torch.randperm(sum(pages), device=DEVICE).int()
    made = {}
    for backend in ("fa2", "fa3"):
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
        try:
            wrapper.plan(
                indptr(case["qo_lens"]).cuda(), indptr(pages).cuda(), indices, lens.cuda(), heads, dim, beside, page,
                case["causal"], 192**-0.5, torch.bfloat16, DTYPES[case["kv"]],
            )
        except Exception as why:
            print(f"flashinfer {backend}: {str(why)[-200:]}", file=sys.stderr)
            continue
        made[f"flashinfer {backend}"] = lambda set, w=wrapper: (lambda: w.run(*set), identity)
    return made


def latent_inputs(case):
    heads, dim, beside, page = case["heads"][0], case["head_dim"], case["latent"], case["page_size"]
    rows, pages = sum(case["qo_lens"]), sum(-(-n // page) for n in case["kv_lens"])
    cache = [noise(pages, page, width).to(DTYPES[case["kv"]]) for width in (dim, beside)]
    return noise(rows, heads, dim), noise(rows, heads, beside), *cache


def inputs(case):
    if case["latent"] is not None:
        return latent_inputs(case)
    (qo, kv), dim, vo, page = case["heads"], case["head_dim"], case["head_dim_vo"], case["page_size"]
    dtype = DTYPES[case["kv"]]
    q = noise(sum(case["qo_lens"]), qo, dim, dtype=torch.float8_e4m3fn if case["fp8"] else torch.bfloat16)
    tokens = (sum(case["kv_lens"]),) if page is None else (num_pages(case), page)
    k, v = noise(*tokens, kv, dim).to(dtype), noise(*tokens, kv, vo).to(dtype)
    return q, k, v, torch.rand(qo, device=DEVICE)


def build(case):
    graphs.clear()
    torch.cuda.empty_cache()
    a, b = noise(8192, 8192), noise(8192, 8192)
    out = torch.empty_like(a)
    graphs["matmul"] = graphed([lambda: torch.mm(a, b, out=out)])
    if not case["has_peers"] or case["latent"] is not None and case["page_size"] is None:
        return {"names": list(graphs)}
    sets = [inputs(case) for _ in range(SETS)]
    made = dense(case) if case["page_size"] is None else {}
    if flashinfer:
        try:
            of_pages = paged if case["latent"] is None else latent
            made |= ragged(case) if case["page_size"] is None else of_pages(case)
        except Exception as why:
            print(f"flashinfer: {str(why)[-300:]}", file=sys.stderr)
    expected = None
    for name, of in made.items():
        try:
            calls = [of(set) for set in sets]
            found = calls[0][1](calls[0][0]()).float()
            expected = found if expected is None else expected
            error = ((found - expected).norm() / expected.norm()).item()
            if not error < (FP8_TOLERANCE if case["fp8"] else TOLERANCE):
                print(f"{name}: differs by {error:.2e}", file=sys.stderr)
                continue
            graphs[name] = graphed([call for call, _ in calls])
        except Exception as why:  # skip backends that do not support the case
            print(f"{name}: {str(why)[:200]}", file=sys.stderr)
    return {"names": list(graphs)}


serve(build)
