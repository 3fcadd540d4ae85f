"""Where algorithms come from: the core itself, the backend, and plugins of the group iris.collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris_core.errors import FAILURES, PluginError
from iris_core.providers import torch_distributed
from iris_core.providers.baseline import local_algorithms, product_algorithms
from iris_core.registry import default_registry
from iris_core.types import DeviceType, PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from iris_core.protocols import Algorithm
    from iris_core.registry import PluginRecord
    from iris_core.types import Capability, DeviceTarget


class Providers:
    """The algorithms of one context, and the measured tables that come with them.

    Args:
        backend: of the context.
        target: device of this rank.
        create: makes the algorithm of a plugin for this rank.
        provides: what the allocator's memory can do.
    """

    def __init__(
        self,
        backend: Any,
        target: DeviceTarget,
        create: Callable[[PluginRecord], Any],
        provides: frozenset[Capability],
    ) -> None:
        self._backend = backend
        self._target = target
        self._groups = torch_distributed.Groups("gloo" if target.type is DeviceType.CPU else "nccl")
        self._create = create
        self._provides = provides
        self._plugins: tuple[list[Algorithm[Any]], list[tuple[str, str]]] | None = None
        self._added: list[Algorithm[Any]] = []

    def tables(self, is_fused: bool) -> Sequence[Path]:
        """Return folders with tables of the backend, for `ctx.ccl` or `ctx.ops`."""
        found: Sequence[Path] = getattr(self._backend, "operation_tables" if is_fused else "tables", tuple)()
        return found

    def found(self, is_fused: bool = False) -> tuple[list[Algorithm[Any]], list[tuple[str, str]]]:
        """Return all algorithms of `ctx.ccl`, or of `ctx.ops`, and plugins that bring none, with the reason."""
        own = product_algorithms() if is_fused else local_algorithms()
        torchs: list[Any]
        if is_fused:
            torchs = torch_distributed.products(self._groups)
        else:
            name = self._groups.backend
            torchs = [torch_distributed.TorchCollective(op, name, self._groups) for op in torch_distributed.COLLECTIVES]
        offered: Sequence[Algorithm[Any]] = getattr(self._backend, "operations" if is_fused else "collectives", tuple)()
        if self._plugins is None:
            self._plugins = self._load()
        plugins, unusable = self._plugins
        return [*own, *offered, *plugins, *self._added, *torchs], unusable

    def add(self, algorithms: Sequence[Algorithm[Any]]) -> None:
        """Add more."""
        self._added += algorithms

    def _load(self) -> tuple[list[Algorithm[Any]], list[tuple[str, str]]]:
        """Create the algorithms of plugins; one that does not work is logged, and does not hurt the others."""
        found: list[Algorithm[Any]] = []
        unusable: list[tuple[str, str]] = []
        for record in default_registry().records(PluginKind.COLLECTIVE):
            try:
                reason = self._obstacle(record)
                if not reason:
                    algorithm = self._create(record)
                    if all(isinstance(each, str) for each in (algorithm.op, algorithm.name, algorithm.info.name)):
                        found.append(algorithm)
                        continue
                    raise PluginError("op, name and info.name of its algorithm must be text")
            except FAILURES as error:
                record.leave_out(error)
                reason = str(error)
            unusable.append((record.label, reason))
        return found, unusable

    def _obstacle(self, record: PluginRecord) -> str:
        """Why a plugin cannot be used here; empty if it can."""
        if record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
            return f"{record.state}: {record.reason}"
        registry = default_registry()
        info = registry.load(record).info
        if info is None:
            raise PluginError(f"{record.label} says nothing about itself")
        if self._target.type not in info.devices:
            return f"it works on {', '.join(sorted(info.devices))} only"
        if missing := info.requires - self._provides:
            return f"it needs {', '.join(sorted(missing))}, which the allocator does not provide"
        answer = registry.probe(record, self._target)
        return "" if answer else f"unavailable: {answer.reason or 'its probe gave no reason'}"
