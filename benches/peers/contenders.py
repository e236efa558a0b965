"""Protocol of the peers of GPU benches: precedes the script that builds the contenders of a bench.

Reads one JSON request per line from stdin and writes one response per line to stdout:

    {"about": true}     -> {"about": "torch 2.11.0, cuDNN 91900, FlashInfer 0.6.18"}
    {"case": {..}}      -> {"names": ["matmul", "cudnn", ..]}       builds the contenders of a case
    {"sample": name, "hot": seconds, "rest": seconds, "least": seconds}
                        -> {"seconds": .., "mhz": .., "watts": ..}  per call
    {"clocks": true}    -> {"mhz": .., "watts": ..}                 now

A contender is a CUDA graph of at least 10 calls that rotate over sets of inputs. `hot`: its own work for that time directly
before the sample. `rest`: a pause before the sample. A sample replays the graph for at least `least` seconds.
"""

import ctypes
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
    """`CALLS` or more calls as one CUDA graph."""
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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            calls[at % len(calls)]()
    return graph, count


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


def sample(request):
    graph, count = graphs[request["sample"]]
    end = time.time() + request["hot"]
    while time.time() < end:
        graph.replay()
        torch.cuda.synchronize()
    if request["rest"]:
        torch.cuda.synchronize()
        time.sleep(request["rest"])
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


