"""Choice of allocator and backend for a device: argument > environment > auto.

An explicit choice fails loudly with its cause.  Automatic choice tries candidates by priority and name and keeps the
reason for each one that it refused or passed over, so a substitute is never silent.  Settings that a caller gives for
plugins are checked, also for those that were not chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_core.errors import CapabilityError, NoUsablePluginError, PluginError, SettingsError
from iris_core.logs import logger
from iris_core.settings import IrisSettingsWarning, load_plugin_settings, nearest
from iris_core.types import DeviceTarget, PluginInfo, PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from iris_core.registry import PluginRecord, Registry
    from iris_core.settings import IrisSettings

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one candidate was chosen, refused or passed over.

    Attributes:
        kind: allocator or backend.
        name: the candidate, as `name@distribution`.
        target: torch's name of the device that it was considered for; empty if the device played no part.
        chosen: whether it was chosen.
        text: why.
    """

    kind: PluginKind
    name: str
    target: str
    chosen: bool
    text: str

    def __str__(self) -> str:
        where = f" on {self.target}" if self.target else ""
        return f"{self.kind} {self.name}{where}: {'chosen' if self.chosen else 'not chosen'}: {self.text}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What was chosen, and why.

    Attributes:
        allocator: the allocator's record, loaded.
        backend: the backend's record, loaded.
        target: the device.
        reasons: one entry per candidate and device that was considered, in that order.
    """

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
    asked_by: str  # "" for auto


def select(
    registry: Registry,
    settings: IrisSettings,
    *,
    targets: Sequence[DeviceTarget],
    allocator: str = AUTO,
    backend: str = AUTO,
) -> Plan:
    """Choose allocator, backend and device.

    Takes the first target for which an allocator and a backend are usable and fit together: the backend's `requires`
    are among the allocator's `provides`.  Ranks with the same plugins, settings and targets choose the same.

    Args:
        registry: the plugins; `settings.block` is applied to it.
        settings: `settings.allocator` and `settings.backend` count where the argument is "auto".
        targets: devices that may be used, the preferred one first.
        allocator: the caller's choice: a name, `name@distribution`, or "auto" for none.
        backend: likewise.

    Raises:
        PluginNotFoundError: no plugin has the name asked for.
        PluginConflictError: several distributions offer it.
        PluginLoadError: the plugin asked for is broken; the cause is chained.
        PluginAPIVersionError: the plugin asked for was written for another plugin API.
        CapabilityError: the allocator and the backend that were asked for do not fit together.
        NoUsablePluginError: nothing usable is left; the message lists every candidate with its reason.
    """
    if not targets:
        raise ValueError("select needs at least one target")
    registry.block(settings.block)
    reasons: list[Reason] = []
    allocators = _candidates(registry, PluginKind.ALLOCATOR, allocator, settings, reasons)
    backends = _candidates(registry, PluginKind.BACKEND, backend, settings, reasons)
    _check_explicit_pair(allocators, backends)
    ever_usable: list[_Candidate] = []
    for target in targets:
        usable_allocators = [each for each in allocators if _usable(registry, each, target, reasons)]
        usable_backends = [each for each in backends if _usable(registry, each, target, reasons)]
        pairs = [(a, b) for b in usable_backends for a in usable_allocators if not _missing(a, b)]
        if pairs:
            chosen_allocator, chosen_backend = pairs[0]
            _record_choice(usable_allocators, chosen_allocator, chosen_backend, target, reasons)
            _record_choice(usable_backends, chosen_backend, chosen_allocator, target, reasons)
            return Plan(chosen_allocator.record, chosen_backend.record, target, tuple(reasons))
        ever_usable += usable_allocators + usable_backends
        for each in usable_allocators:
            reasons.append(_reason(each, target, _why_unpaired(each, usable_backends)))
        for each in usable_backends:
            reasons.append(_reason(each, target, _why_unpaired(each, usable_allocators)))
    raise _nothing_usable(targets, [each for each in allocators + backends if each not in ever_usable], reasons)


def _nothing_usable(
    targets: Sequence[DeviceTarget], unusable: list[_Candidate], reasons: list[Reason]
) -> NoUsablePluginError:
    where = ", ".join(target.torch_device for target in targets)
    asked = [each for each in unusable if each.asked_by]
    if asked:
        message = "; ".join(f"{each.record.label} cannot be used on {where} ({each.asked_by})" for each in asked)
    else:
        message = f"no allocator and backend can be used together on {where}"
    listed = "".join(f"\n  {reason}" for reason in reasons) or " none is installed"
    return NoUsablePluginError(
        f"{message}:{listed}\n`iris doctor` examines the installation",
        reasons={f"{each.kind} {each.name} {each.target}".rstrip(): each.text for each in reasons},
    )


def _candidates(
    registry: Registry, kind: PluginKind, argument: str, settings: IrisSettings, reasons: list[Reason]
) -> list[_Candidate]:
    """The loaded candidates of one kind, best first; an explicit choice is the only one."""
    setting: str = getattr(settings, kind.value)
    name = setting if argument == AUTO else argument
    if name != AUTO:
        from_environment = name == setting and settings.source(kind.value) == "environment"
        record = registry.load(registry.resolve(kind, name))
        assert record.info is not None
        asked_by = f"IRIS_{kind.upper()} names it" if from_environment else f"the argument {kind}={name!r} names it"
        return [_Candidate(record, record.info, asked_by)]
    found = []
    for record in registry.records(kind):
        if record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
            reasons.append(Reason(kind, record.qualified_name, "", False, f"{record.state}: {record.reason}"))
            continue
        try:
            registry.load(record)
        except PluginError as error:
            _refuse_failed(record, "", error, reasons)
        else:
            assert record.info is not None
            found.append(_Candidate(record, record.info, ""))
    return sorted(found, key=lambda each: (-each.info.priority, each.record.name))


def _usable(registry: Registry, candidate: _Candidate, target: DeviceTarget, reasons: list[Reason]) -> bool:
    """Whether a candidate works on a device; if not, says why in `reasons`."""
    if target.type not in candidate.info.devices:
        reasons.append(_reason(candidate, target, f"it works on {_listed(candidate.info.devices)} only"))
        return False
    try:
        answer = registry.probe(candidate.record, target)
    except PluginError as error:
        if candidate.asked_by:
            raise
        _refuse_failed(candidate.record, target.torch_device, error, reasons)
        return False
    if not answer:
        reasons.append(_reason(candidate, target, f"unavailable: {answer.reason or 'its probe gave no reason'}"))
    return answer.ok


def _refuse_failed(record: PluginRecord, target: str, error: PluginError, reasons: list[Reason]) -> None:
    """An installed plugin that does not work is passed over, but not quietly."""
    record.leave_out(error)
    reasons.append(Reason(record.kind, record.qualified_name, target, False, f"{record.state}: {error}"))


def _check_explicit_pair(allocators: list[_Candidate], backends: list[_Candidate]) -> None:
    """Two plugins that the caller named and that cannot work together on any device."""
    if not (len(allocators) == len(backends) == 1 and allocators[0].asked_by and backends[0].asked_by):
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


def _why_unpaired(candidate: _Candidate, others: list[_Candidate]) -> str:
    """Why a usable candidate found no partner on this device."""
    allocator = candidate.record.kind is PluginKind.ALLOCATOR
    if not others:
        return f"no usable {PluginKind.BACKEND if allocator else PluginKind.ALLOCATOR} there"
    if allocator:
        return "; ".join(f"{b.record.name} needs {_listed(_missing(candidate, b))}, which it lacks" for b in others)
    return "; ".join(f"it needs {_listed(_missing(a, candidate))}, which {a.record.name} lacks" for a in others)


def _record_choice(
    usable: list[_Candidate], chosen: _Candidate, partner: _Candidate, target: DeviceTarget, reasons: list[Reason]
) -> None:
    """Say of every usable candidate of one kind why it was or was not taken."""
    for each in usable:
        if each is chosen:
            text = each.asked_by or f"automatic: the first that fits, by priority ({each.info.priority}) and name"
            reasons.append(_reason(each, target, text, chosen=True))
        elif _lacks(each, partner):
            reasons.append(_reason(each, target, _why_unpaired(each, [partner])))
        else:
            reasons.append(_reason(each, target, f"{chosen.record.name} comes first by priority and name"))


def _lacks(candidate: _Candidate, partner: _Candidate) -> bool:
    allocator = candidate.record.kind is PluginKind.ALLOCATOR
    return bool(_missing(candidate, partner) if allocator else _missing(partner, candidate))


def _reason(candidate: _Candidate, target: DeviceTarget, text: str, *, chosen: bool = False) -> Reason:
    return Reason(candidate.record.kind, candidate.record.qualified_name, target.torch_device, chosen, text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))


def check_options(
    registry: Registry, options: Mapping[str, Mapping[str, Any]], used: Iterable[PluginRecord], stacklevel: int = 2
) -> None:
    """Check the settings that a caller gave for plugins, also of plugins that are not used.

    A plugin that was not chosen has no use for its settings; what was given is checked, and a warning says that it has
    no effect.

    Args:
        registry: the plugins.
        options: settings by plugin name.
        used: the allocator and the backend that were chosen.
        stacklevel: of the warnings.

    Raises:
        SettingsError: no such plugin is installed or has settings, or a value is wrong, or a name unknown.
    """
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
        unused = _unused(registry, records, given)
        if unused and given:
            message = f"options has settings for {name!r}, which have no effect: {unused}"
            warnings.warn(message, IrisSettingsWarning, stacklevel=stacklevel + 1)
            logger.warning(message)


def _unused(registry: Registry, records: Iterable[PluginRecord], given: Mapping[str, Any]) -> str:
    """Check settings of a plugin that was not chosen; return why they have no effect, or nothing if they may have."""
    reasons, wrong, fits = [], [], False
    for record in records:
        if record.state is PluginState.BLOCKED:
            reasons.append(f"{record.label} is blocked")
            continue
        try:
            load_plugin_settings(record.name, registry.settings_class(record), given)
        except PluginError as error:
            reasons.append(str(error))
        except SettingsError as error:
            wrong.append(error)
        else:
            fits = True
            if record.kind not in (PluginKind.ALLOCATOR, PluginKind.BACKEND):
                return ""  # made when it is first needed
            reasons.append(f"another {record.kind} was chosen")
    if wrong and not fits:
        raise wrong[0]
    return "; ".join(dict.fromkeys(reasons))
