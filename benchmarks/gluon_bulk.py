"""Bulk copies (TMA) to and from a peer's memory against plain stores and loads, over programs and sizes.

    python benchmarks/gluon_bulk.py [--ranks N] [--quick] [--only REGEX]

Rank 0 copies to and from rank 1; with one rank it copies within its own heap.  "engine push" and "engine pull" are
cuMemcpyDtoDAsync between the same addresses.  "put" and "get" are loads and stores by programs of 16 warps,
"put_bulk" and "get_bulk" bulk copies by programs of one warp; both have the same number of programs.  Every byte that
was moved is compared.

    copy            over the number of programs and the size, in CUDA graphs
    configurations  bulk copies over chunk sizes and stages (only with --only configurations)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import gluon_bulk_kernels as kernels
import torch
from rma_copies import ENGINE, UNTOUCHED, buffers, declare_engine, engine_copy, pattern

from iris_core import bench
from iris_gluon import IrisDeviceCtx

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

MIB = 1 << 20
BLOCK = 8192
WARPS = 16
CHUNK_BYTES, STAGES = 16384, 4


def sizes(options: RunOptions) -> list[int]:
    """Bytes of a copy."""
    if options.device == "cpu":
        return [16384]
    return [MIB, 64 * MIB] if options.quick else [65536, MIB, 16 * MIB, 256 * MIB]


def programs(options: RunOptions) -> list[int]:
    """Programs that copy at the same time."""
    if options.device == "cpu":
        return [1, 3]
    return [1, 8, 32, 132] if options.quick else [1, 4, 8, 16, 32, 66, 132, 264]


def declare(
    state: State, ctx: Iris, nbytes: int, grid: int, chunk_bytes: int, stages: int, *, with_plain: bool
) -> None:
    """Declare the copies between rank 0 and its peer."""
    if state.on_gpu:
        state.set_timer("graph")
    if state.on_gpu and torch.cuda.get_device_capability() < (9, 0):
        state.skip(f"bulk copies need NVIDIA Hopper or newer, and this is {torch.cuda.get_device_name()}")
    rank, world = ctx.cur_rank, ctx.num_ranks
    peer = 1 % world
    source, target = buffers(ctx, nbytes)
    numel, context = source.numel(), ctx.get_device_context()

    def here(call: Callable[[], object]) -> Callable[[], object] | None:
        return call if rank == 0 else None

    copying = {"CHUNK_BYTES": chunk_bytes, "STAGES": stages}

    def bulk(push: bool) -> Callable[[], object] | None:
        return here(
            lambda: kernels.bulk[(grid,)](
                IrisDeviceCtx, context, source, target, numel, peer, PUSH=push, num_warps=1, **copying
            )
        )

    def plain(push: bool) -> Callable[[], object] | None:
        return here(
            lambda: kernels.plain[(grid,)](
                IrisDeviceCtx, context, source, target, numel, peer, PUSH=push, BLOCK=BLOCK, num_warps=WARPS
            )
        )

    def engine(push: bool) -> Callable[[], object] | None:
        theirs = ctx.heap.translate((target if push else source).data_ptr(), rank, peer)
        to, start = (theirs, source.data_ptr()) if push else (target.data_ptr(), theirs)
        return here(lambda: engine_copy(to, start, nbytes))

    def holds(receiver: int, sender: int) -> Callable[[], bool]:
        """Whether the receiver has the sender's data, and nobody else anything."""
        if rank == receiver:
            return lambda: torch.equal(target, pattern(sender, numel, ctx.device))
        return lambda: bool((target == UNTOUCHED).all())

    def spoil() -> None:
        target.fill_(UNTOUCHED)

    pushed: dict[str, Any] = {"check": holds(peer, 0), "prepare": spoil}
    pulled: dict[str, Any] = {"check": holds(0, peer), "prepare": spoil}
    state.set_bytes(nbytes)
    declare_engine(state, {ENGINE[0]: {"call": engine(True), **pushed}, ENGINE[1]: {"call": engine(False), **pulled}})
    if with_plain:
        state.provider("put", plain(True), **pushed)
    state.provider("put_bulk", bulk(True), baseline="put" if with_plain else "", **pushed)
    if with_plain:
        state.provider("get", plain(False), **pulled)
    state.provider("get_bulk", bulk(False), baseline="get" if with_plain else "", **pulled)


@bench.register
@bench.axis("nbytes", sizes)
@bench.axis("programs", programs)
def copy(state: State, ctx: Iris) -> None:
    """Rank 0 to and from rank 1, over programs and sizes, in CUDA graphs."""
    declare(state, ctx, state["nbytes"], state["programs"], CHUNK_BYTES, STAGES, with_plain=True)


@bench.register(by_default=False)
@bench.axis("nbytes", lambda options: sizes(options)[-1:])
@bench.axis("programs", lambda options: [3] if options.device == "cpu" else [8, 32, 132])
@bench.axis("chunk", [4096, 8192, 16384, 32768])
@bench.axis("stages", [2, 4, 6])
def configurations(state: State, ctx: Iris) -> None:
    """Bulk copies over chunk sizes and stages."""
    declare(state, ctx, state["nbytes"], state["programs"], state["chunk"], state["stages"], with_plain=False)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    max_ranks=2,
    backend="gluon",
    results="results/gluon_bulk-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
