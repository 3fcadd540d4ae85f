"""Remote memory access: bandwidth against the copy engine, latency of signals, and the device barrier.

    python benchmarks/rma.py [--allocator torch|vmem] [--ranks N] [--quick] [--only REGEX]

One process per GPU.  "push" stores to a peer (`ctx.put`), "pull" loads from it (`ctx.get`); "engine push" and "engine
pull" are cuMemcpyDtoDAsync between the same addresses in the same run.  (`engine_calls` shows what cuMemcpyPeerAsync
takes for the same.)  Every byte that was moved is compared.  Large copies are of 256 MiB; small ones, whose time is the
latency, of 4 KiB and in CUDA graphs.

    pair          rank 0 and rank 1 alone, over sizes, in CUDA graphs
    pairs         each ordered pair of ranks alone, small and large: matrices
    ring          every rank with its successor, all at once, small and large
    all_to_all    every rank sends 1/W of its data to each peer, all at once, small and large
    latency       half of a round trip of signals between rank 0 and rank 1, inside one kernel, and by the copy engine
    latencies     the same for each ordered pair of ranks, relaxed: matrices
    engine_calls  cuMemcpyDtoDAsync and cuMemcpyPeerAsync, from rank 0's GPU to the next one, within its process
    barrier       ctx.device_barrier() as a kernel of its own, in CUDA graphs
    configurations  push and pull over launch configurations (only with --only configurations)
    heaps         `pair` on a heap of vmem beside that of --allocator, by the same processes (only with --only heaps)

On CPU ranks (--device cpu) the same code runs with tiny sizes, so that it is tested; the times say nothing then.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import rma_kernels as kernels
import torch
from rma_copies import (
    ENGINE,
    UNTOUCHED,
    Config,
    PeerCalls,
    buffers,
    declare_engine,
    declare_route,
    engine_copy,
    engine_is_missing,
    pattern,
    route_calls,
)
from rma_signals import declare_signals

from iris_core import Iris, bench
from iris_core.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.bench import RunOptions, State

MIB = 1 << 20
SMALL, LARGE = 4096, 256 * MIB
LATE_S = 0.01
LATENCY_TARGET_US = 1.0
BARRIER_TARGET_US = {"relaxed": 2.5, "release": 3.3}


# -- copies -----------------------------------------------------------------------------------------------------------
def sizes(options: RunOptions) -> list[int]:
    """Sizes of the sweep."""
    if on_cpu(options):
        return [SMALL, 16384]
    return [SMALL, MIB, LARGE] if options.quick else bench.power_of_two(SMALL, LARGE)


def large(options: RunOptions) -> list[int]:
    """The size at which only the bandwidth counts."""
    return [16384] if on_cpu(options) else [LARGE]


def ends(options: RunOptions) -> list[int]:
    """The size at which only the latency counts, and `large`."""
    return [SMALL, *large(options)]


def as_latency(state: State) -> bool:
    """Whether this is the small size; then what the host does for a launch is left out of the time."""
    small = bool(state["nbytes"] == SMALL)
    if small and state.on_gpu:
        state.set_timer("graph")
    return small


def on_cpu(options: RunOptions) -> bool:
    """Whether the ranks compute on the CPU; `main` has chosen."""
    return options.device == "cpu"


def needs_a_peer(state: State, ctx: Iris) -> None:
    """Skip where there is nobody to talk to."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")


@bench.register
@bench.axis("nbytes", sizes)
def pair(state: State, ctx: Iris) -> None:
    """Rank 0 and rank 1 alone, over sizes, in CUDA graphs."""
    needs_a_peer(state, ctx)
    if state.on_gpu:
        state.set_timer("graph")
    declare_route(state, ctx, state["nbytes"], {0: 1}, Config(), with_targets=state["nbytes"] == LARGE)


@bench.register
@bench.axis("nbytes", ends)
@bench.axis("rank", lambda options: range(options.num_ranks))
@bench.axis("peer", lambda options: range(options.num_ranks))
def pairs(state: State, ctx: Iris) -> None:
    """Each ordered pair of ranks alone, small and large."""
    one_pair(state, ctx)
    route, small = {state["rank"]: state["peer"]}, as_latency(state)
    declare_route(state, ctx, state["nbytes"], route, Config(), with_targets=not small, as_latency=small)


def one_pair(state: State, ctx: Iris) -> None:
    """What holds for a point of the axes rank and peer."""
    needs_a_peer(state, ctx)
    if state["rank"] == state["peer"]:
        state.skip("a rank and itself are no pair")
    state.set_rounds(3)


@bench.register
@bench.axis("nbytes", ends)
def ring(state: State, ctx: Iris) -> None:
    """Every rank with its successor, all at once, small and large."""
    needs_a_peer(state, ctx)
    as_latency(state)
    world = ctx.num_ranks
    declare_route(state, ctx, state["nbytes"], {r: (r + 1) % world for r in range(world)}, Config())


@bench.register(by_default=False)
@bench.axis("nbytes", large)
@bench.axis("block", [4096, 8192, 16384])
@bench.axis("num_warps", [8, 16, 32])
@bench.axis("per_sm", [1, 2, 4])
def configurations(state: State, ctx: Iris) -> None:
    """Push and pull of a pair over launch configurations."""
    needs_a_peer(state, ctx)
    state.set_rounds(5)
    declare_route(state, ctx, state["nbytes"], {0: 1}, Config(state["block"], state["num_warps"], state["per_sm"]))


@bench.register(by_default=False)
@bench.axis("nbytes", sizes)
def heaps(state: State, ctx: Iris) -> None:
    """Rank 0 and rank 1 alone, on this heap and on one of another context's, in CUDA graphs.

    Two runs cannot be compared: loads take up to 0.2 us longer, from all memory, once NCCL is in the process.
    """
    needs_a_peer(state, ctx)
    if state.on_gpu:
        state.set_timer("graph")
    nbytes, beside = state["nbytes"], "vmem" if state.on_gpu else "host"
    other = state.resources.enter_context(Iris(4 * nbytes + 16 * MIB, allocator=beside, device=ctx.target.type.value))
    state.set_bytes(nbytes)
    theirs, ours = (route_calls(each, nbytes, {0: 1}, Config()) for each in (other, ctx))
    for name in ("push", "pull"):
        state.provider(f"{name} {beside}", peer=True, **theirs[name])
        state.provider(name, baseline=f"{name} {beside}", **ours[name])
        if state.on_gpu:
            state.target(name, "ratio", at_least=0.95)


@bench.register
@bench.axis("nbytes", ends)
def all_to_all(state: State, ctx: Iris) -> None:
    """Every rank sends 1/W of its data to each peer, all at once; the chunk that stays is not copied."""
    needs_a_peer(state, ctx)
    as_latency(state)
    rank, world, config = ctx.cur_rank, ctx.num_ranks, Config()
    unit = min(config.block, state["nbytes"] // 4 // world)
    unit = 1 << (unit.bit_length() - 1)
    chunk = state["nbytes"] // 4 // world // unit * unit  # elements
    source, target = buffers(ctx, chunk * world * 4)
    context = ctx.get_device_context()
    block, blocks = config.fitted(chunk)
    peers = [(rank + step) % world for step in range(1, world)]
    per_peer = max(1, min(blocks, ctx.get_cu_count() * config.per_sm // len(peers)))

    def launch(kernel: Any) -> Callable[[], object]:
        return lambda: kernel[(per_peer * len(peers),)](
            source, target, chunk, context, world, BLOCK=block, num_warps=config.num_warps
        )

    def engine(*, push: bool) -> Callable[[], object]:
        nbytes, copies = chunk * 4, []
        for peer in peers:
            if push:
                there = ctx.heap.translate(target.data_ptr(), rank, peer) + rank * nbytes
                copies.append((there, source.data_ptr() + peer * nbytes))
            else:
                there = ctx.heap.translate(source.data_ptr(), rank, peer) + rank * nbytes
                copies.append((target.data_ptr() + peer * nbytes, there))

        def copy_all() -> None:
            for to, start in copies:
                engine_copy(to, start, nbytes)

        return copy_all

    def is_exchanged() -> bool:
        """Chunk p holds what rank p has for this rank."""
        right = [bool((target[rank * chunk : (rank + 1) * chunk] == UNTOUCHED).all())]
        for peer in peers:
            sent = pattern(peer, chunk * world, ctx.device)[rank * chunk : (rank + 1) * chunk]
            right.append(torch.equal(target[peer * chunk : (peer + 1) * chunk], sent))
        return all(right)

    def spoil() -> None:
        target.fill_(UNTOUCHED)

    state.set_bytes(chunk * 4 * len(peers))
    common = {"check": is_exchanged, "prepare": spoil}
    engines = {name: {"call": engine(push=name == "engine push"), **common} for name in ENGINE}
    declare_engine(state, engines)
    state.provider("push", launch(kernels.push_to_all), baseline="engine push", **common)
    state.provider("pull", launch(kernels.pull_from_all), baseline="engine pull", **common)


# -- signals ----------------------------------------------------------------------------------------------------------
@bench.register
@bench.axis("sem", ["relaxed", "release"])
def latency(state: State, ctx: Iris) -> None:
    """Half of a round trip of signals between rank 0 and rank 1, inside one kernel and by the copy engine."""
    needs_a_peer(state, ctx)
    declare_signals(state, ctx, 0, 1, state["sem"])
    if state["sem"] == "relaxed" and state.on_gpu:
        state.target("signal", "time_us", at_most=LATENCY_TARGET_US)


@bench.register
@bench.axis("rank", lambda options: range(options.num_ranks))
@bench.axis("peer", lambda options: range(options.num_ranks))
def latencies(state: State, ctx: Iris) -> None:
    """Half of a round trip of relaxed signals of each ordered pair of ranks."""
    one_pair(state, ctx)
    declare_signals(state, ctx, state["rank"], state["peer"], "relaxed")


@bench.register
@bench.axis("nbytes", ends)
def engine_calls(state: State, ctx: Iris) -> None:
    """The driver's two calls for the copy engine, from rank 0's GPU to the next one within its process, eagerly."""
    if not state.on_gpu or (reason := engine_is_missing()):
        state.skip("the copy engine needs a GPU" if not state.on_gpu else reason)
    calls, problem = None, ""
    if ctx.cur_rank == 0:
        here, visible = ctx.target.index, torch.cuda.device_count()
        try:
            if visible < 2:
                raise RuntimeError("this process sees one GPU only")
            calls = PeerCalls(state["nbytes"], here, (here + 1) % visible)
        except (DriverError, RuntimeError) as error:
            problem = str(error) or type(error).__name__
    if problem := ctx.broadcast(problem):
        state.skip(problem)
    state.set_bytes(state["nbytes"])
    for name, method in (("cuMemcpyDtoDAsync", "device_to_device"), ("cuMemcpyPeerAsync", "peer")):
        if calls is None:
            state.provider(name, None, check=None, peer=True)
        else:
            call = getattr(calls, method)
            state.provider(name, call, check=calls.is_there, prepare=calls.spoil, peer=True)


@bench.register
@bench.axis("sem", ["relaxed", "release"])
def barrier(state: State, ctx: Iris) -> None:
    """ctx.device_barrier() over all ranks as a kernel of its own, in CUDA graphs."""
    needs_a_peer(state, ctx)
    rank, world = ctx.cur_rank, ctx.num_ranks
    board = ctx.zeros(world, dtype=torch.int64)
    context = ctx.get_device_context()
    checks = 0

    def holds() -> bool:
        """Nobody passes before a rank that comes late; with release, what the ranks stored before has come, too."""
        nonlocal checks
        checks += 1
        value = checks * 1000 + 7  # never a number that Triton compiles another kernel for
        ctx.barrier()
        start = time.perf_counter()
        if rank == checks % world:
            time.sleep(2 * LATE_S)
        kernels.stamp[(1,)](board, value, context, world, num_warps=1)
        ctx.device_barrier(sem=state["sem"])
        seen = board.tolist()
        waited = time.perf_counter() - start >= LATE_S
        ctx.barrier()  # nobody writes the next values before all have read these
        return waited and (state["sem"] == "relaxed" or seen == [value] * world)

    if state.on_gpu:
        state.set_timer("graph")
        state.target("barrier", "time_us", at_most=BARRIER_TARGET_US[state["sem"]])
    state.provider("barrier", lambda: ctx.device_barrier(sem=state["sem"]), check=holds)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    allocator="torch",
    results="results/rma-{ranks}x{allocator}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
