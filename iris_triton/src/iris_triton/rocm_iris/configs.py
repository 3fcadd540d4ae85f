"""What `ctx.ccl` and `ctx.ops` of a script share: configs that are advice.

Fields for which kernels here have no use are left out, which is said once; `iris_core.Iris` refuses such configs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from iris_core.device.targets import on_device
from iris_core.dispatch.bind import Binder
from iris_core.dispatch.config import Config as CoreConfig
from iris_core.dispatch.config import FusedConfig as CoreFusedConfig
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.logs import logger

C = TypeVar("C", bound=type[Any])
R = TypeVar("R")

_ADVICE = (
    "swizzle_size", "num_xcds", "chunk_size", "group_size_m", "cache_modifier_a", "cache_modifier_b",
    "all_reduce_distribution", "threads_per_warp", "waves_per_eu", "use_gluon", "all_gather_variant",
    "all_reduce_variant", "reduce_scatter_variant", "comm_sms", "num_sms", "num_stages", "num_warps",
)  # fmt: skip
"""Fields of configs that may be left out, what matters least first."""

_TILES = ("block_size_m", "block_size_n", "block_size_k")


def _assignable(config: C) -> C:
    """Let the fields of a frozen config be assigned, checked as in its constructor."""

    def assign(self: Any, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        self.__dict__.update(vars(dataclasses.replace(self, **{name: value})))  # its hash is among them

    config.__setattr__ = assign  # type: ignore[assignment]
    return config


@_assignable
@dataclasses.dataclass(frozen=True)
class Config(CoreConfig):
    """`iris_core.ccl.Config` whose fields can be assigned; every assignment is checked.

    Fields have the defaults of AMD's Iris, which scripts read; one that has its default counts as not given.
    """

    block_size_m: int | None = 32
    block_size_n: int | None = 64
    swizzle_size: int | None = 4
    comm_sms: int | None = 64
    all_reduce_distribution: int | None = 1
    all_reduce_num_rings: int | None = 1
    all_reduce_ring_slice_n: int | None = None
    num_stages: int | None = 1
    num_warps: int | None = 4
    threads_per_warp: int | None = 64
    waves_per_eu: int | None = 0

    _NOT_GIVEN = ("all_reduce_num_rings", "all_reduce_ring_slice_n")  # no algorithm here has rings
    __hash__ = CoreConfig.__hash__


@_assignable
@dataclasses.dataclass(frozen=True)
class FusedConfig(CoreFusedConfig):
    """`iris_core.ops.FusedConfig` whose fields can be assigned; otherwise as `Config`."""

    block_size_m: int | None = 256
    block_size_n: int | None = 64
    block_size_k: int | None = 64
    group_size_m: int | None = 1
    num_xcds: int | None = 1
    chunk_size: int | None = 1
    cache_modifier_a: str | None = ".ca"
    cache_modifier_b: str | None = ".ca"
    all_reduce_num_rings: int | None = 1

    _NOT_GIVEN = (*CoreFusedConfig._NOT_GIVEN, "all_reduce_num_rings")
    __hash__ = CoreFusedConfig.__hash__

    def validate(self, world_size: int | None = None) -> None:
        """Accept the config, whatever the number of ranks: what AMD's Iris checks here are its rings."""


def plainer(config: Any, tiles: bool) -> Iterator[tuple[Any, str]]:
    """Yield the config without one field, then without more and more of them, each with what it lacks."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    names = [name for name in (*_ADVICE, *(() if tiles else _TILES)) if name in defaults]
    given = [name for name in names if getattr(config, name) != defaults[name]]
    for dropped in (*([name] for name in given), *(given[:count] for count in range(2, len(given) + 1))):
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in dropped)
        yield dataclasses.replace(config, **{name: defaults[name] for name in dropped}), said


# -- calls with such configs ------------------------------------------------------------------------------------------
class Ported:
    """The part that `PortedCollectives` and `PortedOperations` have in common."""

    _binder: Binder
    _laid_out: Callable[..., tuple[Any, ...]]  # the arguments of `_run` and `_describe`, with the layout of the call

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)  # type: ignore[call-arg]
        self._plainer: dict[Any, Any] = {}  # by operation and config: the one with which `_oblige` has run such a call

    @cached_property
    def _anywhere(self) -> Any:  # torch's programs know torch's layouts only
        return type(self).__bases__[-1](self._binder, anywhere=True)

    def _describe(self, op: str, *arguments: Any) -> Any:
        return super()._describe(op, *self._laid_out(op, *arguments))  # type: ignore[misc]

    def _meet(self, group: Any) -> None:
        """End a call that is not asynchronous: a barrier of the group's devices."""
        if len(self._binder.members_of(group)) > 1:
            with on_device(self._binder.target):
                self._binder.barrier(group, async_op=False)

    def _oblige(self, op: str, config: Any, call: Callable[[Any], R], *, tiles: bool = False) -> R:
        """Return call(config), or call(a plainer config) where that is refused for the config's sake, on all ranks.

        With `tiles` the size of tiles is kept.  Raises what the first call did, if nothing helps.
        """
        if not isinstance(config, CoreConfig | CoreFusedConfig):
            return call(config)
        try:
            return call(self._plainer.get((op, config), config))
        except (UnsupportedError, ArgumentError):
            for plain, left_out in plainer(config, tiles):
                with contextlib.suppress(UnsupportedError, ArgumentError):
                    result = call(plain)
                    logger.warning("%s: no algorithm here can fulfil %s; left out", op, left_out)
                    self._plainer[op, dataclasses.replace(config)] = plain
                    return result
            raise
