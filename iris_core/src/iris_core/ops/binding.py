"""From a call of `ctx.ops` to something that can be launched again and again; the slow path.

Teams, their order, agreement and the collectives are those of `ctx.ccl`.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch

from iris_core.dispatch.bind import Bound, Nothing, refuse_capture
from iris_core.dispatch.choice import Chooser
from iris_core.dispatch.launches import Launches
from iris_core.dispatch.requests import reach
from iris_core.errors import ArgumentError
from iris_core.ops import calls
from iris_core.ops.calls import OPS, Call
from iris_core.ops.config import FusedConfig
from iris_core.ops.host import Host, Scratch
from iris_core.ops.overlapped import overlapped_operations
from iris_core.ops.tables import FusedTables
from iris_core.ops.unfused import unfused_operations
from iris_core.ops.workspace import FusedWorkspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from iris_core.dispatch.bind import Binder
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.tables import Tables
    from iris_core.dispatch.team import Team
    from iris_core.protocols import Collective, FusedOperation, SupportsOperations
    from iris_core.types import CollectiveRequest, FusedRequest


class Question(NamedTuple):
    """A call as `Operations` passes it on, not looked at."""

    op: str
    out: Any
    a: Any
    b: Any
    bias: Any
    group: dist.ProcessGroup | Sequence[int] | None
    config: FusedConfig | None
    gather_dim: int | None
    layout: str


class BoundOperation(NamedTuple):
    """A call that can be launched, and what is said of it.

    Attributes:
        call: launches it.
        workspace: what it returns to the caller where the caller has none; it knows this call.
        facts: for `FusedWorkspace.describe`; None for a call that computes nothing.
        reach: bytes from the first to behind the last element of the output, A, B and the bias.
        droppable: it can be made again; what graphs have captured is held beside that.
    """

    call: Bound | Nothing
    workspace: FusedWorkspace
    facts: tuple[FusedRequest, torch.dtype, str, Any] | None
    reach: tuple[int, int, int, int]
    droppable: bool = True


class OperationBinder:
    """What `ctx.ops` knows of the context.

    Args:
        binder: of `ctx.ccl`.
    """

    def __init__(self, binder: Binder) -> None:
        self._binder = binder
        self.own_heap = binder.own_heap
        self.gpu, self.target = binder.gpu, binder.open().target
        self.bound: Launches[BoundOperation] = Launches()
        self._held: dict[int, BoundOperation] = {}
        self._chooser: Chooser | None = None
        self._scratch = Scratch()
        self._exhausted: dict[tuple[int, ...], int] = {}
        self._workspaces: weakref.WeakSet[FusedWorkspace] = weakref.WeakSet()

    def forget(self) -> None:
        """Serve no call any more, in a process that was forked off."""
        self.gpu = None  # CUDA refuses every question there
        self.bound.clear()

    def bind(self, question: Question, key: Any, workspace: FusedWorkspace | None) -> BoundOperation:
        """Return what serves a call, and keep it under its key, if it can have one.

        Collective: every member of the group comes here with its first call of a kind.

        Args:
            question: the call.
            key: what it is looked up by the next time; None for never.
            workspace: the caller's; None for the context's own memory.
        """
        context = self._binder.open()
        members = self._binder.members_of(question.group)
        call: Any = None
        try:
            call = self._call(question, members)
            calls.check(call, torch.device(context.device))
            self._check_owner(question.op, workspace)
            plans = self.bound if workspace is None else workspace.calls
            bound = None if key is None else plans.recall(key)
            if bound is None and not call.is_empty:
                refuse_capture(call.op)
        except Exception as error:  # noqa: BLE001 - raised again, on all members
            shared = lambda: calls.shared_facts(self._request(call))
            self._binder.members.refuse(members, question.op, shared, error)
        if bound is None:
            bound = self._bind(call, workspace)
        if key is not None:
            self._binder.drop([each.call for each in plans.keep(key, bound)])
            bound.workspace.calls[key] = bound
        return bound

    def refuse(self, op: str, error: Exception, group: dist.ProcessGroup | Sequence[int] | None) -> NoReturn:
        """Raise an error on all members that come to compare their first call of an operation."""

        def shared() -> NoReturn:
            raise error  # there is no call that others may know

        self._binder.members.refuse(self.members_of(group), op, shared, error)

    def _check_owner(self, op: str, workspace: FusedWorkspace | None) -> None:
        """Refuse what is no workspace, and one with plans of another context: they are for another heap."""
        if workspace is not None and not isinstance(workspace, FusedWorkspace):
            raise TypeError(f"{op}: workspace must be a FusedWorkspace, not {type(workspace).__name__}")
        if workspace is None or workspace.owner is self:
            return
        if workspace.owner is not None:
            raise ArgumentError(
                f"{op}: the workspace holds plans of another context, which is still open; use one for each "
                "context, or reset() it in between"
            )
        workspace.scratch.clear()  # kernels of whose it was may still use it

    def hold(self, bound: BoundOperation, workspace: FusedWorkspace | None) -> None:
        """Keep what a graph has captured."""
        (self._held if workspace is None else workspace.held)[id(bound)] = bound

    def _bind(self, call: Call, workspace: FusedWorkspace | None) -> BoundOperation:
        own = FusedWorkspace() if workspace is None else workspace
        own.owner = self
        self._workspaces.add(own)
        reach_of = tuple(0 if each is None else reach(each) for each in (call.out, call.a, call.b, call.bias))
        assert len(reach_of) == 4
        binder, asked, config = self._binder, self._request(call), call.config
        if call.is_empty:
            binder.members.agree(call.members, calls.shared_facts(asked))
            return BoundOperation(Nothing(), own, None, reach_of)
        scratch = self._scratch if workspace is None else workspace.scratch

        def prepare(algorithm: FusedOperation, request: FusedRequest, team: Team) -> Any:
            return algorithm.prepare(request, Host(binder, team, scratch, self._exhausted, binder.processors))

        # A chooser asks of requests and algorithms what collectives and operations have in common.
        choose = partial(self._algorithms().choose, cast("CollectiveRequest", asked), cast("Any", config))
        shared = calls.shared_facts(asked)
        chosen, request, plan, team = binder.members.settle(call.members, shared, choose, prepare, config)
        bound = Bound(chosen, plan, binder.order(call.members), team, weakref.ref(binder.open()), request)
        known = request, call.a.dtype, chosen.name, plan
        own.describe(*known)
        return BoundOperation(bound, own, known, reach_of)

    def explain(self, question: Question) -> Explanation:
        """Say what would serve a call."""
        call = self._call(question, self._binder.members_of(question.group))
        calls.check(call, torch.device(self._binder.open().device))
        request = self._request(call)
        left_out = self._binder.members.left_out(request.members, calls.shared_facts(request))
        return self._algorithms().explain(cast("CollectiveRequest", request), cast("Any", call.config), left_out)

    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the world ranks of a group's members, in its order; all for None."""
        return self._binder.members_of(group)

    def _call(self, question: Question, members: tuple[int, ...]) -> Call:
        """Make sense of the arguments."""
        op, out, a, b, bias, _, config, gather_dim, layout = question
        if config is not None and not isinstance(config, FusedConfig):
            raise TypeError(f"{op}: config must be an iris_core.ops.FusedConfig, not {type(config).__name__}")
        if isinstance(gather_dim, bool):
            raise ArgumentError(f"{op}: gather_dim must be 0 (rows) or 1 (columns), not {gather_dim!r}")
        differentiates = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (out, a, b, bias))
        return Call(
            op=op,
            out=out,
            a=a,
            b=b,
            bias=bias,
            members=members,
            rank=members.index(self._binder.rank),
            gather_dim=gather_dim,
            layout=layout,
            config=config,
            differentiates=differentiates,
        )

    def _request(self, call: Call) -> FusedRequest:
        context = self._binder.open()
        return calls.request_of(call, context.target, context.heap.is_symmetric, self._binder.processors)

    def _algorithms(self) -> Chooser:
        if self._chooser is None:
            context = self._binder.open()
            found: list[Any] = [*unfused_operations(OPS), *overlapped_operations(OPS)]
            folders = [Path(context.settings.cache_dir) / "ops"]
            if hasattr(context.backend, "operations"):
                backend = cast("SupportsOperations", context.backend)
                found += backend.operations()
                folders += backend.operation_tables()
            plugins, unusable = self._binder.found()
            found += [each for each in plugins if each.op in OPS]
            tables = FusedTables(folders, self._binder.device_name)
            self._chooser = Chooser(cast("list[Collective]", found), cast("Tables", tables), unusable)
        return self._chooser

    def close(self) -> None:
        """Let go of plans and memory; workspaces of callers know no plans any more."""
        self.bound.clear()
        self._held.clear()
        for workspace in list(self._workspaces):
            if workspace.owner is self:
                workspace.reset()
        self._scratch.clear()
