"""Signals by copies as benchmarks/rma.py has them for the copy engine, with the host's memory copy in its place."""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from rma_signals import EngineTurns

from iris_core import bench


@bench.register
def turns(state, ctx):
    """Three round trips between rank 1, which begins, and rank 0."""
    state.set_repeat(2)
    EngineTurns(ctx, 1, 0, 3, ctypes.memmove).declare(state, "copy")
