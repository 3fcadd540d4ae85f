"""The record of one plugin, and how plugins and distributions are named."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.errors import PluginAPIVersionError, PluginLoadError
from iris_core.logs import logger
from iris_core.types import PluginInfo, PluginKind, PluginState

if TYPE_CHECKING:
    import pluggy

    from iris_core.errors import PluginError

REGISTERED = "(registered)"
"""Distribution of plugins that a program registered itself."""


@dataclass(eq=False, slots=True)
class PluginRecord:
    """One plugin and where it stands.  The registry alone changes it.

    Attributes:
        kind: what it provides.
        name: name of its entry point, by which users choose it.
        distribution: distribution that installed it.
        version: that distribution's version.
        entry_point: what the entry point names ("module:object").
        state: where it stands.
        reason: why, if it cannot be used.
        info: what the plugin says about itself, once loaded; observers may say nothing.
        error: what went wrong, if it is broken or incompatible.
        plugin: the imported object.
        manager: its own pluggy manager, once it has passed the checks.
        reported: whether a warning has said that it is left out.
    """

    kind: PluginKind
    name: str
    distribution: str
    version: str
    entry_point: str
    state: PluginState = PluginState.DISCOVERED
    reason: str = ""
    info: PluginInfo | None = None
    error: PluginError | None = field(default=None, repr=False)
    plugin: Any = field(default=None, repr=False)
    manager: pluggy.PluginManager | None = field(default=None, repr=False)
    reported: bool = field(default=False, repr=False)

    @property
    def api(self) -> str:
        """The plugin API it was written for ("1.0"); empty while unknown."""
        return dotted(self.info.api) if self.info else ""

    @property
    def qualified_name(self) -> str:
        """The name that is unique among distributions: "host@iris-allocators"."""
        return f"{self.name}@{self.distribution}"

    @property
    def block_names(self) -> frozenset[str]:
        """What IRIS_BLOCK may call it."""
        return frozenset({self.name, qualified(self.qualified_name)})

    @property
    def label(self) -> str:
        """For messages: "backend 'triton' (iris-triton 0.2.0)"."""
        return f"{self.kind} {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"

    def to_json(self) -> dict[str, str]:
        """Return what `iris plugins --json` lists."""
        return {
            "kind": str(self.kind),
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "entry_point": self.entry_point,
            "api": self.api,
            "state": str(self.state),
            "reason": self.reason,
            "summary": self.info.summary if self.info else "",
        }

    def fail(self, error: PluginError) -> PluginError:
        """Mark the plugin as broken or incompatible and return the error."""
        self.error, self.manager = error, None
        self.show_error()
        return error

    def leave_out(self, error: object) -> None:
        """Warn, once, that the plugin is not used because it does not work."""
        if not self.reported:
            self.reported = True
            text = str(error)
            where = "" if self.label in text else f"{self.label}: "
            logger.warning("a plugin is left out: %s%s", where, text)

    def show_error(self) -> None:
        """Derive state and reason from the error."""
        incompatible = isinstance(self.error, PluginAPIVersionError)
        self.state = PluginState.INCOMPATIBLE if incompatible else PluginState.BROKEN
        self.reason = str(self.error)


def load_error(record: PluginRecord, problem: str) -> PluginLoadError:
    """Return the error for a plugin that cannot be used: what is wrong, behind its name, and the way out."""
    if record.distribution == REGISTERED:
        return PluginLoadError(f"{record.label}{problem}. Correct the object that the program registers")
    ways = f"Update or reinstall {record.distribution}, or block the plugin with IRIS_BLOCK={record.name}"
    return PluginLoadError(f"{record.label}{problem}. {ways}")


def dotted(api: tuple[int, int]) -> str:
    """Return "1.0" for (1, 0)."""
    return ".".join(map(str, api))


def canonical(distribution: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def qualified(name: str) -> str:
    """Return `name` or `name@distribution` with the distribution's name made canonical."""
    plain, at, distribution = name.partition("@")
    return plain + at + canonical(distribution)
