"""Rank jobs about `ctx.ccl` and `ctx.ops` inside of `torch.compile`."""

import torch

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.torch_backend import library
from iris_core.types import ReduceOp


def in_one_graph():
    """Calls of contexts in a compiled function, and the same eagerly: integers, which are exact."""
    found, config = [], Config(algorithm="two_shot")
    # one context behind the other: code that was compiled for the first may not call it for the second
    for group in (None, [2, 0, 1]):
        with Iris("8MiB", device="cpu") as ctx:
            size, rank = ctx.num_ranks, ctx.cur_rank

            def step(y, x, w, ctx=ctx, size=size, group=group):
                z = 2 * x
                ctx.ccl.all_reduce(y, z, group=group)
                ctx.ccl.all_reduce(z, z, ReduceOp.MAX, config=config)
                gathered = y.new_empty(size * 4)
                ctx.ccl.all_gather(gathered, y + x, group)
                ctx.ccl.broadcast(gathered, 1, group)
                product, rows = w.new_empty(6, 3), w.new_empty(2, 3)
                ctx.ops.matmul_all_reduce(product, w, w[:3], w[0], group=group)
                ctx.ops.matmul_reduce_scatter(rows, w, w[:3])
                eighths, scaled = w.to(torch.float8_e5m2), w.new_empty(6, 3)
                ctx.ops.matmul_all_reduce(scaled, eighths, eighths[:3], a_scales=w[:, 0], b_scales=w[0], group=group)
                residual, normed = w + 1, torch.empty_like(w)
                ctx.ops.all_reduce_rms_norm(normed, residual, 2 * w, w[0], 1e-3, group=group)
                eights, scales = w.new_empty(6, 3, dtype=torch.float8_e5m2), w.new_empty(6)
                ctx.ops.all_reduce_rms_norm(eights, residual, w, w[0], scales=scales)
                return gathered + z.sum(), product + scaled, rows, residual, normed, eights.float() * scales[:, None]

            x, w = ctx.arange(4) * (rank + 1), ctx.arange(18.0).view(6, 3) + rank
            compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
            for _ in range(2):  # first of all, so that ctx.ccl and ctx.ops are made while the call is traced
                y = ctx.zeros(4, dtype=torch.int64)
                ours, wanted = compiled(y, x, w), step(ctx.zeros(4, dtype=torch.int64), x, w)
                found.append([torch.equal(a, b) for a, b in zip(ours, wanted, strict=True)])
                found.append([bool(y.any())])
    return found


def reduce_overhead():
    """What is wrong in calls of a function that CUDA graphs replay, and why a graph was left out."""
    with Iris("64MiB", device="cuda") as ctx:
        group, ops, wrong = library.name_of(ctx), torch.ops.iris, []

        def step(x, w):
            y = torch.empty_like(x)
            ctx.ccl.all_reduce(y, 2 * x)
            fused = (op(x + 1, w, None, group) for op in (ops.matmul_all_reduce, ops.matmul_reduce_scatter))
            gathered = ops.all_gather(x + y, group), ops.all_gather_matmul(x + 1, w, None, group)
            columns = ops.all_gather_matmul(x[:, :64] + 1, w, None, group, 1) if ctx.num_ranks == 2 else x
            return y + 1, *fused, *gathered, columns, ops.reduce_scatter(y + x, "sum", group)

        compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
        counted = torch._dynamo.utils.counters["inductor"]
        counted.clear()
        w = torch.randint(0, 2, (128, 256), device=ctx.device).bfloat16()
        for seed in range(5):  # first calls, in the warm-up; the capture; replays
            drawn = torch.Generator().manual_seed(10 * seed + ctx.cur_rank)
            x = torch.randint(0, 2, (64 * ctx.num_ranks, 128), generator=drawn).to(w)
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in compiled(x, w)]
            pairs = enumerate(zip(found, step(x, w), strict=True))
            wrong += [(seed, place) for place, (ours, eager) in pairs if not torch.equal(ours, eager)]
        torch.cuda.synchronize()
        torch._dynamo.reset()
        return wrong, counted["cudagraph_skips"]


def refusals():
    """What compiled functions say that call where torch would have to record, or with a config of their own."""
    with Iris("1MiB", device="cpu") as ctx:
        x, y = torch.ones(4, requires_grad=True), torch.zeros(4)

        def recorded(x):
            ctx.ccl.all_reduce(y, 2 * x)
            return y.sum()

        def configured(x):
            ctx.ccl.all_reduce(y, 2 * x.detach(), config=Config(algorithm="two_shot"))
            return y.sum()

        said = []
        for step in (recorded, configured):
            try:
                torch.compile(step, backend="aot_eager")(x)
            except Exception as e:  # noqa: BLE001 - the compiler's own, around ours
                said.append(f"{type(e).__name__}: {e}")
        return said
