"""Where algorithms come from: the core (a rank alone), the backend, and plugins of the group iris.collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from iris_core.dispatch.local import local_algorithms
from iris_core.errors import FAILURES, PluginError
from iris_core.registry import default_registry
from iris_core.types import PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.protocols import Collective, Context, SupportsCollectives
    from iris_core.registry import PluginRecord
    from iris_core.types import Capability


def find_algorithms(
    context: Context, create: Callable[[PluginRecord], Collective], provides: frozenset[Capability]
) -> tuple[list[Collective], list[tuple[str, str]]]:
    """Return the algorithms that a context can use, and the plugins that bring none, with the reason.

    A plugin that does not work is logged, and does not hurt the others.

    Args:
        context: the context.
        create: makes a plugin's algorithm for this rank.
        provides: what the allocator's memory can do.
    """
    found: list[Collective] = list(local_algorithms())
    unusable: list[tuple[str, str]] = []
    if hasattr(context.backend, "collectives"):
        found += cast("SupportsCollectives", context.backend).collectives()
    registry = default_registry()
    for record in registry.records(PluginKind.COLLECTIVE):
        try:
            reason = _obstacle(context, record, provides)
            if not reason:
                algorithm = create(record)
                if all(isinstance(each, str) for each in (algorithm.op, algorithm.name, algorithm.info.name)):
                    found.append(algorithm)
                    continue
                raise PluginError("op, name and info.name of its algorithm must be text")
        except FAILURES as error:
            record.leave_out(error)
            reason = str(error)
        unusable.append((record.label, reason))
    return found, unusable


def _obstacle(context: Context, record: PluginRecord, provides: frozenset[Capability]) -> str:
    """Why a plugin cannot be used here; empty if it can."""
    if record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
        return f"{record.state}: {record.reason}"
    registry = default_registry()
    info = registry.load(record).info
    if info is None:
        raise PluginError(f"{record.label} says nothing about itself")
    if context.target.type not in info.devices:
        return f"it works on {', '.join(sorted(info.devices))} only"
    missing = info.requires - provides
    if missing:
        return f"it needs {', '.join(sorted(missing))}, which the allocator does not provide"
    answer = registry.probe(record, context.target)
    return "" if answer else f"unavailable: {answer.reason or 'its probe gave no reason'}"
