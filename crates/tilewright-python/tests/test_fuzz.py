"""Random calls of all functions: each succeeds or raises an exception, and the process survives."""

import resource
import warnings

import pytest
from fuzz_calls import Calls

#: Address space of the calls in bytes: absurd counts raise ``MemoryError`` on every machine.
LIMIT = 8 << 30


@pytest.fixture
def limited_memory():
    """Bounds the address space."""
    previous = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as usage:
        used = int(usage.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, previous[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, previous)


def test_random_calls_never_end_the_process(host, limited_memory, pytestconfig):
    calls = Calls()
    # call `n` is the same in every run
    count, first = (pytestconfig.getoption(name) for name in ("--fuzz-calls", "--fuzz-first"))
    # the simulator executes the code of the GPU backend, but no other checks of arguments
    count = count if host == "cpu" else count // 50
    succeeded = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(first, first + count):
            function, arguments, keywords = calls.one(number)
            try:
                function(*arguments, **keywords)
                succeeded += 1
            except Exception:  # noqa: BLE001, S110: any but a panic, which is a BaseException
                pass
            except BaseException as error:
                raise AssertionError(f"call {number}: {function}, {arguments}, {keywords}") from error
    assert count // 10 < succeeded < count // 2, f"{succeeded} of {count} calls succeeded"


def test_unchanged_calls_succeed():
    """Only so the changes of their arguments reach the checks of values."""
    for function, arguments, keywords in Calls().unchanged():
        function(*arguments, **keywords)
