"""Jobs that the suites of plugins and allocators run in other processes: a worker that crashes is a failed test.

Each job returns what is wrong, as sentences.
"""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iris_core.device.targets import device_targets
from iris_core.registry import Registry
from iris_core.testing.conformance import oracle
from iris_core.types import CreateRequest, DeviceTarget, PluginKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.types import Segment

_TIMEOUT_S = 30.0


def create(kind: PluginKind, name: str, target: DeviceTarget, nbytes: int, rank: int, world_size: int) -> Any:
    """Create what an installed plugin provides, with default settings."""
    registry = Registry()
    record = registry.resolve(kind, name)
    return registry.create(record, CreateRequest(target, rank, world_size, nbytes, registry.settings_class(record)()))


def diagnose(kind: PluginKind, name: str) -> list[str]:
    """Ask a plugin for its findings, with no device and with those of this machine."""
    registry = Registry()
    record = registry.resolve(kind, name)
    problems = []
    for targets in ((), device_targets(None, rank=0)):
        for finding in registry.diagnose(record, targets):
            if not (finding.subject.strip() and finding.text.strip()):
                problems.append(f"a finding has no subject or no text: {finding}")
            if not isinstance(json.loads(json.dumps(finding.data)), dict):
                problems.append(f"data of the finding about {finding.subject!r} is no dict")
    return problems


def received(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments as a peer receives them: with descriptors of its own."""
    return [replace(each, fd=None if each.fd is None else os.dup(each.fd)) for each in segments]


def mark(rank: int, index: int) -> bytes:
    """Return the 8 bytes that a rank writes at one of its marks."""
    return oracle.pattern(8, seed=10 * rank + index)


def see_peers(name: str, device: str, nbytes: int) -> list[str]:
    """Write marks into the own heap, look for the peers' in theirs, and write one back into each."""
    from iris_core.world import connect

    world = connect(None, _TIMEOUT_S)
    me, everyone = world.rank, range(world.world_size)
    (target,) = device_targets(device, me)
    allocator, where = create(PluginKind.ALLOCATOR, name, target, nbytes, me, world.world_size), target.torch_device
    problems = []
    try:
        allocator.commit(0, allocator.nbytes)
        # 8 bytes at the heap's ends, at page ends, and at odd places
        marks = 0, 9, 4087, 4096, nbytes // 2 + 1, nbytes - 4096, nbytes - 8
        for index, offset in enumerate(marks):
            oracle.write_bytes(allocator.base_ptr + offset, mark(me, index), where)
        segments = world.exchange_segments(allocator.export())
        sizes = [size for (size,) in world.all_gather_ints([allocator.nbytes])]
        mappings = {peer: allocator.import_peer(peer, segments[peer]) for peer in everyone if peer != me}
        for peer, mapping in mappings.items():
            if mapping.nbytes != sizes[peer]:
                problems.append(f"rank {me} maps {mapping.nbytes} bytes of the heap of rank {peer}, not {sizes[peer]}")
            seen = [oracle.read_bytes(mapping.base_ptr + offset, 8, where) for offset in marks]
            if seen != [mark(peer, index) for index in range(len(marks))]:
                problems.append(f"rank {me} sees other bytes than rank {peer} has written")
        world.barrier()
        for peer, mapping in mappings.items():
            oracle.write_bytes(mapping.base_ptr + 8192 + 8 * me, mark(me, peer), where)
        world.barrier()
        for peer in mappings:
            if oracle.read_bytes(allocator.base_ptr + 8192 + 8 * peer, 8, where) != mark(peer, me):
                problems.append(f"what rank {peer} has written to rank {me} has not arrived")
        world.barrier()
        return problems
    finally:
        allocator.close()
        world.close()


def outlive_close(name: str, device: str, nbytes: int) -> list[str]:
    """Close an allocator with a live tensor, whose storage keeps its memory."""
    allocator = create(PluginKind.ALLOCATOR, name, device_targets(device, 0)[0], nbytes, 0, 1)
    allocator.commit(0, allocator.nbytes)
    released: list[bool] = []
    tensor = allocator.tensor(4096, 8192, lambda: released.append(True))
    data = oracle.pattern(8192, seed=1)
    oracle.write_bytes(tensor.data_ptr(), data, device)
    before = bytes(tensor.cpu().numpy().tobytes())
    allocator.close()
    del allocator
    gc.collect()
    tensor[0] = 7  # it can be written, too
    after = bytes(tensor.cpu().numpy().tobytes())
    problems = [] if before == data else ["the tensor is not the memory at its address"]
    problems += [] if after == b"\x07" + data[1:] else ["the tensor's memory has changed with close()"]
    return problems + ["on_release was called although the tensor was alive"] * len(released)
