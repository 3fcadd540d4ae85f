"""What the copies of benchmarks/rma.py are made of: buffers, the copy engine, and ranks that copy at the same time."""

from __future__ import annotations

import functools
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
    """Let the copy engine copy, on the current stream: cuMemcpyDtoDAsync.

    A peer's memory is mapped into this process's own context, and there is none of the peer's device here, for which
    cuMemcpyPeerAsync asks; `PeerCalls` compares the two calls where both are possible.
    """
    from cuda.bindings import driver

    _call(driver.cuMemcpyDtoDAsync, target, source, nbytes, torch.cuda.current_stream().cuda_stream)


def _call(function: Any, *args: Any) -> Any:
    """Call a driver function and return what it returns behind its result code, if anything."""
    code, *values = function(*args)
    if code.value:
        raise DriverError(function.__name__, int(code), code.name)
    return values[0] if values else None


@functools.cache
def _primary_context(index: int) -> Any:
    """The context of a device that torch uses too; retained once, to the end of the process."""
    from cuda.bindings import driver

    return _call(driver.cuDevicePrimaryCtxRetain, _call(driver.cuDeviceGet, index))


class PeerCalls:
    """A copy from one GPU to another within this process, by either of the driver's calls.

    Args:
        nbytes: how much.
        here: index of the GPU that it is copied from.
        there: index of the GPU that it is copied to.

    Raises:
        DriverError, RuntimeError: this process cannot use the two GPUs.
    """

    def __init__(self, nbytes: int, here: int, there: int) -> None:
        self._nbytes, self._here, self._there = nbytes, here, there
        self._source = pattern(0, nbytes // 4, f"cuda:{here}")
        self._target = torch.empty_like(self._source, device=f"cuda:{there}")
        self._target.copy_(self._source)  # torch lets the devices reach each other
        for call in (self.device_to_device, self.peer):
            self.spoil()
            call()
            torch.cuda.synchronize(here)
            if not self.is_there():
                raise RuntimeError(f"{call.__name__} between cuda:{here} and cuda:{there} did not copy")

    def device_to_device(self) -> None:
        """cuMemcpyDtoDAsync."""
        engine_copy(self._target.data_ptr(), self._source.data_ptr(), self._nbytes)

    def peer(self) -> None:
        """cuMemcpyPeerAsync, which is what cudaMemcpyPeerAsync calls."""
        from cuda.bindings import driver

        _call(
            driver.cuMemcpyPeerAsync,
            self._target.data_ptr(), _primary_context(self._there),
            self._source.data_ptr(), _primary_context(self._here),
            self._nbytes, torch.cuda.current_stream(self._here).cuda_stream,
        )  # fmt: skip

    def spoil(self) -> None:
        """Forget what has been copied."""
        self._target.fill_(UNTOUCHED)
        torch.cuda.synchronize(self._there)

    def is_there(self) -> bool:
        """Whether everything has been copied."""
        return torch.equal(self._target.cpu(), self._source.cpu())


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


def route_calls(ctx: Iris, nbytes: int, route: Mapping[int, int], config: Config) -> dict[str, dict[str, Any]]:
    """Return the calls of push, pull and both directions of the engine, by name, as `State.provider` takes them.

    Args:
        ctx: the context on whose heap the buffers are.
        nbytes: bytes that each rank of the route copies.
        route: peer by rank; the others take no part.
        config: of the launches.
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

    pushed = {"check": came_from(writer), "prepare": spoil}
    pulled = {"check": came_from(peer), "prepare": spoil}
    return {
        "engine push": {"call": engine(push=True), **pushed},
        "engine pull": {"call": engine(push=False), **pulled},
        "push": {"call": launch(kernels.push), **pushed},
        "pull": {"call": launch(kernels.pull), **pulled},
    }


def declare_route(
    state: State,
    ctx: Iris,
    nbytes: int,
    route: Mapping[int, int],
    config: Config,
    *,
    with_targets: bool = False,
    as_latency: bool = False,
) -> None:
    """Declare push, pull and engine for ranks that copy at the same time.

    Args:
        state: of the benchmark.
        ctx, nbytes, route, config: see `route_calls`.
        with_targets: whether the targets of a pair hold.
        as_latency: whether the time counts and not the bandwidth.
    """
    calls = route_calls(ctx, nbytes, route, config)
    if not as_latency:
        state.set_bytes(nbytes)
    declare_engine(state, calls)
    for name in ("push", "pull"):
        state.provider(name, baseline=f"engine {name}", **calls[name])
    if with_targets and state.on_gpu:
        state.target("push", "ratio_to_best_peer", at_least=PUSH_TARGET)
        state.target("pull", "ratio_to_best_peer", at_least=PULL_TARGET)
