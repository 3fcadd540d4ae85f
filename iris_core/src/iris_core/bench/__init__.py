"""Benchmarks: functions with axes, providers that are measured in turn and verified, results with their machine.

    from iris_core import bench

    @bench.register
    @bench.axis("nbytes", bench.power_of_two(4096, 1 << 20))
    def copy(state, ctx):
        ...
        state.set_bytes(state["nbytes"])
        state.provider("torch", lambda: out.copy_(x), check=lambda: torch.equal(out, x), peer=True)
        state.provider("ours", lambda: kernel[grid](...), check=lambda: torch.equal(out, x))

    if __name__ == "__main__":
        sys.exit(bench.main("copy", __doc__, source=__file__))

Importing this package imports neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from iris_core.bench.script import finish as finish
    from iris_core.bench.script import main as main
    from iris_core.bench.script import options_from as options_from
    from iris_core.bench.script import parser as parser
    from iris_core.bench.session import run as run
    from iris_core.bench.state import State as State

_HOMES = {
    "Benchmark": "registry",
    "Report": "results",
    "Result": "results",
    "RunOptions": "options",
    "State": "state",
    "Target": "results",
    "axis": "registry",
    "find": "registry",
    "finish": "script",
    "linear_range": "registry",
    "load": "registry",
    "main": "script",
    "options_from": "script",
    "parser": "script",
    "power_of_two": "registry",
    "register": "registry",
    "registered": "registry",
    "run": "session",
}

__all__ = [
    "Benchmark",
    "Report",
    "Result",
    "RunOptions",
    "State",
    "Target",
    "axis",
    "find",
    "finish",
    "linear_range",
    "load",
    "main",
    "options_from",
    "parser",
    "power_of_two",
    "register",
    "registered",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
