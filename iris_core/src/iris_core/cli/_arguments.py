"""What several subcommands share: arguments that are checked before a rank is started, variables, plugins."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
import tempfile

from iris_core.device.targets import device_targets
from iris_core.errors import ArgumentError, NoUsablePluginError
from iris_core.registry import Registry, default_registry
from iris_core.registry.select import Plan, select
from iris_core.settings import (
    IrisSettings,
    load_plugin_settings,
    load_settings,
    size_of,
    sizes_of,
    unknown_variables,
    writable,
)
from iris_core.types import PluginKind, PluginState
from iris_core.world.launch import check_num_ranks


def seconds(text: str) -> float:
    """Return a bound in seconds, more than 0 and at most a day; the type of an option."""
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: a bound is a number of seconds above 0, and at most a day")
    return value


def size(text: str) -> int:
    """Return a size in bytes; the type of an option."""
    try:
        return int(size_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def file_to_write(path: str) -> str:
    """Return the path of a file to write, or "", and make its folder; an `IrisError` if it cannot be."""
    folder = pathlib.Path(path).parent
    try:
        if path:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError(f"no file can be made in {folder} ({error.strerror}): name one by --out") from error
    return path and writable(path)


def say_unknown_variables() -> None:
    """Print a line for each variable that nothing reads; ranks and programs of this process do not warn of it again."""
    for message in unknown_variables(default_registry().names()):
        print(f"iris: {message}", file=sys.stderr)
        filters = os.environ.get("PYTHONWARNINGS", ""), f"ignore:{message.partition(',')[0]}"
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))


def registry_as_set() -> Registry:
    """Return the registry, in which plugins are blocked as the settings say; a `SettingsError` if one is wrong."""
    default_registry().block(load_settings().block)
    return default_registry()


def block_in_ranks() -> None:
    """Leave in IRIS_BLOCK what is installed, now that the rest was named here: ranks say no more of it."""
    if "IRIS_BLOCK" in os.environ:
        blocked = (each.qualified_name for each in default_registry().records() if each.state is PluginState.BLOCKED)
        os.environ["IRIS_BLOCK"] = ",".join(blocked)


def check(args: argparse.Namespace, least_ranks: int = 1) -> tuple[IrisSettings, int | None]:
    """Return the settings and the number of ranks, None if nothing says it; an IrisError if an argument is wrong."""
    asked = {name: getattr(args, name, None) for name in ("device", "nodes", "allocator", "backend")}
    settings = load_settings(**asked)
    ranks = sum(sizes_of(settings.nodes)) if settings.nodes else args.ranks
    if args.ranks not in (None, ranks):
        raise ArgumentError(f"nodes {settings.nodes} have {ranks} ranks, --ranks says {args.ranks}")
    if ranks is not None:
        check_num_ranks(ranks, "ranks of all nodes" if settings.nodes else "--ranks", least_ranks)
    for kind in (PluginKind.ALLOCATOR, PluginKind.BACKEND):
        if (name := getattr(settings, kind.value)) != "auto":
            default_registry().resolve(kind, name)
    return settings, ranks


def choose_plugins(settings: IrisSettings, device: str | None) -> Plan:
    """Choose plugins as a rank on this device will, and check their settings; an error of one line if none can."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    registry = default_registry()
    packages = {PluginKind.ALLOCATOR: "./iris_allocators", PluginKind.BACKEND: "./iris_triton"}
    if missing := {kind: package for kind, package in packages.items() if not registry.records(kind)}:
        ways = " ".join(missing.values())
        raise ArgumentError(f"no {' and no '.join(missing)} is installed: pip install {ways}")
    try:
        plan = select(registry, settings, targets=device_targets(device, 0))
    except NoUsablePluginError as error:
        head, *more = str(error).splitlines()
        reasons = {text: plugin for plugin, text in error.reasons.items() if more and not text.startswith("no usable")}
        of_backends = [text for text, plugin in reasons.items() if plugin.startswith("backend")]
        raise ArgumentError(f"{head} {'; '.join(of_backends or reasons)}".rstrip()) from error
    for record in (plan.allocator, plan.backend):
        load_plugin_settings(record.name, registry.settings_class(record))
    block_in_ranks()
    return plan
