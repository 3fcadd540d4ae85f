"""Rank job of test_gemm_examples: the GEMM examples in sizes, strides and orders of events that they do not try."""

import random
import time

import jobs_examples
import torch
import triton

from iris_core import Iris

LATE_S = 0.02
"""How late a rank may be, at most."""


def transposed(make, rows, columns, dtype=torch.bfloat16):
    """A matrix whose columns are dense, not its rows."""
    return make(columns, rows, dtype=dtype).t()


class Scatter:
    """C = A @ B; B is divided by columns, and C is whole on every rank."""

    def __init__(self, example, ctx, m, n, k):
        self.example, self.ctx, self.sizes = example, ctx, (m, n, k)
        self.c = transposed(ctx.zeros, m, n * ctx.num_ranks)
        self.flags = []
        if hasattr(example, "compute") or hasattr(example, "compute_or_send"):
            tiles = example.num_tiles(m, n, example.gemm_options(ctx))
            self.flags = [ctx.zeros(tiles, dtype=torch.int32)]

    def call(self, turn, seed):
        """Returns what C must be."""
        (m, n, k), rank = self.sizes, self.ctx.cur_rank
        a = self.example.whole_numbers(self.ctx, k, m, seed).t()
        b = self.example.whole_numbers(self.ctx, n * self.ctx.num_ranks, k, seed + 1).t()
        counted = (*self.flags, turn) if self.flags else ()
        self.example.gemm_all_scatter(self.ctx, a, b[:, rank * n : (rank + 1) * n], self.c, *counted)
        return self.example.product(a, b)


class Reduce:
    """C = sum of A @ B; both are divided along K, and C is whole on every rank."""

    def __init__(self, example, ctx, m, n, k):
        self.example, self.ctx, self.sizes = example, ctx, (m, n, k)
        tiles = example.num_tiles(m, n, example.gemm_options(ctx))
        self.flags = []
        self.counts = False
        if hasattr(example, "make_locks"):
            self.c, parts = transposed(ctx.zeros, m, n), transposed(ctx.zeros, m, n, torch.float32)
            options = example.gemm_options(ctx)
            self.flags = [parts, example.make_locks(ctx, m, n, options["BLOCK_M"], options["BLOCK_N"])]
        elif hasattr(example, "RingMemory"):
            self.c, self.flags = transposed(ctx.zeros, m, n), [example.RingMemory(ctx, m, n)]
        elif "parts" in example.gemm_all_reduce_kernel.arg_names:
            self.c = transposed(torch.zeros, m, n).to(ctx.device)
            parts = ctx.empty(2, m, n, dtype=torch.float32)
            self.flags = [parts, ctx.zeros(ctx.num_ranks, tiles, dtype=torch.int32)]
            self.counts = True
        else:
            self.c = transposed(ctx.ones, m, n, torch.float32)

    def call(self, turn, seed):
        """Returns what C must be."""
        (m, n, k), rank, world = self.sizes, self.ctx.cur_rank, self.ctx.num_ranks
        a = self.example.whole_numbers(self.ctx, k * world, m, seed).t()
        b = self.example.whole_numbers(self.ctx, k * world, n, seed + 1)
        mine = slice(rank * k, (rank + 1) * k)
        counted = [turn] if self.counts else []
        self.example.gemm_all_reduce(self.ctx, a[:, mine], b[mine], self.c, *self.flags, *counted)
        if hasattr(self.example, "make_locks"):
            self.ctx.device_barrier()  # C is whole behind it; no other one is needed
        return self.example.product(a, b)


class Gather:
    """C = A @ B; the rows of A are divided, B is the rank's own."""

    def __init__(self, example, ctx, m, n, k):
        self.example, self.ctx, self.sizes = example, ctx, (m, n, k)
        self.c = transposed(torch.zeros, m * ctx.num_ranks, n).to(ctx.device)
        self.flags = []
        if hasattr(example, "push_gemm"):
            self.a = transposed(ctx.zeros, m * ctx.num_ranks, k)
            blocks = triton.cdiv(m, example.gemm_options(ctx)["BLOCK_M"])
            self.flags = [ctx.zeros(ctx.num_ranks, blocks, dtype=torch.int32)]
            self.shard = self.a[ctx.cur_rank * m : (ctx.cur_rank + 1) * m]
        else:
            self.a = self.shard = transposed(ctx.zeros, m, k)

    def call(self, turn, seed):
        """Returns what C must be."""
        (m, n, k), rank = self.sizes, self.ctx.cur_rank
        a = self.example.whole_numbers(self.ctx, m * self.ctx.num_ranks, k, seed)
        b = self.example.whole_numbers(self.ctx, n, k, seed + 1 + rank).t()
        self.shard.copy_(a[rank * m : (rank + 1) * m])
        counted = (*self.flags, turn) if self.flags else ()
        self.example.all_gather_gemm(self.ctx, self.a, b, self.c, *counted)
        return self.example.product(a, b)


def run_in_turns(path, sizes, turns, seed, device):
    """Call an example's function again and again, with other data and, at random, with late ranks.

    Returns the turns whose result is wrong.
    """
    example = jobs_examples.load(path)
    kinds = {"gemm_all_scatter": Scatter, "gemm_all_reduce": Reduce, "all_gather_gemm": Gather}
    (kind,) = (kinds[name] for name in kinds if hasattr(example, name))
    wrong = []
    with Iris("16MiB", device=device) as ctx:
        late = random.Random(1000 * seed + ctx.cur_rank)
        case = kind(example, ctx, *sizes)
        ctx.barrier()
        for turn in range(1, turns + 1):
            wanted = case.call(turn, seed=100 * turn)
            if late.random() < 0.4:  # the others are ahead while this rank has not used its result
                time.sleep(LATE_S * late.random())
            if not torch.equal(case.c, wanted.to(case.c.dtype)):
                wrong.append(turn)
            if late.random() < 0.4:
                time.sleep(LATE_S * late.random())
        ctx.barrier()
    return wrong
