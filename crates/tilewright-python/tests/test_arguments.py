"""Refused arguments: each has its message, and none ends the process."""

import numpy
import pytest
import tilewright as tw
from conftest import OnDevice, needs_torch

OK = dict(qo_indptr=[0, 1], kv_indptr=[0, 2])


def operator():
    return tw.Attention(tw.Problem(2, 1, 8))


def tensors(**changes):
    arrays = {"q": numpy.ones((1, 2, 8), "float32"), "k": numpy.ones((2, 1, 8), "float32"),
              "v": numpy.ones((2, 1, 8), "float32")}
    return {**arrays, **changes}


def run(**changes):
    one = operator()
    return one.run(one.plan(tw.Batch.ragged(**OK)), **tensors(**changes))


def rotate(rope):
    q = numpy.ones((2, 1, 8), "float32")
    tw.apply_rope(q, q.copy(), [0, 1], rope)


def to_slots(slot_mapping):
    k, cache = numpy.ones((2, 1, 8), "float32"), numpy.zeros((2, 2, 4, 1, 8), "float32")
    tw.append_to_slots(k, k, slot_mapping, *cache)


@pytest.mark.parametrize("call, text", [
    (lambda: tw.Problem(3, 2, 8), "attention.problem: qo heads = 3 is not a multiple of kv heads = 2"),
    (lambda: tw.Problem(2, 1, 0), "attention.problem: head_dim.qk = 0, expected at least 1"),
    (lambda: tw.Problem(2, 1, 8, dtype="float8_e4m3fn"), "q/o dtype = e4m3, expected f32, f16 or bf16"),
    (lambda: tw.Problem(2, 1, 8, dtype="float99"), "dtype = float99, expected one of float32"),
    (lambda: tw.Problem(2, 1, 8, layout="DHN"), 'layout = "DHN", expected "NHD" or "HND"'),
    (lambda: tw.Problem(2, 1, 8, window_right=1), "window_right = 1, expected it with window_left"),
    (lambda: tw.Problem(2, 1, 8, scale=float("nan")), "scale = NaN, expected a finite number above 0"),
    (lambda: tw.Problem.latent(2, 8, 0, scale=1.0), "kpe = 0, expected at least 1"),
    (lambda: tw.Device("tpu"), 'device: name = "tpu", expected "cpu"'),
    (lambda: tw.Device("simulator", threads=2), "threads = 2"),
    (lambda: tw.Device("cpu", threads=0), "threads = 0 is not in 1..=1024"),
    (lambda: operator().plan(tw.Batch.ragged([0, 1], [0, 1, 2])), "kv_indptr has 3 entries, expected num_requests + 1 = 2"),
    (lambda: operator().plan(tw.Batch.ragged([0, 2, 1], [0, 1, 2])), "request 1: qo_indptr decreases from 2 to 1"),
    (lambda: operator().plan(tw.Batch.paged([0, 1], tw.PageTable([0, 1], [0], [5], 4))), "last_page_len = 5 is not in 1..=4"),
    (lambda: operator().plan(tw.Batch.paged([0, 1], tw.PageTable([0, 1], [-1], [1], 4))), "page = -1"),
    (lambda: operator().plan(tw.Batch.ragged(**OK), split="often"), "split = 'often', expected \"balanced\", \"never\""),
    (lambda: operator().plan(tw.Batch.ragged(**OK), split=0), "split = 0 tokens, expected at least 1"),
    (lambda: tw.Batch.ragged([0, 1.5], [0, 1]), "is not an array, expected integers"),
    (lambda: tw.Batch.ragged(numpy.ones(2, "float32"), [0, 1]), "dtype = float32, expected int32 or int64"),
    (lambda: tw.Batch(qo_indptr=[0, 1]), "expected one of pages, ragged tokens and blocks"),
    (lambda: run(q=numpy.ones((1, 2, 8), "float64")), "attention.run: q is float64, expected float32"),
    (lambda: run(q=numpy.ones((1, 2, 8), "float16")), "q is f16, expected f32"),
    (lambda: run(q=numpy.ones((1, 3, 8), "float32")), "q has shape [1, 3, 8], expected"),
    (lambda: run(q=numpy.ones((1, 2, 8, 1, 1), "float32")), "has 5 axes, the most is 4"),
    (lambda: run(q=numpy.ones((1, 2, 16), "float32")[..., ::2]), "head_dim, the last axis, must have stride 1"),
    (lambda: run(q=numpy.ones((1, 2, 8), "float32")[:, ::-1]), "stride = -8, expected at least 0"),
    (lambda: run(k=numpy.ones((3, 1, 8), "float32")), "k has 3 tokens, kv_indptr ends at 2"),
    (lambda: run(q=numpy.array([[[object()] * 8] * 2])), "dtype = object, expected one of"),
    (lambda: run(q=[[1.0] * 8] * 2), "tensor: list is not a tensor, expected a NumPy array, a torch tensor"),
    (lambda: run(out=numpy.ones((1, 2, 4), "float32")), "o has shape [1, 2, 4], expected"),
    (lambda: run(lse=numpy.ones((1, 2), "float16")), "lse is f16, expected f32"),
    (lambda: run(k_scale=0.0), "k scale = 0"),
    (lambda: run(k_scale=[1.0, 2.0]), "k scale"),
    (lambda: run(k_scale=["1"]), "arguments: k_scale: must be real number, not str"),
    (lambda: tw.rmsnorm(numpy.ones((2, 4), "float32"), numpy.ones(3, "float32")), "weight has shape [3], expected [hidden] = [4]"),
    (lambda: tw.rmsnorm(numpy.ones((2, 4), "float32"), numpy.ones(4, "float32"), -1.0), "eps = -1 is not a finite number >= 0"),
    (lambda: tw.silu_and_mul(numpy.ones((2, 3), "float32")), "expected an even 2*d"),
    (lambda: tw.sampling.sample(numpy.ones((2, 3), "float32"), top_p=1.5), "request 0: top_p = 1.5 is not in (0, 1]"),
    (lambda: tw.sampling.sample(numpy.ones((2, 3), "float32"), top_k=[1, 0]), "request 1: top_k = 0 is not at least 1"),
    (lambda: tw.sampling.sample(numpy.ones((2, 3), "float32"), top_k=[1]), "top_k has 1 elements, expected rows = 2"),
    (lambda: tw.sampling.sample(numpy.ones((2, 3), "float32"), seed=-1), "seeds of 64 bits"),
    (lambda: tw.sampling.top_k(numpy.ones((2, 3), "float32"), 4), "k = 4 is not in 1..=3"),
    (lambda: rotate(tw.CosSinCache(numpy.ones((4, 3), "float32"))), "cos_sin_cache has shape [4, 3], expected [max_positions"),
    (lambda: rotate(tw.CosSinCache(numpy.ones((4, 8), "float16"))), "cos_sin_cache is f16, expected f32"),
    (lambda: rotate(tw.CosSinCache(numpy.ones((4, 16), "float32")[:, ::2])), "cos_sin_cache has strides [16, 2], expected a contig"),
    (lambda: tw.apply_rope(numpy.ones((2, 1, 8), "float32"), numpy.ones((2, 1, 8), "float32"), [0, -1], tw.Rope(8)), "position"),
    (lambda: tw.Variant.from_json("{"), "attention.variant"),
    (lambda: tw.Attention(tw.Problem(2, 1, 8), tw.variants.sinks([1.0])), "sinks: 1, expected one for each of the 2 query heads"),
    (lambda: tw.variants.alibi(0), "attention.variant: num_qo_heads = 0 is not in 1..=65536"),
    (lambda: tw.variants.alibi(2**40), "attention.variant: num_qo_heads = 1099511627776 is not in 1..=65536"),
    (lambda: to_slots([0, 8]), "kv.append_to_slots: token 1: slot = 8 is not in 0..8, nor -1 to skip the token"),
    (lambda: to_slots([3, 3]), "kv.append_to_slots: tokens 0 and 1 both go to slot 3 of page 0"),
    (lambda: to_slots([3]), "k has shape [2, 1, 8], expected [num_tokens, num_kv_heads, head_dim] = [1, 1, 8]"),
    (lambda: to_slots([0.5, 1]), "is not an array, expected integers"),
])
def test_refused_arguments_are_named(call, text):
    with pytest.raises(tw.Error) as refused:
        call()
    assert text in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_read_only_outputs_and_shared_memory_are_refused():
    out = numpy.ones((1, 2, 8), "float32")
    out.flags.writeable = False
    with pytest.raises(tw.Error, match="o is read-only, expected a writable tensor"):
        run(out=out)
    q = numpy.ones((1, 2, 8), "float32")
    with pytest.raises(tw.Error, match="o shares memory with q, expected separate tensors"):
        run(q=q, out=q)


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8"])
def test_big_endian_elements_are_refused(dtype):
    x = numpy.ones((2, 4), dtype)
    with pytest.raises(tw.Error, match=f"tensor: dtype = {dtype} is big-endian, expected little-endian elements"):
        tw.rmsnorm(x, numpy.ones(4, "float32"), out=numpy.empty((2, 4), "float32"))
    with pytest.raises(tw.Error, match="dtype = >i4 is big-endian"):
        tw.Batch.ragged(numpy.array([0, 1], ">i4"), [0, 2])
    # '<', '=' and '|' are the order of this machine, or none
    for native in ("<f4", "=f4"):
        tw.rmsnorm(x.astype(native), numpy.ones(4, "float32"))
    tw.packbits(numpy.ones(8, "|b1"))


def test_plans_of_other_operators_are_refused():
    plan = tw.Attention(tw.Problem(4, 1, 8)).plan(tw.Batch.ragged(**OK))
    with pytest.raises(tw.Error, match="the plan was made by another operator"):
        operator().run(plan, **tensors())


def test_operators_of_one_device_name_share_plans():
    """Two simulators have memory of their own, so a plan of one is out of bounds in the other."""
    one, other = (tw.Attention(tw.Problem(2, 1, 8), device="simulator") for _ in range(2))
    numpy.testing.assert_array_equal(other.run(one.plan(tw.Batch.ragged(**OK)), **tensors()), 1.0)
    previous = tw.set_host_device(tw.Device("simulator"))
    try:
        assert tw.Attention(tw.Problem(2, 1, 8), device="simulator").device is tw.Attention(tw.Problem(2, 1, 8)).device
    finally:
        tw.set_host_device(previous)


def test_freed_plans_and_other_objects_are_refused():
    one = operator()
    plan = one.plan(tw.Batch.ragged(**OK), capacity=tw.Capacity(1, 1, 1))
    one.run(plan, **tensors())
    plan.free()
    plan.free()
    freed = "attention: the plan was freed, expected a plan that Attention.plan has returned"
    for use in (lambda: one.run(plan, **tensors()), lambda: one.replan(plan, tw.Batch.ragged(**OK)),
                lambda: one.check_plan(plan), plan.explain, lambda: plan.num_rows, lambda: plan._repr_svg_()):
        with pytest.raises(tw.Error, match=freed):
            use()
    with pytest.raises(AttributeError, match="'Plan' object has no attribute 'nothing'"):
        plan.nothing
    for function, use in (("run", lambda: one.run(None, **tensors())),
                          ("replan", lambda: one.replan(None, tw.Batch.ragged(**OK))),
                          ("check_plan", lambda: one.check_plan(None))):
        with pytest.raises(tw.Error, match=f"attention.{function}: plan is of type NoneType, expected a Plan"):
            use()
    with pytest.raises(tw.Error, match="attention.plan: batch is of type list, expected a Batch or a DeviceBatch"):
        one.plan([0, 1])


def test_streams_are_numbers():
    device = tw.Device("cpu")
    assert device.queue_of(0) is device.queue()
    expected = "expected the number of a stream .cudaStream_t., such as cuda_stream of torch's"
    for stream in (None, "0", 1.0, [], object()):
        with pytest.raises(tw.Error, match=f"device.queue_of: stream is of type {type(stream).__name__}, {expected}"):
            device.queue_of(stream)
    for stream in (-1, 1 << 64):
        with pytest.raises(tw.Error, match=f"device.queue_of: stream = {stream}, expected a number of 64 bits from 0"):
            device.queue_of(stream)


def test_page_indices_on_a_device_reach_the_plan():
    there = "page indices are in the memory of device 0, expected host memory"
    table = tw.PageTable([0, 2], OnDevice(length=3), [1], 4)
    with pytest.raises(tw.Error, match=f"attention.plan: {there}"):
        operator().plan(tw.Batch.paged([0, 1], table))
    shared = tw.Level([0, 1], tw.PageTable([0, 2], OnDevice(), [4], 4))
    with pytest.raises(tw.Error, match=f"attention.plan: {there}"):
        operator().plan(tw.Batch.paged([0, 1], tw.PageTable([0, 1], [0], [1], 4), levels=[shared]))
    with pytest.raises(tw.Error, match="page indices is int64 with strides .*, expected contiguous int32"):
        operator().plan(tw.Batch.paged([0, 1], tw.PageTable([0, 2], OnDevice("<i8"), [1], 4)))
    # the wrappers convert lengths that this rejects
    for indptr, last in ((OnDevice(length=2), [1]), ([0, 1], OnDevice(length=1))):
        with pytest.raises(tw.Error, match="the array is in the memory of device 0, expected host memory"):
            tw.Batch._unconverted([0, 1], (indptr, [0], last, 4))
    with pytest.raises(tw.Error, match="kv indptr ends at 4, but indices has 3 pages"):
        operator().plan(tw.Batch.paged([0, 1], tw.PageTable([0, 4], OnDevice(length=3), [1], 4)))


def test_masks_on_a_device_reach_the_plan():
    with pytest.raises(tw.Error, match="attention.plan: mask is in the memory of device 0, expected host memory"):
        operator().plan(tw.Batch.ragged([0, 2], [0, 8], mask=OnDevice("|u1", 2)))
    with pytest.raises(tw.Error, match="mask is in the memory of device 0"):
        operator().plan(tw.Batch.ragged([0, 2], [0, 8], mask=OnDevice("|u1", 1), mask_columns=[3]))
    with pytest.raises(tw.Error, match="mask has 3 bytes, expected 2"):
        operator().plan(tw.Batch.ragged([0, 2], [0, 8], mask=OnDevice("|u1", 3)))
    with pytest.raises(tw.Error, match="attention.batch: mask is int32, expected uint8"):
        tw.Batch.ragged([0, 2], [0, 8], mask=OnDevice(length=2))
    with pytest.raises(tw.Error, match="attention.segment_packbits: flags are in host memory, expected a GPU"):
        queue = tw.Device("cpu")._core.queue(0)
        flags, packed = numpy.ones(8, "bool"), numpy.zeros(1, "uint8")
        tw._core.segment_packbits_on_device(queue, flags, [0, 8], packed)


def test_kinds_of_errors():
    assert issubclass(tw.Unsupported, NotImplementedError) and issubclass(tw.DeviceError, RuntimeError)
    batch = tw.DeviceBatch(1, tw.BlockTable(numpy.zeros((1, 1), "int32"), numpy.ones(1, "int32"), 4))
    with pytest.raises(tw.Unsupported, match="attention.plan_on_device: .* has no memory of its own"):
        operator()._operator().plan_on_device(batch._fields(), batch._limits(), None)


class Exported:
    """A tensor that is reached by DLPack only."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_tensors_are_read_in_place(rng):
    x, weight = rng.standard_normal((3, 8)).astype("float32"), rng.standard_normal(8).astype("float32")
    out = numpy.empty_like(x)
    tw.rmsnorm(Exported(x), Exported(weight), out=Exported(out))
    numpy.testing.assert_array_equal(out, tw.rmsnorm(x, weight))
    with pytest.raises(tw.Unsupported, match="expected out for a library"):
        tw.rmsnorm(Exported(x), weight)


def test_queues_follow_the_current_stream(monkeypatch):
    """The lookup of a tensor on a GPU: the queue of its GPU's current stream, which the device makes once."""
    import types

    from tilewright import _device

    current, made = [5], []
    device = types.SimpleNamespace(current_stream=lambda: current[0], _queues={5: "known"},
                                   queue=lambda: made.append(current[0]) or "made")
    monkeypatch.setitem(_device._devices, 3, device)
    x = types.SimpleNamespace(is_cuda=True, get_device=lambda: 3)
    assert _device.queue_of(x) == "known" and not made
    current[0] = 6
    assert _device.queue_of(x) == "made"
    assert made == [6]


@needs_torch
def test_the_current_stream_is_torch_s(monkeypatch):
    """0 until torch has initialized CUDA, then torch's stream of that GPU; the lookup of torch's function happens once."""
    import torch

    from tilewright import _device

    device = _device.Device("cpu")
    assert device.current_stream() == 0
    device._ordinal, initialized, looked_up = 3, [False], []

    def is_initialized():
        looked_up.append(1)
        return initialized[0]

    monkeypatch.setattr(torch.cuda, "is_initialized", is_initialized)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 100 + gpu, raising=False)
    assert device.current_stream() == 0
    initialized[0] = True
    assert [device.current_stream() for _ in range(3)] == [103] * 3 and len(looked_up) == 2
