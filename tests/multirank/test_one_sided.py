"""ctx.put, ctx.get, ctx.signal and ctx.signal_wait, on CPU ranks and on GPUs."""

import random
import time

import pytest
import torch
from jobs_common import environment, in_vain, said_by, soon

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
        found = [said_by(call).partition(";")[0] for call in calls]
        ctx.barrier()
        return [*found, f"{x.tolist()} {word.tolist()}"]


def waits_in_vain(device: str) -> str:
    """Return the error that follows a wait for a signal that nobody gives."""
    with environment(IRIS_DEVICE_TIMEOUT=soon(device)), in_vain(100), Iris("1MiB", device=device) as ctx:
        word = ctx.zeros(1, dtype=torch.int64)
        return said_by(lambda: (ctx.signal_wait(word, 1), ctx.barrier()))


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_puts_and_signals_arrive_in_order(pool, device, num_ranks):
    for dtype in (torch.int64, torch.int32):
        assert pool.run(rounds_of_puts, num_ranks, device, 10, dtype) == [[]] * num_ranks


def test_wrong_calls_are_refused(pool, device):
    num_ranks = 2
    first, *_, nothing = said = pool.run(refused, num_ranks, device)[0]
    assert len(said) == 9
    assert first == "ArgumentError: as_remote: rank 2 is out of range in a world of 2"
    assert said[1].startswith("NotOnHeapError: as_remote: the tensor of shape (4,)")
    assert [each.partition(":")[0] for each in said[2:7]] == ["ArgumentError"] * 5
    assert said[7].startswith("TypeError: stream must be a torch stream")
    assert nothing == "[0.0, 0.0, 0.0, 0.0] [0]"


def test_a_wait_has_a_bound(pool, device):
    num_ranks = 1
    (said,) = pool.run(waits_in_vain, num_ranks, device)
    assert said.startswith("DeviceTimeoutError: ")
    assert "IRIS_DEVICE_TIMEOUT" in said
