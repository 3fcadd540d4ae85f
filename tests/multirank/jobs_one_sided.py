"""Rank jobs of test_one_sided; they run on CPU ranks and on GPUs."""

import random
import time

import torch
from jobs_common import environment, in_vain, said, soon

from iris_core import Iris


def rounds_of_puts(device: str, rounds: int, dtype: torch.dtype) -> list[object]:
    """Each rank puts to the next one and takes from the one before, with delays; return what was wrong.

    A box is filled again when its owner has added to the sender's `taken`; senders wait for that.
    """
    wrong: list[object] = []
    with Iris("4MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        after, before = (rank + 1) % size, (rank - 1) % size
        box = ctx.zeros(16, 6)
        arrived, taken, everyone = (ctx.zeros(1, dtype=dtype) for _ in range(3))
        delays = random.Random(rank)
        ctx.barrier()
        for turn in range(1, rounds + 1):
            part = box[:, ::2] if turn % 2 else box  # strided, or whole
            ctx.signal_wait(taken, turn - 1)
            time.sleep(delays.random() * 0.01)
            ctx.put(
                part, after, torch.full(part.shape, 100.0 * turn + rank, device=ctx.device), signal=arrived, value=turn
            )
            ctx.signal_wait(arrived, turn, cmp="eq")
            if not torch.equal(part, torch.full_like(part, 100.0 * turn + before)):
                wrong.append(("put", turn, part.tolist()))
            mine = ctx.get(box, rank)
            if mine is box or not torch.equal(mine, box):
                wrong.append(("get of its own", turn))
            ctx.signal(taken, before, 1, op="add")
        for peer in range(size):
            ctx.signal(everyone, peer, 2, op="add")
        ctx.signal_wait(everyone, 2 * size)
        ctx.barrier()
        box.fill_(rank)
        ctx.barrier()
        ctx.put(box, rank)  # nothing to copy
        found = ctx.get(box, after, torch.empty(16, 6, device=ctx.device))
        if found.unique().tolist() != [after] or int(everyone) != 2 * size:
            wrong.append(("get", found.tolist(), everyone.tolist()))
        ctx.barrier()
    return wrong


def refused(device: str) -> list[str]:
    """Return what wrong calls raise; nothing is launched."""
    with Iris("1MiB", device=device) as ctx:
        x, word = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64)
        calls = [
            lambda: ctx.put(x, ctx.num_ranks), lambda: ctx.put(torch.zeros(4, device=ctx.device), 0),
            lambda: ctx.put(x, 0, torch.ones(5, device=ctx.device)), lambda: ctx.put(x, 0, signal=x[:1]),
            lambda: ctx.put(x, 0, signal=word, op="sub"),
            lambda: ctx.get(x, 0, torch.zeros(4, dtype=torch.int32, device=ctx.device)),
            lambda: ctx.signal_wait(word, 0, cmp="=="), lambda: ctx.signal(word, 0, stream=7),
        ]  # fmt: skip
        found = [said(call).partition(";")[0] for call in calls]
        ctx.barrier()
        return [*found, f"{x.tolist()} {word.tolist()}"]


def waits_in_vain(device: str) -> str:
    """Return the error that follows a wait for a signal that nobody gives."""
    with environment(IRIS_DEVICE_TIMEOUT=soon(device)), in_vain(100), Iris("1MiB", device=device) as ctx:
        word = ctx.zeros(1, dtype=torch.int64)
        return said(lambda: (ctx.signal_wait(word, 1), ctx.barrier()))
