"""Heat in a plate: Jacobi's iteration on a 2-D grid, split into bands of rows over all ranks.

The plate's top edge is hot, the other edges are cold; each step replaces a cell by the mean of its four neighbours
until nothing changes any more.  A band keeps one extra row above and below (the halo), which the neighbouring bands
fill by remote stores; a signal per side says "my step s is done and your halo row is there".

One program per band, alive for many steps.  Two copies of the band alternate: step s reads copy s % 2 and writes the
other.  A neighbour can be at most one step ahead, because it waits for our signal of the step before; and we signal
only after we have read our halo.  So no row is overwritten before it was read, and no barrier over all ranks is needed.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from iris_core.types import DemoResult
from iris_triton.context import DeviceContext
from iris_triton.language.asm import wait_stores

ROWS, COLUMNS = 8, 16  # of a band
BANDS_PER_RANK = 1
STEPS = 100  # per launch
CHANGE = 1e-4  # converged when no cell changes more than this in one step
MAX_STEPS = 20_000


@triton.jit
def solve(
    bands, done, changes, first_step, context, rank: tl.constexpr, world_size: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Make STEPS steps on this rank's bands.

    `bands`: [band, copy, ROWS + 2, COLUMNS + 2] f32; `done`: [band, 2] i64, steps finished by the neighbour above and
    below; `changes`: f32, per band of the world the largest change in the last step.
    """
    ctx = DeviceContext.initialize(context, rank, world_size)
    band = tl.program_id(0)
    per_rank = tl.num_programs(0)
    index = rank * per_rank + band
    last = world_size * per_rank - 1
    WIDTH: tl.constexpr = COLUMNS + 2
    COPY: tl.constexpr = (ROWS + 2) * WIDTH
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)
    cells = (rows + 1) * WIDTH + 1 + columns[None, :]
    change = 0.0
    for i in range(STEPS):
        step = first_step + i
        old = bands + (band * 2 + step % 2) * COPY
        new_copy = (step + 1) % 2
        new = bands + (band * 2 + new_copy) * COPY
        if index > 0:
            ctx.wait(done + band * 2, step)
        if index < last:
            ctx.wait(done + band * 2 + 1, step)
        here = tl.load(old + cells)
        around = tl.load(old + cells - WIDTH) + tl.load(old + cells + WIDTH)
        around += tl.load(old + cells - 1) + tl.load(old + cells + 1)
        value = around * 0.25
        tl.store(new + cells, value)
        change = tl.max(tl.max(tl.abs(value - here), axis=1), axis=0)
        if index > 0:  # our first row is the lower halo of the band above
            above = bands + ((index - 1) % per_rank * 2 + new_copy) * COPY
            peer = (index - 1) // per_rank
            first = tl.sum(tl.where(rows == 0, value, 0.0), axis=0)
            ctx.store(above + (ROWS + 1) * WIDTH + 1 + columns, first, peer)
            ctx.signal(done + (index - 1) % per_rank * 2 + 1, step + 1, peer)
        if index < last:  # our last row is the upper halo of the band below
            below = bands + ((index + 1) % per_rank * 2 + new_copy) * COPY
            peer = (index + 1) // per_rank
            final = tl.sum(tl.where(rows == ROWS - 1, value, 0.0), axis=0)
            ctx.store(below + 1 + columns, final, peer)
            ctx.signal(done + (index + 1) % per_rank * 2, step + 1, peer)
        wait_stores()  # a band without neighbours signals nobody, and its other threads read this in the next step
        tl.debug_barrier()
    for peer in range(world_size):
        ctx.store(changes + index, change, peer)


def run(ctx, progress) -> DemoResult:
    """Solve until converged on every rank of `ctx` and compare with as many steps by torch."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    total_rows = ROWS * BANDS_PER_RANK * world
    bands = ctx.zeros(BANDS_PER_RANK, 2, ROWS + 2, COLUMNS + 2, dtype=torch.float32)
    done = ctx.zeros(BANDS_PER_RANK, 2, dtype=torch.int64)
    changes = ctx.zeros(BANDS_PER_RANK * world, dtype=torch.float32)
    if rank == 0:
        bands[0, :, 0, :] = 1.0  # the hot edge
    ctx.barrier()
    steps, change, start = 0, float("inf"), 0.0
    while change > CHANGE and steps < MAX_STEPS:
        solve[(BANDS_PER_RANK,)](
            bands, done, changes, steps, ctx.get_device_context(), rank, world,
            STEPS=STEPS, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        ctx.barrier()
        steps += STEPS
        change = changes.max().item()  # the same on every rank
        start = start or change
        progress(_converged_part(start, change))
        ctx.barrier()  # nobody stores the next changes before all have read these
    mine = bands[:, steps % 2, 1:-1, 1:-1].reshape(-1, COLUMNS).cpu()
    expected = _reference(total_rows, steps)[rank * mine.shape[0] : (rank + 1) * mine.shape[0]]
    error = (mine - expected).abs().max().item() if change <= CHANGE else float("nan")
    return DemoResult(error, 1e-5, f"{total_rows} x {COLUMNS} cells, {steps} steps, last change {change:.1e}")


def _reference(rows: int, steps: int) -> torch.Tensor:
    plate = torch.zeros(rows + 2, COLUMNS + 2)
    plate[0] = 1.0
    for _ in range(steps):
        inner = plate[:-2, 1:-1] + plate[2:, 1:-1] + (plate[1:-1, :-2] + plate[1:-1, 2:])
        plate[1:-1, 1:-1] = inner * 0.25
    return plate[1:-1, 1:-1]


def _converged_part(start: float, change: float) -> float:
    """How much of the way to convergence is done, by orders of magnitude."""
    import math

    if change <= CHANGE or start <= CHANGE:
        return 1.0
    return max(0.0, math.log(start / change) / math.log(start / CHANGE))
