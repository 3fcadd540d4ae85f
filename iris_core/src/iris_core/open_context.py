"""Opening: from a context's arguments to a heap that all ranks share, on all of them or on none.

Every step that can fail on a single rank is followed by an exchange, so the others raise, too (`on_all_ranks`).
Nothing here refers to the context: a context holds what was opened, never the other way round.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from iris_core.device import context_words
from iris_core.device.barrier import GRAPHS, DeviceBarriers
from iris_core.device.reports import KernelReports
from iris_core.device.status import STANDSTILL_NBYTES, Standstill, StatusPage
from iris_core.device.targets import device_targets
from iris_core.errors import IrisError, SettingsError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.streams import TorchStreams
from iris_core.logs import set_logger_level
from iris_core.protocols import Allocator, DeviceBackend
from iris_core.registry import PluginRecord, default_registry, select
from iris_core.registry.select import Plan, check_options
from iris_core.settings import IrisSettings, IrisSettingsWarning, load_plugin_settings, load_settings, unknown_variables
from iris_core.types import VERSION, ContextSpec, CreateRequest, DeviceTarget, DeviceType
from iris_core.world import Arrival, World
from iris_core.world.failures import check_agreement, on_all_ranks

Options = Mapping[str, Mapping[str, Any]]

T = TypeVar("T")

_SYSTEM_NBYTES_GPU = 64 << 20  # the defaults of IRIS_SYSTEM_SIZE
_SYSTEM_NBYTES_CPU = 8 << 20
_GAP_NBYTES = 1024  # behind each block, where IRIS_CHECK names "bounds"


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes what plugins offer for this rank; `options` are settings of plugins by plugin name."""

    world: World
    target: DeviceTarget
    settings: IrisSettings
    options: Options

    def create(self, record: PluginRecord) -> Any:
        """Return a plugin's allocator, backend or algorithm."""
        registry = default_registry()
        given = self.options.get(record.name, {})
        settings = load_plugin_settings(record.name, registry.settings_class(record), given)
        nbytes = int(self.settings.heap_size) + self.system_nbytes
        request = CreateRequest(self.target, self.world.rank, self.world.world_size, nbytes, settings)
        return registry.create(record, request)

    @property
    def system_nbytes(self) -> int:
        """Size of the system area in bytes."""
        if self.settings.system_size is not None:
            return int(self.settings.system_size)
        return _SYSTEM_NBYTES_CPU if self.target.type is DeviceType.CPU else _SYSTEM_NBYTES_GPU


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open context; `maker` is for plugins that are made later."""

    world: World
    plan: Plan
    maker: Maker
    allocator: Allocator
    backend: DeviceBackend
    heap: SymmetricHeap
    device_barriers: DeviceBarriers
    reports: KernelReports
    spec: ContextSpec
    context_tensor: torch.Tensor


def open_heap(
    asked: Mapping[str, Any],
    options: Options,
    arrival: Arrival,
    *,
    on_allocated: Callable[[int, int], None],
    undo: contextlib.ExitStack,
) -> Opened:
    """Open everything that a context needs before there are collectives.

    Collective: every rank calls it with the same arguments: the core's settings that were asked for, None where the
    environment decides, and `options` of plugins by name.  `undo` gets what closes each thing that was opened; the
    caller closes it, also after an error.  Raises as `iris_core.Iris` does.
    """
    settings = load_settings(**asked)
    if settings.source("log_level") != "default":  # else what the program set itself stays
        set_logger_level(settings.log_level)
    world = arrival.open(settings.barrier_timeout)
    undo.push(lambda kind, error, trace: world.close(error))
    if world.rank == world.local_members[0]:
        for message in unknown_variables(default_registry().names()):
            warnings.warn(message, IrisSettingsWarning, stacklevel=3)  # the context's caller

    def choose() -> Plan:
        place = world.local_members.index(world.rank)
        plan = select.select(default_registry(), settings, targets=device_targets(settings.device, place))
        # the level: choose, on_all_ranks and its caller, open_heap, the context, its caller
        check_options(default_registry(), options, (plan.allocator, plan.backend), stacklevel=6)
        return plan

    plan = _on_all(world, "choose plugins", choose)
    target = plan.target
    maker = Maker(world, target, settings, options)
    facts = plan_facts(plan, int(settings.heap_size))
    facts |= {"system_size": str(maker.system_nbytes), "IRIS_CHECK_SEED": str(settings.check_seed)}
    facts |= {"IRIS_CCL_WORKSPACE": "default" if settings.ccl_workspace is None else str(int(settings.ccl_workspace))}
    facts |= {"deterministic": str(settings.deterministic), "IRIS_CHECK": ", ".join(settings.check)}
    facts |= {"IRIS_NODES": settings.nodes or "", "IRIS_TUNE": settings.tune or "default"}
    check_agreement(world, facts)
    if target.type is not DeviceType.CPU:
        torch.cuda.set_device(target.index)
    allocator: Allocator = _on_all(
        world, f"create allocator {plan.allocator.name!r}", lambda: maker.create(plan.allocator)
    )
    undo.callback(allocator.close)
    backend: DeviceBackend = _on_all(world, f"create backend {plan.backend.name!r}", lambda: maker.create(plan.backend))

    def make_heap() -> SymmetricHeap:
        whole = -(-int(settings.heap_size) // allocator.granularity) * allocator.granularity
        return SymmetricHeap(
            allocator,
            world,
            on_allocated=on_allocated,
            usable_nbytes=min(whole, allocator.nbytes - maker.system_nbytes),  # what lies beyond it is the system area
            streams=None if target.type is DeviceType.CPU else TorchStreams(target.index),
            device=target.torch_device,
            gap_nbytes=_GAP_NBYTES if "bounds" in settings.check else 0,
        )

    heap: SymmetricHeap = _on_all(world, f"make a heap by allocator {plan.allocator.name!r}", make_heap)
    _on_all(world, "open the heap", heap.open)
    undo.callback(heap.close)
    undo.callback(backend.detach)  # before the next steps: any may fail on another rank only
    area = heap.system_area
    barriers = DeviceBarriers(heap, world, backend, 0 if target.type is DeviceType.CPU else GRAPHS)

    def clear() -> None:
        area.clear()
        heap.streams.synchronize()  # a peer may store there as soon as it is open

    _on_all(world, "clear the system area", clear)
    if target.type is DeviceType.CPU:
        row = heap.usable_nbytes + area.reserve_at_opening(STANDSTILL_NBYTES)
        rows = [heap.heap_bases[rank] + row for rank in world.local_members]  # no one else can end a wait
        heap.standstill = Standstill(rows, world.local_members.index(world.rank))
    page = StatusPage(world)

    def make_context() -> tuple[KernelReports, ContextSpec, torch.Tensor]:
        reports = KernelReports(target, page, heap, settings.device_timeout, settings.watchdog)
        spec = ContextSpec(
            rank=world.rank,
            world_size=world.world_size,
            heap_bases=heap.heap_bases,
            timeout_ns=reports.timeout_ns,
            status_ptr=reports.words.data_ptr(),
            report_range=(page.address, page.nbytes),
            device=target.torch_device,
            network=heap.network_words(),
        )
        return reports, spec, backend.make_context(spec)

    reports, spec, tensor = _on_all(world, "make the device context", make_context)
    reports.describers.append(barriers.explain_report)
    undo.callback(reports.close)
    _on_all(world, "attach the backend", lambda: backend.attach(heap))
    if settings.check:
        _on_all(world, "start the checker", lambda: _start_checker(settings, backend, target, heap, world))
    return Opened(world, plan, maker, allocator, backend, heap, barriers, reports, spec, tensor)


def _start_checker(
    settings: IrisSettings, backend: DeviceBackend, target: DeviceTarget, heap: SymmetricHeap, world: World
) -> None:
    start = getattr(backend, "start_checker", None)
    if start is None or target.type is not DeviceType.CPU or world.spans_nodes:
        raise UnsupportedError(
            f"IRIS_CHECK={','.join(settings.check)} needs CPU ranks of one node and a backend whose kernels run there, "
            f"not {backend.info.name!r} on {target.torch_device}: open it with device='cpu', or unset IRIS_CHECK"
        )
    if settings.check_seed and "schedules" not in settings.check:
        raise SettingsError(f"IRIS_CHECK_SEED={settings.check_seed} needs schedules in IRIS_CHECK, or is to be unset")
    start(settings.check, settings.check_reports, settings.check_timeline, heap, world, settings.check_seed)
    if settings.check_reports is not None:
        open(settings.check_reports, "a").close()  # that it is there says that something is checked


def _on_all(world: World, what: str, step: Callable[[], T]) -> T:
    return on_all_ranks(world, f"could not {what}", step, IrisError)


def plan_facts(plan: Plan, heap_nbytes: int) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, for `check_agreement`."""
    return {
        "iris-core": VERSION,
        "torch": torch.__version__,
        "heap_size": str(heap_nbytes),
        "device type": plan.target.type.value,
        "device architecture": plan.target.arch or "any",
        "allocator": f"{plan.allocator.name} ({plan.allocator.distribution} {plan.allocator.version})",
        "backend": f"{plan.backend.name} ({plan.backend.distribution} {plan.backend.version})",
        "context layout": str(context_words.CONTEXT_LAYOUT),
    }
