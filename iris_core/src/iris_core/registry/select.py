"""Choice of allocator and backend for a device: argument > environment > auto.

An explicit choice fails loudly with its cause.  Automatic choice tries candidates by priority and name and keeps the
reason for each one that it refused or passed over, so a substitute is never silent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.errors import CapabilityError, NoUsablePluginError, PluginError, SettingsError
from iris_core.logs import logger
from iris_core.registry import PluginRecord, Registry
from iris_core.settings import IrisSettingsWarning, load_plugin_settings, nearest
from iris_core.types import DeviceTarget, PluginInfo, PluginKind, PluginState

if TYPE_CHECKING:
    from iris_core.settings import IrisSettings


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one candidate was chosen, refused or passed over."""

    kind: PluginKind
    name: str  # `name@distribution`
    target: str  # torch's name of the device that it was considered for; empty if the device played no part
    chosen: bool
    text: str

    def __str__(self) -> str:
        where = f" on {self.target}" if self.target else ""
        return f"{self.kind} {self.name}{where}: {'chosen' if self.chosen else 'not chosen'}: {self.text}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen plugins, whose records are loaded, the device, and the reason for each candidate and device."""

    allocator: PluginRecord
    backend: PluginRecord
    target: DeviceTarget
    reasons: tuple[Reason, ...]

    def explain(self) -> str:
        """Return the choice and its reasons as text, one line each."""
        head = f"{self.allocator.label} and {self.backend.label} on {self.target.torch_device}"
        return "\n".join([head, *(f"  {reason}" for reason in self.reasons)])


@dataclass(frozen=True, slots=True)
class _Candidate:
    record: PluginRecord
    info: PluginInfo
    asked_by: str = ""  # empty where nothing names it


def select(registry: Registry, settings: IrisSettings, *, targets: Sequence[DeviceTarget]) -> Plan:
    """Choose allocator, backend and device.

    Takes the first target for which an allocator and a backend are usable and fit together: the backend's `requires`
    are among the allocator's `provides`.  Ranks with the same plugins, settings and targets choose the same.

    Args:
        registry: the plugins; `settings.block` is applied to it.
        settings: `settings.allocator` and `settings.backend` are a name, `name@distribution`, or "auto".
        targets: devices that may be used, the preferred one first.

    Raises:
        PluginError: the plugin asked for is not installed or broken, or several distributions offer it.
        CapabilityError: the allocator and the backend that were asked for do not fit together.
        NoUsablePluginError: nothing usable is left; the message lists every candidate with its reason.
    """
    registry.block(settings.block)
    search = _Search(registry)
    allocators = search.candidates(PluginKind.ALLOCATOR, settings)
    backends = search.candidates(PluginKind.BACKEND, settings)
    _check_explicit_pair(allocators, backends)
    unusable = allocators + backends
    for target in targets:
        usable = [[each for each in kind if search.is_usable(each, target)] for kind in (allocators, backends)]
        pair = next(((a, b) for b in usable[1] for a in usable[0] if not _missing(a, b)), None)
        for own, other in ((0, 1), (1, 0)):
            partners = usable[other] if pair is None else [pair[other]]
            for each in usable[own]:
                unmet = [text for partner in partners if (text := _unmet(each, partner))]
                if pair is not None and each is pair[own]:
                    automatic = f"automatic: the first that fits, by priority ({each.info.priority}) and name"
                    search.note(each, target, each.asked_by or automatic, chosen=True)
                elif unmet or not partners:
                    kind = PluginKind.BACKEND if own == 0 else PluginKind.ALLOCATOR
                    search.note(each, target, "; ".join(unmet) or f"no usable {kind} there")
                elif pair is not None:
                    search.note(each, target, f"{pair[own].record.name} comes first by priority and name")
        if pair is not None:
            return Plan(pair[0].record, pair[1].record, target, tuple(search.reasons))
        unusable = [each for each in unusable if each not in usable[0] + usable[1]]
    where = ", ".join(target.torch_device for target in targets)
    named = [f"{each.record.label} cannot be used on {where} ({each.asked_by})" for each in unusable if each.asked_by]
    listed = "".join(f"\n  {reason}" for reason in search.reasons) or " none is installed"
    raise NoUsablePluginError(
        f"{'; '.join(named) or f'no allocator and backend can be used together on {where}'}:{listed}\n"
        "`iris doctor` examines the installation",
        reasons={f"{each.kind} {each.name} {each.target}".rstrip(): each.text for each in search.reasons},
    )


@dataclass
class _Search:
    registry: Registry
    reasons: list[Reason] = field(default_factory=list)

    def note(self, candidate: _Candidate, target: DeviceTarget, text: str, *, chosen: bool = False) -> None:
        record = candidate.record
        self.reasons.append(Reason(record.kind, record.qualified_name, target.torch_device, chosen, text))

    def leave_out(self, record: PluginRecord, target: str, error: PluginError) -> None:
        """Pass over an installed plugin that does not work, but not quietly."""
        record.leave_out(error)
        self.reasons.append(Reason(record.kind, record.qualified_name, target, False, f"{record.state}: {error}"))

    def candidates(self, kind: PluginKind, settings: IrisSettings) -> list[_Candidate]:
        """Return the loaded candidates of one kind, best first; an explicit choice is the only one."""
        name: str = getattr(settings, kind.value)
        if name != "auto":
            record = self.registry.load(self.registry.resolve(kind, name))
            assert record.info is not None
            from_environment = settings.source(kind.value) == "environment"
            asked_by = f"IRIS_{kind.upper()} names it" if from_environment else f"the argument {kind}={name!r} names it"
            return [_Candidate(record, record.info, asked_by)]
        found = []
        for record in self.registry.records(kind):
            if record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
                text = f"{record.state}: {record.reason}"
                self.reasons.append(Reason(kind, record.qualified_name, "", False, text))
                continue
            try:
                self.registry.load(record)
            except PluginError as error:
                self.leave_out(record, "", error)
            else:
                assert record.info is not None
                found.append(_Candidate(record, record.info))
        return sorted(found, key=lambda each: (-each.info.priority, each.record.name))

    def is_usable(self, candidate: _Candidate, target: DeviceTarget) -> bool:
        """Return whether a candidate works on a device; if not, note why."""
        if target.type not in candidate.info.devices:
            self.note(candidate, target, f"it works on {_listed(candidate.info.devices)} only")
            return False
        try:
            answer = self.registry.probe(candidate.record, target)
        except PluginError as error:
            if candidate.asked_by:
                raise
            self.leave_out(candidate.record, target.torch_device, error)
            return False
        if not answer:
            self.note(candidate, target, f"unavailable: {answer.reason or 'its probe gave no reason'}")
        return answer.ok


def _check_explicit_pair(allocators: list[_Candidate], backends: list[_Candidate]) -> None:
    """Refuse two plugins that the caller named and that cannot work together on any device."""
    if not all(len(found) == 1 and found[0].asked_by for found in (allocators, backends)):
        return
    allocator, backend = allocators[0], backends[0]
    if missing := _missing(allocator, backend):
        raise CapabilityError(
            f"{backend.record.label} needs {_listed(missing)}, which {allocator.record.label} does not provide "
            f"(it provides {_listed(allocator.info.provides) or 'nothing'}): choose another allocator or backend"
        )
    if not allocator.info.devices & backend.info.devices:
        raise CapabilityError(
            f"{allocator.record.label} works on {_listed(allocator.info.devices)} and {backend.record.label} on "
            f"{_listed(backend.info.devices)}: choose two that share a device type"
        )


def _missing(allocator: _Candidate, backend: _Candidate) -> frozenset[str]:
    return frozenset(map(str, backend.info.requires - allocator.info.provides))


def _unmet(candidate: _Candidate, partner: _Candidate) -> str:
    """Return the reason why two plugins cannot work together; empty if they can."""
    if candidate.record.kind is PluginKind.ALLOCATOR:
        missing = _missing(candidate, partner)
        return f"{partner.record.name} needs {_listed(missing)}, which it lacks" if missing else ""
    missing = _missing(partner, candidate)
    return f"it needs {_listed(missing)}, which {partner.record.name} lacks" if missing else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))


def check_options(
    registry: Registry, options: Mapping[str, Mapping[str, Any]], used: Iterable[PluginRecord], stacklevel: int = 2
) -> None:
    """Check the settings that a caller gave for plugins, and warn of those without effect: their plugin is not used."""
    used = list(used)
    for name, given in options.items():
        records = [record for record in registry.records() if record.name == name]
        if not records:
            known = registry.names()
            raise SettingsError(f"options has settings for {name!r}, which is not installed" + nearest(name, known))
        if not isinstance(given, Mapping):
            raise SettingsError(f"options[{name!r}] must map names of settings to values, not be {given!r}")
        records = [record for record in records if record.kind is not PluginKind.OBSERVER]
        if not records:
            raise SettingsError(f"options has settings for {name!r}, which is an observer: these have none")
        if any(record is each for record in records for each in used):
            continue  # checked when it is created
        reasons = [_why_unused(registry, record, given) for record in records]
        if given and all(reasons):
            message = f"options has settings for {name!r}, which have no effect: {'; '.join(dict.fromkeys(reasons))}"
            warnings.warn(message, IrisSettingsWarning, stacklevel=stacklevel + 1)
            logger.warning(message)


def _why_unused(registry: Registry, record: PluginRecord, given: Mapping[str, Any]) -> str:
    """Check settings of a plugin that was not chosen; return why they have no effect, or nothing if they may have."""
    try:
        load_plugin_settings(record.name, registry.settings_class(record), given)
    except PluginError as error:
        return str(error)
    # algorithms are made when they are first needed
    return "" if record.kind is PluginKind.COLLECTIVE else f"another {record.kind} was chosen"
