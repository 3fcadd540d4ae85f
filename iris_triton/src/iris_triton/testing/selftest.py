"""The self-test of this backend for `iris doctor`: write, read, atomics and signals between every two ranks.

At distance d every rank works on rank + d, all at the same time; distance 0 is its own memory by way of address
translation.  What is expected is computed by torch, not by the functions under test.
"""
# mypy: ignore-errors

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.diagnosis import PairCheck
from iris_core.errors import DeviceTimeoutError
from iris_triton.context import DeviceContext

NUMEL, CPU_NUMEL = 1 << 20, 1 << 13
"""32-bit words that are written and read per pair; on GPUs 4 MiB, which are several granules of virtual memory."""

ADDITIONS = 1000
"""Times that every rank adds 1 to a word of every rank."""

MESSAGE = 256
"""32-bit words that are handed over behind a signal."""

_BLOCK, _CPU_BLOCK = 4096, 1024
_ADD_BLOCK = 128


# -- kernels ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["peer"])
def write(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Store `source` to the peer's `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.store(target + i, tl.load(source + i, mask=i < numel), peer, mask=i < numel)


@triton.jit(do_not_specialize=["peer"])
def read(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Load the peer's `source` into `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, ctx.load(source + i, peer, mask=i < numel), mask=i < numel)


@triton.jit
def add(own, shared, additions, context, world_size: tl.constexpr, BLOCK: tl.constexpr):
    """Add 1 `additions` times to two words of rank program_id(1): the caller's word there, and one for all ranks."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    same = tl.zeros((BLOCK,), tl.int32)
    peer = tl.program_id(1)
    ctx.atomic_add(own + ctx.rank + same, 1, peer, mask=i < additions)
    ctx.atomic_add(shared + same, 1, peer, mask=i < additions)


@triton.jit(do_not_specialize=["peer", "epoch"])
def hand_over(source, inbox, received, flag, context, world_size: tl.constexpr, peer, epoch, BLOCK: tl.constexpr):
    """Store a message to the peer and signal it; wait for the message to this rank and keep it in `received`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.arange(0, BLOCK)
    ctx.store(inbox + i, tl.load(source + i), peer)
    ctx.signal(flag, epoch, peer)
    ctx.wait(flag, epoch, cmp="ge")
    tl.store(received + i, tl.load(inbox + i))


# -- the test ---------------------------------------------------------------------------------------------------------
def self_test(ctx: Any, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
    """Yield a `PairCheck` for everything that this rank can judge; see `iris_core.protocols.SupportsSelfTest`.

    Collective: every rank of `ctx` calls it.
    """
    with ctx.scope():
        for operation in (_writes, _reads, _additions, _signals):
            yield from operation(ctx, begin)
            _meet(ctx, begin)


def _writes(ctx, begin):
    rank, world, numel, block = _sizes(ctx)
    inbox = ctx.empty(numel, dtype=torch.int32)
    for distance in range(world):
        peer, source = (rank + distance) % world, (rank - distance) % world
        values = _pattern(rank, peer, numel, ctx.device)
        inbox.fill_(-1)
        _meet(ctx, begin)
        begin("write", peer)
        write[(triton.cdiv(numel, block),)](values, inbox, numel, ctx.get_device_context(), world, peer, BLOCK=block)
        _meet(ctx, begin)
        problem = _difference(inbox, _pattern(source, rank, numel, ctx.device), "arrived wrong")
        yield PairCheck("write", source, rank, problem)


def _reads(ctx, begin):
    rank, world, numel, block = _sizes(ctx)
    offered = ctx.empty(numel, dtype=torch.int32)
    offered.copy_(_pattern(rank, rank, numel, ctx.device))
    _meet(ctx, begin)
    for distance in range(world):
        peer = (rank + distance) % world
        begin("read", peer)
        got = torch.full((numel,), -1, dtype=torch.int32, device=ctx.device)
        read[(triton.cdiv(numel, block),)](offered, got, numel, ctx.get_device_context(), world, peer, BLOCK=block)
        problem = _difference(got, _pattern(peer, peer, numel, ctx.device), "returned wrong values")
        yield PairCheck("read", rank, peer, problem)


def _additions(ctx, begin):
    rank, world = ctx.cur_rank, ctx.num_ranks
    own = ctx.zeros(world, dtype=torch.int32)
    shared = ctx.zeros(1, dtype=torch.int64)
    _meet(ctx, begin)
    begin("atomic_add", None)
    grid = (triton.cdiv(ADDITIONS, _ADD_BLOCK), world)
    add[grid](own, shared, ADDITIONS, ctx.get_device_context(), world, BLOCK=_ADD_BLOCK)
    _meet(ctx, begin)
    counts = own.tolist()
    lost = ADDITIONS * world - shared.item()
    source_is_unknown = lost not in (0, sum(ADDITIONS - count for count in counts))
    for source, count in enumerate(counts):
        problem = _lost(ADDITIONS - count, ADDITIONS)
        if not problem and source_is_unknown:
            problem = f"{_lost(lost, ADDITIONS * world)} of all ranks to one word"
        yield PairCheck("atomic_add", source, rank, problem)


def _signals(ctx, begin):
    rank, world = ctx.cur_rank, ctx.num_ranks
    inbox = ctx.empty(MESSAGE, dtype=torch.int32)
    received = torch.empty(MESSAGE, dtype=torch.int32, device=ctx.device)
    flag = ctx.zeros(1, dtype=torch.int64)
    for distance in range(world):
        peer, source = (rank + distance) % world, (rank - distance) % world
        message = _pattern(rank, peer, MESSAGE, ctx.device)
        inbox.fill_(-1)
        _meet(ctx, begin)
        begin("signal", peer)
        hand_over[(1,)](
            message, inbox, received, flag, ctx.get_device_context(), world, peer, distance + 1, BLOCK=MESSAGE
        )
        late = False
        try:
            _meet(ctx, begin)
        except DeviceTimeoutError as error:  # raised after the barrier, on all ranks, whoever waited in vain
            late = error.rank == rank
        problem = _difference(received, _pattern(source, rank, MESSAGE, ctx.device), "came before its data")
        if late:
            problem = "did not arrive in time"
        yield PairCheck("signal", source, rank, problem)


# -- small change -----------------------------------------------------------------------------------------------------
def _sizes(ctx):
    cpu = ctx.device == "cpu"
    return ctx.cur_rank, ctx.num_ranks, CPU_NUMEL if cpu else NUMEL, _CPU_BLOCK if cpu else _BLOCK


def _meet(ctx, begin):
    """Finish this rank's kernels first, which tells one that hangs from waiting for a rank; then meet the others."""
    if ctx.device != "cpu":
        torch.cuda.synchronize()
    begin("barrier", None)
    ctx.barrier()


def _pattern(rank, peer, numel, device):
    """Non-negative int32 values, different for every pair of ranks."""
    start = (rank * 1009 + peer + 1) * 104729
    return ((torch.arange(numel, dtype=torch.int64, device=device) + start) * 7919 % (2**31 - 1)).to(torch.int32)


def _difference(got, expected, verb):
    """Describe the differences as a phrase; empty if there are none."""
    wrong = (got != expected).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    values = f"{got[first].item()} instead of {expected[first].item()}"
    return f"{verb}: {len(wrong)} of {got.numel()} words, the first is word {first}: {values}"


def _lost(missing, additions):
    """How many additions were lost, as a phrase; empty if none was."""
    if not missing:
        return ""
    return (
        f"lost {missing} of {additions} additions" if missing > 0 else f"added {-missing} more than {additions} times"
    )
