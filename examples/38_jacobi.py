"""Jacobi's iteration in two dimensions: tiles exchange their edges by stores and signals until nothing changes.

A plate with given values on its border; each step replaces every cell by the mean of its four neighbours.  The ranks
form a grid, each rank's part is a grid of tiles, and every tile has a program.  A tile keeps a frame of one cell, the
halo, which the four neighbouring tiles fill.  Whether a neighbour lives on this rank or on another makes no difference:
a store to a peer's memory is a store.

Two copies of a tile alternate: step s reads one and writes the other.  A neighbour is at most one step ahead, because
it waits for our signal of the step before, and we signal only after we have read our halo.  So nothing is overwritten
before it was read, and there is no barrier in a step.  The host asks for the largest change after some hundred steps.

On the border stands x^2 - y^2, which is also the solution inside: it equals the mean of its four neighbours exactly.

    python examples/38_jacobi.py [ranks]
"""

import math
import sys

import torch
import triton
import triton.language as tl
from example_tools import on_gpu

import iris_core
from iris_core.ccl import ReduceOp
from iris_triton import DeviceContext
from iris_triton.language.asm import wait_stores

SIDES = 4  # above, below, left, right; the opposite of side s is s ^ 1


@triton.constexpr_function
def toward(axis, side):
    """One step down (axis 0) or to the right (axis 1), or back: where the neighbour on a side is."""
    return ((-1, 1, 0, 0), (0, 0, -1, 1))[axis][side]


@triton.jit
def jacobi(
    tiles, done, changes, first_step, context, WORLD: tl.constexpr, STEPS: tl.constexpr,
    RANKS_X: tl.constexpr, TILES_Y: tl.constexpr, TILES_X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Make STEPS steps; one program for each tile of this rank.

    `tiles`: f32 [tile, copy, ROWS + 2, COLUMNS + 2]; `done`: i64 [tile, side], steps that the neighbour on that side
    has finished; `changes`: f32 [tile], the largest change in the last step.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    me = tl.program_id(0)
    # the tile's place on the plate, counted in tiles
    place_y = ctx.rank // RANKS_X * TILES_Y + me // TILES_X
    place_x = ctx.rank % RANKS_X * TILES_X + me % TILES_X
    END_Y: tl.constexpr = WORLD // RANKS_X * TILES_Y
    END_X: tl.constexpr = RANKS_X * TILES_X
    WIDTH: tl.constexpr = COLUMNS + 2
    COPY: tl.constexpr = (ROWS + 2) * WIDTH
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    cells = (row[:, None] + 1) * WIDTH + column[None, :] + 1
    change = 0.0
    for step in range(first_step, first_step + STEPS):
        old = tiles + (me * 2 + step % 2) * COPY
        new_copy = (step + 1) % 2
        for side in tl.static_range(4):
            y, x = place_y + toward(0, side), place_x + toward(1, side)
            if (y >= 0) & (y < END_Y) & (x >= 0) & (x < END_X):
                ctx.wait(done + me * 4 + side, step)
        value = 0.25 * (
            tl.load(old + cells - WIDTH)
            + tl.load(old + cells + WIDTH)
            + tl.load(old + cells - 1)
            + tl.load(old + cells + 1)
        )
        change = tl.max(tl.max(tl.abs(value - tl.load(old + cells)), axis=1), axis=0)
        tl.store(tiles + (me * 2 + new_copy) * COPY + cells, value)
        for side in tl.static_range(4):
            y, x = place_y + toward(0, side), place_x + toward(1, side)
            if (y >= 0) & (y < END_Y) & (x >= 0) & (x < END_X):
                peer = y // TILES_Y * RANKS_X + x // TILES_X
                theirs = y % TILES_Y * TILES_X + x % TILES_X
                halo = tiles + (theirs * 2 + new_copy) * COPY
                if side == 0:  # our first row is the lower halo of the tile above; and so on
                    edge = tl.sum(tl.where(row[:, None] == 0, value, 0.0), axis=0)
                    ctx.store(halo + (ROWS + 1) * WIDTH + 1 + column, edge, peer)
                elif side == 1:
                    edge = tl.sum(tl.where(row[:, None] == ROWS - 1, value, 0.0), axis=0)
                    ctx.store(halo + 1 + column, edge, peer)
                elif side == 2:
                    edge = tl.sum(tl.where(column[None, :] == 0, value, 0.0), axis=1)
                    ctx.store(halo + (row + 1) * WIDTH + COLUMNS + 1, edge, peer)
                else:
                    edge = tl.sum(tl.where(column[None, :] == COLUMNS - 1, value, 0.0), axis=1)
                    ctx.store(halo + (row + 1) * WIDTH, edge, peer)
                ctx.signal(done + theirs * 4 + (side ^ 1), step + 1, peer)
        wait_stores()  # a tile without neighbours has met no barrier yet: its stores come before the next loads
        tl.debug_barrier()
    tl.store(changes + me, change)


def grid_of(ranks):
    """Rows and columns of ranks, as square as they can be."""
    rows = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return rows, ranks // rows


def plate(height, width):
    """The border with x^2 - y^2 and zeros inside: float32 (height + 2, width + 2); the longer side is 1."""
    y, x = torch.meshgrid(*(torch.arange(n + 2.0) / (max(height, width) + 1) for n in (height, width)), indexing="ij")
    solution = x**2 - y**2
    start = solution.clone()
    start[1:-1, 1:-1] = 0
    return start, solution


def main(tiles=None, cells=(4, 4), steps=25, tolerance=1e-4):
    """Solve.  `tiles`: of a rank, down and across; `cells`: of a tile, powers of two; `steps`: between two looks."""
    with iris_core.Iris(heap_size="64MiB") as ctx:
        if tiles is None:
            tiles = 1, 2
            if on_gpu(ctx):
                tiles, cells, steps = (4, 8), (8, 16), 500
        rank, world = ctx.cur_rank, ctx.num_ranks
        ranks_y, ranks_x = grid_of(world)
        number = tiles[0] * tiles[1]
        if on_gpu(ctx) and number > ctx.get_cu_count():
            raise ValueError(
                f"{number} programs wait for each other, and {ctx.device} has room for {ctx.get_cu_count()}"
            )
        height, width = ranks_y * tiles[0] * cells[0], ranks_x * tiles[1] * cells[1]
        start, solution = plate(height, width)

        # every tile with its frame; frames overlap the neighbouring tiles
        top, left = rank // ranks_x * tiles[0] * cells[0], rank % ranks_x * tiles[1] * cells[1]
        part = start[top : top + tiles[0] * cells[0] + 2, left : left + tiles[1] * cells[1] + 2]
        frames = part.unfold(0, cells[0] + 2, cells[0]).unfold(1, cells[1] + 2, cells[1]).flatten(0, 1)
        mine = ctx.zeros(number, 2, cells[0] + 2, cells[1] + 2, dtype=torch.float32)
        mine.copy_(frames[:, None].expand(mine.shape))
        done = ctx.zeros(number, SIDES, dtype=torch.int64)
        changes, largest = ctx.zeros(number, dtype=torch.float32), ctx.zeros(number, dtype=torch.float32)
        ctx.barrier()

        made, change = 0, float("inf")
        while change > tolerance:
            jacobi[(number,)](
                mine, done, changes, made, ctx.get_device_context(), WORLD=world, STEPS=steps, RANKS_X=ranks_x,
                TILES_Y=tiles[0], TILES_X=tiles[1], ROWS=cells[0], COLUMNS=cells[1],
            )  # fmt: skip
            ctx.ccl.all_reduce(largest, changes, op=ReduceOp.MAX)
            made, change = made + steps, largest.max().item()  # the same on all ranks
        ctx.barrier()

        inner = (
            mine[:, made % 2, 1:-1, 1:-1].reshape(*tiles, *cells).permute(0, 2, 1, 3).reshape(part[2:, 2:].shape).cpu()
        )
        for _ in range(made):
            middle = start[1:-1, 1:-1]
            middle.copy_((start[:-2, 1:-1] + start[2:, 1:-1] + start[1:-1, :-2] + start[1:-1, 2:]) * 0.25)
        here = slice(top + 1, top + 1 + inner.shape[0]), slice(left + 1, left + 1 + inner.shape[1])
        torch.testing.assert_close(inner, start[here], rtol=0, atol=1e-5)  # as many steps by torch
        error = (inner - solution[here]).abs().max().item()
        # a step shrinks the error at least by this factor, so what is left is about change / (1 - shrink)
        shrink = (math.cos(math.pi / (height + 1)) + math.cos(math.pi / (width + 1))) / 2
        assert error < 2 * change / (1 - shrink), f"converged to something else: the error is {error}"
        return f"rank {rank} of {world} on {ctx.device}: {height} x {width} cells, {made} steps, error {error:.1e}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 4)))
