"""`ctx.ccl` as scripts of AMD's Iris call it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris_core.api import Iris
from iris_core.ccl.api import Collectives
from iris_core.dispatch.config import Config
from iris_core.dispatch.requests import COLUMNS, TILES, TORCH
from iris_core.errors import UnsupportedError
from iris_core.types import Group, ReduceOp
from iris_triton.rocm_iris.configs import Ported

_THEIRS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")  # others are as with `iris_core.Iris`


@dataclass(eq=False)
class AllReduceWorkspace:
    """Describes a call of `ctx.ccl.all_reduce`, which returns it; the next call takes it, or does without.

    Buffers and flags belong to the library, so `ring_buffer`, `flags` and `locks` are None, and `prepared` is True.
    """

    variant: str = "auto"  #: variant, num_rings: as the config says; "auto" where it leaves the choice
    shape: tuple[int, ...] = ()  #: shape, dtype: of the tensors of the last call
    dtype: torch.dtype | None = None
    num_rings: int = 1
    flags_per_tile: int = 0
    prepared: bool = True
    ring_buffer = flags = locks = None

    def describe(self, tensor: Tensor, config: Config | None) -> AllReduceWorkspace:
        """Describe a call, and return this."""
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.variant = (config and config.named("all_reduce")[0]) or "auto"
        self.num_rings = getattr(config, "all_reduce_num_rings", None) or 1
        return self


def _checked(workspace: AllReduceWorkspace | None) -> AllReduceWorkspace:
    if workspace is not None and not isinstance(workspace, AllReduceWorkspace):
        raise TypeError(f"all_reduce: workspace must be an AllReduceWorkspace, not {type(workspace).__name__}")
    return workspace or AllReduceWorkspace()


class PortedCollectives(Ported, Collectives):
    """`Collectives` with the layouts and workspaces of AMD's Iris, and configs that are advice.

    The operations that AMD's Iris has end with a barrier of the group's devices: what comes next may use the memory of
    peers.  With `async_op=True` they do not, and run on the current stream all the same: what is launched next reads
    their result, and there is no handle.  Where shapes say which layout is meant, they decide; `all_to_all` of matrices
    exchanges chunks of columns.
    """

    def all_reduce(  # type: ignore[override]
        self, output: Tensor, input: Tensor, op: ReduceOp | Any = None, group: Group = None, async_op: bool = False,
        config: Config | None = None, workspace: AllReduceWorkspace | None = None,
    ) -> AllReduceWorkspace:  # fmt: skip
        """Reduce the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`.

        Returns the workspace, of an earlier call or of `all_reduce_preamble`, or a new one.
        """
        own = _checked(workspace)
        described: Any = super().all_reduce(output, input, op, group, async_op, config)  # by `explain` or `bind`
        return described or own.describe(input, config)

    def all_reduce_preamble(
        self, output: Tensor, input: Tensor, config: Config | None = None, workspace: AllReduceWorkspace | None = None
    ) -> AllReduceWorkspace:
        """Check a call, and return its workspace.  Nothing else is needed: outputs and flags are not to be zeroed.

        Local.  Raises what the call would raise for its arguments.
        """
        own = _checked(workspace)

        def check(config: Config | None) -> None:
            chosen = self.explain("all_reduce", output, input, config=config)
            if not chosen.algorithm:
                raise UnsupportedError(f"all_reduce: {chosen.why}")

        self._oblige("all_reduce", config, check)
        return own.describe(input, config)

    all_to_all = partialmethod(Collectives.all_to_all, layout=None)

    def _laid_out(
        self, op: str, out: Any, inp: Any, group: Any, async_op: Any, config: Any, first: Any = None,
        second: Any = None, splits: Any = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the arguments of a call, in which the layout is what its shapes say, where they do."""
        if len(shape := getattr(inp, "shape", ())) == 2 and getattr(out, "shape", None) == shape:
            if op == "all_to_all" and first is None and not splits:
                second = second or COLUMNS
            elif op == "reduce_scatter":  # torch's output is a part; one member alone gets all
                second = TILES if len(self._binder.members_of(group)) > 1 else TORCH
        second = TORCH if op == "all_to_all" and second is None else second
        return out, inp, group, async_op, config, first, second, splits

    def _run(self, op: str, *arguments: Any) -> Any:
        out, inp, group, async_op, config, *how = self._laid_out(op, *arguments)
        run, beside = super()._run, async_op and op not in _THEIRS
        work = self._oblige(op, config, lambda c: run(op, out, inp, group, beside, c, *how), tiles=how[1] == TILES)
        if op in _THEIRS and not async_op:
            self._meet(group)
        return work


def extract_group_info(group: dist.ProcessGroup | None, ctx: Iris) -> tuple[int, int, int, int, int]:
    """Return (rank_in_group, rank_global, world_size, rank_start, rank_stride), for kernels on such groups only.

    Local.  Member i of world_size is rank rank_start + i * rank_stride.  The collectives here need no strides.

    Args:
        group: a process group of torch.distributed; None for all ranks.
        ctx: the open context.

    Raises:
        GroupError: (a RuntimeError) this rank is not a member.
        UnsupportedError: (a NotImplementedError) the members are not the same distance apart.
    """
    rank, members = ctx.get_rank(), ctx.ops.members_of(group)
    stride, *others = {later - earlier for earlier, later in itertools.pairwise(members)} or {1}
    if others:
        raise UnsupportedError(f"the group's ranks {list(members)} are not the same distance apart")
    return members.index(rank), rank, len(members), members[0], stride
