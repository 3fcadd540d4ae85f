"""Observers: plugins of the group iris.plugins that are called when something happens.

An observer that fails to load is left out, and one that raises is reported once for each hook; neither hurts the
program or other observers.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from iris_core.errors import FAILURES, PluginError
from iris_core.hooks import OBSERVER_HOOKS
from iris_core.logs import logger
from iris_core.registry import default_registry
from iris_core.types import PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.registry import PluginRecord, Registry


class Observers:
    """The observers of a registry, loaded at construction; blocked, broken and conflicting ones are left out."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reported: set[tuple[str, str]] = set()
        self._watching: dict[str, list[PluginRecord]] = {hook: [] for hook in OBSERVER_HOOKS}
        for record in registry.records(PluginKind.OBSERVER):
            if record.state is PluginState.CONFLICTING:
                way = f"block one with IRIS_BLOCK={record.qualified_name}"
                record.leave_out(f"{record.label} is not the only one of that name: {way}")
            elif record.state is not PluginState.BLOCKED:
                try:
                    for hook in registry.observed_hooks(record):
                        self._watching[hook].append(record)
                except PluginError as error:
                    record.leave_out(error)

    def watched(self, hook: str) -> bool:
        """Return whether any observer implements a hook."""
        return bool(self._watching[hook])

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook with its arguments, all of them, on every observer that implements it."""
        for record in self._watching[hook]:
            try:
                self._registry.observe(record, hook, **arguments)
            except FAILURES:
                if (record.qualified_name, hook) not in self._reported:
                    self._reported.add((record.qualified_name, hook))
                    way = f"update {record.distribution}, or block it with IRIS_BLOCK={record.name}"
                    logger.exception("%s raised in %s (reported once); %s", record.label, hook, way)


@functools.lru_cache(maxsize=1)
def _observers(registry: Registry, revision: int) -> Observers:
    return Observers(registry)


def is_watched(hook: str) -> bool:
    """Return whether any observer of this process implements a hook; cheap, for what happens often."""
    registry = default_registry()
    return _observers(registry, registry.revision).watched(hook)


def notify(hook: str, **arguments: Any) -> None:
    """Call this process's observers; they are loaded at the first call and again when plugins were blocked or added.

    Args:
        hook: "iris_opened", "iris_closing", "iris_allocated" or "iris_collective".
        **arguments: the hook's arguments, all of them (see `iris_core.hooks`).

    Example:
        >>> notify("iris_allocated", context=ctx, offset_bytes=0, nbytes=256)
    """
    registry = default_registry()
    _observers(registry, registry.revision).notify(hook, **arguments)


def allocation_notifier(context: object) -> Callable[[int, int], None]:
    """Return a function of (offset_bytes, nbytes) that notifies observers; it does not keep the context alive."""
    alive = weakref.ref(context)

    def tell(offset_bytes: int, nbytes: int) -> None:
        if (found := alive()) is not None:
            notify("iris_allocated", context=found, offset_bytes=offset_bytes, nbytes=nbytes)

    return tell
