"""ctx.put, ctx.get, ctx.signal and ctx.signal_wait, on CPU ranks and on GPUs."""

import random
import time

import pytest
import torch
from jobs_common import environment, in_vain, soon, unlike

from iris_core import Iris


def rounds_of_puts(device: str, rounds: int, dtype: torch.dtype) -> None:
    """Each rank puts to the next one and takes from the one before, with delays.

    A box is filled again when its owner has added to the sender's `taken`; senders wait for that.
    """
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
            given = torch.full(part.shape, 100.0 * turn + rank, device=ctx.device)
            ctx.put(part, after, given, signal=arrived, value=turn)
            ctx.signal_wait(arrived, turn, cmp="eq")
            assert part.unique().tolist() == [100.0 * turn + before], turn
            mine = ctx.get(box, rank)
            assert mine is not box
            assert torch.equal(mine, box), turn
            ctx.signal(taken, before, 1, op="add")
        for peer in range(size):
            ctx.signal(everyone, peer, 2, op="add")
        ctx.signal_wait(everyone, 2 * size)
        ctx.barrier()
        box.fill_(rank)
        ctx.barrier()
        ctx.put(box, rank)  # nothing to copy
        found = ctx.get(box, after, torch.empty(16, 6, device=ctx.device))
        assert (found.unique().tolist(), int(everyone)) == ([after], 2 * size)
        ctx.barrier()


def refused(device: str) -> None:
    """Nothing of wrong calls is launched."""
    with Iris("1MiB", device=device) as ctx:
        x, word, elsewhere = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64), torch.zeros(5, device=ctx.device)
        assert unlike(
            ("ArgumentError: as_remote: rank 2 is out of range in a world of 2(;|$)", lambda: ctx.put(x, 2)),
            (r"NotOnHeapError: as_remote: the tensor of shape \(4,\)", lambda: ctx.put(elsewhere[:4], 0)),
            ("ArgumentError", lambda: ctx.put(x, 0, elsewhere)), ("ArgumentError", lambda: ctx.put(x, 0, signal=x[:1])),
            ("ArgumentError", lambda: ctx.put(x, 0, signal=word, op="sub")),
            ("ArgumentError", lambda: ctx.get(x, 0, elsewhere[:4].int())),
            ("ArgumentError", lambda: ctx.signal_wait(word, 0, cmp="==")),
            ("TypeError: stream must be a torch stream", lambda: ctx.signal(word, 0, stream=7)),
        ) == []  # fmt: skip
        ctx.barrier()
        assert (x.tolist(), word.tolist()) == ([0.0] * 4, [0])


def waits_in_vain(device: str) -> None:
    with environment(IRIS_DEVICE_TIMEOUT=soon(device)), in_vain(100), Iris("1MiB", device=device) as ctx:
        word = ctx.zeros(1, dtype=torch.int64)
        call = lambda: (ctx.signal_wait(word, 1), ctx.barrier())
        assert unlike(("DeviceTimeoutError: .*IRIS_DEVICE_TIMEOUT", call)) == []


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_puts_and_signals_arrive_in_order(pool, device, num_ranks):
    for dtype in (torch.int64, torch.int32):
        pool.run(rounds_of_puts, num_ranks, device, 10, dtype)


def test_wrong_calls_are_refused(pool, device):
    pool.run(refused, 2, device)


def test_a_wait_has_a_bound(pool, device):
    pool.run(waits_in_vain, 1, device)
