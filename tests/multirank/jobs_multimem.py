"""Rank jobs of test_multimem; the kernel is compiled for GPUs, too."""

import functools
import operator

import torch
import triton
import triton.language as tl

from iris_core import Iris
from iris_triton.language.multimem import multimem_fence, multimem_load_reduce, multimem_store

COUNT, BLOCK = 1000, 256  # elements; accesses of 16 bytes
GUARD = 7.0


@triton.jit
def sum_to_all(data, out, me, bases, multicast, count, W: tl.constexpr, BLOCK: tl.constexpr):
    """Add up all ranks' `data` and store the sums into all ranks' `out`, 16 bytes for each lane."""
    UNIT: tl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, BLOCK) * UNIT
    words = multimem_load_reduce(data + place, me, bases, multicast, place < count, W)
    multimem_fence()
    multimem_store(out + place, words, me, bases, multicast, place < count, W)


def sums(dtype):
    """Each rank adds up all inputs in its turn; return whether all outputs, and what follows, have the right bits."""
    right = []
    with Iris("1MiB", device="cpu") as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        inputs = [torch.randn(COUNT, generator=torch.Generator().manual_seed(each)).to(dtype) for each in range(size)]
        data, out = ctx.zeros(BLOCK * 16 // dtype.itemsize, dtype=dtype), ctx.zeros(2 * COUNT, dtype=dtype)
        data[:COUNT] = inputs[rank]
        expected = functools.reduce(operator.add, (each.float() for each in inputs)).to(dtype)
        for turn in range(size):
            out.fill_(GUARD)
            ctx.barrier()
            if turn == rank:
                bases = ctx.get_heap_bases()
                sum_to_all[(1,)](data, out, rank, bases, ctx.heap.multicast_base, COUNT, W=size, BLOCK=BLOCK)
            ctx.barrier()
            right.append(torch.equal(out[:COUNT], expected) and bool((out[COUNT:] == GUARD).all()))
    return right
