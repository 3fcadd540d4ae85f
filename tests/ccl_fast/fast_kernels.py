"""Kernels of tests/ccl_fast."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.packets.packet import spot


@triton.jit(do_not_specialize=["first"])
def spots(offsets, flags, first, ENC: tl.constexpr, BLOCK: tl.constexpr):
    """Where the data of BLOCK packets lies."""
    lanes = tl.arange(0, BLOCK)
    offset, flag = spot(first + lanes, ENC)
    tl.store(offsets + lanes, offset)
    tl.store(flags + lanes, flag)
