"""Settings: IRIS_* variables, arguments and plugin options, validated when `Iris()` is called.

An argument beats the environment, the environment beats the default.  The core's settings are IRIS_HEAP_SIZE,
IRIS_BACKEND, ...; a plugin's are IRIS_<NAME>__<FIELD> (a "-" in the name becomes "_") or `Iris(options={name: {...}})`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, PrivateAttr
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as _Source
from pydantic_settings import SettingsError as _DecodeError

from iris_core.errors import FAILURES, SettingsError, error_text

PREFIX = "IRIS_"
NESTING = "__"

_S = TypeVar("_S", bound="BaseSettings")


class IrisSettingsWarning(UserWarning):
    """A variable begins with IRIS_ but nothing reads it; probably its name is misspelt."""


class SettingsBase(BaseSettings):
    """Frozen; unknown names are errors; neither .env files nor secret directories are read."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_nested_delimiter=NESTING, env_ignore_empty=True, validate_default=True,
        use_attribute_docstrings=True,
    )  # fmt: skip

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: _Source, env_settings: _Source, *_: Any, **others: Any
    ) -> tuple[_Source, ...]:
        """Read arguments, then the environment if there is a prefix: else a field `path` would be read from PATH."""
        prefixed = isinstance(env_settings, EnvSettingsSource) and env_settings.env_prefix
        return (init_settings, env_settings) if prefixed else (init_settings,)


class PluginSettings(SettingsBase):
    """Base of a plugin's settings class: frozen, unknown names are errors.

    Fields have no aliases and a default each; the docstring below a field is its description in `iris config`.
    Building the class directly reads no environment; the core calls `load_plugin_settings`, which does.

    Example:
        >>> class MySettings(PluginSettings):
        ...     chunk_nbytes: ByteSize = ByteSize(1 << 20)
        ...     "Bytes per chunk."
    """


def size_of(value: Any) -> ByteSize:
    """Return a size in bytes; ValueError if it is none."""
    with contextlib.suppress(ValueError, OverflowError):
        if not isinstance(value, bool):
            return _SIZE.validate_python(value)
    raise ValueError("a size is a number of bytes or text such as 64MiB")


_SIZE = pydantic.TypeAdapter(ByteSize)
_Size = Annotated[ByteSize, BeforeValidator(size_of)]


def sizes_of(nodes: str) -> list[int]:
    """Return the numbers of ranks of nodes; SettingsError if the text says nothing of the kind."""
    if found := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", nodes):
        return [int(found[2])] * int(found[1])
    if re.fullmatch(r"[1-9]\d{0,4}(\+[1-9]\d{0,4})*", nodes):
        return [int(part) for part in nodes.split("+")]
    raise SettingsError(f'IRIS_NODES is like "2x4", two nodes of four ranks, or "3+1", not {nodes!r}')


def _device(value: str) -> str:
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", value):
        raise ValueError("say cpu, cuda or cuda:1")
    return value


_IN_ANY_CASE = BeforeValidator(lambda text: str(text).strip().upper())


def writable(path: str) -> str:
    """Return the path of a file if it can be written; SettingsError if it cannot."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise SettingsError(f"{path} is a folder, where a file belongs")
    if not (os.path.isdir(folder) and os.access(path if os.path.exists(path) else folder, os.W_OK)):
        raise SettingsError(f"{path} cannot be written: its folder is not there, or is read-only")
    return path


def _names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


ORDINARY_CHECKS = ("races", "uninitialised", "bounds")
CHECKS = (*ORDINARY_CHECKS, "schedules")
"""What IRIS_CHECK can name; "schedules" is for several runs with a seed each."""


def _checks(value: Any) -> Any:
    names = _names(value)
    if isinstance(names, (list, tuple)) and (unknown := [each for each in names if each not in CHECKS]):
        raise ValueError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(CHECKS)}")
    return names


def _torch_is_deterministic() -> bool:
    torch = sys.modules.get("torch")  # importing it would make `iris plugins` slow
    return torch is not None and torch.get_deterministic_debug_mode() == 2  # 1 is warn_only


class IrisSettings(SettingsBase):
    """Settings of the core.  Sizes accept "64MiB", "1GiB" or a number of bytes."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    heap_size: Annotated[_Size, Field(ge=4096)] = ByteSize(1 << 30)
    """Size of each rank's symmetric heap."""
    system_size: Annotated[_Size, Field(ge=64 << 10)] | None = None
    """Size of what each rank's heap has beyond that for Iris itself: flags of groups of ranks, and workspaces of their
    collectives; unset: 64 MiB on GPUs, 8 MiB on CPUs, where only what is used takes memory."""
    ccl_workspace: _Size | None = None
    """Largest workspace of a group's collectives, which is as large as the largest call needs; what is larger goes in
    pieces; unset: 256 MiB on GPUs, 32 MiB on CPUs."""
    tune: Literal["first", "off", "exhaustive"] | None = None
    """Whether the first call of a kind measures algorithms where no table has a measured point near to it: "first"
    measures the few that may be the fastest, "exhaustive" all with all their launches, also near measured points, "off"
    none; unset: first on GPUs, off on CPUs."""
    deterministic: bool = Field(default_factory=_torch_is_deterministic)
    """Whether reductions have the same bits in every call, by whatever algorithm (docs/collectives.md); unset: whether
    torch.use_deterministic_algorithms(True) was called before, without warn_only."""
    cache_dir: str = Field(
        default_factory=lambda: os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "iris")
    )
    """Folder for what Iris measures on this machine: tables of collectives; default: iris in the user's cache."""
    allocator: Annotated[str, Field(min_length=1)] = "auto"
    """Allocator by name, `name@distribution`, or "auto"."""
    backend: Annotated[str, Field(min_length=1)] = "auto"
    """Device backend by name, `name@distribution`, or "auto"."""
    device: Annotated[str, AfterValidator(_device)] | None = None
    """Device of this rank ("cpu", "cuda", "cuda:1"); unset: a GPU where one is usable, otherwise the CPU."""
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], _IN_ANY_CASE] = "WARNING"
    """Level of the logger "iris": DEBUG, INFO, WARNING or ERROR."""
    block: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = ()
    """Plugins that are never loaded: `name` or `name@distribution`, separated by commas."""
    device_timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Bound in seconds of every wait inside a kernel; unset: unbounded."""
    watchdog: Annotated[float, Field(ge=0, le=1e9)] = 60.0
    """Seconds after which a wait inside a kernel that has no bound is warned about; 0: never."""
    barrier_timeout: Annotated[float, Field(gt=0, le=1e9)] = 300.0
    """Bound in seconds of host barriers and exchanges between ranks."""
    check: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_checks)] = ()
    """What kernels on CPU ranks are checked for: "races", "uninitialised", "bounds", "schedules", separated by commas
    (docs/checking.md)."""
    check_seed: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^order:[0-9.]*(~[0-9:;,+-]*)?$")] = 0
    """Which schedule kernels on CPU ranks run in, and how weak their memory is, where `check` names "schedules"; or an
    order that `iris check --all-orders` has named, such as "order:1.0.2"."""
    check_reports: Annotated[str, Field(min_length=1), AfterValidator(writable)] | None = None
    """File to which findings of the checker are appended, one JSON object a line, and the program goes on; unset: the
    first finding is raised."""
    check_timeline: bool = False
    """Whether that file says what programs did around the findings, too; `iris check --timeline` draws it."""
    nodes: Annotated[str, AfterValidator(lambda nodes: sizes_of(nodes) and nodes)] | None = None
    """How to divide the ranks of one host into nodes, for trials: "2x4", "3+1"; unset: each host is a node."""

    _given: frozenset[str] = PrivateAttr(default=frozenset())

    def source(self, name: str) -> str:
        """Return where a setting's value came from: "argument", "environment" or "default"."""
        if name not in self.model_fields_set:
            return "default"
        return "argument" if name in self._given else "environment"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as `iris config` shows it."""

    variable: str  #: environment variable that sets it
    type: str  #: what it accepts
    value: Any  #: its value now
    source: str  #: "default" or "environment"
    help: str  #: what it is for
    plugin: str = ""  #: the plugin that it belongs to; empty for the core


def plugin_prefix(name: str) -> str:
    """Return what the variables of a plugin begin with: "IRIS_MY_PLUGIN__" for "my-plugin"."""
    return PREFIX + name.upper().replace("-", "_") + NESTING


def load_settings(**given: Any) -> IrisSettings:
    """Read the core's settings.

    Args:
        **given: values of the caller, which beat the environment; None means "not given": the environment decides, as
            for an allocator or backend that is "auto".

    Raises:
        SettingsError: a value is wrong or a name unknown; says which variable or argument, its value and source.
    """
    open_to = {"allocator": "auto", "backend": "auto"}
    arguments = {name: value for name, value in given.items() if value not in (None, open_to.get(name))}
    _refuse_unknown(arguments, IrisSettings, "argument {!r} is not a setting of Iris")
    settings = _build(IrisSettings, PREFIX, arguments, "argument {name}={value!r}")
    settings._given = frozenset(arguments)
    return settings


def load_plugin_settings(
    name: str, cls: type[PluginSettings], options: Mapping[str, Any] | None = None
) -> PluginSettings:
    """Read one plugin's settings of class `cls` from the caller's options, then from IRIS_<NAME>__<FIELD>.

    Raises:
        SettingsError: a value is wrong or a name unknown; says which, where it came from, and close matches.
    """
    options = dict(options or {})
    _refuse_unknown(options, cls, f"options[{name!r}] has {{!r}}, which is not a setting of plugin {name!r}")
    prefix = plugin_prefix(name)
    for variable in _environment(prefix):
        field = variable[len(prefix) :].lower().split(NESTING)[0]
        if field not in cls.model_fields:
            known = [prefix + each.upper() for each in cls.model_fields]
            raise SettingsError(
                f"{variable} (from the environment) is not a setting of plugin {name!r}"
                + nearest(variable.upper(), known, prefix)
            )
    return _build(cls, prefix, options, f"options[{name!r}][{{name!r}}]={{value!r}}")


def unknown_variables(plugin_names: Iterable[str]) -> list[str]:
    """Return a message on every variable that begins with IRIS_ and that nothing reads, with the nearest name.

    What begins with IRIS_<NAME>__ belongs to the plugin of that name; pydantic-settings ignores unknown ones silently.
    """
    prefixes = [plugin_prefix(name) for name in plugin_names]
    known = [PREFIX + field.upper() for field in IrisSettings.model_fields]
    messages = []
    for variable in _environment(PREFIX):
        name = variable.upper()
        if name in known or any(name.startswith(prefix) for prefix in prefixes):
            continue
        what, near = "Iris has no such setting", nearest(name, known, PREFIX)
        if NESTING in name:
            what = "no plugin of that name is installed"
            near = nearest(name.partition(NESTING)[0] + NESTING, prefixes, PREFIX)
        meant = [prefix for prefix in prefixes if name.startswith(prefix[:-1])]  # IRIS_TRITON__X by IRIS_TRITON_X
        hint = f"; settings of that plugin begin with {meant[0]}" if meant else ""
        messages.append(f"{variable} is set, but {what}{near}{hint}")
    return messages


def describe(plugin: str = "", cls: type[PluginSettings] | None = None) -> tuple[SettingRow, ...]:
    """Return the settings of a plugin, by its name and settings class, or of the core, with type, value and source.

    Raises:
        SettingsError: a value is wrong or a name unknown.
    """
    settings = load_settings() if cls is None else load_plugin_settings(plugin, cls)
    prefix = PREFIX if cls is None else plugin_prefix(plugin)
    rows = []
    for name, field in type(settings).model_fields.items():
        value, kind, variable = getattr(settings, name), _type_name(field.annotation), prefix + name.upper()
        if isinstance(value, pydantic.BaseModel):
            value = value.model_dump(mode="json")
        source = "environment" if name in settings.model_fields_set else "default"
        rows.append(SettingRow(variable, kind, value, source, field.description or "", plugin))
    return tuple(rows)


def _environment(prefix: str) -> dict[str, str]:
    """Return the variables that begin with `prefix` in any case; empty ones count as unset."""
    return {name: value for name, value in sorted(os.environ.items()) if name.upper().startswith(prefix) and value}


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown name; a common prefix does not make two names similar."""
    rests = sorted(each.removeprefix(prefix) for each in known)
    if close := difflib.get_close_matches(name.removeprefix(prefix), rests, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{close[0]}?"
    return f"; known are {', '.join(prefix + rest for rest in rests)}" if rests else "; there are none"


def _refuse_unknown(given: Mapping[str, Any], cls: type[BaseSettings], message: str) -> None:
    for name in given:
        if name not in cls.model_fields:
            raise SettingsError(message.format(name) + nearest(name, cls.model_fields))


def _build(cls: type[_S], prefix: str, given: Mapping[str, Any], label: str) -> _S:
    """Build a settings object; `label` is the format of the name of a value that the caller gave."""
    try:
        return cls(_env_prefix=prefix, **given)
    except pydantic.ValidationError as error:
        problems = [_problem(dict(detail), prefix, given, label) for detail in error.errors()]
        raise SettingsError("; ".join(problems)) from error
    except _DecodeError as error:  # a structured value that is not JSON
        raise SettingsError(f"a variable {prefix}... is not valid JSON: {error}") from error
    except FAILURES as error:  # of a plugin's own code
        way = "update the plugin, or block it with IRIS_BLOCK"
        raise SettingsError(f"making the settings {prefix}... raised {error_text(error)}; {way}") from error


def _problem(detail: dict[str, Any], prefix: str, given: Mapping[str, Any], label: str) -> str:
    path = [str(part) for part in detail["loc"]]
    reason = str(detail["msg"]).removeprefix("Value error, ")
    variable = prefix + NESTING.join(path).upper()
    environment = {name.upper(): value for name, value in _environment(prefix).items()}
    if path and path[0] in given:
        where = label.format(name=path[0], value=given[path[0]])
    elif variable in environment:
        where = f"{variable}={environment[variable]!r} (from the environment)"
    elif detail["type"] == "missing":
        return f"{variable} is required and not set"
    else:  # part of a structured value, or a default that does not hold
        where = f"{variable}={detail['input']!r}"
    return f"{where} is not valid: {reason}"


def _type_name(annotation: Any) -> str:
    if annotation is ByteSize:
        return "size"
    if annotation is type(None):
        return "unset"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if hasattr(annotation, "__metadata__"):  # Annotated[T, ...]
        return _type_name(get_args(annotation)[0])
    origin = str(getattr(annotation, "__origin__", ""))
    if "tuple" in origin or "list" in origin:
        return "names, separated by commas" if get_args(annotation)[0] is str else "list, as JSON"
    return " | ".join(_type_name(part) for part in get_args(annotation)) or str(annotation)
