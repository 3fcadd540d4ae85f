"""`ctx.ccl` as scripts of AMD's Iris call it, and the same as functions: `from iris.ccl.all_gather import all_gather`.

Where shapes say which layout is meant, they decide; `all_to_all` of matrices exchanges chunks of columns.  A call that
is not asynchronous ends with a barrier of the group's devices, where AMD's Iris has one of all hosts: what comes next
may use the memory of peers.  An asynchronous one returns its handle, and `ctx.barrier()` waits for it.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.ccl.api import Collectives
from iris_core.dispatch.requests import COLUMNS, TILES, TORCH
from iris_core.errors import UnsupportedError
from iris_triton.rocm_iris.configs import Obliging
from iris_triton.rocm_iris.handles import Handle, UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from iris_core.dispatch.bind import Binder
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.config import Config
    from iris_core.protocols import Work
    from iris_core.types import ReduceOp

_ENDING_TOGETHER = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@dataclass(eq=False)
class AllReduceWorkspace(Handle):
    """Describes a call of `ctx.ccl.all_reduce`, which returns it, and is the handle of an asynchronous one.

    Buffers and flags belong to the library: they are made once, and never reset by the caller.  So `ring_buffer`,
    `flags` and `locks` are None, and a workspace may be passed on to the next call, or left out.

    Attributes:
        variant: what the config names; "auto" where it leaves the choice.
        shape, dtype: of the tensors of the last call.
        ring_buffer, flags, locks: None.
        num_rings: as the config says.
        flags_per_tile: 0: there are no flags of the caller's.
        prepared: whether nothing remains to be done before the next call, which is always so.
    """

    variant: str = "auto"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    ring_buffer: torch.Tensor | None = None
    flags: torch.Tensor | None = None
    locks: torch.Tensor | None = None
    num_rings: int = 1
    flags_per_tile: int = 0
    prepared: bool = True
    work: Work | None = field(default=None, repr=False)

    def describe(self, tensor: torch.Tensor, config: Config | None, work: Work | None) -> AllReduceWorkspace:
        """Take over a call."""
        self.shape, self.dtype, self.work = tuple(tensor.shape), tensor.dtype, work
        self.variant = (config and config.named("all_reduce")[0]) or "auto"
        self.num_rings = (config and config.all_reduce_num_rings) or 1
        return self


class PortedCollectives(Collectives):
    """`Collectives` with the layouts and workspaces of AMD's Iris, and configs that are advice.

    Attributes:
        under_way: asynchronous operations, for which the context's barriers wait.
    """

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)
        self.under_way = UnderWay()
        self._obliging = Obliging()
        self._has_gluon = False

    def all_reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp | Any = None,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        async_op: bool = False,
        config: Config | None = None,
        workspace: AllReduceWorkspace | None = None,
    ) -> AllReduceWorkspace:
        """Reduce the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`.

        Args:
            output, input, op, group, async_op, config: see there.
            workspace: of an earlier call or of `all_reduce_preamble`; it is returned again.

        Returns:
            The workspace, or a new one; with `async_op` it is the handle as well.
        """
        workspace = _checked(workspace)
        work = super().all_reduce(output, input, op, group, async_op, config)
        return workspace.describe(input, config, work)

    def all_reduce_preamble(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        config: Config | None = None,
        workspace: AllReduceWorkspace | None = None,
    ) -> AllReduceWorkspace:
        """Check a call, and return its workspace.  Nothing else is needed: outputs and flags are not to be zeroed.

        Local.  Raises what the call would raise for its arguments.
        """

        def check(config: Config | None) -> None:
            chosen = super(PortedCollectives, self).explain("all_reduce", output, input, config=config)
            if not chosen.algorithm:
                raise UnsupportedError(f"all_reduce: {chosen.why}")

        self._add_gluon(config)
        self._obliging.run("all_reduce", config, check)
        return _checked(workspace).describe(input, config, None)

    def _add_gluon(self, config: Config | None) -> None:
        """Add the algorithms in Gluon for the first config that wants one; this context's backend has those in Triton.

        Raises:
            UnsupportedError: iris-gluon is not installed.
        """
        if not getattr(config, "use_gluon", False) or self._has_gluon:
            return
        try:  # by name, as this distribution does not require that one
            prepare = importlib.import_module("iris_gluon.backend").prepare
            collectives = importlib.import_module("iris_gluon.collectives").collectives
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"Config(use_gluon=True) needs iris-gluon: pip install ./iris_gluon ({error})"
            ) from error
        if not any(each.info.name == "gluon" for each in self._binder.providers.found()[0]):
            prepare(on_cpu=self._binder.gpu is None)
            self._binder.add(collectives())
        self._has_gluon = True

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        layout: str | None = None,
    ) -> Work | None:
        """Give each member its part of the input; see `iris_core.ccl.api.Collectives`.

        Args:
            output, input, group, async_op, config, output_split_sizes, input_split_sizes: see there.
            layout: "columns" or "torch".  By default matrices without split sizes exchange chunks of columns, as in
                AMD's Iris, and everything else exchanges rows, as in torch.
        """
        splits = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
        layout = self._layout("all_to_all", output, input, group, layout, **splits)
        return super().all_to_all(output, input, group, async_op, config, **splits, layout=layout)

    def explain(self, op: str, /, *tensors: torch.Tensor | None, **options: Any) -> Explanation:
        """Return which algorithm serves a call; see `iris_core.ccl.api.Collectives`."""
        self._add_gluon(options.get("config"))
        if op in ("all_to_all", "reduce_scatter") and len(tensors) > 1:
            splits = {name: options.get(name) for name in ("output_split_sizes", "input_split_sizes")}
            where = options.get("group"), options.get("layout")
            options["layout"] = self._layout(op, tensors[0], tensors[1], *where, **splits)
        return super().explain(op, *tensors, **options)

    def _layout(self, op: str, out: Any, inp: Any, group: Any, layout: str | None, **splits: Any) -> str:
        """Return the layout of a call: what its shapes say, where they do."""
        shape = getattr(inp, "shape", ())
        are_equal_matrices = len(shape) == 2 and getattr(out, "shape", None) == shape
        has_splits = any(each is not None for each in splits.values())
        if op == "all_to_all" and layout is None and are_equal_matrices and not has_splits:
            return COLUMNS
        if op == "reduce_scatter" and are_equal_matrices:  # torch's output is a part; one member alone gets all
            return TILES if len(self._binder.members_of(group)) > 1 else TORCH
        return layout or TORCH

    def _run(
        self,
        op: str,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        group: dist.ProcessGroup | Sequence[int] | None,
        async_op: bool,
        config: Config | None,
        first: Any = None,
        second: Any = None,
    ) -> Work | None:
        if op == "reduce_scatter":
            second = self._layout(op, out, inp, group, second)
        run = super()._run
        if config is None:
            work = run(op, out, inp, group, async_op, None, first, second)
        else:
            self._add_gluon(config)
            call = lambda c: run(op, out, inp, group, async_op, c, first, second)
            work = self._obliging.run(op, config, call, tiles=second == TILES)
        if work is not None:
            self.under_way.add(work)
        elif op in _ENDING_TOGETHER and len(self._binder.members_of(group)) > 1:
            self._binder.barrier(group, async_op=False)
        return work


def _checked(workspace: AllReduceWorkspace | None) -> AllReduceWorkspace:
    if workspace is not None and not isinstance(workspace, AllReduceWorkspace):
        raise TypeError(f"all_reduce: workspace must be an AllReduceWorkspace, not {type(workspace).__name__}")
    return workspace or AllReduceWorkspace()


def _function(name: str) -> Callable[..., Any]:
    """Return a method of `PortedCollectives` as a function whose third argument is the context."""

    def call(output: torch.Tensor, input: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(ctx.ccl, name)(output, input, *args, **kwargs)

    signature = inspect.signature(getattr(PortedCollectives, name))
    _, output, input, *others = signature.parameters.values()
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(parameters=(output, input, context, *others))  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Call `ctx.ccl.{name}`; see `PortedCollectives`."
    return call


all_gather, all_reduce, all_reduce_preamble, all_to_all, reduce_scatter = map(
    _function, ("all_gather", "all_reduce", "all_reduce_preamble", "all_to_all", "reduce_scatter")
)
