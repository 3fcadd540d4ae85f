"""Every operation of `ctx.ops`, products of matrices and norms fused with communication, and the layers made of them.

Each is checked on every rank against torch on the host.  The layers train: their gradients are those of the layers that
are not divided.

    python examples/36_operations.py [ranks]
"""

import sys

import torch

import iris_core
from iris_core.nn import (
    ColumnParallelLinear,
    ExpertParallel,
    RMSNorm,
    RowParallelLinear,
    all_gather_linear,
    all_reduce_rms_norm,
    combine,
    dispatch,
    linear,
    linear_all_gather,
    linear_all_reduce,
    linear_reduce_scatter,
    ring_attention,
    ulysses,
)
from iris_core.ops import FusedConfig, FusedWorkspace

M, N, K = 8, 12, 20  # for each rank, where it is divided


def close(got, want):
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=5e-3, atol=5e-3)  # TF32 has 11 bits


def operations(ctx):
    """The operations themselves.  Returns the names of those that were checked."""
    rank, world, ops = ctx.cur_rank, ctx.num_ranks, ctx.ops
    generator = torch.Generator().manual_seed(36)  # the same numbers on all ranks
    rows, columns = slice(rank * M, (rank + 1) * M), slice(rank * K, (rank + 1) * K)
    a = torch.randn(world * M, world * K, generator=generator) / (world * K) ** 0.5
    b = torch.randn(world * K, N, generator=generator)
    bias = torch.randn(N, generator=generator)
    on = lambda x: x.contiguous().to(ctx.device)
    done = []

    # matmul_all_reduce: A and B are divided along K; all ranks get the sum of the products, the same bits
    out = ctx.empty(world * M, N)
    ops.matmul_all_reduce(out, on(a[:, columns]), on(b[columns]), on(bias))
    close(out, a @ b + bias)
    done.append("matmul_all_reduce")

    # matmul_reduce_scatter: the same sum, of which each rank gets its rows
    part = ctx.empty(M, N)
    ops.matmul_reduce_scatter(part, on(a[:, columns]), on(b[columns]))
    close(part, (a @ b)[rows])
    done.append("matmul_reduce_scatter")

    # all_gather_matmul: the shards of A of all ranks, put together, times the own B
    shard = ctx.empty(M, world * K)
    shard.copy_(a[rows])
    ops.all_gather_matmul(out, shard, on(b), gather_dim=0)  # shards are rows, as in torch's asynchronous TP
    close(out, a @ b)
    shard = ctx.empty(world * M, K)
    shard.copy_(a[:, columns])
    ops.all_gather_matmul(out, shard, on(b))  # shards are columns
    close(out, a @ b)
    done.append("all_gather_matmul")

    # matmul_all_gather: the products of all ranks, below each other or beside each other
    ops.matmul_all_gather(out, on(a[rows]), on(b))
    close(out, a @ b)
    wide = ctx.empty(world * M, world * N)
    ops.matmul_all_gather(wide, on(a), on(b + rank / world), gather_dim=1)
    close(wide, torch.cat([a @ (b + r / world) for r in range(world)], dim=1))
    done.append("matmul_all_gather")

    # all_reduce_rms_norm: the sum of all is added to the residual, which is normalised
    normed, residual = torch.empty(M, N, device=ctx.device), on(a[:M, :1] + bias)
    ops.all_reduce_rms_norm(normed, residual, on(b[:M, :] * (rank + 1)), on(bias), 1e-5)
    stream = a[:M, :1] + bias + b[:M] * (world * (world + 1) // 2)
    close(residual, stream)
    close(normed, torch.nn.functional.rms_norm(stream, (N,), bias, 1e-5))
    done.append("all_reduce_rms_norm")

    # ulysses: rows divided among the ranks, then columns
    turned = torch.empty(world * M, K, device=ctx.device)
    ops.ulysses(turned, on(a[rows]), scatter_dim=1, gather_dim=0)
    close(turned, a[:, columns])
    done.append("ulysses")

    # transposed operands, half precision; async_op: a handle; workspace: who owns plans and memory; config: how to run.
    # Each operation has a preamble, which need not be called
    half, transposed = a[:, columns].half().to(ctx.device), b[columns].half().T.contiguous().to(ctx.device).T
    result = ctx.empty(world * M, N, dtype=torch.float16)
    workspace = FusedWorkspace()
    ops.matmul_all_reduce_preamble(result, half, transposed, workspace=workspace)  # launches nothing
    work = ops.matmul_all_reduce(result, half, transposed, async_op=True, workspace=workspace)
    work.wait()
    torch.testing.assert_close(result.cpu().float(), a @ b, rtol=2e-2, atol=2e-2)
    workspace.clear()
    ops.matmul_all_reduce(out, on(a[:, columns]), on(b[columns]), config=FusedConfig(algorithm="unfused"))
    close(out, a @ b)
    done.append("options")

    # explain: which algorithm, why, and what the others would cost; print(explanation) shows all candidates
    explanation = ops.explain("matmul_all_reduce", out, on(a[:, columns]), on(b[columns]))
    assert explanation.algorithm in [each.name for each in explanation.candidates]
    done.append(f"explain ({explanation.algorithm})")
    return done


def functions(ctx):
    """`iris_core.nn`: the operations with gradients, one layer each."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    generator = torch.Generator().manual_seed(37)
    x = torch.randn(world * M, world * K, generator=generator) / (world * K) ** 0.5
    weight = torch.randn(world * N, world * K, generator=generator)
    rows, ins, outs = (slice(rank * n, (rank + 1) * n) for n in (M, K, N))
    on = lambda t: t.contiguous().to(ctx.device)
    whole = x @ weight.T
    close(linear(ctx, on(x), on(weight[outs])), whole[:, outs])  # divided by output features
    close(linear_all_gather(ctx, on(x), on(weight[outs])), whole)
    close(all_gather_linear(ctx, on(x[rows]), on(weight[outs])), whole[:, outs])
    close(linear_all_reduce(ctx, on(x[:, ins]), on(weight[:, ins])), whole)  # divided by input features
    close(linear_reduce_scatter(ctx, on(x[:, ins]), on(weight[:, ins])), whole[rows])
    close(ulysses(ctx, on(x[rows]), 1, 0), x[:, ins])
    q = torch.randn(2, world * M, 16, generator=generator)  # two heads
    ring = ctx.ops.ring_attention(2, 2, world * M, 16, dtype=torch.float32, gradients=True)
    close(ring_attention(ring, *[on(ring.part(q))] * 3), ring.part((q @ q.mT / 4).softmax(-1) @ q))
    out, stream = all_reduce_rms_norm(ctx, on(x / world), on(x), on(weight[0]))
    close(stream, 2 * x)
    close(RMSNorm(ctx, world * K)(on(x / world), on(x))[0], torch.nn.functional.rms_norm(2 * x, (world * K,)))
    close(out, torch.nn.functional.rms_norm(2 * x, (world * K,), weight[0], 1e-6))
    return ["nn functions"]


def experts(ctx):
    """A layer of experts, two for each rank, of which each token has two: as a module, and by its two halves."""
    rank, world, hidden = ctx.cur_rank, ctx.num_ranks, 16
    generator = torch.Generator().manual_seed(39)
    tokens = torch.randn(world * M, hidden, generator=generator)
    matrices = torch.randn(2 * world, hidden, hidden, generator=generator) / 4
    weights, chosen = torch.randn(world * M, 2 * world, generator=generator).softmax(1).topk(2)
    rows, own = slice(rank * M, (rank + 1) * M), slice(2 * rank, 2 * rank + 2)
    group = ctx.ops.experts(M, hidden, 2 * world, top_k=2, dtype=torch.float32)
    mine = matrices[own].to(ctx.device).requires_grad_()

    def grouped(rows, counts, offsets):
        expert = torch.searchsorted(offsets[1:], torch.arange(len(rows), device=rows.device), right=True).clamp(max=1)
        return torch.where(expert[:, None] == 0, rows @ mine[0], rows @ mine[1])

    x, gate, choice = (each[rows].to(ctx.device) for each in (tokens, weights, chosen))
    out = ExpertParallel(group, grouped)(x, choice, gate)
    arrived = dispatch(group, x, choice, gate)
    close(combine(grouped(arrived.rows, arrived.counts, arrived.turn.offsets), arrived.turn), out.cpu())

    whole = matrices.clone().requires_grad_()
    results = torch.einsum("th,ehk->tek", tokens, whole).gather(1, chosen[:, :, None].expand(-1, -1, hidden))
    want = (results * weights[:, :, None]).sum(1)
    close(out, want[rows])
    out.square().sum().backward()
    want.square().sum().backward()
    close(mine.grad, whole.grad[own])
    return ["experts"]


def layers(ctx, sequence_parallel):
    """Two layers of a transformer's MLP, divided by columns and by rows, and one step of training."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    torch.manual_seed(38)
    up, down = torch.nn.Linear(K, world * N), torch.nn.Linear(world * N, K)  # the layers that are not divided
    x, target = torch.randn(world * M, K), torch.randn(world * M, K)
    first = ColumnParallelLinear(ctx, K, world * N, sequence_parallel=sequence_parallel)
    second = RowParallelLinear(ctx, world * N, K, sequence_parallel=sequence_parallel)
    first.load_whole(up.weight, up.bias)
    second.load_whole(down.weight, down.bias)

    loss = torch.nn.functional.mse_loss(down(torch.relu(up(x))), target, reduction="sum")
    loss.backward()

    mine = slice(rank * M, (rank + 1) * M) if sequence_parallel else slice(None)  # with it, a rank has some of the rows
    y = second(torch.relu(first(x[mine].to(ctx.device))))
    torch.nn.functional.mse_loss(y, target[mine].to(ctx.device), reduction="sum").backward()
    features = slice(rank * N, (rank + 1) * N)
    for got, want in (
        (y, down(torch.relu(up(x)))[mine]),
        (first.weight.grad, up.weight.grad[features]),
        (first.bias.grad, up.bias.grad[features]),
        (second.weight.grad, down.weight.grad[:, features]),
        (second.bias.grad, down.bias.grad),
    ):
        torch.testing.assert_close(
            got.detach().cpu(), want.detach(), rtol=1e-2, atol=1e-2 * want.detach().abs().max().item()
        )
    return ["sequence-parallel layers" if sequence_parallel else "layers"]


def main():
    with iris_core.Iris(heap_size="64MiB") as ctx:
        done = operations(ctx) + functions(ctx) + experts(ctx) + layers(ctx, False) + layers(ctx, True)
        ctx.barrier()
        return f"rank {ctx.cur_rank} of {ctx.num_ranks} on {ctx.device}: {', '.join(done)} are right"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
