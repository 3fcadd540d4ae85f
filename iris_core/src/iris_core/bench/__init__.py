"""Benchmarks: functions with axes, providers that are measured in turn and verified, results with their machine.

docs/benchmarks.md has a whole program.  Importing this package imports neither torch nor triton.
"""

from iris_core.bench.registry import Benchmark, RunOptions, axis, linear_range, load, power_of_two, register, registered
from iris_core.bench.results import Report, Result, Target
from iris_core.bench.runner import run
from iris_core.bench.state import State, do_bench
from iris_core.bench.suites import Suite, finish

__all__ = [
    "Benchmark", "Report", "Result", "RunOptions", "State", "Suite", "Target", "axis", "do_bench", "finish",
    "linear_range", "load", "power_of_two", "register", "registered", "run",
]  # fmt: skip
