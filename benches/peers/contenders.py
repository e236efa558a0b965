"""Protocol of the peers of GPU benches: precedes the script that builds the contenders of a bench.

Reads one JSON request per line from stdin and writes one response per line to stdout:

    {"about": true}     -> {"about": "torch 2.11.0, cuDNN 91900, FlashInfer 0.6.18"}
    {"case": {..}}      -> {"names": ["matmul", "cudnn", ..]}       builds the contenders of a case
    {"sample": name, "hot": seconds, "rest": seconds, "least": seconds, "cold": count, "flush": bytes}
                        -> {"seconds": .., "mhz": .., "watts": ..}  per call
    {"clocks": true}    -> {"mhz": .., "watts": ..}                 now

A contender is a CUDA graph of at least 10 calls that rotate over sets of inputs. `hot`: its own work for that time directly
before the sample. `rest`: a pause before the sample. A sample replays the graph for at least `least` seconds. If `cold` is not 0, a
sample is the median of that many graphs of one call. Each is submitted while a read of `flush` bytes replaces the contents of L2.
"""

import ctypes
import functools
import json
import sys
import time

import torch

try:
    import flashinfer
except ImportError:
    flashinfer = None

DEVICE = "cuda"
CALLS = 10
graphs = {}


class Nvml:
    """SM clock and power of the first device."""

    def __init__(self):
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self.library.nvmlInit_v2()
        self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))

    def read(self):
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self.library.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(clock))
        self.library.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(power))
        return {"mhz": clock.value, "watts": power.value // 1000}


nvml = Nvml()


def graphed(calls):
    """`CALLS` or more calls as one CUDA graph, their number, and a function that returns graphs of one call each.

    The function keeps the calls and thus their inputs alive.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    once = timed(calls[0], 1)
    count = max(CALLS, min(200, int(0.01 / once)))
    count = -(-count // len(calls)) * len(calls)
    graph = recorded([calls[at % len(calls)] for at in range(count)])
    return graph, count, functools.cache(lambda: [recorded([call]) for call in calls])


def recorded(calls):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def timed(call, times):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    clocks = nvml.read()
    torch.cuda.synchronize()
    timed.clocks = clocks
    return start.elapsed_time(stop) / 1e3 / times


def cold(single, request):
    """The median seconds of graphs that are replayed in turn, each submitted while a read of `flush` bytes runs."""
    memory = torch.empty(request["flush"] // 4, device=DEVICE)
    for graph in single:
        graph.replay()  # the first replay uploads the graph
    times = []
    for at in range(request["cold"]):
        memory.sum()
        times.append(timed(single[at % len(single)].replay, 1))
    return sorted(times)[len(times) // 2]


def sample(request):
    graph, count, single = graphs[request["sample"]]
    end = time.time() + request["hot"]
    while time.time() < end:
        graph.replay()
        torch.cuda.synchronize()
    if request["rest"]:
        torch.cuda.synchronize()
        time.sleep(request["rest"])
    if request["cold"]:
        return {"seconds": cold(single(), request), **timed.clocks}
    once = timed(graph.replay, 1)
    if request["least"] > once:
        once = timed(graph.replay, int(request["least"] / once) + 1)
    return {"seconds": once / count, **timed.clocks}


def about():
    version = f", FlashInfer {flashinfer.__version__}" if flashinfer else ""
    return f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}{version}"


def respond(request, build):
    if "about" in request:
        return {"about": about()}
    if "clocks" in request:
        return nvml.read()
    return build(request["case"]) if "case" in request else sample(request)


def serve(build):
    """Answers requests until stdin ends."""
    for line in sys.stdin:
        try:
            response = respond(json.loads(line), build)
        except Exception as why:
            response = {"error": str(why)[:300]}
        print(json.dumps(response), flush=True)


