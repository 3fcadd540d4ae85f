"""Where algorithms come from: the core itself, the backend, and plugins of the group iris.collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from iris_core.dispatch import COLLECTIVES, PRODUCTS
from iris_core.dispatch.requests import OPS, REDUCING
from iris_core.errors import FAILURES, PluginError
from iris_core.protocols import Algorithm
from iris_core.providers import torch_distributed, torch_symmetric
from iris_core.providers.baseline import Unfused
from iris_core.providers.exchanged import Exchanged
from iris_core.providers.hierarchical import STEPS, Hierarchical
from iris_core.providers.model import everywhere
from iris_core.providers.norms import UnfusedNorm
from iris_core.providers.overlapped import Overlapped
from iris_core.providers.straight import StraightAllToAll
from iris_core.registry import PluginRecord, default_registry
from iris_core.types import (
    Availability,
    Capability,
    CollectiveRequest,
    DeviceTarget,
    DeviceType,
    PluginKind,
    PluginState,
)
from iris_core.world import World

_BYTES_PER_S, _LAUNCH_S = 1e11, 2e-6


class Local:
    """A collective of a group of one rank: a copy, or nothing."""

    name = "local"
    info: ClassVar = everywhere("local", "collectives of groups of one rank")

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, request: CollectiveRequest) -> Availability:
        if request.group_size > 1:
            return Availability.no(f"it serves groups of one rank, and this group has {request.group_size}")
        if request.options.get("config"):
            return Availability.no(f"it has no use for {', '.join(request.options['config'])} of the config")
        if request.options.get("device_splits"):
            return Availability.no("it copies all rows, and knows no split sizes of devices")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        return _LAUNCH_S + request.nbytes / _BYTES_PER_S

    def prepare(self, request: CollectiveRequest, context: Any) -> None:
        """Nothing is needed."""

    def launch(self, plan: None, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Copy the input to the output, if they are not the same memory."""
        if out is None or inp is None or (out.data_ptr() == inp.data_ptr() and out.stride() == inp.stride()):
            return
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            out.copy_(inp.view(out.shape))


class Providers:
    """The algorithms of one context, whose parts have been `opened`, and the measured tables that come with them."""

    def __init__(self, opened: Any) -> None:
        self._backend: Any = opened.backend
        self._target: DeviceTarget = opened.plan.target
        self._torch = "gloo" if self._target.type is DeviceType.CPU else "nccl"
        self._create: Callable[[PluginRecord], Any] = opened.maker.create
        self._provides: frozenset[Capability] = opened.allocator.info.provides
        self._ranks, self._spans_nodes = opened.world.torch_ranks, opened.world.spans_nodes
        self._records = default_registry().records(PluginKind.COLLECTIVE)
        self._plugins: tuple[list[Algorithm[Any]], list[tuple[str, str]]] | None = None

    def tables(self, is_fused: bool) -> Sequence[Path]:
        """Return folders with tables of the backend, for `ctx.ccl` or `ctx.ops`."""
        found: Sequence[Path] = getattr(self._backend, "operation_tables" if is_fused else "tables", tuple)()
        return found

    def found(self, is_fused: bool = False) -> tuple[list[Algorithm[Any]], list[tuple[str, str]]]:
        """Return all algorithms of `ctx.ccl`, or of `ctx.ops`, and plugins that bring none, with the reason."""
        own: list[Any]
        if is_fused:
            own = [kind(op) for kind in (Unfused, *([Overlapped] * self._spans_nodes)) for op in PRODUCTS]
            own.append(UnfusedNorm())
            torchs: list[Any] = [torch_distributed.UnfusedTorch(op, self._torch, self._ranks) for op in PRODUCTS]
            torchs += [torch_symmetric.AsyncProduct(op, self._torch) for op in torch_symmetric.PRODUCTS]
        else:
            own = [Local(op) for op in COLLECTIVES]
            kinds = OPS if self._spans_nodes else COLLECTIVES
            torchs = [torch_distributed.TorchCollective(op, self._torch, self._ranks) for op in kinds]
            if self._torch == "nccl":
                torchs.append(torch_symmetric.SymmetricSum(self._torch, self._ranks))
            if self._spans_nodes:
                own += [*(Hierarchical(op) for op in STEPS), *(Exchanged(op) for op in REDUCING)]
                own += [StraightAllToAll(each) for each in torchs if each.op == "all_to_all"]
        offered: Sequence[Algorithm[Any]] = getattr(self._backend, "operations" if is_fused else "collectives", tuple)()
        if self._plugins is None:
            self._plugins = self._load()
        plugins, unusable = self._plugins
        return [*own, *offered, *plugins, *torchs], unusable

    def open_messages(self, world: World) -> None:
        """Let ranks on several nodes send messages.  Collective: every rank calls it, while the context is opened."""
        if self._spans_nodes:
            torch_distributed.open_messages(self._ranks, self._torch, world)

    def _load(self) -> tuple[list[Algorithm[Any]], list[tuple[str, str]]]:
        """Create the algorithms of plugins; one that does not work is logged, and does not hurt the others."""
        found: list[Algorithm[Any]] = []
        unusable: list[tuple[str, str]] = []
        for record in self._records:
            try:
                if not (reason := self._obstacle(record)):
                    algorithm = self._create(record)
                    if not all(isinstance(each, str) for each in (algorithm.op, algorithm.name, algorithm.info.name)):
                        raise PluginError("op, name and info.name of its algorithm must be text")
                    found.append(algorithm)
                    continue
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
        if (info := registry.load(record).info) is None:
            raise PluginError(f"{record.label} says nothing about itself")
        if self._target.type not in info.devices:
            return f"it works on {', '.join(sorted(info.devices))} only"
        if missing := info.requires - self._provides:
            return f"it needs {', '.join(sorted(missing))}, which the allocator does not provide"
        answer = registry.probe(record, self._target)
        return "" if answer else f"unavailable: {answer.reason or 'its probe gave no reason'}"
