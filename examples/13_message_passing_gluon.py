"""A pipeline in Gluon: each rank produces blocks into the next rank's memory and uses what the rank before it produces.

A ring of stages lies between producer and consumer, so the producer runs ahead by as many blocks as there are stages.
`full` counts how often the producer has filled a stage, `empty` how often the consumer has given it back; both only
grow, so nothing is ever reset.  One launch holds both sides, and several pipelines run next to each other.

    python examples/13_message_passing_gluon.py [ranks]
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_core
from iris_gluon import IrisDeviceCtx, default_layout

BLOCK, STAGES, BLOCKS, PIPELINES = 1024, 4, 19, 3


@gluon.jit
def produce(ctx, source, ring, full, empty, blocks, consumer, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK], vector=4))
    for n in range(blocks):
        stage, turn = n % STAGES, n // STAGES
        ctx.wait(empty + stage, turn)
        ctx.put(source + n * BLOCK + i, ring + stage * BLOCK + i, consumer)
        ctx.signal(full + stage, turn + 1, consumer)


@gluon.jit
def consume(ctx, result, ring, full, empty, blocks, producer, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = default_layout([BLOCK], vector=4)
    i = gl.arange(0, BLOCK, layout=layout)
    total = gl.zeros([BLOCK], gl.float32, layout)
    for n in range(blocks):
        stage, turn = n % STAGES, n // STAGES
        ctx.wait(full + stage, turn + 1)
        total += gl.load(ring + stage * BLOCK + i) * (n + 1)
        ctx.signal(empty + stage, turn + 1, producer)
    gl.store(result + i, total)


@gluon.jit
def pipeline(
    IrisDeviceCtx: gl.constexpr, context, source, result, rings, full, empty, blocks,
    BLOCK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Even programs produce, odd ones consume; two neighbours of different ranks share a ring."""
    ctx = IrisDeviceCtx.initialize(context)
    index = gl.program_id(0) // 2
    ring = rings + index * STAGES * BLOCK
    if gl.program_id(0) % 2 == 0:
        consumer = (ctx.cur_rank + 1) % ctx.num_ranks
        produce(
            ctx, source + index * blocks * BLOCK, ring, full + index * STAGES, empty + index * STAGES, blocks, consumer,
            BLOCK, STAGES,
        )  # fmt: skip
    else:
        producer = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
        consume(
            ctx, result + index * BLOCK, ring, full + index * STAGES, empty + index * STAGES, blocks, producer,
            BLOCK, STAGES,
        )  # fmt: skip


def data_of(rank):
    """What a rank produces."""
    numbers = torch.arange(PIPELINES * BLOCKS * BLOCK, dtype=torch.float32).remainder(251)
    return numbers.view(PIPELINES, BLOCKS, BLOCK) + rank


def main():
    with iris_core.Iris(heap_size="1MiB", backend="gluon") as ctx:
        rings = ctx.zeros(PIPELINES, STAGES, BLOCK, dtype=torch.float32)
        full, empty = (ctx.zeros(PIPELINES, STAGES, dtype=torch.int64) for _ in range(2))
        source = data_of(ctx.cur_rank).to(ctx.device)
        result = torch.full((PIPELINES, BLOCK), float("nan"), device=ctx.device)
        ctx.barrier()
        pipeline[(2 * PIPELINES,)](
            IrisDeviceCtx, ctx.get_device_context(), source, result, rings, full, empty, BLOCKS,
            BLOCK=BLOCK, STAGES=STAGES,
        )  # fmt: skip
        ctx.barrier()
        weights = torch.arange(1, BLOCKS + 1, dtype=torch.float32)[:, None]
        expected = (data_of((ctx.cur_rank - 1) % ctx.num_ranks) * weights).sum(dim=1)
        assert torch.equal(result.cpu(), expected)  # whole numbers below 2^24, so their sums are exact
        return f"rank {ctx.cur_rank} of {ctx.num_ranks} on {ctx.device} used {PIPELINES * BLOCKS} blocks"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
