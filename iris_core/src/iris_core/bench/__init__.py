"""Benchmarks: functions with axes, providers that are measured in turn and verified, results with their machine.

    from iris_core import bench

    @bench.register
    @bench.axis("nbytes", bench.power_of_two(4096, 1 << 20))
    def copy(state, ctx):
        ...
        state.set_bytes(state["nbytes"])
        state.provider("torch", lambda: out.copy_(x), check=lambda: torch.equal(out, x), peer=True)
        state.provider("ours", lambda: kernel[grid](...), check=lambda: torch.equal(out, x))

    SUITE = bench.suite("copy", __doc__, source=__file__)

    if __name__ == "__main__":
        sys.exit(SUITE.main())

Importing this package imports neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.bench.once import do_bench as do_bench
    from iris_core.bench.options import RunOptions as RunOptions
    from iris_core.bench.registry import Benchmark as Benchmark
    from iris_core.bench.registry import axis as axis
    from iris_core.bench.registry import find as find
    from iris_core.bench.registry import linear_range as linear_range
    from iris_core.bench.registry import load as load
    from iris_core.bench.registry import power_of_two as power_of_two
    from iris_core.bench.registry import register as register
    from iris_core.bench.registry import registered as registered
    from iris_core.bench.results import Report as Report
    from iris_core.bench.results import Result as Result
    from iris_core.bench.results import Target as Target
    from iris_core.bench.session import run as run
    from iris_core.bench.state import State as State
    from iris_core.bench.suites import Suite as Suite
    from iris_core.bench.suites import finish as finish
    from iris_core.bench.suites import suite as suite

_HOMES = {
    "Benchmark": "registry",
    "Report": "results",
    "Result": "results",
    "RunOptions": "options",
    "State": "state",
    "Suite": "suites",
    "Target": "results",
    "axis": "registry",
    "do_bench": "once",
    "find": "registry",
    "finish": "suites",
    "linear_range": "registry",
    "load": "registry",
    "power_of_two": "registry",
    "register": "registry",
    "registered": "registry",
    "run": "session",
    "suite": "suites",
}

__all__ = [
    "Benchmark",
    "Report",
    "Result",
    "RunOptions",
    "State",
    "Suite",
    "Target",
    "axis",
    "do_bench",
    "find",
    "finish",
    "linear_range",
    "load",
    "power_of_two",
    "register",
    "registered",
    "run",
    "suite",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
