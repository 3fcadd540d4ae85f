"""Copying strided elements: by 16 bytes where neighbours allow it, one by one elsewhere, and never anything else."""

import functools
import re

import torch
import triton
import triton.language as tl
from tables import table

from iris_triton import interpreter
from iris_triton.collectives.parts.elements import copy_part
from iris_triton.collectives.parts.sizes import layout_of
from iris_triton.collectives.pull import pull
from iris_triton.testing.compile_only import assembly, compile_for

PROGRAMS = 3
BLOCK = 64


@triton.jit(do_not_specialize=["count", "sizes", "strides", "dst_at", "src_at"])
def run_copy(
    dst, dst_at, src, src_at, sizes, strides, count,
    DST_DIMS: tl.constexpr, SRC_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    copy_part(
        dst, tl.cast(dst_at, tl.int64), src, tl.cast(src_at, tl.int64), sizes, strides, tl.cast(count, tl.int64),
        tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64), DST_DIMS, SRC_DIMS, BLOCK
    )  # fmt: skip


LAYOUTS = {
    "dense": lambda make: make(6, 32), "columns": lambda make: make(6, 96)[:, 32:64],
    "odd columns": lambda make: make(6, 97)[:, 1:33], "every other": lambda make: make(6, 64)[:, ::2],
    "transposed": lambda make: make(32, 6).t(),
    "shifted": lambda make: make(6 * 48 + 1)[1:].view(6, 48)[:, :32],
}  # fmt: skip
PAIRS = [*(("dense", each) for each in LAYOUTS), *((each, "dense") for each in LAYOUTS if each != "dense")]


@table("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@table(("target", "source"), PAIRS)
def test_every_layout(target, source, dtype):
    interpreter.enable()
    for dst_at, src_at, count in ((0, 0, 192), (32, 16, 96), (16, 32, 33), (5, 7, 90), (0, 0, 0), (0, 0, -16)):
        dst, src = (LAYOUTS[each](functools.partial(torch.zeros, dtype=dtype)) for each in (target, source))
        src.copy_(torch.arange(192).view(6, 32) % 120)
        dst.fill_(-1)
        to, origin = (layout_of(each.shape, each.stride()) for each in (dst, src))
        run_copy[(PROGRAMS,)](
            dst, dst_at, src, src_at, *((to.sizes, to.strides) if to.num_dims else (origin.sizes, origin.strides)),
            count, DST_DIMS=to.num_dims, SRC_DIMS=origin.num_dims, BLOCK=BLOCK,
        )  # fmt: skip
        wanted = torch.full((192,), -1, dtype=dtype)
        number = max(count, 0)
        wanted[dst_at : dst_at + number] = src.reshape(-1)[src_at : src_at + number]
        assert torch.equal(dst.reshape(-1), wanted), (dst_at, src_at, count)


def test_strided_outputs_are_written_by_16_bytes():
    words, anything = torch.int64, 1 << 40
    ranks, parts, bound = (1, 1, 1), (anything,) * 6, (anything, anything)  # of equal parts there is no table
    sides = ((), (), (4, 8192, 7168), (7168, 28672, 1))
    arguments = (torch.bfloat16, torch.bfloat16, words, torch.uint8, None, words, *ranks, *parts, *bound, *sides)
    constants = {"SIZE": 4, "SOURCE": "direct", "SHARED": True, "IN_DIMS": 0, "OUT_DIMS": 3, "BLOCK": 2048}
    text = assembly(compile_for(pull, arguments, constants, "sm_90"))
    assert re.search(r"st\.global\.v4\.b32", text)
    assert re.search(r"ld\.global\.v4\.b32", text)
