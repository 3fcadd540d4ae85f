"""Jobs that the suites of plugins and allocators run in other processes: a worker that crashes is a failed test."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from iris_core.device.targets import device_targets
from iris_core.heap.heap import SymmetricHeap
from iris_core.registry import PluginRecord, Registry
from iris_core.testing.conformance import oracle
from iris_core.types import CreateRequest, DeviceTarget, PluginKind, Segment
from iris_core.world import connect


def installed(kind: PluginKind, name: str) -> tuple[Registry, PluginRecord]:
    """Return a plugin, loaded, as users' programs find it; PluginError if it is not installed."""
    registry = Registry()
    return registry, registry.load(registry.resolve(kind, name))


def create(
    registry: Registry, record: PluginRecord, target: DeviceTarget, nbytes: int = 1 << 20, rank: int = 0, size: int = 1
) -> Any:
    """Create what a plugin provides, as the core does, for a rank of a world of some size, with default settings."""
    return registry.create(record, CreateRequest(target, rank, size, nbytes, registry.settings_class(record)()))


def diagnose(kind: PluginKind, name: str) -> None:
    """Ask a plugin for its findings, with no device and with those of this machine."""
    registry, record = installed(kind, name)
    for targets in ((), device_targets(None, rank=0)):
        for finding in registry.diagnose(record, targets):
            assert finding.subject.strip(), finding
            assert finding.text.strip(), finding
            json.dumps(dict(finding.data))


def received(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments as a peer receives them: with descriptors of its own."""
    return [replace(each, fd=None if each.fd is None else os.dup(each.fd)) for each in segments]


def see_peers(name: str, device: str, nbytes: int) -> list[str]:
    """Write marks into the own heap, look for the peers' in theirs, and write one back into each; return problems."""
    mark: Callable[[int, int], bytes] = lambda rank, index: oracle.pattern(8, seed=10 * rank + index)
    with contextlib.closing(connect(None, timeout_s=30.0)) as world:
        me, (target,) = world.rank, device_targets(device, world.rank)
        allocator = create(*installed(PluginKind.ALLOCATOR, name), target, nbytes, me, world.world_size)
        read = functools.partial(oracle.read_bytes, nbytes=8, device=target.torch_device)
        write = functools.partial(oracle.write_bytes, device=target.torch_device)
        # 8 bytes at the heap's ends, at page ends, and at odd places
        marks = (0, 9, 4087, 4096, nbytes // 2 + 1, nbytes - 4096, nbytes - 8)
        with contextlib.closing(SymmetricHeap(allocator, world, device=target.torch_device)) as heap:
            allocator.commit(0, allocator.nbytes)
            for index, offset in enumerate(marks):
                write(allocator.base_ptr + offset, mark(me, index))
            heap.open()  # it also compares the sizes of the mappings
            peers = {peer: base for peer, base in enumerate(heap.heap_bases) if peer != me}
            seen = {peer: [read(base + offset) for offset in marks] for peer, base in peers.items()}
            world.barrier()
            for peer, base in peers.items():
                write(base + 8192 + 8 * me, mark(me, peer))
            world.barrier()
            arrived = {peer: read(allocator.base_ptr + 8192 + 8 * peer) for peer in peers}
            world.barrier()
        lost = [peer for peer in peers if seen[peer] != [mark(peer, index) for index in range(len(marks))]]
        lost += [peer for peer in peers if arrived[peer] != mark(peer, me)]
        return [f"rank {me} does not see what rank {peer} has written, in its heap or here" for peer in lost]


def outlive_close(name: str, device: str, nbytes: int) -> None:
    """Close an allocator with a live tensor, whose storage keeps its memory."""
    allocator = create(*installed(PluginKind.ALLOCATOR, name), device_targets(device, 0)[0], nbytes)
    allocator.commit(0, allocator.nbytes)
    released: list[bool] = []
    tensor, data = allocator.tensor(4096, 8192, lambda: released.append(True)), oracle.pattern(8192, seed=1)
    oracle.write_bytes(tensor.data_ptr(), data, device)
    assert bytes(tensor.tolist()) == data, "the tensor is not the memory at its address"
    allocator.close()
    del allocator
    gc.collect()
    tensor[0] = 7  # it can be written, too
    assert bytes(tensor.tolist()) == b"\x07" + data[1:], "the tensor's memory has changed with close()"
    assert not released, "on_release was called although the tensor was alive"
