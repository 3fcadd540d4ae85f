"""A program in the language of this backend: C = A B, where each rank has rows of A and a slice of B.

In every step a rank multiplies the slice of B that it holds with the columns of A that belong to it, and hands the
slice on to the next rank.  After as many steps as there are ranks every slice has been everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from iris_core.types import DemoResult
from iris_example_backend import language as ex

ROWS, COLUMNS, SLICE = 48, 64, 32
"""Rows of A and C per rank, columns of B and C, and rows of B per rank."""


@ex.kernel
def ring_gemm(
    a: Any, b: Any, inbox: Any, arrived: Any, c: Any, bases: Any, rank: int, world: int, rows: int, columns: int, k: int
) -> None:
    """Each program computes some rows of C; the first one also hands the slices on.

    a: [programs * rows, world * k], b: [k, columns], inbox: [world, k * columns], arrived: [1], c: as a by b.
    """
    numel = k * columns
    block = np.arange(numel)
    mine = (ex.program_id(0) * rows + np.arange(rows))[:, None]
    total = np.zeros((rows, columns))
    for step in range(world):
        if step > 0:
            ex.wait(arrived, step)
        held = b + block if step == 0 else inbox + step * numel + block
        if step + 1 < world and ex.program_id(0) == 0:
            there = inbox + (step + 1) * numel + block
            ex.put_signal(held, there, arrived, step + 1, rank, (rank + 1) % world, bases)
        owner = (rank - step) % world
        columns_of_owner = owner * k + np.arange(k)
        total += (a + mine * world * k + columns_of_owner).load() @ held.load().reshape(k, columns)
    (c + mine * columns + np.arange(columns)).store(total)


def run(ctx: Any) -> DemoResult:
    """Run it on an open context with this backend and compare with torch.  Collective: every rank calls it."""
    rank, world, programs = ctx.cur_rank, ctx.num_ranks, 4
    generator = torch.Generator().manual_seed(7)  # the same numbers on every rank, so that each can check itself
    all_a = torch.randn(world * ROWS, world * SLICE, generator=generator)
    all_b = torch.randn(world * SLICE, COLUMNS, generator=generator)
    a = all_a[rank * ROWS : (rank + 1) * ROWS]
    b = all_b[rank * SLICE : (rank + 1) * SLICE]
    c = torch.empty(ROWS, COLUMNS)
    inbox = ctx.empty(world, SLICE * COLUMNS)  # a place for every step, so nobody waits for an empty one
    arrived = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()  # nobody puts before all have their inbox, and the zero in `arrived`
    arguments = (a, b, inbox, arrived, c, ctx.get_heap_bases(), rank, world)
    ring_gemm[(programs,)](*arguments, rows=ROWS // programs, columns=COLUMNS, k=SLICE)
    ctx.barrier()  # nobody frees while a neighbour still puts
    error = float((c - a @ all_b).abs().max())
    shape = f"{world * ROWS} x {world * SLICE} x {COLUMNS}"
    return DemoResult(error, tolerance=1e-4 * world, detail=f"{shape} on {world} ranks")
