"""The record of one plugin, how plugins and distributions are named, and what a plugin's object must look like.

Every plugin gets a pluggy manager of its own.  So its hooks are called on it alone (in a broadcast one raising
implementation aborts the rest), and one that fails validation takes nothing with it.
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
from dataclasses import dataclass, field
from typing import Any, cast

import pluggy

from iris_core import hooks
from iris_core.errors import PluginAPIVersionError, PluginError, PluginLoadError
from iris_core.logs import logger
from iris_core.protocols import Allocator, Collective, DeviceBackend
from iris_core.types import PLUGIN_API, Capability, DeviceType, PluginInfo, PluginKind, PluginState

PROTOCOLS = {PluginKind.ALLOCATOR: Allocator, PluginKind.BACKEND: DeviceBackend, PluginKind.COLLECTIVE: Collective}

REGISTERED = "(registered)"
"""Distribution of plugins that a program registered itself."""


@dataclass(eq=False, slots=True)
class PluginRecord:
    """One plugin and where it stands.  The registry alone changes it."""

    kind: PluginKind  #: what it provides
    name: str  #: of its entry point, by which users choose it
    distribution: str  #: that installed it
    version: str  #: of the distribution
    entry_point: str  #: what the entry point names ("module:object")
    state: PluginState = PluginState.DISCOVERED  #: where it stands
    reason: str = ""  #: why, if it cannot be used
    info: PluginInfo | None = None  #: the plugin's description, once loaded; observers may have none
    error: PluginError | None = field(default=None, repr=False)  #: what went wrong, if it is broken or incompatible
    plugin: Any = field(default=None, repr=False)  #: the imported object
    manager: pluggy.PluginManager | None = field(default=None, repr=False)  #: its own, once it has passed the checks
    reported: bool = field(default=False, repr=False)  #: whether a warning has said that it is left out

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
        """The names that IRIS_BLOCK may give it."""
        return frozenset({self.name, qualified(self.qualified_name)})

    @property
    def label(self) -> str:
        """For messages: "backend 'triton' (iris-triton 0.2.0)"."""
        return f"{self.kind} {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"

    def to_json(self) -> dict[str, str]:
        """Return what `iris plugins --json` lists."""
        names = ("kind", "name", "distribution", "version", "entry_point", "api", "state", "reason")
        return {name: str(getattr(self, name)) for name in names} | {"summary": self.info.summary if self.info else ""}

    def implements(self, hook: str) -> bool:
        """Return whether the plugin, which is loaded, implements a hook."""
        return bool(self._caller(hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> Any:
        """Return what a hook of the loaded plugin returns, in a list that is empty for None; raises what it raises."""
        return self._caller(hook)(**arguments)

    def _caller(self, hook: str) -> Any:
        assert self.manager is not None, f"{self.label} is not loaded"
        return getattr(self.manager.hook, hook)

    def fail(self, error: PluginError) -> PluginError:
        """Mark the plugin as broken or incompatible and return the error."""
        self.error, self.manager = error, None
        self.show_error()
        return error

    def leave_out(self, error: object) -> None:
        """Warn, once, that the plugin is not used because it does not work."""
        if not self.reported:
            self.reported = True
            where = "" if self.label in str(error) else f"{self.label}: "
            logger.warning("a plugin is left out: %s%s", where, error)

    def show_error(self) -> None:
        """Derive state and reason from the error."""
        self.state = PluginState.INCOMPATIBLE if isinstance(self.error, PluginAPIVersionError) else PluginState.BROKEN
        self.reason = str(self.error)

    def load_error(self, problem: str) -> PluginLoadError:
        """Return the error for a plugin that cannot be used: its name, what is wrong, and the way out."""
        if self.distribution == REGISTERED:
            return PluginLoadError(f"{self.label}{problem}. Correct the object that the program registers")
        ways = f"Update or reinstall {self.distribution}, or block the plugin with IRIS_BLOCK={self.name}"
        return PluginLoadError(f"{self.label}{problem}. {ways}")

    def wrong_result(self, hook: str, expected: str, got: Any) -> PluginLoadError:
        """Return the error for a hook that returned something else than it must."""
        return self.load_error(f": {hook} must return {expected}, not {reprlib.repr(got)}")

    def missing_members(self, created: Any) -> list[str]:
        """Return what the allocator, backend or algorithm lacks of its protocol; properties are not evaluated."""
        names = [name for name in vars(PROTOCOLS[self.kind]) if not name.startswith("_")]
        return [name for name in names if not (hasattr(type(created), name) or hasattr(created, name))]


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


# -- checks -----------------------------------------------------------------------------------------------------------
def validate_hooks(record: PluginRecord, plugin: Any) -> pluggy.PluginManager:
    """Return a manager with this plugin alone, after checking which hooks it implements and how."""
    where = f": {record.entry_point!r}"
    if plugin is None or inspect.isclass(plugin):
        what = "a class" if plugin else "None"
        raise record.load_error(f"{where} is {what}: name an instance with hookimpl methods")
    manager = pluggy.PluginManager(hooks.PROJECT_NAME)
    manager.add_hookspecs(hooks.ProviderHooks)
    manager.add_hookspecs(hooks.ObserverHooks)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        raise record.load_error(f"{where} is not valid: {' '.join(str(error).split())}") from error
    implemented = {caller.name: caller.get_hookimpls() for caller in manager.get_hookcallers(plugin) or ()}
    if not implemented:
        raise record.load_error(f"{where} has no method marked with iris_core.hookimpl")
    observer = record.kind is PluginKind.OBSERVER
    own = hooks.OBSERVER_HOOKS if observer else hooks.PROVIDER_HOOKS
    allowed = (*own, "iris_plugin_info") if observer else (*own, *hooks.OPTIONAL_PROVIDER_HOOKS)
    for hook, implementations in implemented.items():
        if any(each.wrapper or each.hookwrapper for each in implementations):
            raise record.load_error(f"{where} implements {hook} as a wrapper; hooks of Iris are plain methods")
        if hook not in allowed and not all(each.optionalhook for each in implementations):
            close = difflib.get_close_matches(hook, allowed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(allowed)}"
            raise record.load_error(f"{where} implements {hook}, which is no hook of the kind {record.kind}: {hint}")
    if not observer and (missing := [hook for hook in own if hook not in implemented]):
        raise record.load_error(f"{where} does not implement {', '.join(missing)}")
    return manager


def check_info(record: PluginRecord, info: Any) -> PluginInfo:
    """Check a plugin's description; the API first, because the rest may depend on it."""

    def check(right: bool, expected: str, got: Any) -> None:
        if not right:
            raise record.wrong_result("iris_plugin_info", expected, got)

    check(isinstance(info, PluginInfo), "a PluginInfo", info)
    api, name = info.api, info.name
    is_pair = isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)
    check(is_pair, "api as (major, minor)", api)
    if api[0] != PLUGIN_API[0] or api[1] > PLUGIN_API[1]:
        older = "iris-core" if api > PLUGIN_API else record.distribution
        raise PluginAPIVersionError(
            f"{record.label} was written for plugin API {dotted(api)}, this iris-core has {dotted(PLUGIN_API)}: "
            f"upgrade {older}"
        )
    if info.kind is not record.kind:
        problem = f" says that it is of kind {info.kind!s}, but stands in the group {record.kind.group!r}"
        raise record.load_error(problem)
    is_name = isinstance(name, str) and name != "auto" and re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) is not None
    check(is_name, "a name of letters, digits, - _ . (not 'auto')", name)
    if record.name and name != record.name:
        problem = f" says that its name is {name!r}: PluginInfo.name and the entry point's must be equal"
        raise record.load_error(problem)
    for part, member in (("devices", DeviceType), ("provides", Capability), ("requires", Capability), ("demos", str)):
        value = getattr(info, part)
        is_set = isinstance(value, frozenset) and all(isinstance(each, member) for each in value)
        check(is_set, f"{part} as a frozenset of {member.__name__}", value)
    check(type(info.priority) is int, "priority as an integer", info.priority)
    check(isinstance(info.summary, str), "a summary as text", info.summary)
    if not info.devices and record.kind in (PluginKind.ALLOCATOR, PluginKind.BACKEND):
        raise record.load_error(" names no device type that it works on (PluginInfo.devices)")
    return cast("PluginInfo", info)
