"""Remote memory access on GPUs: bandwidth against the copy engine, latency of signals, and the device barrier.

    python benchmarks/rma.py [--allocator torch|vmem] [--ranks N]

One process per GPU.  Bandwidth: 256 MiB per copy; "push" stores to the peer (`ctx.put`), "pull" loads from it
(`ctx.get`), "engine" is cuMemcpyDtoDAsync between the same addresses in the same run, the three taken in turn, median
of seven rounds of events.  "pair": rank 0 and rank 1 alone; "all": every rank with its successor at the same time.
Latency: half of a round trip of signals between rank 0 and rank 1 inside one kernel.  Barrier: a kernel of its own that
does nothing else, 20 per CUDA graph, maximum over ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, Any

import common
import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 256 << 20
ROUNDS, REPEATS = 7, 5
TARGETS = {"push pair": 0.93, "pull pair": 0.86}


@triton.jit
def push(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Copy own `source` to `target` on the peer; programs stride over the blocks."""
    ctx = DeviceContext.from_tensor(context, world_size)
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + lanes
        ctx.put(source + i, target + i, peer)


@triton.jit
def pull(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Copy `source` on the peer to own `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + lanes
        ctx.get(source + i, target + i, peer)


@triton.jit
def ping_pong(flag, context, world_size: tl.constexpr, first, rounds):
    """Rank 0 and rank 1 signal each other in turn."""
    ctx = DeviceContext.from_tensor(context, world_size)
    peer = 1 - ctx.rank
    for r in range(rounds):
        if ctx.rank == 0:
            ctx.signal(flag, first + r + 1, peer)
            ctx.wait(flag, first + r + 1)
        else:
            ctx.wait(flag, first + r + 1)
            ctx.signal(flag, first + r + 1, peer)


@triton.jit
def only_a_barrier(flags, context, world_size: tl.constexpr):
    """What a device-wide barrier between two kernels costs."""
    DeviceContext.from_tensor(context, world_size).barrier(flags)


def seconds_per_call(call: Callable[[], object]) -> float:
    """Time one call on the current stream by events, from a batch behind one warm-up call."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS / 1e3


def gathered(value: float) -> list[float]:
    """Return every rank's value."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def measure(allocator: str) -> list[dict[str, Any]]:
    """Run everything on one rank; rank 0's rows count, and its numbers are the slowest rank's."""
    from cuda.bindings import driver

    with iris_core.Iris("1GiB", device="cuda", allocator=allocator) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        numel = NBYTES // 4
        source, target = ctx.empty(numel, dtype=torch.float32), ctx.empty(numel, dtype=torch.float32)
        source.fill_(rank + 1)
        context = ctx.get_device_context()
        stream = torch.cuda.current_stream().cuda_stream
        peer = (rank + 1) % world
        there = ctx.heap.translate(target.data_ptr(), rank, peer)
        sms = ctx.get_cu_count()

        def engine() -> None:
            (code,) = driver.cuMemcpyDtoDAsync(there, source.data_ptr(), NBYTES, stream)
            assert code == driver.CUresult.CUDA_SUCCESS, code

        ways: dict[str, Callable[[], object]] = {"engine": engine}
        for per_sm in (1, 2):
            grid = (sms * per_sm,)
            for name, kernel in (("push", push), ("pull", pull)):
                ways[f"{name} {grid[0]} programs"] = lambda kernel=kernel, grid=grid: kernel[grid](
                    source, target, numel, context, world, peer, BLOCK=8192, num_warps=16
                )
        rows = []
        for scene, active in (("pair", rank == 0), ("all", True)):
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, call in ways.items():
                    ctx.barrier()
                    times[name].append(seconds_per_call(call) if active else 0.0)
            slowest = {name: max(gathered(statistics.median(t))) for name, t in times.items()}
            rates = {name: NBYTES / seconds / 1e9 for name, seconds in slowest.items()}
            best = {kind: max(v for n, v in rates.items() if n.startswith(kind)) for kind in ("push", "pull")}
            rows += [{"name": f"{name}, {scene}", "value": rate, "unit": "GB/s"} for name, rate in rates.items()]
            for kind, rate in best.items():
                row = {"name": f"best {kind}, {scene}, of the engine", "value": rate / rates["engine"], "unit": "x"}
                if f"{kind} {scene}" in TARGETS:
                    row["target_at_least"] = TARGETS[f"{kind} {scene}"]
                    row["reached"] = row["value"] >= row["target_at_least"]
                rows.append(row)
        check(ctx, source, target, peer)
        rows.append(latency(ctx))
        rows.append(barrier(ctx))
        return rows


def check(ctx: Any, source: torch.Tensor, target: torch.Tensor, peer: int) -> None:
    """The timed kernels must have moved the right data."""
    context, world, rank = ctx.get_device_context(), ctx.num_ranks, ctx.cur_rank
    for kernel, expected in ((push, (rank - 1) % world + 1), (pull, peer + 1)):
        target.fill_(-1)
        ctx.barrier()
        kernel[(ctx.get_cu_count(),)](source, target, target.numel(), context, world, peer, BLOCK=8192, num_warps=16)
        ctx.barrier()
        assert bool((target == expected).all()), f"{kernel.__name__} moved wrong data"


def latency(ctx: Any, rounds: int = 1000) -> dict[str, Any]:
    """One-way latency of a signal."""
    flag = ctx.zeros(1, dtype=torch.int64)
    times = []
    for launch in range(ROUNDS + 1):
        ctx.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if ctx.cur_rank < 2:
            first = launch * rounds + 3  # never 1 or a multiple of 16: Triton would compile another kernel for those
            ping_pong[(1,)](flag, ctx.get_device_context(), ctx.num_ranks, first, rounds, num_warps=1)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / rounds / 2 * 1e3)
    return {"name": "one-way signal latency", "value": statistics.median(times[1:]), "unit": "us", "target": 1.0}


def barrier(ctx: Any, per_graph: int = 20) -> dict[str, Any]:
    """A device barrier as a kernel of its own, in a CUDA graph."""
    flags = ctx.zeros(ctx.num_ranks + 1, dtype=torch.int64)
    launch = lambda: only_a_barrier[(1,)](flags, ctx.get_device_context(), ctx.num_ranks, num_warps=1)
    ctx.barrier()
    launch()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            launch()
    times = []
    for _ in range(ROUNDS):
        ctx.barrier()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 10 / per_graph * 1e3)
    slowest = max(gathered(statistics.median(times)))
    name = f"device barrier with release, {ctx.num_ranks} ranks, kernel of its own in a graph"
    return {"name": name, "value": slowest, "unit": "us", "target": 3.3}


def main() -> int:
    """Start the ranks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", default="torch")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks > torch.cuda.device_count():
        print(f"needs two GPUs or more and one for each rank; torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 1
    results = iris_core.run(measure, args.ranks, args.allocator)[0]
    print(common.write(f"rma-{args.ranks}x{args.allocator}", results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
