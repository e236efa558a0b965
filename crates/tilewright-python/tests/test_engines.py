"""The attention backends of vLLM and SGLang against attention from its definition.

The drivers make the calls of vLLM 0.33.0 and SGLang 0.5.23. If an engine is installed, its own base classes are used.
"""

import inspect
import sys

import pytest
from conftest import HAS_TORCH

if not HAS_TORCH:
    pytest.skip("torch is not installed", allow_module_level=True)
pytestmark = pytest.mark.torch

import dense
import engine_standins
import numpy
import torch
from engine_driver import Case, SglangDriver, VllmDriver

import tilewright
from tilewright import engines
from tilewright.engines import _steps

FP8 = torch.float8_e4m3fn
CASES = {
    "plain": Case(),
    "float16 in HND": Case(dtype=torch.float16, layout="HND", heads=(4, 4), dim=128),
    "large pages": Case(page_size=64),
    "window": Case(windows=(7, None, 20)),
    "hybrid pool": Case(windows=(7, None), hybrid_pool=True),
    "soft cap": Case(soft_cap=2.0),
    "sinks": Case(has_sinks=True),
    "scales that bfloat16 needs not": Case(scales=(0.5, 2.0)),
    "fp8": Case(kv_dtype=FP8, scales=(0.5, 2.0)),
    "fp8 e5m2": Case(kv_dtype=torch.float8_e5m2, scales=(0.25, 1.0)),
    "sinks, window, cap and fp8": Case(windows=(12, None), soft_cap=5.0, has_sinks=True, kv_dtype=FP8, scales=(0.5, 0.25)),
}
DRIVERS = {"vllm": VllmDriver, "sglang": SglangDriver}


def limit(case):
    """The tolerance: queries and weights of 8-bit mantissas."""
    return 2e-2 if case.dtype == torch.bfloat16 else 4e-3


@pytest.fixture(params=list(DRIVERS))
def driver(request):
    return DRIVERS[request.param]


@pytest.mark.parametrize("name", ["plain", "sinks, window, cap and fp8"])
def test_drivers_expect_attention_from_its_definition(rng, name):
    case = CASES[name]
    q, k, v = (torch.from_numpy(rng.standard_normal((n, heads, 8))) for n, heads in ((3, 8), (20, 2), (20, 2)))
    engine = SglangDriver(case)
    cap, visible = case.soft_cap, dense.causal(3, 20, case.windows[0])
    expected, lse = dense.attention(*(x.numpy() for x in (q, k, v)), scale=case.scale, visible=visible,
                                    logits=(lambda s: cap * numpy.tanh(s / cap)) if cap else None)
    if case.has_sinks:
        expected /= (1.0 + numpy.exp(engine.sinks[0].double().numpy() - lse * numpy.log(2.0)))[..., None]
    numpy.testing.assert_allclose(engine.expected(0, q, k, v).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(CASES))
def test_prefill_decode_and_mixed_steps(host, driver, name):
    case = CASES[name]
    engine = driver(case)
    steps = [[(0, 37), (1, 5)], [(0, 1), (1, 1)], [(2, 30), (0, 1)], [(2, 18), (3, 16), (1, 1)], [(3, 1), (2, 1), (0, 1)]]
    assert max(engine.step(new) for new in steps) < limit(case)


@pytest.mark.parametrize("name", list(CASES))
def test_graphs_replay_other_batches(host, driver, name):
    case = CASES[name]
    engine = driver(case)
    engine.step([(0, 33), (1, 16), (2, 2), (3, 100)])
    for requests in (4, 2):
        engine.capture(requests)
    assert engine.step([(0, 1), (3, 1)], graph=2) < limit(case)
    assert engine.step([(1, 1), (2, 1), (3, 1)], graph=4) < limit(case)
    assert engine.step([(1, 3), (0, 1)]) < limit(case)
    assert engine.step([(2, 1)], graph=2) < limit(case)


@pytest.mark.parametrize("name", ["plain", "window", "hybrid pool", "sinks, window, cap and fp8"])
def test_decode_steps_with_lengths_on_the_gpu(host, driver, name, monkeypatch):
    """With speculation, vLLM's lengths on the host are upper bounds."""
    case = CASES[name]
    engine = VllmDriver(case, num_drafts=2) if driver is VllmDriver else driver(case)
    engine.hides_lengths = True
    assert engine.step([(0, 33), (1, 16), (2, 2), (3, 100)]) < limit(case)
    for requests in (4, 2):
        engine.capture(requests)
    monkeypatch.setattr(_steps, "host_lengths", lambda x: pytest.fail("lengths were read on the host"))
    drafts = [(0, 3), (1, 2), (3, 1)] if driver is VllmDriver else [(0, 1), (1, 1), (3, 1)]
    assert engine.step([(1, 1), (2, 1), (3, 1)]) < limit(case)
    assert engine.step(drafts) < limit(case)
    assert engine.step([(0, 1), (3, 1)], graph=2) < limit(case)
    assert engine.step([(1, 1), (2, 1), (3, 1)], graph=4) < limit(case)
    assert engine.step(drafts) < limit(case)
    assert engine.step([(2, 1)], graph=2) < limit(case)


def test_graphs_of_sglang_read_block_tables_at_one_address(monkeypatch):
    addresses, plan_on_device = set(), _steps.StepPlans.plan_on_device

    def recorded(self, problem, rows, table, size, in_graph):
        addresses.add(table.block_tables.data_ptr())
        return plan_on_device(self, problem, rows, table, size, in_graph)

    engine = SglangDriver(CASES["plain"])
    engine.hides_lengths = True
    engine.step([(0, 33), (1, 16)])
    monkeypatch.setattr(_steps.StepPlans, "plan_on_device", recorded)
    engine.capture(2)
    kept = [engine.step([(0, 1), (1, 1)], graph=2) for _ in range(3)]
    assert len(addresses) == 1 and max(kept) < limit(engine.case)


def test_a_graph_of_vllm_reads_one_block_table():
    engine = VllmDriver(CASES["plain"], num_drafts=1)
    engine.step([(0, 33), (1, 16)])
    engine.capture(2)
    engine.table = engine.table.clone()
    with pytest.raises(tilewright.Error, match="vllm.build: block_table_tensor is torch.int32 at .*, which the graph reads"):
        engine.step([(0, 1), (1, 1)], graph=2)


@pytest.mark.parametrize("name", ["plain", "fp8"])
def test_padding_is_not_written(host, driver, name):
    engine = driver(CASES[name])
    assert engine.step([(0, 20), (1, 7)], pad=5) < limit(engine.case)
    assert engine.step([(0, 1), (1, 1)]) < limit(engine.case)
    if driver is VllmDriver:
        blocks = {block for request in engine.blocks.values() for block in request}
        unused = [block for block in range(engine.num_blocks) if block not in blocks]
        assert not engine.layers[0].kv_cache[unused].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_inference", [False, True])
def test_reloaded_sinks_are_read(host, driver, dtype, is_inference, no_host_reads):
    """In eager steps and by recorded graphs. No value of a sink is read on the host."""
    with torch.inference_mode(is_inference):
        engine = driver(Case(has_sinks=True, sinks_dtype=dtype))
    with torch.inference_mode():
        assert engine.step([(0, 20), (1, 7)]) < limit(engine.case)
        engine.capture(2)
        assert engine.step([(0, 1), (1, 1)], graph=2) < limit(engine.case)
    with torch.inference_mode(is_inference):
        engine.sinks[0].data.add_(3.0)  # as loaders of weights write: no version counts it
    if driver is VllmDriver:
        engine.layers[0].impl.process_weights_after_loading(engine.case.dtype)
    with torch.inference_mode():
        assert engine.step([(0, 1), (1, 1)], graph=2) < limit(engine.case)
        assert engine.step([(0, 3), (1, 1)]) < limit(engine.case)


def test_layers_share_an_operator_and_bind_their_own_sinks(host, driver):
    engine = driver(Case(has_sinks=True, windows=(None, None)))
    count = len(_steps._operators)
    assert engine.step([(0, 20), (1, 1)]) < limit(engine.case)
    assert len(_steps._operators) <= count + 2  # one that plans, one that runs
    if driver is VllmDriver:
        tables = [layer.impl._sinks.tables["sinks"] for layer in engine.layers]
    else:
        tables = [engine.backend._sinks[index].tables["sinks"] for index in range(2)]
    assert [one.data_ptr() for one in tables] == [one.data_ptr() for one in engine.sinks]


def test_vllm_finds_the_backend():
    engine_standins.ensure_vllm()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tilewright.vllm import TilewrightBackend

    engines.register_vllm()
    assert TilewrightBackend.get_name() == AttentionBackendEnum.CUSTOM.name
    assert TilewrightBackend.supports_sink() and "fp8" in TilewrightBackend.supported_kv_cache_dtypes
    if engine_standins.has_engine("vllm"):
        assert AttentionBackendEnum.CUSTOM.get_class() is TilewrightBackend
        from vllm.platforms.interface import DeviceCapability

        assert TilewrightBackend.validate_configuration(
            128, torch.bfloat16, "fp8", 16, False, True, False, False, False, DeviceCapability(9, 0), "decoder",
            has_sliding_window=True) == []


def test_sglang_finds_the_backend(monkeypatch):
    engine_standins.ensure_sglang()
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setenv(engines.SGLANG_REPLACES, "a list's name")
    engines.register_sglang()
    engines.register_sglang()
    assert ATTENTION_BACKEND_CHOICES.count("tilewright") == 1
    assert ATTENTION_BACKENDS["tilewright"] is ATTENTION_BACKENDS.pop("a list's name")


@pytest.mark.parametrize("engine, module, register", [
    ("vLLM 0.33", "vllm.v1.attention.backends.registry", engines.register_vllm),
    ("SGLang 0.5.23", "sglang.srt.layers.attention.attention_registry", engines.register_sglang),
])
def test_other_releases_get_a_warning(monkeypatch, engine, module, register):
    engine_standins.ensure_vllm()
    engine_standins.ensure_sglang()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.warns(UserWarning, match=f"the attention backend is not registered: .*, expected {engine}"):
        register()


def test_signatures_have_the_engines_arguments():
    engine_standins.ensure_vllm()
    engine_standins.ensure_sglang()
    from tilewright.sglang import TilewrightAttnBackend
    from tilewright.vllm import TilewrightImpl, TilewrightMetadataBuilder

    for ours in (TilewrightImpl, TilewrightMetadataBuilder, TilewrightAttnBackend):
        assert not inspect.isabstract(ours)
        for base in ours.__mro__[1:]:
            for name in set(vars(base)) & set(vars(ours)):
                method = vars(base)[name]
                if inspect.isfunction(method) and name != "__init__":
                    theirs = [one for one in inspect.signature(method).parameters.values() if one.kind != one.VAR_KEYWORD]
                    known = inspect.signature(vars(ours)[name]).parameters
                    assert [one.name for one in theirs] == list(known)[: len(theirs)], f"{ours.__name__}.{name}"


@pytest.mark.parametrize("arguments, text", [
    ({"alibi_slopes": [1.0]}, "vllm.attention: alibi_slopes = [1.0], expected None"),
    ({"attn_type": "encoder"}, "vllm.attention: attn_type = 'encoder', expected decoder"),
    ({"kv_cache_dtype": "nvfp4"}, "vllm.attention: kv_cache_dtype = 'nvfp4', expected one of auto, float16"),
    ({"sinks": torch.zeros(3)}, "vllm.attention: sinks has shape (3,), expected (8,)"),
])
def test_vllm_refuses_other_layers(arguments, text):
    engine_standins.ensure_vllm()
    from tilewright.vllm import TilewrightImpl

    with pytest.raises((tilewright.Error, tilewright.Unsupported)) as why:
        TilewrightImpl(8, 64, 0.125, 2, **arguments)
    assert text in str(why.value)


def test_vllm_refuses_fused_outputs_and_other_masks():
    engine = VllmDriver(Case())
    with pytest.raises(tilewright.Unsupported, match="vllm.forward: output_scale"):
        engine.layers[0].impl.forward(engine.layers[0], None, None, None, None, None, None, output_scale=torch.ones(1))
    engine.slots(0, 0, 3)
    common = engine.common([(0, 3)], 1, 3, [0, 0, 0], [3])
    common.causal = False
    with pytest.raises(tilewright.Unsupported, match="vllm.build: causal = 'False', expected True"):
        engine.builder.build(0, common)


def test_vllm_profiles_without_metadata():
    layer = VllmDriver(Case()).layers[0]
    q = torch.ones(3, 8, 64, dtype=torch.bfloat16)
    assert not layer.impl.forward(layer, q, q, q, layer.kv_cache, None, output=torch.ones_like(q)).any()


def test_sglang_refuses_speculation_and_cross_attention():
    engine = SglangDriver(Case())
    engine.slots(0, 0, 1)
    engine.kv_lens[0] = 1
    batch = engine.batch([(0, 1)], [0], "DECODE", 1)
    with pytest.raises(tilewright.Error, match=r"init_cuda_graph_state\(\) has not been called"):
        engine.backend.init_forward_metadata_out_graph(batch)
    engine.layers[0].is_cross_attention = True
    with pytest.raises(tilewright.Unsupported, match="sglang.forward: is_cross_attention = True, expected None"):
        engine.backend.forward_decode(None, None, None, engine.layers[0], batch)
    batch.spec_info = "EAGLE"
    with pytest.raises(tilewright.Unsupported, match="sglang.init_forward_metadata: spec_info = 'EAGLE', expected None"):
        engine.backend.init_forward_metadata(batch)
