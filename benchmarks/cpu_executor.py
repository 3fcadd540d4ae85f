"""The CPU executor against Triton's stock interpreter, in the same run, on one core, with bounds checks on.

    python benchmarks/cpu_executor.py [--rounds 5] [--only REGEX]

Claims: launches and programs of 1024 elements are at least 1.5 times as fast, calls of device functions at least 20
times; a 512^3 GEMM takes 0.25 s or less.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from iris_core import bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.bench import State

HERE = pathlib.Path(__file__).parent

# case -> least ratio to the stock interpreter, upper bound of the executor's own time in microseconds
CASES: dict[str, tuple[float | None, float | None]] = {
    "empty": (1.5, None),
    "add, 1 program": (1.5, None),
    "add, 64 programs": (1.5, None),
    "softmax, 64 rows": (1.5, None),
    "100 device functions": (20, None),
    "100 atomics": (None, None),
    "dot 128x128x32": (None, None),
    "gemm 512 float32": (None, 250e3),
    "gemm 512 bfloat16": (None, None),
}
WITHOUT_RESULT = ("empty", "100 device functions")


@functools.cache
def process(kind: str) -> subprocess.Popen[str]:
    """The process that measures with the executor or with the stock interpreter; ends with this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if kind == "stock":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(HERE / "cpu_executor_cases.py"), kind]
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.kill)
    return started


def ask(kind: str, case: str) -> dict[str, Any]:
    """Have a case measured once."""
    asked = process(kind)
    assert asked.stdin is not None
    assert asked.stdout is not None
    asked.stdin.write(case + "\n")
    asked.stdin.flush()
    answer = asked.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of {kind!r} ended with {asked.wait()} at {case!r}; its error is above")
    found: dict[str, Any] = json.loads(answer)
    return found


@bench.register(ranks=False)
@bench.axis("case", CASES)
def kernels(state: State, ctx: None) -> None:
    """Kernels in the executor and in the stock interpreter."""
    case, right = state["case"], {}
    least, bound = CASES[case]

    def measuring(kind: str) -> Callable[[], float]:
        def seconds() -> float:
            answer = ask(kind, case)
            right[kind] = answer["right"]
            return float(answer["seconds"])

        return seconds

    def check_of(kind: str) -> Callable[[], bool] | None:
        return None if case in WITHOUT_RESULT else lambda: right[kind]

    state.set_timer("reported")
    state.set_warmup(0)
    state.provider("executor", measuring("executor"), check=check_of("executor"), baseline="stock")
    if case == "gemm 512 bfloat16":
        state.skip_provider("stock", "the stock interpreter's result is wrong")
    else:
        state.provider("stock", measuring("stock"), check=check_of("stock"))
    if least is not None:
        state.target("executor", "ratio", at_least=least)
    if bound is not None:
        state.target("executor", "time_us", at_most=bound)


SUITE = bench.Suite(about=__doc__, source=__file__, results="results/cpu_executor.json")

if __name__ == "__main__":
    sys.exit(SUITE.main())
