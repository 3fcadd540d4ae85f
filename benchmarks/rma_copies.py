"""What the copies of benchmarks/rma.py are made of: buffers, the copy engine, and ranks that copy at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rma_kernels as kernels
import torch

from iris_core.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core import Iris
    from iris_core.bench import State

ENGINE = "engine push", "engine pull"
UNTOUCHED = -1
PUSH_TARGET, PULL_TARGET = 0.93, 0.86  # of the better of the two directions of the engine


@dataclass(frozen=True)
class Config:
    """How the copy kernels are launched: elements per block, warps per program, programs per multiprocessor."""

    block: int = 8192
    num_warps: int = 16
    per_sm: int = 2

    def fitted(self, numel: int) -> tuple[int, int]:
        """Elements per block, and the number of blocks."""
        block = min(self.block, numel & -numel)  # the largest power of two that divides the size
        return block, numel // block


def pattern(rank: int, numel: int, device: str) -> torch.Tensor:
    """Data of a rank: int32[numel], different in every element and on every rank."""
    return torch.arange(numel, dtype=torch.int32, device=device) + rank * 2**27


def buffers(ctx: Iris, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source, filled, and target on the heap."""
    numel = nbytes // 4
    source = ctx.empty(numel, dtype=torch.int32)
    source.copy_(pattern(ctx.cur_rank, numel, ctx.device))
    return source, ctx.full((numel,), UNTOUCHED, dtype=torch.int32)


def engine_copy(target: int, source: int, nbytes: int) -> None:
    """Let the copy engine copy, on the current stream."""
    from cuda.bindings import driver

    (code,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, torch.cuda.current_stream().cuda_stream)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError("cuMemcpyDtoDAsync", int(code), code.name)


def engine_is_missing() -> str:
    """Why there is no copy engine to compare with; empty if there is one."""
    if torch.version.cuda is None:
        return "the copy engine is driven through cuda-bindings, and this torch is not built for CUDA"
    return ""


def declare_engine(state: State, providers: Mapping[str, dict[str, Any]]) -> None:
    """Declare the two directions of the engine, or say why they are left out."""
    reason = "the copy engine needs a GPU" if not state.on_gpu else engine_is_missing()
    for name in ENGINE:
        if reason:
            state.skip_provider(name, reason)
        else:
            state.provider(name, peer=True, **providers[name])


def declare_route(
    state: State, ctx: Iris, nbytes: int, route: Mapping[int, int], config: Config, *, with_targets: bool = False
) -> None:
    """Declare push, pull and engine for ranks that copy at the same time.

    Args:
        state: of the benchmark.
        ctx: the context.
        nbytes: bytes that each of them copies.
        route: peer by rank; the others take no part.
        config: of the launches.
        with_targets: whether the targets of a pair hold.
    """
    rank, world = ctx.cur_rank, ctx.num_ranks
    source, target = buffers(ctx, nbytes)
    numel, context = source.numel(), ctx.get_device_context()
    block, blocks = config.fitted(numel)
    grid = (min(blocks, ctx.get_cu_count() * config.per_sm),)
    peer = route.get(rank)
    writer = next((r for r, p in route.items() if p == rank), None)

    def launch(kernel: Any) -> Callable[[], object] | None:
        if peer is None:
            return None
        return lambda: kernel[grid](
            source, target, numel, context, world, peer, BLOCK=block, num_warps=config.num_warps
        )

    def engine(*, push: bool) -> Callable[[], object] | None:
        if peer is None:
            return None
        theirs = ctx.heap.translate((target if push else source).data_ptr(), rank, peer)
        here, there = (theirs, source.data_ptr()) if push else (target.data_ptr(), theirs)
        return lambda: engine_copy(here, there, nbytes)

    def came_from(other: int | None) -> Callable[[], bool]:
        """Whether the target holds that rank's data, or nothing if nobody was to write here."""
        if other is None:
            return lambda: bool((target == UNTOUCHED).all())
        return lambda: torch.equal(target, pattern(other, numel, ctx.device))

    def spoil() -> None:
        target.fill_(UNTOUCHED)

    state.set_bytes(nbytes)
    pushed = {"check": came_from(writer), "prepare": spoil}
    pulled = {"check": came_from(peer), "prepare": spoil}
    declare_engine(
        state,
        {"engine push": {"call": engine(push=True), **pushed}, "engine pull": {"call": engine(push=False), **pulled}},
    )
    state.provider("push", launch(kernels.push), baseline="engine push", **pushed)
    state.provider("pull", launch(kernels.pull), baseline="engine pull", **pulled)
    if with_targets and state.on_gpu:
        state.target("push", "ratio_to_best_peer", at_least=PUSH_TARGET)
        state.target("pull", "ratio_to_best_peer", at_least=PULL_TARGET)
