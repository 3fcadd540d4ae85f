"""Reduce-scatter + RMSNorm + all-gather in one kernel: what stands between two layers under tensor parallelism.

Each rank has a partial sum for all tokens, as the second linear layer leaves it.  The sum over the ranks is added to
the residual stream, the new stream is normalised, and the next layer wants the result for all tokens on all ranks.
With sequence parallelism every rank adds up and normalises only its own tokens, so that nothing is computed twice and
the residual stream is divided among the ranks.

The three phases run in one kernel, a tile of rows at a time: a program puts its rank's partial sums into their owner's
inbox; an owner's program adds a tile up as soon as all parts are there, normalises it, and stores it to all ranks; and
at the end the programs wait until all tiles have come.  So the tiles of one phase travel while others are computed.

Nothing is reset and nothing is double-buffered.  An inbox is free again when a rank begins the next launch, because it
then has the tiles of all owners, which they made after reading their inboxes; and an owner stores to `out` again only
when the parts of the next launch are there, which that rank sent after using what it had.

Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, 2022.  Zhang, Sennrich: Root Mean
Square Layer Normalization, 2019.

    python examples/34_norm.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import num_programs, on_gpu, timing

import iris_core
from iris_triton import DeviceContext

TILE = 4096  # elements of a tile


@triton.jit
def reduce_norm_gather_kernel(
    x, residual, weight, out, inbox, arrived, done, turns, context, tokens, rows, hidden, eps,
    WORLD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Rank r owns the tokens r * rows and following.  Programs take tiles in turn, phase by phase."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(turns + tl.program_id(0)) + 1  # counted here, so that a captured graph can be replayed
    tiles = tl.cdiv(rows, BLOCK_ROWS)  # of a rank
    lane = tl.arange(0, BLOCK_ROWS)
    h = tl.arange(0, BLOCK_H)[None, :]

    # reduce-scatter, first half: every part to its owner, those for the next rank first
    for i in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        owner, tile = (ctx.rank + 1 + i // tiles) % WORLD, i % tiles
        row = tile * BLOCK_ROWS + lane
        token = (owner * rows + row).to(tl.int64)
        mask = ((row < rows) & (token < tokens))[:, None] & (h < hidden)
        slot = (ctx.rank * rows + row).to(tl.int64)
        ctx.put_signal(
            x + token[:, None] * hidden + h, inbox + slot[:, None] * hidden + h,
            arrived + ctx.rank * tiles + tile, turn, owner, mask=mask,
        )  # fmt: skip

    # second half: add up in rank order, normalise, and give to all
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * BLOCK_ROWS + lane).to(tl.int64)
        token = ctx.rank * rows + row
        mask = ((row < rows) & (token < tokens))[:, None] & (h < hidden)
        stream = tl.load(residual + row[:, None] * hidden + h, mask=mask, other=0.0)
        for peer in range(WORLD):
            ctx.wait(arrived + peer * tiles + tile, turn)
            part = tl.load(inbox + (peer * rows + row)[:, None] * hidden + h, mask=mask, other=0.0)
            stream += part.to(tl.float32)
        tl.store(residual + row[:, None] * hidden + h, stream, mask=mask)
        scale = tl.rsqrt(tl.sum(stream * stream, axis=1) / hidden + eps)
        y = stream * scale[:, None] * tl.load(weight + h, mask=h < hidden, other=0.0).to(tl.float32)
        for i in range(WORLD):
            peer = (ctx.rank + 1 + i) % WORLD
            ctx.store(out + token[:, None] * hidden + h, y.to(out.dtype.element_ty), peer, mask=mask)
            ctx.signal(done + ctx.rank * tiles + tile, turn, peer)

    # all-gather: what follows on this stream finds all tokens
    for i in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        ctx.wait(done + i, turn)
    tl.store(turns + tl.program_id(0), turn)


class ReduceNormGather:
    """The operation for one shape.  Collective: every rank makes it, and calls it equally often, on one stream.

    Args:
        ctx: the open Iris.
        tokens: rows of the partial sums; rank r owns `rows` = ceil(tokens / ranks) of them, from r * rows on.
        hidden: columns.
        dtype: of the partial sums and of the result.
        eps: added to the mean of the squares.

    Attributes:
        residual: float32 (rows, hidden), this rank's part of the residual stream; zero at first.
    """

    def __init__(self, ctx, tokens, hidden, dtype=torch.float16, eps=1e-6):
        if tokens < 1 or not 1 <= hidden <= 16384:
            raise ValueError(f"{tokens=} must be positive, and {hidden=} up to 16384: a program holds whole rows")
        self.ctx, self.shape, self.eps = ctx, (tokens, hidden), eps
        world, self.rows = ctx.num_ranks, -(-tokens // ctx.num_ranks)
        self.block_h = triton.next_power_of_2(hidden)
        self.block_rows = max(1, TILE // self.block_h)
        tiles = -(-self.rows // self.block_rows)
        self.residual = torch.zeros(self.rows, hidden, dtype=torch.float32, device=ctx.device)
        self.inbox = ctx.zeros(world, self.rows, hidden, dtype=dtype)
        self.out = ctx.zeros(tokens, hidden, dtype=dtype)
        self.arrived, self.done = (ctx.zeros(world, tiles, dtype=torch.int64) for _ in range(2))
        # programs that wait for each other must all be on the device at the same time
        self.programs = min(world * tiles, num_programs(ctx))
        self.turns = torch.zeros(self.programs, dtype=torch.int64, device=ctx.device)
        ctx.barrier()

    def __call__(self, x, weight):
        """Add the sum of all ranks' x to the residual stream and return its norm for all tokens.

        Args:
            x: (tokens, hidden), contiguous: this rank's partial sums.
            weight: (hidden,), the same on all ranks.

        Returns:
            (tokens, hidden) on the symmetric heap, the same bits on all ranks; the next call overwrites it.
        """
        if x.shape != self.shape or x.dtype != self.out.dtype or not x.is_contiguous() or weight.shape != x.shape[1:]:
            raise ValueError(f"x must be contiguous, {self.shape} and {self.out.dtype}, and weight ({self.shape[1]},)")
        reduce_norm_gather_kernel[(self.programs,)](
            x, self.residual, weight, self.out, self.inbox, self.arrived, self.done, self.turns,
            self.ctx.get_device_context(), self.shape[0], self.rows, self.shape[1], self.eps, WORLD=self.ctx.num_ranks,
            BLOCK_ROWS=self.block_rows, BLOCK_H=self.block_h,
        )  # fmt: skip
        return self.out


def main(tokens=None, hidden=200, layers=3):
    """Some layers behind each other: their residual stream is the sum of all partial sums so far."""
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if tokens is None:
            tokens = 101
            if on_gpu(ctx):
                tokens, hidden = 2047, 4096
        rank, world = ctx.cur_rank, ctx.num_ranks
        operation = ReduceNormGather(ctx, tokens, hidden)
        generator = torch.Generator().manual_seed(34)  # the same numbers on all ranks
        weight = (torch.rand(hidden, generator=generator) + 0.5).to(ctx.device)
        stream, worst = torch.zeros(tokens, hidden, dtype=torch.float64, device=ctx.device), 0.0
        for _ in range(layers):
            parts = torch.randn(world, tokens, hidden, generator=generator).half().to(ctx.device)
            out = operation(parts[rank], weight)
            stream += parts.double().sum(dim=0)
            expected = torch.nn.functional.rms_norm(stream, (hidden,), weight.double(), operation.eps)
            error = (out.double() - expected).abs().max().item()
            assert error < 8e-3, f"the largest error is {error}"  # float16 has 11 bits, and values go up to about 8
            worst = max(worst, error)
            mine = stream[rank * operation.rows : (rank + 1) * operation.rows]
            torch.testing.assert_close(operation.residual[: len(mine)].double(), mine, rtol=1e-5, atol=1e-5)
            first = out.clone()
            ctx.ccl.broadcast(first, src=0)
            assert torch.equal(out.view(torch.int16), first.view(torch.int16)), "the ranks' results differ in bits"
        nbytes = parts[0].nbytes * (world - 1) / world * 2  # this rank sends its parts, and its tokens' results
        time = timing(ctx, lambda: operation(parts[rank], weight), nbytes=nbytes)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: {layers} norms of {tokens} tokens, error {worst:.1e}{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
