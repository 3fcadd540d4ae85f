"""Errors that all ranks raise together, wherever they happened, and facts that must be equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from iris_core import errors

T = TypeVar("T")

Failure = tuple[int | None, tuple[int, int, int] | None, str]
"""An error: number in `_KINDS`, the sizes of a HeapExhaustedError, and its text."""

_KINDS = (
    errors.PluginNotFoundError, errors.PluginLoadError, errors.PluginConflictError, errors.PluginAPIVersionError,
    errors.NoUsablePluginError, errors.PluginError, errors.SettingsError, errors.CapabilityError,
    errors.PeerAccessError, errors.LayoutError, errors.UnsupportedError, errors.ArgumentError, errors.DeviceError,
    errors.CollectiveTimeoutError, errors.RankMismatchError, TypeError,
)  # fmt: skip
"""Errors that keep their kind when all ranks raise them; a driver's are only the reason for another one."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def by_text(texts: Iterable[str], ranks: Iterable[int] | None = None) -> list[tuple[str, str]]:
    """Return ("ranks 0, 2", text) for each different text; without `ranks`, the first text is that of rank 0."""
    found: dict[str, list[int]] = {}
    for rank, text in zip(itertools.count() if ranks is None else ranks, texts, strict=False):
        found.setdefault(text, []).append(rank)
    return [(name_ranks(named), text) for text, named in found.items()]


def list_ranks(texts: Iterable[str], ranks: Iterable[int] | None = None) -> str:
    """Return `by_text` as lines of a message."""
    return "\n".join(f"  {named}: {text}" for named, text in by_text(texts, ranks))


def on_all_ranks(
    world: Any,
    what: str,
    step: Callable[[], T],
    otherwise: type[errors.IrisError] = errors.HeapError,
    ranks: Sequence[int] | None = None,
    exchange: Callable[[Exception | None], Sequence[bool | int]] | None = None,
) -> T:
    """Do a local step; if it fails on any rank, all ranks raise the same error.

    Collective: every rank calls it.  The error names the ranks and has their reasons; where it happened, the original
    one is its cause.  In a world of one the original itself is raised.

    Args:
        world: the `World` of the ranks.
        what: what a rank could not do, the words after "rank 1 ".
        step: what this rank does, alone.
        otherwise: raised where the first rank that failed had an error that is not one of `_KINDS`.
        ranks: the numbers of the ranks in the message; their ranks in `world` by default.
        exchange: gets this rank's error, exchanges it with what else there is to exchange, and returns, per rank,
            whether its step counts as done; by default, steps that raised nothing do.

    Raises:
        PeerLostError, CollectiveTimeoutError: raised by the step, at once: the other ranks learn it by themselves.
        IrisError, TypeError: any rank has failed.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = step()
    except (errors.PeerLostError, errors.CollectiveTimeoutError):
        raise
    except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
        error = e
    oks = [ok for (ok,) in world.all_gather_ints([error is None])] if exchange is None else exchange(error)
    if all(oks):
        return result  # type: ignore[no-any-return]
    own = None if oks[world.rank] else error
    if world.world_size == 1 and own is not None:
        raise own
    everyone = world.all_gather_object(failure_of(own))
    raise_described([None if ok else row for ok, row in zip(oks, everyone, strict=True)], own, what, otherwise, ranks)


def failure_of(error: Exception | None) -> Failure:
    """Describe an error for the other ranks, as JSON."""
    sizes = None
    if isinstance(error, errors.HeapExhaustedError):
        sizes = error.requested_bytes, error.free_bytes, error.largest_free_bytes
    keeps = not isinstance(error, errors.DriverError)
    kind = next((number for number, each in enumerate(_KINDS) if keeps and isinstance(error, each)), None)
    return kind, sizes, str(error) or type(error).__name__


def raise_described(
    failures: Sequence[Failure | None],
    error: Exception | None,
    what: str,
    otherwise: type[errors.IrisError] = errors.HeapError,
    ranks: Sequence[int] | None = None,
) -> NoReturn:
    """Raise like `on_all_ranks`, where all know the failures: per rank, None for none."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    named = failed if ranks is None else [ranks[rank] for rank in failed]
    kind, sizes, _ = next(iter(failed.values()))
    text = "\n".join(f"{who} {what}: {cause}" for who, cause in by_text((each[2] for each in failed.values()), named))
    if sizes is not None:
        raise errors.HeapExhaustedError(
            text, requested_bytes=sizes[0], free_bytes=sizes[1], largest_free_bytes=sizes[2]
        ) from error
    raise (otherwise if kind is None else _KINDS[kind])(text) from error


def check_agreement(world: Any, facts: Mapping[str, str]) -> None:
    """Compare facts by name; a RankMismatchError if the ranks differ.  Collective: every rank calls it."""
    if differing := differences(world.all_gather_object(dict(facts))):
        problem = "the ranks were not opened alike; all must have the same plugins, versions and sizes:"
        raise errors.RankMismatchError("\n  ".join([problem, *map(": ".join, differing.items())]))


def differences(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> dict[str, str]:
    """Return which facts of the ranks differ, by name with all values: "4 on ranks 0, 2; absent on rank 1"."""
    found = {}
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = by_text((facts.get(name, "absent") for facts in everyone), ranks)
        if len(values) > 1:
            found[name] = "; ".join(f"{value} on {named}" for named, value in values)
    return found
