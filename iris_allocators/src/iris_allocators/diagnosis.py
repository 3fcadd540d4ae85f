"""What the allocators need of GPUs and drivers, for `iris doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from iris_allocators.driver import device_facts, peer_facts, topology_command
from iris_core.diagnosis import Finding, Verdict
from iris_core.types import CreateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_allocators.driver.facts import DeviceFacts, PeerFacts
    from iris_core.protocols import Allocator
    from iris_core.settings import PluginSettings
    from iris_core.types import DeviceTarget

    Create = Callable[[CreateRequest], Allocator]

_TRIAL_NBYTES = 2 << 20
_FAILURES = (ImportError, OSError, RuntimeError)
"""What bindings raise where the driver or a library of it is missing, and what the drivers' errors are."""


def diagnose_torch(targets: Sequence[DeviceTarget], create: Create, settings: PluginSettings) -> list[Finding]:
    """Say whether memory can be shared by IPC handle, and what the ways between the GPUs can do.

    Args:
        targets: the GPUs.
        create: makes the allocator.
        settings: its settings.
    """
    if not targets:
        return []
    tried = _tried(targets[0], create, settings)
    if tried:
        text = f"the driver makes none on {targets[0].torch_device} ({tried}): take allocator='vmem'"
        return [Finding("IPC handles", Verdict.NOTE, text)]
    verdict, lines, data = _peers(targets)
    lines.insert(0, f"can be made (tried on {targets[0].torch_device})")
    return [Finding("IPC handles", verdict, "\n".join(lines), data)]


def diagnose_vmem(targets: Sequence[DeviceTarget], create: Create, settings: PluginSettings) -> list[Finding]:
    """Say whether there is virtual memory management and by which handles its memory can be shared.

    Args:
        targets: the GPUs.
        create: makes the allocator.
        settings: its settings.
    """
    if not targets:
        return []
    try:
        facts = {target.index: device_facts(target) for target in targets}
    except _FAILURES as error:
        return [Finding("virtual memory", Verdict.BROKEN, f"the driver cannot be asked: {_text(error)}")]
    data: dict[str, Any] = {"devices": {str(index): asdict(each) for index, each in facts.items()}}
    lacking = [str(i) for i, each in facts.items() if each.virtual_memory is False or each.fd_handles is False]
    if lacking:
        text = f"GPU {', '.join(lacking)} or the driver cannot manage it, or not share it by file descriptor"
        memory = Finding("virtual memory", Verdict.NOTE, f"{text}: take allocator='torch'", data)
    elif tried := _tried(targets[0], create, settings):
        text = f"reported, but it cannot be made and exported on {targets[0].torch_device}: {tried}"
        memory = Finding("virtual memory", Verdict.BROKEN, f"{text}. Take allocator='torch'", data)
    else:
        verdict, lines, peers = _peers(targets)
        lines.insert(0, f"can be made and shared by file descriptor (tried on {targets[0].torch_device})")
        memory = Finding("virtual memory", verdict, "\n".join(lines), {**data, **peers})
    return [memory, *_further(facts)]


def _tried(target: DeviceTarget, create: Create, settings: PluginSettings) -> str:
    """Why a small heap cannot be made and exported; empty if it can."""
    try:
        # as rank 0 of two: alone, nothing would have to be exported
        allocator = create(CreateRequest(target, rank=0, world_size=2, heap_nbytes=_TRIAL_NBYTES, settings=settings))
        try:
            allocator.commit(0, allocator.granularity)
            for segment in allocator.export():
                if segment.fd is not None:
                    os.fstat(segment.fd)  # it is one; the allocator closes it
        finally:
            allocator.close()
    except Exception as error:  # noqa: BLE001 - whatever torch or the driver raises is what was found
        return _text(error)
    return ""


def _peers(targets: Sequence[DeviceTarget]) -> tuple[Verdict, list[str], dict[str, Any]]:
    """What the ways between the GPUs can do: verdict, lines and data; nothing to say of a single GPU."""
    if len(targets) < 2:
        return Verdict.OK, [], {}
    try:
        facts = {
            (one.index, other.index): peer_facts(one, other) for one in targets for other in targets if one != other
        }
    except _FAILURES as error:
        return Verdict.NOTE, [f"the driver cannot be asked about the ways between GPUs: {_text(error)}"], {}
    data = {"pairs": [{"from": one, "to": other, **asdict(each)} for (one, other), each in facts.items()]}
    lines, verdict = [], Verdict.OK
    for name, without in (
        ("access", "heaps cannot be mapped there"),
        ("native_atomics", "atomics on a peer may get lost where both sides do some"),
    ):
        what = "peer access" if name == "access" else "native atomics"
        missing = _names(facts, name, False)
        unknown = _names(facts, name, None)
        if missing:
            verdict = Verdict.NOTE
            lines.append(f"no {what}: {missing}; {without} (`{topology_command(targets[0].type)}`)")
        elif unknown:
            verdict = Verdict.NOTE
            lines.append(f"the driver does not say whether there is {what}: {unknown}")
        else:
            lines.append(f"{what} between all {len(facts)} ordered pairs of GPUs")
    return verdict, lines, data


def _names(facts: dict[tuple[int, int], PeerFacts], name: str, value: bool | None, most: int = 8) -> str:
    """The pairs of which a fact has this value, as text."""
    pairs = [f"{one}->{other}" for (one, other), each in facts.items() if getattr(each, name) is value]
    return ", ".join(pairs[:most]) + (f" and {len(pairs) - most} more" if len(pairs) > most else "")


def _further(facts: dict[int, DeviceFacts]) -> list[Finding]:
    """What Iris does not use, but users ask for."""
    return [
        Finding("fabric handles", Verdict.OK, f"{_reported(facts, 'fabric_handles')}; Iris does not use them"),
        Finding(
            "GPUDirect RDMA",
            Verdict.OK,
            f"{_reported(facts, 'gpu_direct_rdma')}; for virtual memory: "
            f"{_reported(facts, 'gpu_direct_rdma_virtual_memory')}; dma-buf: {_reported(facts, 'dma_buf')}",
        ),
        Finding("multicast", Verdict.OK, f"{_reported(facts, 'multicast')}; Iris does not use it"),
    ]


def _reported(facts: dict[int, DeviceFacts], name: str) -> str:
    answers = {index: getattr(each, name) for index, each in facts.items()}
    if len(set(answers.values())) == 1:
        return {True: "reported", False: "not supported", None: "not known"}[next(iter(answers.values()))]
    return "reported for GPU " + ", ".join(str(index) for index, answer in answers.items() if answer) + " only"


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
