"""`ctx.ops` as scripts of AMD's Iris call it, and the same as functions of a context."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from iris_core.errors import UnsupportedError
from iris_core.logs import logger
from iris_core.ops.api import Operations
from iris_core.ops.workspace import FusedWorkspace
from iris_triton.rocm_iris.configs import FusedConfig, Obliging
from iris_triton.rocm_iris.handles import Handle, UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from iris_core.api import Iris
    from iris_core.dispatch.bind import Binder
    from iris_core.dispatch.config import FusedConfig as CoreConfig
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
    """Let a method take its arguments by the names that they have in AMD's Iris, too."""

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
    """`Operations` with the names, layouts and workspaces of AMD's Iris, and configs that are advice.

    `matmul_reduce_scatter` into an output of the whole product's shape gives each member its tiles.  A call that is
    not asynchronous ends with a barrier of the group's devices.  Asynchronous calls return a workspace that is the
    handle as well, and `ctx.barrier()` waits for them.

    Attributes:
        under_way: asynchronous operations, for which the context's barriers wait.
    """

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)
        self.under_way = UnderWay()
        self._obliging = Obliging()

    matmul_all_reduce = _by_either_name(Operations.matmul_all_reduce)
    all_gather_matmul = _by_either_name(Operations.all_gather_matmul)
    matmul_all_gather = _by_either_name(Operations.matmul_all_gather)
    matmul_reduce_scatter = _by_either_name(Operations.matmul_reduce_scatter)

    def _run(
        self,
        op: str,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | Sequence[int] | None,
        async_op: bool | None,
        config: CoreConfig | None,
        workspace: FusedWorkspace | None,
        gather_dim: int | None = None,
        layout: str = _TORCH,
    ) -> FusedWorkspace | Work:
        if op == "matmul_reduce_scatter" and _is_whole(out, a, b):
            layout = _TILES if len(self.members_of(group)) > 1 else _TORCH
        run = super()._run
        call = lambda c: run(op, out, a, b, bias, group, async_op, c, workspace, gather_dim, layout)
        result = self._obliging.run(op, config, call, tiles=layout == _TILES)
        if not async_op:
            if async_op is not None and len(self.members_of(group)) > 1:  # None: it was prepared
                self._binder.barrier(group, async_op=False)
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


def _is_whole(out: Any, a: Any, b: Any) -> bool:
    """Whether an output is as large as the product, where torch's is a part of its rows."""
    if any(len(getattr(each, "shape", ())) != 2 for each in (out, a, b)):
        return False
    return tuple(out.shape) == (a.shape[0], b.shape[1])


# -- functions of a context -------------------------------------------------------------------------------------------
def matmul_all_reduce(
    shmem: Iris, output_tensor: Tensor, A: Tensor, B: Tensor, async_op: bool = False,
    config: CoreConfig | None = None, workspace: FusedWorkspace | None = None, *, bias: Tensor | None = None,
) -> FusedWorkspace | Work:  # fmt: skip
    """Add up the products of all ranks: `ctx.ops.matmul_all_reduce` of `shmem`, the open context.

    Args:
        shmem: the open context.
        output_tensor: (M, N).
        A, B: (M, K) and (K, N).
        async_op, config, workspace, bias: see `iris_core.ops.api.Operations`.
    """
    return shmem.ops.matmul_all_reduce(output_tensor, A, B, bias, async_op, config, workspace)


def all_gather_matmul(
    shmem: Iris, output_tensor: Tensor, A_sharded: Tensor, B: Tensor, bias: Tensor | None = None,
    async_op: bool = False, config: CoreConfig | None = None, workspace: FusedWorkspace | None = None,
) -> FusedWorkspace | Work:  # fmt: skip
    """Multiply the shards of all ranks, put side by side, with B; as `matmul_all_reduce`.

    `A_sharded` is (M, K / world_size).
    """
    return shmem.ops.all_gather_matmul(output_tensor, A_sharded, B, bias, async_op, config, workspace)


def matmul_all_gather(
    shmem: Iris, output_tensor: Tensor, A: Tensor, B: Tensor, bias: Tensor | None = None, async_op: bool = False,
    config: CoreConfig | None = None, workspace: FusedWorkspace | None = None,
) -> FusedWorkspace | Work:  # fmt: skip
    """Put the products of all ranks below each other; as `matmul_all_reduce`.

    `output_tensor` is (world_size * M, N).
    """
    return shmem.ops.matmul_all_gather(output_tensor, A, B, bias, async_op, config, workspace)


def matmul_reduce_scatter(
    shmem: Iris, output_tensor: Tensor, A: Tensor, B: Tensor, async_op: bool = False,
    config: CoreConfig | None = None, workspace: FusedWorkspace | None = None, *, bias: Tensor | None = None,
) -> FusedWorkspace | Work:  # fmt: skip
    """Add up the products of all ranks; each gets its tiles, or its rows; as `matmul_all_reduce`.

    `output_tensor` is (M, N) for this rank's tiles at their places, or (M / world_size, N) for its rows.
    """
    return shmem.ops.matmul_reduce_scatter(output_tensor, A, B, bias, async_op, config, workspace)


_STAGED = "k_contiguous"
_FETCH = "fetch"  # of iris_triton.gemm.fetch_product: programs that fetch beside programs that multiply


def all_gather_matmul_hbm_buffer(
    ctx: Iris,
    output_tensor: Tensor,
    A_sharded: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    async_op: bool = False,
    config: CoreConfig | None = None,
    workspace: FusedWorkspace | None = None,
    num_fetch_sms: int | None = None,
    k_per_flag: int | None = None,
    fetch_block_m: int | None = None,
    fetch_block_k: int | None = None,
    staged_a_layout: str = _STAGED,
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
    _warn_of_tunings(
        k_per_flag=k_per_flag,
        fetch_block_m=fetch_block_m,
        fetch_block_k=fetch_block_k,
        num_fetch_stages=num_fetch_stages,
        first_stage_fetch_sms=first_stage_fetch_sms,
        staged_a_layout=None if staged_a_layout == _STAGED else staged_a_layout,
    )
    given = {"num_fetch_sms": num_fetch_sms, "num_warps": num_warps, "num_stages": num_stages}
    wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if ctx.get_num_ranks() > 1:  # a rank alone has nothing to fetch
        config = dataclasses.replace(FusedConfig() if config is None else config, algorithm=_FETCH, **wanted)
    return ctx.ops.all_gather_matmul(output_tensor, A_sharded, B, bias, async_op, config, workspace)


_warned_of: set[str] = set()


def _warn_of_tunings(**given: Any) -> None:
    """Warn once of each tuning that it has no effect."""
    new = {name: value for name, value in given.items() if value is not None and name not in _warned_of}
    if new:
        said = ", ".join(f"{name}={value!r}" for name, value in new.items())
        logger.warning("all_gather_matmul_hbm_buffer: the algorithm here has no use for %s; left out", said)
    _warned_of.update(new)


# -- preambles --------------------------------------------------------------------------------------------------------
def matmul_all_reduce_preamble(
    shmem: Iris, C: Tensor, A: Tensor, B: Tensor, config: CoreConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:  # fmt: skip
    """Prepare `matmul_all_reduce`.  Collective.  It need not be called."""
    return shmem.ops.matmul_all_reduce_preamble(C, A, B, None, config, workspace)


def matmul_reduce_scatter_preamble(
    shmem: Iris, C: Tensor, A: Tensor, B: Tensor, config: CoreConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:  # fmt: skip
    """Prepare `matmul_reduce_scatter`.  Collective.  It need not be called."""
    return shmem.ops.matmul_reduce_scatter_preamble(C, A, B, None, config, workspace)


def all_gather_matmul_preamble(
    shmem: Iris, A_sharded: Tensor, B: Tensor, config: CoreConfig | None = None
) -> FusedWorkspace:
    """Return an empty workspace, which the first `all_gather_matmul` fills.

    Local.  What a call needs depends on its output, which is not known here; so operands are checked, no more.

    Raises:
        ArgumentError: the operands do not fit.
    """
    return _check_operands(shmem, "all_gather_matmul", A_sharded, B, A_sharded.shape[0], config)


def matmul_all_gather_preamble(shmem: Iris, A: Tensor, B: Tensor, config: CoreConfig | None = None) -> FusedWorkspace:
    """Return an empty workspace, which the first `matmul_all_gather` fills; see `all_gather_matmul_preamble`."""
    return _check_operands(shmem, "matmul_all_gather", A, B, A.shape[0] * shmem.get_num_ranks(), config)


def all_gather_matmul_hbm_buffer_preamble(
    ctx: Iris, A_sharded: Tensor, B: Tensor, config: CoreConfig | None = None, k_per_flag: int | None = None,
    staged_a_layout: str = _STAGED,
) -> FusedWorkspace:  # fmt: skip
    """Return an empty workspace, which the first call fills; see `all_gather_matmul_preamble`."""
    _warn_of_tunings(k_per_flag=k_per_flag, staged_a_layout=None if staged_a_layout == _STAGED else staged_a_layout)
    return all_gather_matmul_preamble(ctx, A_sharded, B, config)


def _check_operands(shmem: Iris, op: str, a: Tensor, b: Tensor, rows: int, config: CoreConfig | None) -> FusedWorkspace:
    if config is not None:
        config.validate(shmem.get_num_ranks())
    shmem.ops.explain(op, torch.empty((rows, b.shape[-1]), dtype=a.dtype, device=a.device), a, b)
    return FusedWorkspace()
