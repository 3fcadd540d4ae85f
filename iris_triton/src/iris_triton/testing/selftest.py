"""The self-test of this backend for `iris doctor`: write, read, atomics and signals between every two ranks.

At distance d every rank works on rank + d, all at the same time; distance 0 is its own memory by way of address
translation.  What is expected is computed by torch, not by the functions under test.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.diagnosis import PairCheck
from iris_core.errors import DeviceTimeoutError
from iris_triton.context import DeviceContext
from iris_triton.testing.kit_programs import send

NUMEL, CPU_NUMEL = 1 << 20, 1 << 13
"""32-bit words that are written and read per pair; on GPUs 4 MiB, which are several granules of virtual memory."""
ADDITIONS = 1000  # that every rank makes to a word of every rank
MESSAGE = 256  # 32-bit words that are sent before a signal
_BLOCK, _CPU_BLOCK = 4096, 1024
_ADD_BLOCK = 128


# -- kernels ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["peer"])
def move(source, target, numel, context, world_size: tl.constexpr, peer, reads: tl.constexpr, BLOCK: tl.constexpr):
    """Load the peer's `source` into `target`, or store `source` to the peer's `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if reads:
        tl.store(target + i, ctx.load(source + i, peer, mask=i < numel), mask=i < numel)
    else:
        ctx.store(target + i, tl.load(source + i, mask=i < numel), peer, mask=i < numel)


@triton.jit
def add(own, shared, additions, context, world_size: tl.constexpr, BLOCK: tl.constexpr):
    """Add 1 `additions` times to two words of rank program_id(1): the caller's word there, and one for all ranks."""
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    same = tl.zeros((BLOCK,), tl.int32)
    peer = tl.program_id(1)
    ctx.atomic_add(own + ctx.rank + same, 1, peer, mask=i < additions)
    ctx.atomic_add(shared + same, 1, peer, mask=i < additions)


# -- the test ---------------------------------------------------------------------------------------------------------
def self_test(ctx: Any, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
    """Yield a `PairCheck` for everything that this rank can judge; see `iris_core.protocols.SupportsSelfTest`.

    Collective: every rank of `ctx` calls it.
    """
    with ctx.scope():
        for operation in (_moves, _additions, _signals):
            yield from operation(ctx, begin)
            _meet(ctx, begin)


def _moves(ctx, begin):
    numel, block = (CPU_NUMEL, _CPU_BLOCK) if ctx.device == "cpu" else (NUMEL, _BLOCK)
    source, target = (ctx.empty(numel, dtype=torch.int32) for _ in range(2))
    for reads, op, verb in ((False, "write", "arrived wrong"), (True, "read", "returned wrong values")):
        for distance, (peer, other) in enumerate(_distances(ctx)):
            source.copy_(_pattern(ctx, ctx.cur_rank, distance, numel))
            target.fill_(-1)
            _meet(ctx, begin)
            begin(op, peer)
            move[(triton.cdiv(numel, block),)](source, target, numel, *_where(ctx), peer, reads, BLOCK=block)
            _meet(ctx, begin)
            problem = _difference(target, _pattern(ctx, peer if reads else other, distance, numel), verb)
            yield PairCheck(op, *((ctx.cur_rank, peer) if reads else (other, ctx.cur_rank)), problem)


def _additions(ctx, begin):
    world = ctx.num_ranks
    own = ctx.zeros(world, dtype=torch.int32)
    shared = ctx.zeros(1, dtype=torch.int64)
    _meet(ctx, begin)
    begin("atomic_add", None)
    add[triton.cdiv(ADDITIONS, _ADD_BLOCK), world](own, shared, ADDITIONS, *_where(ctx), BLOCK=_ADD_BLOCK)
    _meet(ctx, begin)
    missing = [ADDITIONS - count for count in own.tolist()]
    lost = ADDITIONS * world - shared.item()
    source_is_unknown = lost not in (0, sum(missing))
    for source, number in enumerate(missing):
        problem = _lost(number, ADDITIONS)
        if not problem and source_is_unknown:
            problem = f"{_lost(lost, ADDITIONS * world)} of all ranks to one word"
        yield PairCheck("atomic_add", source, ctx.cur_rank, problem)


def _signals(ctx, begin):
    inbox = ctx.empty(MESSAGE, dtype=torch.int32)
    received = torch.empty(MESSAGE, dtype=torch.int32, device=ctx.device)
    flag = ctx.zeros(1, dtype=torch.int64)
    for epoch, (peer, source) in enumerate(_distances(ctx), start=1):
        message = _pattern(ctx, ctx.cur_rank, peer, MESSAGE)
        inbox.fill_(-1)
        _meet(ctx, begin)
        begin("signal", peer)
        send(ctx, "method", "signal", "set", message, inbox, received, flag, epoch, epoch, 0, peer)
        late = False
        try:
            _meet(ctx, begin)
        except DeviceTimeoutError as error:  # raised after the barrier, on all ranks, whoever waited in vain
            late = error.rank == ctx.cur_rank
        problem = _difference(received, _pattern(ctx, source, ctx.cur_rank, MESSAGE), "came before its data")
        yield PairCheck("signal", source, ctx.cur_rank, "did not arrive in time" if late else problem)


def _distances(ctx):
    """Which rank this one works on at each distance, and which one works on it."""
    return [((ctx.cur_rank + d) % ctx.num_ranks, (ctx.cur_rank - d) % ctx.num_ranks) for d in range(ctx.num_ranks)]


def _where(ctx):
    return ctx.get_device_context(), ctx.num_ranks


def _meet(ctx, begin):
    """Synchronise this rank's device, to separate a hanging kernel from a missing rank; then wait at a barrier."""
    if ctx.device != "cpu":
        torch.cuda.synchronize()
    begin("barrier", None)
    ctx.barrier()


def _pattern(ctx, rank, other, numel):
    """Non-negative int32 values, different for every two numbers of ranks or distances."""
    start = (rank * 1009 + other + 1) * 104729
    return ((torch.arange(numel, dtype=torch.int64, device=ctx.device) + start) * 7919 % (2**31 - 1)).to(torch.int32)


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
    if missing > 0:
        return f"lost {missing} of {additions} additions"
    return f"added {-missing} more than {additions} times" if missing else ""
