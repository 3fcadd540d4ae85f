"""Warps and lanes of the running program.

The CPU has neither.  Layouts name both, and the compiler refuses layouts that do not fit the launch, so a launch on the
CPU has them too: num_warps as it was given, 4 by default; and 32 or 64 lanes, whichever the first layout of the launch
is made for, so that kernels for NVIDIA and for AMD run.
"""

from __future__ import annotations

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.hopper.memory_ops import partition
from iris_gluon.interpreter.inference import threads_per_warp, warps_per_program
from iris_triton.interpreter.state import current

_DEFAULT_WARPS = 4
_DEFAULT_LANES = 32
_LANES = "warp_size"


def launched_warps() -> int:
    """Warps that the launch asked for: those of a kernel outside gl.warp_specialize, and of the default partition."""
    return int(current.launch.options.get("num_warps", _DEFAULT_WARPS))


def num_warps() -> int:
    """Warps of the running partition."""
    return partition().warps


def num_ctas() -> int:
    """CTAs of the running program, which may be one only."""
    count = int(current.launch.options.get("num_ctas", 1))
    if count != 1:
        raise UnsupportedError(f"the CPU executor has no clusters: num_ctas must be 1, not {count}")
    return count


def warp_size() -> int:
    """Lanes of a warp; the first question decides for the rest of the launch."""
    return int(current.launch.options.setdefault(_LANES, _DEFAULT_LANES))


def check_layout(layout: object) -> None:
    """Refuse a layout that is made for another number of warps or lanes, as the compiler's verifier does."""
    lanes, warps = threads_per_warp(layout), warps_per_program(layout)
    if lanes is not None:
        wanted = warp_size() if lanes not in (32, 64) else current.launch.options.setdefault(_LANES, lanes)
        if lanes != wanted:
            raise ValueError(
                f"Layout has a total of {lanes} threads per warp, but the module specifies {wanted} threads per warp: "
                f"{layout}.  On the CPU, the first layout of a launch decides between 32 and 64."
            )
    if warps is not None and warps != num_warps():
        raise ValueError(
            f"Layout has {warps} warps per CTA, but the context requires {num_warps()} warps per CTA: {layout}.  "
            "Launch the kernel with num_warps to match, or take the layout from gl.num_warps()."
        )
