"""What several subcommands share: arguments that are checked before a rank is started, GPUs, plugins."""

from __future__ import annotations

import argparse
import re

from iris_core.errors import ArgumentError
from iris_core.registry import Registry, default_registry
from iris_core.types import PluginKind


def seconds(text: str) -> float:
    """Return a bound in seconds, more than 0 and at most a day; the type of an option."""
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: a bound is a number of seconds above 0, and at most a day")
    return value


def num_gpus() -> int:
    """Return how many GPUs torch sees; 0 on a machine without."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def registry_as_set() -> Registry:
    """Return the registry, in which plugins are blocked as the settings say; a `SettingsError` if one is wrong."""
    from iris_core.settings import load_settings

    default_registry().block(load_settings().block)
    return default_registry()


def check(args: argparse.Namespace, least_ranks: int = 1) -> None:
    """Refuse what no machine has: numbers of ranks, devices and plugins by name.

    Raises:
        ArgumentError, PluginNotFoundError, PluginConflictError: an argument is wrong.
    """
    if args.ranks is not None and args.ranks < least_ranks:
        why = "--ranks must be at least 1", "one rank leaves nothing to choose: --ranks 2 or more"
        raise ArgumentError(why[least_ranks > 1])
    if args.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ArgumentError(f"--device {args.device}: say cpu, cuda or cuda:1")
    for kind, name in ((PluginKind.ALLOCATOR, args.allocator), (PluginKind.BACKEND, args.backend)):
        if name != "auto":
            default_registry().resolve(kind, name)
