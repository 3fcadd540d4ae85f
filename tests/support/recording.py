"""What is launched on the CPU executor is compiled for GPUs as well."""

import contextlib
from typing import Any, NamedTuple

from iris_triton import _compat, interpreter
from iris_triton.testing.compile_only import TARGETS, compile_for


class Compilation(NamedTuple):
    kernel: str
    target: str
    compiled: Any


@contextlib.contextmanager
def record(targets=TARGETS):
    """Compile every kernel that is launched within the block for `targets` as well; the launch follows as usual.

    Yields a list that grows by a `Compilation` per launch and target.  What does not compile raises at the launch.
    """
    interpreter.enable()
    compilations = []
    run = _compat.JITFunction.run

    def recorded(self, *args, grid, warmup, **kwargs):
        if not warmup:
            for name, target in targets.items():
                compilations.append(Compilation(self.__name__, name, compile_for(self, args, kwargs, target)))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    _compat.JITFunction.run = recorded
    try:
        yield compilations
    finally:
        if _compat.JITFunction.run is recorded:  # else the executor was disabled within the block
            _compat.JITFunction.run = run
