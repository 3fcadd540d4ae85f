"""`ctx.ops` as scripts of the reference system call it, and the same as functions of a context."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from iris_core.errors import UnsupportedError
from iris_core.logs import logger
from iris_core.ops.api import Operations
from iris_core.ops.workspace import FusedWorkspace
from iris_triton.rocm_iris.configs import FusedConfig, Obliging
from iris_triton.rocm_iris.pending import Handle, UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.dispatch.bind import Binder
    from iris_core.dispatch.config import FusedConfig as CoreFusedConfig
    from iris_core.protocols import Work

F = TypeVar("F", bound="Callable[..., Any]")

_NAMES = {"output_tensor": "output", "A_sharded": "A"}
_TORCH, _TILES = "torch", "tiles"


@dataclass(eq=False)
class PendingWorkspace(Handle, FusedWorkspace):
    """A workspace that is the handle of an asynchronous call as well.

    Attributes:
        work: the handle.
    """

    work: Work | None = field(default=None, repr=False)


def _by_either_name(method: F) -> F:
    """Let a method take its arguments by the reference system's names, too."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for theirs, ours in _NAMES.items():
            if theirs in kwargs:
                if ours in kwargs:
                    raise TypeError(f"{method.__name__}() got {ours} twice, as {theirs} as well")
                kwargs[ours] = kwargs.pop(theirs)
        return method(self, *args, **kwargs)

    return cast("F", call)


class PortedOperations(Operations):
    """`Operations` with the reference system's names, layouts, workspaces and free-handed configs.

    `matmul_reduce_scatter` into an output of the whole product's shape gives each member its tiles.  Asynchronous calls
    return a workspace that is the handle as well, and `ctx.barrier()` waits for them.

    Attributes:
        under_way: asynchronous operations, for which the context's barriers wait.
        meet: `PortedCollectives.meet`, with which calls end that are not asynchronous.
    """

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)
        self.under_way = UnderWay()
        self.meet: Callable[[dist.ProcessGroup | Sequence[int] | None], None] | None = None
        self._obliging = Obliging()

    matmul_all_reduce = _by_either_name(Operations.matmul_all_reduce)
    all_gather_matmul = _by_either_name(Operations.all_gather_matmul)
    matmul_all_gather = _by_either_name(Operations.matmul_all_gather)
    matmul_reduce_scatter = _by_either_name(Operations.matmul_reduce_scatter)

    def _run(
        self,
        op: str,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | Sequence[int] | None,
        async_op: bool | None,
        config: CoreFusedConfig | None,
        workspace: FusedWorkspace | None,
        gather_dim: int | None = None,
        layout: str = _TORCH,
    ) -> FusedWorkspace | Work:
        layout = self._layout(op, out, a, b, group, layout)
        run = super()._run
        call = lambda c: run(op, out, a, b, bias, group, async_op, c, workspace, gather_dim, layout)
        result = self._obliging.run(op, config, call, tiles=layout == _TILES)
        if not async_op:
            if self.meet is not None and async_op is not None:  # None: it was prepared
                self.meet(group)
            return result
        work = cast("Work", result)
        self.under_way.add(work)
        if isinstance(workspace, PendingWorkspace):
            workspace.work = work
            return workspace
        if workspace is not None:
            return PendingWorkspace(**vars(workspace), work=work)  # with the same plans and memory
        pending = PendingWorkspace(work=work)
        known = self._obliging.known(op, config)
        pending.describe(self._find((op, out, a, b, bias, group, known, gather_dim, layout), None))
        return pending

    def _layout(
        self, op: str, out: Any, a: Any, b: Any, group: dist.ProcessGroup | Sequence[int] | None, layout: str
    ) -> str:
        if op != "matmul_reduce_scatter":
            return layout
        return _scattered(out, a, b, len(self.members_of(group)), layout)


def _scattered(out: Any, a: Any, b: Any, size: int, layout: str = _TORCH) -> str:
    """An output as large as the product means tiles: torch's is a part of its rows.  One member alone has all."""
    if any(len(getattr(each, "shape", ())) != 2 for each in (out, a, b)):
        return layout
    if tuple(out.shape) != (a.shape[0], b.shape[1]):
        return layout
    return _TILES if size > 1 else _TORCH


# -- functions of a context -------------------------------------------------------------------------------------------
def matmul_all_reduce(
    shmem: Iris,
    output_tensor: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    async_op: bool = False,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> FusedWorkspace | Work:
    """Add up the products of all ranks; `ctx.ops.matmul_all_reduce`.

    Args:
        shmem: the open context.
        output_tensor: (M, N).
        A, B: (M, K) and (K, N).
        async_op, config, workspace, bias: see `iris_core.ops.api.Operations`.
    """
    return shmem.ops.matmul_all_reduce(output_tensor, A, B, bias, async_op, config, workspace)


def all_gather_matmul(
    shmem: Iris,
    output_tensor: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace | Work:
    """Multiply the shards of all ranks, put side by side, with B; `ctx.ops.all_gather_matmul`.

    Args:
        shmem: the open context.
        output_tensor: (M, N).
        A_sharded, B: (M, K / world_size) and (K, N).
        bias, async_op, config, workspace: see `iris_core.ops.api.Operations`.
    """
    return shmem.ops.all_gather_matmul(output_tensor, A_sharded, B, bias, async_op, config, workspace)


def matmul_all_gather(
    shmem: Iris,
    output_tensor: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace | Work:
    """Put the products of all ranks below each other; `ctx.ops.matmul_all_gather`.

    Args:
        shmem: the open context.
        output_tensor: (world_size * M, N).
        A, B: (M, K) and (K, N).
        bias, async_op, config, workspace: see `iris_core.ops.api.Operations`.
    """
    return shmem.ops.matmul_all_gather(output_tensor, A, B, bias, async_op, config, workspace)


def matmul_reduce_scatter(
    shmem: Iris,
    output_tensor: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    async_op: bool = False,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> FusedWorkspace | Work:
    """Add up the products of all ranks; each gets its tiles, or its rows; `ctx.ops.matmul_reduce_scatter`.

    Args:
        shmem: the open context.
        output_tensor: (M, N) for this rank's tiles at their places, or (M / world_size, N) for its rows.
        A, B: (M, K) and (K, N).
        async_op, config, workspace, bias: see `iris_core.ops.api.Operations`.
    """
    layout = _scattered(output_tensor, A, B, shmem.get_num_ranks())
    return shmem.ops.matmul_reduce_scatter(output_tensor, A, B, bias, async_op, config, workspace, layout=layout)


_STAGED = "k_contiguous"
_FETCH = "fetch"  # of iris_triton.gemm.fetch_product: programs that fetch beside programs that multiply


def all_gather_matmul_hbm_buffer(
    ctx: Iris,
    output_tensor: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    num_fetch_sms: int | None = None,
    k_per_flag: int | None = None,
    fetch_block_m: int | None = None,
    fetch_block_k: int | None = None,
    staged_a_layout: str = "k_contiguous",
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_fetch_stages: int | None = None,
    first_stage_fetch_sms: int | None = None,
    trace: bool = False,
) -> FusedWorkspace | Work:
    """`all_gather_matmul` by programs that fetch shards into a buffer, beside others that multiply.

    Args:
        ctx: the open context.
        output_tensor, A_sharded, B, bias, async_op, config, workspace: as in `all_gather_matmul`.
        num_fetch_sms, num_warps, num_stages: see `iris_core.ops.FusedConfig`.
        k_per_flag, fetch_block_m, fetch_block_k, staged_a_layout, num_fetch_stages, first_stage_fetch_sms: tunings of
            that system's kernel, for which the algorithm here has no use; a warning says so once.
        trace: must be False: use `ctx.tracing`.

    Raises:
        UnsupportedError: `trace` is True.
    """
    if trace:
        raise UnsupportedError("all_gather_matmul_hbm_buffer: trace=True is not offered; call ctx.tracing.enable()")
    _leave_out(
        k_per_flag=k_per_flag,
        fetch_block_m=fetch_block_m,
        fetch_block_k=fetch_block_k,
        num_fetch_stages=num_fetch_stages,
        first_stage_fetch_sms=first_stage_fetch_sms,
        staged_a_layout=None if staged_a_layout == _STAGED else staged_a_layout,
    )
    given = {"num_fetch_sms": num_fetch_sms, "num_warps": num_warps, "num_stages": num_stages}
    wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    how = config
    if ctx.get_num_ranks() > 1:  # a rank alone has nothing to fetch
        how = dataclasses.replace(FusedConfig() if config is None else config, algorithm=_FETCH, **wanted)
    return ctx.ops.all_gather_matmul(output_tensor, A_sharded, B, bias, async_op, how, workspace)


_left_out: set[str] = set()


def _leave_out(**given: Any) -> None:
    """Say once of each tuning that it has no effect."""
    said = [f"{name}={value!r}" for name, value in given.items() if value is not None and name not in _left_out]
    if said:
        logger.warning("all_gather_matmul_hbm_buffer: the algorithm here has no use for %s; left out", ", ".join(said))
    _left_out.update(name for name, value in given.items() if value is not None)


# -- preambles --------------------------------------------------------------------------------------------------------
def matmul_all_reduce_preamble(
    shmem: Iris,
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:
    """Prepare `matmul_all_reduce`.  Collective.  It need not be called."""
    return shmem.ops.matmul_all_reduce_preamble(C, A, B, None, config, workspace)


def matmul_reduce_scatter_preamble(
    shmem: Iris,
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    config: CoreFusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:
    """Prepare `matmul_reduce_scatter`.  Collective.  It need not be called."""
    layout = _scattered(C, A, B, shmem.get_num_ranks())
    return shmem.ops.matmul_reduce_scatter_preamble(C, A, B, None, config, workspace, layout=layout)


def all_gather_matmul_preamble(
    shmem: Iris, A_sharded: torch.Tensor, B: torch.Tensor, config: CoreFusedConfig | None = None
) -> FusedWorkspace:
    """Return an empty workspace, which the first `all_gather_matmul` fills.

    Local.  What a call needs depends on its output, which is not known here; so operands are checked, no more.

    Raises:
        ArgumentError: the operands do not fit.
    """
    return _checked_later(shmem, "all_gather_matmul", A_sharded, B, (A_sharded.shape[0], B.shape[-1]), config)


def matmul_all_gather_preamble(
    shmem: Iris, A: torch.Tensor, B: torch.Tensor, config: CoreFusedConfig | None = None
) -> FusedWorkspace:
    """Return an empty workspace, which the first `matmul_all_gather` fills; see `all_gather_matmul_preamble`."""
    shape = A.shape[0] * shmem.get_num_ranks(), B.shape[-1]
    return _checked_later(shmem, "matmul_all_gather", A, B, shape, config)


def all_gather_matmul_hbm_buffer_preamble(
    ctx: Iris,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    config: CoreFusedConfig | None = None,
    k_per_flag: int | None = None,
    staged_a_layout: str = "k_contiguous",
) -> FusedWorkspace:
    """Return an empty workspace, which the first call fills; see `all_gather_matmul_preamble`.

    Raises:
        ArgumentError: the operands do not fit.
    """
    _leave_out(k_per_flag=k_per_flag, staged_a_layout=None if staged_a_layout == _STAGED else staged_a_layout)
    return all_gather_matmul_preamble(ctx, A_sharded, B, config)


def _checked_later(
    shmem: Iris, op: str, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, int], config: CoreFusedConfig | None
) -> FusedWorkspace:
    import torch

    if config is not None:
        config.validate(shmem.get_num_ranks())
    shmem.ops.explain(op, torch.empty(shape, dtype=a.dtype, device=a.device), a, b)
    return FusedWorkspace()
