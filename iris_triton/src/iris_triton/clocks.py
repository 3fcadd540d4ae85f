"""Clock comparison of two devices by round trips of a word, timestamped on each rank; of nodes, by the hosts."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from iris_core.tracing.clocks import ClockOffset, offset_of
from iris_triton.context import DeviceContext
from iris_triton.language.asm import read_realtime

ROUNDS, HOST_ROUNDS = 64, 16


@triton.jit
def exchange(words, times, context, partner, FIRST: tl.constexpr, COUNT: tl.constexpr, WORLD: tl.constexpr):
    """Send words there and back, COUNT times.

    Args:
        words: int32[2] on the heap, 0 before: the word of the rank that begins (FIRST), and the answer.
        times: int64[COUNT, 2]: before sending and after the answer; on the other rank after receiving and before
            answering.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    for i in range(COUNT):
        if FIRST:
            tl.store(times + 2 * i, read_realtime())
            ctx.signal(words, i + 1, partner, sem="relaxed")
            ctx.wait(words + 1, i + 1, cmp="eq", sem="relaxed")
            tl.store(times + 2 * i + 1, read_realtime())
        else:
            ctx.wait(words, i + 1, cmp="eq", sem="relaxed")
            now = read_realtime()
            tl.store(times + 2 * i, now)
            tl.store(times + 2 * i + 1, now)
            ctx.signal(words + 1, i + 1, partner, sem="relaxed")


def compare(context: Any) -> ClockOffset:
    """Return how this rank's clock compares with rank 0's.  Collective: every rank of the context calls it."""
    if context.num_nodes > 1:
        return bracket(context)
    if context.device == "cpu":
        return ClockOffset(_now(context), 0, 1.0)  # ranks of one host have one clock
    return measure(context)


def measure(context: Any) -> ClockOffset:
    """Compare by words that are sent there and back.  Collective: every rank of the context calls it."""
    rank, world = context.cur_rank, context.num_ranks
    own = ClockOffset(_now(context), 0, 1.0)
    with context.scope():
        words = context.zeros(2 * world, dtype=torch.int32)
        times = torch.zeros((world, ROUNDS, 2), dtype=torch.int64, device=context.device)
        context.barrier()
        for other in range(1, world):
            if rank in (0, other):
                exchange[(1,)](
                    words[2 * other :], times[other], context.get_device_context(), other if rank == 0 else 0,
                    FIRST=rank == 0, COUNT=ROUNDS, WORLD=world, num_warps=1,
                )  # fmt: skip
            context.barrier()
        mine = times.cpu().numpy()
        first = context.broadcast(mine, 0)
    if rank == 0:
        return own
    return offset_of(first[rank], mine[rank], max(_resolution(first[rank]), _resolution(mine[rank])))


def bracket(context: Any) -> ClockOffset:
    """Compare by barriers of the hosts, for ranks that share no memory.  Collective, like `compare`.

    A rank reads its clock before and after each: what any rank has read before is earlier than what any reads after.
    """
    times = np.zeros((HOST_ROUNDS, 2), np.int64)
    for row in times:
        row[0] = _now(context)
        context.barrier()
        row[1] = _now(context)
    first = context.broadcast(times, 0)
    if context.cur_rank == 0:
        return ClockOffset(int(times[-1, 1]), 0, 1.0)
    least, most = int((times[:, 0] - first[:, 1]).max()), int((times[:, 1] - first[:, 0]).min())
    return ClockOffset(int(times[-1, 1]), (least + most) // 2, (most - least) / 2 + 1)


def _resolution(times: np.ndarray[Any, Any]) -> float:
    """Ticks by which a clock goes on at least, as far as these times show it."""
    steps = np.diff(np.unique(times))
    return float(steps.min()) if len(steps) else 1.0


def _now(context: Any) -> int:
    out = torch.zeros(1, dtype=torch.int64, device=context.device)
    _read[(1,)](out, num_warps=1)
    return int(out)


@triton.jit
def _read(out):
    tl.store(out, read_realtime())
