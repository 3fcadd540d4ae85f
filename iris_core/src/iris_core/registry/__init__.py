"""Registry of plugins: discover -> load -> check -> register.

The only package that uses pluggy and importlib_metadata.  Discovering reads entry points and imports nothing; a plugin
is imported when it is chosen.  One that cannot be used stays listed with its state and reason, and hurts no other one.
"""

from __future__ import annotations

import difflib
import functools
import reprlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from iris_core import errors
from iris_core.diagnosis import Finding
from iris_core.hooks import OBSERVER_HOOKS
from iris_core.logs import logger
from iris_core.registry.discovery import discover, import_plugin
from iris_core.registry.records import REGISTERED, PluginRecord, canonical, check_info, qualified, validate_hooks
from iris_core.types import Availability, CreateRequest, DeviceTarget, PluginKind, PluginState

if TYPE_CHECKING:
    from iris_core.settings import PluginSettings


__all__ = ["PluginRecord", "Registry", "default_registry", "reset_default_registry"]

MAY_BE_WATCHED = set(OBSERVER_HOOKS)
"""Hooks that an observer may implement: after a change all of them, until `notify` has loaded the observers."""

_SIBLINGS = {
    (PluginKind.ALLOCATOR, "host"): "iris-allocators",
    (PluginKind.BACKEND, "triton"): "iris-triton",
    (PluginKind.BACKEND, "gluon"): "iris-gluon",
}


class Registry:
    """The plugins of one process.  `default_registry()` is the one that `Iris()` uses.

    Args:
        search_path: directories with installed distributions; default is the interpreter's path.
    """

    def __init__(self, *, search_path: Sequence[str] | None = None) -> None:
        self._lock = threading.RLock()  # importing a plugin may come back here
        self._blocked: frozenset[str] = frozenset()
        self.revision = 0  #: grows whenever plugins are registered, unregistered, blocked or unblocked
        self._watching: dict[str, list[PluginRecord]] | None = None  # loaded observers by hook
        self._reported: set[tuple[str, str]] = set()  # observers that have raised, with the hook
        self._records = discover(search_path)
        self._settle()

    # -- looking ------------------------------------------------------------------------------------------------------
    def records(self, kind: PluginKind | None = None) -> tuple[PluginRecord, ...]:
        """Return all plugins, or those of one kind, by kind, name and distribution.  Imports nothing."""
        chosen = [record for record in self._records if kind in (None, record.kind)]
        return tuple(sorted(chosen, key=lambda record: (record.kind, record.name, record.distribution)))

    def names(self) -> tuple[str, ...]:
        """Return the names of all plugins, sorted, each once.  Imports nothing."""
        return tuple(sorted({record.name for record in self._records}))

    def resolve(self, kind: PluginKind, name: str) -> PluginRecord:
        """Return the one plugin that a name means: "gluon", or "gluon@iris-gluon" where two offer the same name.

        Raises:
            PluginNotFoundError: no installed plugin has this name.
            PluginConflictError: several distributions offer it.
        """
        plain, _, distribution = name.partition("@")
        named = [record for record in self.records(kind) if record.name == plain]
        if distribution:
            named = [record for record in named if canonical(record.distribution) == canonical(distribution)]
        if not named:
            raise self._not_found(kind, name)
        usable = [record for record in named if record.state is not PluginState.BLOCKED] or named
        if len(usable) > 1:
            offers = ", ".join(f"{record.distribution} {record.version}" for record in usable)
            ways = " or ".join(repr(record.qualified_name) for record in usable)
            raise errors.PluginConflictError(
                f"{kind} {plain!r} is offered by several distributions: {offers}. Choose one by {ways}, "
                "or block the others with IRIS_BLOCK"
            )
        return usable[0]

    def _not_found(self, kind: PluginKind, name: str) -> errors.PluginNotFoundError:
        installed = sorted({record.name for record in self.records(kind)})
        known = [record.qualified_name for record in self.records(kind)] if "@" in name else installed
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hints = [f"installed are {', '.join(installed)}" if installed else f"no {kind} is installed at all"]
        if close:
            hints.append(f"did you mean {' or '.join(map(repr, close))}?")
        if sibling := _SIBLINGS.get((kind, name)):
            hints.append(f"it comes with the distribution {sibling}: pip install ./{sibling.replace('-', '_')}")
        elif not close:
            hints.append(f"a distribution adds one with an entry point in the group {kind.group!r}")
        message = f"no {kind} named {name!r} is installed; {'; '.join(hints)}"
        return errors.PluginNotFoundError(message, name=name, close_matches=close)

    # -- changing -----------------------------------------------------------------------------------------------------
    def block(self, names: Iterable[str]) -> None:
        """Never load these plugins, and no others: by `name`, which counts for every kind, or `name@distribution`."""
        with self._lock:
            wanted = frozenset(qualified(name) for name in names)
            known = {name for record in self._records for name in record.block_names}
            for name in sorted(wanted - known - self._blocked):
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                logger.warning("IRIS_BLOCK names %r, which is not installed%s", name, hint)
            if wanted != self._blocked:
                self._blocked = wanted
                self._settle()

    def register(self, kind: PluginKind, plugin: Any, name: str | None = None) -> PluginRecord:
        """Add an object whose methods are marked with `hookimpl`, without an entry point, for tests and notebooks.

        Its name is by default the one in the plugin's description.

        Raises:
            PluginLoadError: the object is not a valid plugin of this kind.
            PluginAPIVersionError: it was written for another plugin API.
            PluginConflictError: the name is taken.
        """
        with self._lock:
            record = PluginRecord(kind, name or "", REGISTERED, "", type(plugin).__qualname__, plugin=plugin)
            self._check(record)
            if not record.name:
                raise errors.PluginLoadError(f"{kind} {plugin!r} does not say its name: pass register(..., name=...)")
            if rivals := self._rivals(record):
                raise errors.PluginConflictError(
                    f"{kind} {record.name!r} is there already, from {', '.join(rivals)}: "
                    "register it under another name, or block the other one"
                )
            self._records.append(record)
            self._settle()
            return record

    def unregister(self, record: PluginRecord) -> None:
        """Take a plugin out again that `register` added."""
        with self._lock:
            self._records.remove(record)
            self._settle()

    def _settle(self) -> None:
        """Derive which plugins are blocked and which conflict; a plugin that was loaded before stays loaded."""
        self.revision += 1
        self._watching = None
        MAY_BE_WATCHED.update(OBSERVER_HOOKS)
        for record in self._records:
            if record.block_names & self._blocked:
                record.state, record.reason = PluginState.BLOCKED, "IRIS_BLOCK names it"
            elif record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
                if record.error is not None:
                    record.show_error()
                else:
                    record.state = PluginState.DISCOVERED if record.manager is None else PluginState.LOADED
                    record.reason = ""
        for record in self._records:
            if record.state is PluginState.DISCOVERED and (rivals := self._rivals(record)):
                record.state = PluginState.CONFLICTING
                record.reason = f"{', '.join(rivals)} offers this name too; choose {record.qualified_name!r}"

    def _rivals(self, record: PluginRecord) -> list[str]:
        same = (other for other in self._records if (other.kind, other.name) == (record.kind, record.name))
        return [each.distribution for each in same if each is not record and each.state is not PluginState.BLOCKED]

    # -- loading ------------------------------------------------------------------------------------------------------
    def load(self, record: PluginRecord) -> PluginRecord:
        """Import and check a plugin, also a conflicting one: its record was chosen; nothing if that is done.

        Raises:
            NoUsablePluginError: it is blocked.
            PluginLoadError: importing or validating it failed; the cause is chained.
            PluginAPIVersionError: it was written for another plugin API.
        """
        with self._lock:
            if record.state is PluginState.BLOCKED:
                raise errors.NoUsablePluginError(
                    f"{record.label} is blocked: take it out of IRIS_BLOCK", reasons={record.name: record.reason}
                )
            if record.error is not None:
                raise record.error.with_traceback(None)  # else every call would lengthen its traceback
            if record.manager is None:
                self._check(record)
            return record

    def _check(self, record: PluginRecord) -> None:
        try:
            record.plugin = import_plugin(record) if record.plugin is None else record.plugin
            record.manager = validate_hooks(record, record.plugin)
            if record.implements("iris_plugin_info"):
                record.info = check_info(record, self._call(record, "iris_plugin_info"))
                record.name = record.name or record.info.name
        except errors.PluginError as error:
            record.fail(error)
            raise
        except errors.FAILURES as error:  # the object's own code runs where its attributes are looked at
            raise record.fail(record.load_error(f": checking it raised {errors.error_text(error)}")) from error
        record.state, record.reason = PluginState.LOADED, ""

    def load_all(self) -> tuple[PluginRecord, ...]:
        """Load every plugin and probe it on each device type it names; return all records.

        Never raises for a plugin that fails: `state` and `reason` of its record say so.
        """
        for record in self.records():
            if record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
                continue
            try:
                self.load(record)
                if record.info is None or record.kind is PluginKind.OBSERVER or record.state is PluginState.CREATED:
                    continue
                answers = [self.probe(record, DeviceTarget(device)) for device in sorted(record.info.devices)]
            except errors.PluginError as error:
                logger.debug("%s", error, exc_info=error)  # the record keeps it
                continue
            available = not answers or any(answers)
            record.state = PluginState.LOADED if available else PluginState.UNAVAILABLE
            record.reason = "" if available else "; ".join(dict.fromkeys(answer.reason for answer in answers))
        return self.records()

    # -- calling one plugin -------------------------------------------------------------------------------------------
    def settings_class(self, record: PluginRecord) -> type[PluginSettings]:
        """Return the class of a plugin's settings; PluginLoadError if it raised or returned something else."""
        from iris_core.settings import PluginSettings  # pydantic is heavy

        cls = self._call(record, "iris_plugin_settings")
        if isinstance(cls, type) and issubclass(cls, PluginSettings):
            return cls
        raise record.fail(record.wrong_result("iris_plugin_settings", "a subclass of PluginSettings", cls))

    def probe(self, record: PluginRecord, target: DeviceTarget) -> Availability:
        """Ask a plugin whether it can be used on a device; raises like `settings_class`, which it needs, too."""
        answer = self._call(record, "iris_plugin_probe", target=target)
        if not isinstance(answer, Availability):
            raise record.fail(record.wrong_result("iris_plugin_probe", "an Availability", answer))
        self.settings_class(record)
        return answer

    def create(self, record: PluginRecord, request: CreateRequest) -> Any:
        """Let a plugin create its allocator, backend or collective.

        Raises:
            IrisError: whatever the plugin raises of Iris's own errors.
            PluginError: it raised another error, which is chained, or returned something else; or as `load`.
        """
        created = self._call(record, "iris_plugin_create", request=request)
        if lacking := record.missing_members(created):
            problem = f"iris_plugin_create returned {reprlib.repr(created)}, which has no {', '.join(lacking)}"
            raise errors.PluginError(f"{record.label}: {problem}")
        record.state, record.reason = PluginState.CREATED, ""
        return created

    def diagnose(self, record: PluginRecord, targets: Sequence[DeviceTarget]) -> tuple[Finding, ...]:
        """Ask a plugin what it needs of this machine and finds there; nothing if it does not implement that hook.

        It is asked about those of the targets, the devices of this machine, that it works on.

        Raises:
            PluginError: the plugin raised or returned something else, which does not make it unusable.
        """
        self.load(record)
        if record.info is None or not record.implements("iris_plugin_diagnose"):
            return ()
        own = [target for target in targets if target.type in record.info.devices]
        try:
            (findings,) = record.call("iris_plugin_diagnose", targets=own) or (None,)
        except errors.FAILURES as error:
            problem = f"iris_plugin_diagnose raised {errors.error_text(error)}"
            raise errors.PluginError(f"{record.label}: {problem}") from error
        if not (isinstance(findings, list | tuple) and all(isinstance(each, Finding) for each in findings)):
            raise record.wrong_result("iris_plugin_diagnose", "a list of Finding", findings)
        return tuple(findings)

    def _call(self, record: PluginRecord, hook: str, **arguments: Any) -> Any:
        """Load a plugin and call a hook; what the hook raises becomes one of our errors, with the cause chained."""
        self.load(record)
        try:
            results = record.call(hook, **arguments)
        except errors.FAILURES as error:
            if hook != "iris_plugin_create":
                raise record.fail(record.load_error(f": {hook} raised {errors.error_text(error)}")) from error
            if isinstance(error, errors.IrisError):  # an exhausted device, say: no fault of the plugin
                raise
            raise errors.PluginError(f"{record.label} could not be created: {errors.error_text(error)}") from error
        if len(results) != 1:
            raise record.fail(record.wrong_result(hook, "one result", results or None))
        return results[0]

    # -- observers ----------------------------------------------------------------------------------------------------
    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook with its arguments, all of them, on every observer that implements it.

        Observers are loaded at the first call, and again when plugins were blocked or added.  One that raises is
        reported once; blocked, broken and conflicting ones are left out.
        """
        with self._lock:
            revision, watching = self.revision, self._watching or self._load_observers()
            if revision == self.revision:  # else loading one has changed it
                self._watching = watching
                MAY_BE_WATCHED.intersection_update(each for each, records in watching.items() if records)
        for record in watching[hook]:
            try:
                record.call(hook, **arguments)
            except errors.FAILURES:
                if (record.qualified_name, hook) not in self._reported:
                    self._reported.add((record.qualified_name, hook))
                    way = f"update {record.distribution}, or block it with IRIS_BLOCK={record.name}"
                    logger.exception("%s raised in %s (reported once); %s", record.label, hook, way)

    def _load_observers(self) -> dict[str, list[PluginRecord]]:
        watching: dict[str, list[PluginRecord]] = {hook: [] for hook in OBSERVER_HOOKS}
        for record in self.records(PluginKind.OBSERVER):
            if record.state is PluginState.CONFLICTING:
                way = f"block one with IRIS_BLOCK={record.qualified_name}"
                record.leave_out(f"{record.label} is not the only one of that name: {way}")
            elif record.state is not PluginState.BLOCKED:
                try:
                    self.load(record)
                    for hook in filter(record.implements, OBSERVER_HOOKS):
                        watching[hook].append(record)
                except errors.PluginError as error:
                    record.leave_out(error)
        return watching


def notify(hook: str, **arguments: Any) -> None:
    """Call a hook (see `iris_core.hooks`) of this process's observers, with all of its arguments."""
    if hook in MAY_BE_WATCHED:
        default_registry().notify(hook, **arguments)


@functools.cache
def default_registry() -> Registry:
    """Return this process's registry; made at the first call."""
    return Registry()


def reset_default_registry() -> None:
    """Forget the process's registry: the next call discovers again (after an installation, in tests)."""
    default_registry.cache_clear()
    MAY_BE_WATCHED.update(OBSERVER_HOOKS)
