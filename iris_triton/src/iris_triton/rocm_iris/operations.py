"""`ctx.ops` as scripts of AMD's Iris call it; its methods and those of `ctx.ccl` as functions of a context."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from iris_core.api import Iris
from iris_core.dispatch.products import NORM
from iris_core.dispatch.requests import TILES, TORCH
from iris_core.errors import UnsupportedError
from iris_core.logs import logger
from iris_core.ops.api import FusedWorkspace, Operations
from iris_triton.rocm_iris.configs import FusedConfig, Ported

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = {"output_tensor": "output", "C": "output", "A_sharded": "A"}


def _by_either_name(method: F) -> F:
    """Let a method take its arguments by the names that they have in AMD's Iris, too."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for theirs in _NAMES.keys() & kwargs.keys():
            if (ours := _NAMES[theirs]) in kwargs:
                raise TypeError(f"{method.__name__}() got {ours} twice, as {theirs} as well")
            kwargs[ours] = kwargs.pop(theirs)
        return method(self, *args, **kwargs)

    return cast("F", call)


class PortedOperations(Ported, Operations):
    """`Operations` with the names, layouts and workspaces of AMD's Iris, and configs that are advice.

    Calls end, or do not with `async_op=True`, as those of `PortedCollectives`, and all return the workspace.
    `matmul_reduce_scatter` into an output of the whole product's shape gives each member its tiles.
    """

    matmul_all_reduce = _by_either_name(Operations.matmul_all_reduce)
    all_gather_matmul = _by_either_name(Operations.all_gather_matmul)
    matmul_all_gather = _by_either_name(Operations.matmul_all_gather)
    matmul_reduce_scatter = _by_either_name(Operations.matmul_reduce_scatter)

    def _run(self, op: str, tensors: Any, how: Any, async_op: bool | None, workspace: Any = None) -> Any:
        run = super()._run
        if op == NORM:
            return run(op, tensors, how, async_op)
        _, (group, config, *more) = self._laid_out(op, tensors, how)
        at_once = None if async_op is None else False  # None: it is only prepared
        call = lambda c: run(op, tensors, (group, c, *more), at_once, workspace)
        result = self._oblige(op, config, call, tiles=more[-1] == TILES)
        if async_op is not None and not async_op:
            self._meet(group)
        return result

    def _laid_out(self, op: str, tensors: Any, how: Any, *more: Any) -> tuple[Any, ...]:
        """Return the arguments of a call: for tiles, where an output is as large as the product."""
        shapes = [tuple(getattr(each, "shape", ())) for each in tensors[:3]]
        if op == "matmul_reduce_scatter" and {*map(len, shapes)} == {2} and shapes[0] == (shapes[1][0], shapes[2][1]):
            how = (*how[:-1], TILES if len(self.members_of(how[0])) > 1 else TORCH)
        return tensors, how, *more


# -- functions of a context, the open `shmem` or `ctx` ----------------------------------------------------------------
_FUSED = "async_op config workspace"
_FUNCTIONS = {
    "all_gather": "output input ctx group async_op config",
    "all_reduce": f"output input ctx op group {_FUSED}",
    "all_reduce_preamble": "output input ctx config workspace",
    "all_to_all": "output input ctx group async_op config output_split_sizes input_split_sizes layout",
    "reduce_scatter": "output input ctx op group async_op config layout",
    "matmul_all_reduce": f"shmem output_tensor A B {_FUSED} bias",
    "matmul_reduce_scatter": f"shmem output_tensor A B {_FUSED} bias",
    "all_gather_matmul": f"shmem output_tensor A_sharded B bias {_FUSED}",
    "matmul_all_gather": f"shmem output_tensor A B bias {_FUSED}",
    "all_gather_matmul_hbm_buffer": f"ctx output_tensor A_sharded B bias {_FUSED} num_fetch_sms k_per_flag "
    "fetch_block_m fetch_block_k staged_a_layout num_warps num_stages num_fetch_stages first_stage_fetch_sms trace",
    "matmul_all_reduce_preamble": "shmem C A B config workspace",
    "matmul_reduce_scatter_preamble": "shmem C A B config workspace",
    "all_gather_matmul_preamble": "shmem A_sharded B config",
    "matmul_all_gather_preamble": "shmem A B config",
    "all_gather_matmul_hbm_buffer_preamble": "ctx A_sharded B config k_per_flag staged_a_layout",
}
_REQUIRED = ("shmem", "ctx", "output_tensor", "A", "A_sharded", "B", "C", "output", "input")
_DEFAULTS = {"async_op": False, "staged_a_layout": "k_contiguous", "trace": False}
_FIELDS = ("num_fetch_sms", "num_warps", "num_stages")  # of FusedConfig
_OURS = ("output", "A", "B", "bias", "async_op", "config", "workspace")
"""Arguments of our operations; others are tunings of that system's kernel, for which the algorithm here has no use."""

_warned_of: set[str] = set()


def _function(name: str, parameters: list[str]) -> Callable[..., Any]:
    """Return a function with these parameters, which calls the method of this name."""
    defaults = _DEFAULTS | dict.fromkeys(_REQUIRED, inspect.Parameter.empty)
    one = functools.partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([one(each, default=defaults.get(each)) for each in parameters])

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        context = given.pop("shmem" if "shmem" in given else "ctx")
        return getattr(context.ccl, name)(**given) if "input" in parameters else _run(name, context, given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    return call


def _run(name: str, context: Iris, given: dict[str, Any]) -> Any:
    """Call a method of `ctx.ops` with the arguments of the function that has this name."""
    given = {_NAMES.get(key, key): value for key, value in given.items()}
    if "_hbm_buffer" in name:
        name, given = name.replace("_hbm_buffer", ""), _with_fetching_programs(context, given)
    if "output" in given:
        return getattr(context.ops, name)(**given)
    a, b = given["A"], given["B"]  # checked without the output; the first call fills the workspace
    rows = a.shape[0] * (context.get_num_ranks() if name == "matmul_all_gather_preamble" else 1)
    output = torch.empty((rows, b.shape[-1]), dtype=a.dtype, device=a.device)
    context.ops.explain(name.removesuffix("_preamble"), output, a, b)
    return FusedWorkspace()


def _with_fetching_programs(context: Iris, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `all_gather_matmul` for programs that fetch beside programs that multiply."""
    if given.pop("trace", False):
        raise UnsupportedError("all_gather_matmul_hbm_buffer: trace=True is not offered; call ctx.tracing.enable()")
    fields = {name: value for name in _FIELDS if (value := given.pop(name, None)) is not None}
    tunings = {name: given.pop(name) for name in [*given] if name not in _OURS}
    new = {k: v for k, v in tunings.items() if v not in (None, "k_contiguous") and k not in _warned_of}
    if new:
        said = ", ".join(f"{name}={value!r}" for name, value in new.items())
        logger.warning("all_gather_matmul_hbm_buffer: the algorithm here has no use for %s; left out", said)
        _warned_of.update(new)
    if context.get_num_ranks() > 1 and "output" in given:  # a world of one has nothing to fetch
        # of iris_triton.gemm.fetch_product
        given["config"] = dataclasses.replace(given.get("config") or FusedConfig(), algorithm="fetch", **fields)
    return given


globals().update({name: _function(name, parameters.split()) for name, parameters in _FUNCTIONS.items()})
