"""What the suites run on ranks.  Each job returns bytes that an oracle read; the tests judge them.

A worker that crashes is a failed test and not the end of the test run, so jobs also do what a broken plugin
could not survive.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from iris_core.errors import DeviceTimeoutError
from iris_core.testing.conformance import oracle
from iris_core.types import CreateRequest, DeviceTarget, PluginKind

TIMEOUT_S = 30.0
_SLOW_S = 0.1  # how long one rank lets the others wait


# -- allocators -------------------------------------------------------------------------------------------------------
def place_marks(nbytes: int) -> tuple[int, ...]:
    """Return offsets at which a heap is probed: its ends, page ends, and odd places; each has room for 8 bytes."""
    return (0, 9, 4087, 4096, nbytes // 2 + 1, nbytes - 4096, nbytes - 8)


def mark(rank: int, index: int) -> bytes:
    """Return the 8 bytes that a rank writes at one of its marks."""
    return oracle.pattern(8, seed=10 * rank + index)


def see_peers(name: str, device: str, nbytes: int) -> tuple[dict[int, tuple[bool, bool, list[bytes]]], list[bytes]]:
    """Write marks into the own heap, look for the peers' in theirs, and write one back into each.

    Returns:
        For each peer, whether its heap is mapped as a whole, whether the rank's allocator takes the mapping for its own
        memory, and the bytes at the marks; and what the peers have written into this rank's heap, by rank.
    """
    from iris_core.world import connect

    world = connect(None, TIMEOUT_S)
    allocator, target = _create(PluginKind.ALLOCATOR, name, device, nbytes, world.rank, world.world_size)
    where = target.torch_device
    try:
        allocator.commit(0, allocator.nbytes)
        marks = place_marks(nbytes)
        for index, offset in enumerate(marks):
            oracle.write_bytes(allocator.base_ptr + offset, mark(world.rank, index), where)
        everyone = world.exchange_segments(allocator.export())
        sizes = [size for (size,) in world.all_gather_ints([allocator.nbytes])]
        peers = [peer for peer in range(world.world_size) if peer != world.rank]
        mappings = {peer: allocator.import_peer(peer, everyone[peer]) for peer in peers}
        reports = {}
        for peer, mapping in mappings.items():
            seen = [oracle.read_bytes(mapping.base_ptr + offset, 8, where) for offset in marks]
            reports[peer] = mapping.nbytes == sizes[peer], allocator.owns(mapping.base_ptr), seen
        world.barrier()
        for peer, mapping in mappings.items():
            oracle.write_bytes(mapping.base_ptr + 8192 + 8 * world.rank, mark(world.rank, peer), where)
        world.barrier()
        written = [oracle.read_bytes(allocator.base_ptr + 8192 + 8 * peer, 8, where) for peer in range(len(sizes))]
        world.barrier()
        return reports, written
    finally:
        allocator.close()
        world.close()


def outlive_close(name: str, device: str, nbytes: int) -> tuple[bytes, bytes, int]:
    """Close an allocator with a live tensor; return the tensor's bytes before and after, and releases told so far."""
    allocator, target = _create(PluginKind.ALLOCATOR, name, device, nbytes, rank=0, world_size=1)
    allocator.commit(0, allocator.nbytes)
    told: list[int] = []
    tensor = allocator.tensor(4096, 8192, lambda: told.append(1))
    oracle.write_bytes(tensor.data_ptr(), oracle.pattern(8192, seed=1), target.torch_device)
    before = bytes(tensor.cpu().numpy().tobytes())
    allocator.close()
    del allocator
    gc.collect()
    tensor[0] = 7  # it can be written, too
    after = bytes(tensor.cpu().numpy().tobytes())
    return before, after, len(told)


def _create(
    kind: PluginKind, name: str, device: str, nbytes: int, rank: int, world_size: int
) -> tuple[Any, DeviceTarget]:
    from iris_core.device.targets import device_targets
    from iris_core.registry import Registry

    registry = Registry()
    record = registry.resolve(kind, name)
    (target,) = device_targets(device, rank)
    request = CreateRequest(target, rank, world_size, nbytes, registry.settings_class(record)())
    return registry.create(record, request), target


# -- stacks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stack:
    """Allocator, backend and programs of a stack suite, as ranks need them."""

    allocator: str
    backend: str
    programs: str  # module that satisfies `iris_core.testing.conformance.stack.Programs`
    device: str  # "cpu" or "cuda"
    timeout_s: float  # bound of the waits in kernels


@dataclass(frozen=True)
class Seen:
    """Contents of a symmetric tensor after a program."""

    own: bytes  # this rank's tensor, as plain torch copies it to the host
    peers: tuple[bytes, ...]  # every rank's, as raw memory at translated addresses shows it to this rank
    local: bytes = b""  # what the program itself noted on this rank, one tensor behind the other


def source_data(rank: int, turn: int, numel: int) -> torch.Tensor:
    """Return int32[numel] that differs between ranks, turns and positions."""
    return torch.arange(1, numel + 1, dtype=torch.int32) + 100_000 * (rank + 1) + 10_000_000 * (turn + 1)


def ring(stack: Stack, numel: int, num_turns: int) -> list[Seen]:
    """Every rank puts data to the next one and signals; the ranks take turns in being slow."""
    out = []
    with open_stack(stack) as ctx:
        programs = importlib.import_module(stack.programs)
        source, target, found = (ctx.zeros(numel, dtype=torch.int32) for _ in range(3))
        flag = ctx.zeros(1, dtype=torch.int64)
        for turn in range(num_turns):
            source.copy_(source_data(ctx.cur_rank, turn, numel))
            start(ctx, slow=turn % ctx.num_ranks)
            programs.ring(ctx, source, target, found, flag, turn + 1, stack.timeout_s)
            out.append(look(ctx, target, found, flag))
    return out


def all_to_all(stack: Stack, numel: int) -> Seen:
    """Every rank stores a row of its own to every rank."""
    with open_stack(stack) as ctx:
        programs = importlib.import_module(stack.programs)
        source = ctx.zeros(ctx.num_ranks, numel, dtype=torch.int32)
        target = ctx.zeros(ctx.num_ranks, numel, dtype=torch.int32)
        for peer in range(ctx.num_ranks):
            source[peer].copy_(source_data(ctx.cur_rank, peer, numel))
        start(ctx)
        programs.all_to_all(ctx, source, target)
        return look(ctx, target)


def meet(stack: Stack, num_turns: int) -> list[Seen]:
    """Every rank writes to all, all meet at the device barrier, and each notes what it has got by then."""
    out = []
    with open_stack(stack) as ctx:
        programs = importlib.import_module(stack.programs)
        slots, found = (ctx.zeros(ctx.num_ranks, dtype=torch.int64) for _ in range(2))
        flags = ctx.zeros(ctx.num_ranks + 1, dtype=torch.int64)
        for turn in range(num_turns):
            start(ctx, slow=turn % ctx.num_ranks)
            value = 1000 * (turn + 1) + ctx.cur_rank
            programs.meet(ctx, "function", slots, found, flags, value, None, stack.timeout_s)
            out.append(look(ctx, slots, found))
    return out


def give_up(stack: Stack) -> list[str] | None:
    """Wait in a kernel for a flag that no rank raises; the errors of the launch and of two barriers after it.

    None for a backend without methods: only these know where to report.
    """
    with open_stack(stack) as ctx:
        if "DeviceContext" not in ctx.backend.device_api():
            return None
        programs = importlib.import_module(stack.programs)
        flag, found = (ctx.zeros(1, dtype=torch.int64) for _ in range(2))
        start(ctx)
        wait = partial(programs.await_flag, ctx, "method", "ge", flag, 0, 1, found, stack.timeout_s)
        said = []
        for step in (wait, ctx.barrier, ctx.barrier):
            try:
                step()
                said.append("")
            except DeviceTimeoutError as error:
                said.append(type(error).__name__)
        return said


def open_stack(stack: Stack) -> Any:
    """Open a context whose waits inside kernels are bounded, those without a bound of their own as well."""
    from iris_core import Iris

    name = "IRIS_DEVICE_TIMEOUT"
    before = os.environ.get(name)
    os.environ[name] = str(stack.timeout_s)
    try:
        return Iris("4MiB", allocator=stack.allocator, backend=stack.backend, device=stack.device)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def start(ctx: Any, slow: int | None = None, seconds: float = _SLOW_S) -> None:
    """Let all ranks begin together, except for a slow one: who does not wait for it computes with old data."""
    ctx.barrier()
    if ctx.cur_rank == slow:
        time.sleep(seconds)


def look(ctx: Any, tensor: torch.Tensor, *noted: torch.Tensor) -> Seen:
    """Let all ranks finish, and return what a tensor has here and on the others, and what the program noted."""
    if ctx.device != "cpu":
        torch.cuda.synchronize()
    ctx.barrier()
    bases = ctx.heap.heap_bases
    offset = tensor.data_ptr() - bases[ctx.cur_rank]
    nbytes = tensor.numel() * tensor.element_size()
    peers = tuple(oracle.read_bytes(base + offset, nbytes, ctx.device) for base in bases)
    ctx.barrier()  # nobody goes on while another rank is still looking
    return Seen(_content(tensor), peers, b"".join(map(_content, noted)))


def _content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


# -- what a backend may have besides ----------------------------------------------------------------------------------
def device_barrier(stack: Stack, num_turns: int) -> list[tuple[tuple[int, ...], bytes]] | None:
    """Every rank writes to all, all launch a barrier, and each notes what it has got by then; None without a barrier.

    The last turns are those of a group, the first and the last rank, for which the others do not wait.

    Returns:
        The members and the contents of this rank's words, for each turn.
    """
    out: list[tuple[tuple[int, ...], bytes]] = []
    with open_stack(stack) as ctx:
        if not hasattr(ctx.backend, "device_barrier"):
            return None
        me, world = ctx.cur_rank, ctx.num_ranks
        everyone, ends = tuple(range(world)), tuple(sorted({0, world - 1}))
        slots = ctx.zeros(world, dtype=torch.int64)
        offset = slots.data_ptr() - ctx.heap.heap_bases[me]
        for turn in range(2 * num_turns):
            members = everyone if turn < num_turns else ends
            slots.zero_()
            start(ctx, slow=members[turn % len(members)])
            if me in members:
                for base in ctx.heap.heap_bases:
                    word = (1000 * (turn + 1) + me).to_bytes(8, "little")
                    oracle.write_bytes(base + offset + 8 * me, word, ctx.device)
                ctx.device_barrier(None if members == everyone else ends, sem=("release", "relaxed")[turn % 2])
            if ctx.device != "cpu":
                torch.cuda.synchronize()
            out.append((members, _content(slots)))
            ctx.barrier()
    return out


@dataclass(frozen=True)
class SelfTest:
    """Results of a backend's self-test on one rank."""

    checks: tuple[tuple[str, int, int, str], ...]  # operation, rank, peer, problem
    begun: tuple[tuple[str, int | None], ...]  # arguments of `begin`
    others: tuple[str, ...]  # results that are no `PairCheck`
    error: str  # what it raised


def self_test(stack: Stack, misdirected: bool) -> SelfTest | None:
    """Run the backend's self-test, as `iris doctor` does; None if it has none.

    If `misdirected`, kernels take this rank's own memory for every peer's, which a test has to notice.
    """
    from iris_core.diagnosis import PairCheck
    from iris_core.errors import IrisError

    begun: list[tuple[str, int | None]] = []
    given: list[Any] = []
    error = ""
    with open_stack(stack) as ctx:
        if not hasattr(ctx.backend, "self_test"):
            return None
        if misdirected:
            ctx.get_heap_bases().fill_(ctx.heap.heap_bases[ctx.cur_rank])
            ctx.barrier()
        try:
            given.extend(ctx.backend.self_test(ctx, lambda op, peer: begun.append((op, peer))))
        except IrisError as raised:
            error = f"{type(raised).__name__}: {raised}"
    right = [each for each in given if isinstance(each, PairCheck)]
    checks = tuple((each.op, each.rank, each.peer, each.problem) for each in right)
    others = tuple(repr(each) for each in given if not isinstance(each, PairCheck))
    return SelfTest(checks, tuple(begun), others, error)


def compare_clocks(stack: Stack) -> list[tuple[int, int, float]] | None:
    """Compare the clocks twice, a moment apart; None for a backend that cannot.

    Returns:
        (at, ahead, error) in seconds.
    """
    with open_stack(stack) as ctx:
        if not hasattr(ctx.backend, "compare_clocks"):
            return None
        out = []
        for _ in range(2):
            offset = ctx.backend.compare_clocks(ctx)
            second = ctx.backend.ticks_per_second
            out.append((offset.at / second, offset.ahead / second, offset.error / second))
            start(ctx, slow=0)
        return out


def diagnose(kind: PluginKind, name: str) -> list[list[tuple[str, str, str, str]]]:
    """Ask a plugin for its findings, with no device and with those of this machine.

    Returns:
        (subject, verdict, text, data as JSON) of each finding.
    """
    import json

    from iris_core.device.targets import device_targets
    from iris_core.registry import Registry

    registry = Registry()
    record = registry.resolve(kind, name)
    answers = [registry.diagnose(record, targets) for targets in ((), device_targets(None, rank=0))]
    return [[(each.subject, str(each.verdict), each.text, json.dumps(each.data)) for each in one] for one in answers]
