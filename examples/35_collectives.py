"""Every collective of `ctx.ccl`, one block each, checked on every rank.

The calls mean what torch.distributed's mean.  Tensors on the symmetric heap are worked on where they are, others go
through a workspace.  An operation runs on the current stream and the host goes on; here the checks read the results,
which waits for the device.

    python examples/35_collectives.py [ranks]
"""

import sys

import torch

import iris_core
from iris_core.ccl import Config, ReduceOp

M, N = 6, 4


def data(rank, rows=M):
    """What a rank has: whole numbers, so that sums are exact."""
    return torch.arange(rows * N, dtype=torch.float32).view(rows, N) + 100 * rank


def main():
    with iris_core.Iris(heap_size="64MiB") as ctx:
        rank, world, ccl, done = ctx.cur_rank, ctx.num_ranks, ctx.ccl, []
        everyone = range(world)

        def check(name, got, want, rtol=0.0):
            torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=0, msg=lambda m: f"rank {rank}, {name}: {m}")
            done.append(name)

        x = ctx.empty(M, N)  # a tensor on the heap; any other tensor on the device would do as well
        x.copy_(data(rank))
        ordinary = data(rank).to(ctx.device)
        total = sum(data(r) for r in everyone)

        # all_reduce: the sum, or another reduction, of all ranks' tensors
        out = ctx.empty(M, N)
        ccl.all_reduce(out, x)
        check("all_reduce", out, total)
        ccl.all_reduce(out, ordinary, op=ReduceOp.MAX)
        check("all_reduce, maximum", out, data(world - 1))
        out.copy_(x)
        ccl.all_reduce(out, out, op=ReduceOp.AVG)
        check("all_reduce, average in place", out, total / world, rtol=1e-6)

        # all_gather: the tensors of all ranks, in the order of ranks
        gathered = ctx.empty(world, M, N)
        ccl.all_gather(gathered, x)
        check("all_gather", gathered, torch.stack([data(r) for r in everyone]))

        # reduce_scatter: the sum, of which each rank gets its part of the rows
        large = data(rank, world * M).to(ctx.device)
        part = ctx.empty(M, N)
        ccl.reduce_scatter(part, large)
        check("reduce_scatter", part, sum(data(r, world * M) for r in everyone)[rank * M : (rank + 1) * M])

        # all_to_all: each rank's i-th part goes to rank i
        parts = ctx.empty(world * M, N)
        ccl.all_to_all(parts, large)
        check("all_to_all", parts, torch.cat([data(r, world * M)[rank * M : (rank + 1) * M] for r in everyone]))

        # the same with parts of different sizes: rank r sends i + 1 rows to rank i
        send = data(rank, sum(i + 1 for i in everyone)).to(ctx.device)
        received = torch.empty(world * (rank + 1), N, device=ctx.device)
        ccl.all_to_all(
            received, send, output_split_sizes=[rank + 1] * world, input_split_sizes=[i + 1 for i in everyone]
        )
        first = sum(i + 1 for i in range(rank))
        check("all_to_all, uneven", received, torch.cat([data(r, first + rank + 1)[first:] for r in everyone]))

        # broadcast: one rank's tensor to all
        out.copy_(x)
        ccl.broadcast(out, src=world - 1)
        check("broadcast", out, data(world - 1))

        # reduce and gather: the result on one rank; the others may give None
        ccl.reduce(out if rank == 0 else None, x, dst=0)
        if rank == 0:
            check("reduce", out, total)
        ccl.gather(gathered if rank == 0 else None, ordinary, dst=0)
        if rank == 0:
            check("gather", gathered, torch.stack([data(r) for r in everyone]))

        # scatter: a part of one rank's tensor to each
        ccl.scatter(part, large if rank == 0 else None, src=0)
        check("scatter", part, data(0, world * M)[rank * M : (rank + 1) * M])

        # send and recv: between two ranks, here from each to the next; small messages wait in the receiver's inbox
        if world > 1:
            ccl.send(x, (rank + 1) % world)
            ccl.recv(out, (rank - 1) % world)
            check("send and recv", out, data((rank - 1) % world))

        # group: some of the ranks, or any process group of torch.distributed; the others take no part
        pair = [r for r in everyone if r % 2 == 0]
        if rank % 2 == 0:
            ccl.all_reduce(out, x, group=pair)
            check("all_reduce, even ranks", out, sum(data(r) for r in pair))

        # async_op: on a stream of the group; the handle lets the current stream wait
        work = ccl.all_reduce(out, x, async_op=True)
        elsewhere = ordinary * 2  # runs meanwhile
        work.wait()
        check("all_reduce, asynchronous", out + elsewhere, total + 2 * data(rank))

        # config: an algorithm by name, or how it is to be launched; what cannot be fulfilled is refused, not ignored
        if world > 1:
            ccl.all_reduce(out, x, config=Config(algorithm="one_shot"))
            check("all_reduce by one_shot", out, total)

        # barrier: streams wait for each other, hosts do not; ctx.barrier() is for hosts
        ccl.barrier()
        done.append("barrier")

        # reset: back to the beginning, after a wait has timed out on the device; it waits for all members
        ccl.reset()
        ccl.all_reduce(out, x)
        check("all_reduce after reset", out, total)

        # explain: which algorithm, why, and what the others would cost; local, nothing is launched
        explanation = ccl.explain("all_reduce", out, x)
        assert explanation.algorithm in [each.name for each in explanation.candidates]
        done.append("explain")  # print(explanation) shows all candidates
        ctx.barrier()
        return (
            f"rank {rank} of {world} on {ctx.device}: {len(done)} calls are right; {str(explanation).splitlines()[0]}"
        )


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
