"""What one rank refuses, all refuse: errors that all ranks raise together, and what must be alike on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from iris_core.errors import (
    ArgumentError,
    CapabilityError,
    CollectiveTimeoutError,
    DeviceError,
    DriverError,
    HeapError,
    HeapExhaustedError,
    IrisError,
    LayoutError,
    NoUsablePluginError,
    PeerAccessError,
    PeerLostError,
    PluginAPIVersionError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    RankMismatchError,
    SettingsError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")

Failure = tuple[int | None, tuple[int, int, int] | None, str]
"""An error: number in `_KINDS`, the sizes of a HeapExhaustedError, and what it says."""

_KINDS = (
    PluginNotFoundError, PluginLoadError, PluginConflictError, PluginAPIVersionError, NoUsablePluginError, PluginError,
    SettingsError, CapabilityError, PeerAccessError, LayoutError, UnsupportedError, ArgumentError, DeviceError,
    CollectiveTimeoutError, RankMismatchError, TypeError,
)  # fmt: skip
"""Errors that keep their kind when all ranks raise them; a driver's are only the reason for another one."""


class _Ranks(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_gather_object(self, obj: Any) -> Any: ...
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]: ...


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def on_all_ranks(
    world: _Ranks,
    what: str,
    step: Callable[[], T],
    otherwise: type[IrisError] = HeapError,
    ranks: Sequence[int] | None = None,
    tell: Callable[[Exception | None], Sequence[bool | int]] | None = None,
) -> T:
    """Do a local step; if it fails on any rank, all ranks raise the same error.

    Collective: every rank calls it.

    Args:
        world: the ranks.
        what: what a rank could not do, the words behind "rank 1 ".
        step: what this rank does, alone.
        otherwise: as of `raise_failure`.
        ranks: likewise.
        tell: exchanges whether the step has worked, with whatever else there is to be exchanged: gets this rank's
            error, returns who counts as not failed.

    Raises:
        PeerLostError, CollectiveTimeoutError: raised by the step, at once: the other ranks learn it by themselves.
        IrisError: see `raise_failure`.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as e:
        if isinstance(e, PeerLostError | CollectiveTimeoutError):
            raise
        error = e
    oks = [ok for (ok,) in world.all_gather_ints([error is None])] if tell is None else tell(error)
    raise_failure(world, None if oks[world.rank] else error, oks, what, otherwise, ranks)
    return result  # type: ignore[no-any-return]


def raise_failure(
    world: _Ranks,
    error: Exception | None,
    outcomes: Sequence[bool | int],
    what: str,
    otherwise: type[IrisError] = HeapError,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise the same error on every rank if the local part of a step failed on any.

    Collective where an outcome is false.  The error names the ranks and has their reasons; where it happened, the
    original one is its cause.  In a world of one the original itself is raised.
    """
    if all(outcomes):
        return
    if world.world_size == 1 and error is not None:
        raise error
    everyone = world.all_gather_object(failure_of(error))
    failures = [None if ok else row for ok, row in zip(outcomes, everyone, strict=True)]
    raise_described(failures, error, what, otherwise, ranks)


def failure_of(error: Exception | None) -> Failure:
    """Describe an error for the other ranks, as JSON."""
    sizes = None
    if isinstance(error, HeapExhaustedError):
        sizes = error.requested_bytes, error.free_bytes, error.largest_free_bytes
    keeps = not isinstance(error, DriverError)
    kind = next((number for number, each in enumerate(_KINDS) if keeps and isinstance(error, each)), None)
    return kind, sizes, str(error) or type(error).__name__


def raise_described(
    failures: Sequence[Failure | None],
    error: Exception | None,
    what: str,
    otherwise: type[IrisError] = HeapError,
    ranks: Sequence[int] | None = None,
) -> NoReturn:
    """Raise what all ranks raise, like `raise_failure`, where all know the failures: per rank, None for none."""
    by_cause: dict[str, list[int]] = {}
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    for rank, (_, _, cause) in failed:
        by_cause.setdefault(cause, []).append(rank if ranks is None else ranks[rank])
    text = "\n".join(f"{name_ranks(named)} {what}: {cause}" for cause, named in by_cause.items())
    kind, sizes, _ = failed[0][1]
    if sizes is not None:
        requested, free, largest = sizes
        raise HeapExhaustedError(
            text, requested_bytes=requested, free_bytes=free, largest_free_bytes=largest
        ) from error
    raise (otherwise if kind is None else _KINDS[kind])(text) from error


def check_agreement(world: _Ranks, facts: Mapping[str, str]) -> None:
    """Compare what must be equal on all ranks ("heap_size": "1073741824", ...); they are opened with it.

    Collective: every rank calls it with the same keys.
    """
    everyone = world.all_gather_object(dict(facts))
    keys = dict.fromkeys(key for row in everyone for key in row)
    differing = [key for key in keys if len({row.get(key) for row in everyone}) > 1]
    if not differing:
        return
    lines = []
    for key in differing:
        by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(everyone):
            by_value.setdefault(str(row.get(key, "absent")), []).append(rank)
        lines.append(f"  {key}: " + "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()))
    raise RankMismatchError(
        "the ranks were not opened alike; all must have the same plugins, versions and sizes:\n" + "\n".join(lines)
    )
