"""ctx.put, ctx.get, ctx.signal and ctx.signal_wait, on CPU ranks and on GPUs."""

import random
import time

import pytest
import torch
from jobs_common import environment, in_vain, unlike

from iris_core import Iris


def rounds_of_puts(opened, rounds, distance=1, dtype=torch.int64, between_nodes=False):
    """Each rank puts to the one at a distance and takes from it, with delays.

    A box is filled again when its owner has added to the sender's `taken`; senders wait for that.  The network between
    nodes copies what is in one piece, and adds to signals.
    """
    with opened as ctx:
        me, size = ctx.cur_rank, ctx.num_ranks
        after, before = (me + distance) % size, (me - distance) % size
        box, source, own, copy = ctx.zeros(16, 6), ctx.zeros(16, 6), ctx.full((5,), float(me)), ctx.zeros(5)
        arrived, taken, everyone = (ctx.zeros(1, dtype=dtype) for _ in range(3))
        late = random.Random(me)
        ctx.barrier()
        for turn in range(1, rounds + 1):
            ctx.signal_wait(taken, turn - 1)
            time.sleep(late.random() * 0.01)
            part = slice(turn % 3, None) if turn % 2 or between_nodes else (slice(None), slice(None, None, 2))
            how = {"op": "add"} if between_nodes else {"value": turn}
            ctx.put(box[part], after, source.fill_(100.0 * turn + me)[part], signal=arrived, **how)
            source.fill_(-1.0)  # a put has read it
            ctx.signal_wait(arrived, turn, cmp="eq")
            assert box[part].unique().tolist() == [100.0 * turn + before], turn
            if turn % 2:
                ctx.put(box[:0], before, signal=taken, op="add")  # nothing to copy
            else:
                ctx.signal(taken, before, 1, op="add")
            assert ctx.get(own, after, copy.fill_(-1.0)) is copy
            assert copy.unique().tolist() == [after], turn
        ctx.signal_wait(taken, rounds)
        ctx.put(box, after, source.fill_(-2.0 - me))  # without a signal, which comes by itself
        ctx.signal(arrived, after, op="add")
        ctx.signal_wait(arrived, rounds + 1)
        assert box.unique().tolist() == [-2.0 - before]
        for peer in range(size):
            ctx.signal(everyone, peer, 2, op="add")
        ctx.signal_wait(everyone, 2 * size)
        ctx.barrier()
        assert int(everyone) == 2 * size


def within_a_node(device: str, dtype: torch.dtype) -> None:
    rounds_of_puts(Iris("4MiB", device=device), 10, dtype=dtype)
    with Iris("1MiB", device=device) as ctx:
        x = ctx.full((4,), float(ctx.cur_rank))
        ctx.put(x, ctx.cur_rank)  # nothing to copy
        mine = ctx.get(x, ctx.cur_rank)
        assert mine is not x
        assert mine.unique().tolist() == [ctx.cur_rank]
        ctx.put(x, ctx.cur_rank, torch.full((4,), 7.0, device=ctx.device))  # from elsewhere
        assert x.unique().tolist() == [7.0]


def refused(device: str) -> None:
    """Nothing of wrong calls is launched; and a wait has a bound."""
    with environment(IRIS_DEVICE_TIMEOUT="10"), in_vain(20), Iris("1MiB", device=device) as ctx:
        x, word, elsewhere = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64), torch.zeros(5, device=ctx.device)
        assert unlike(
            ("ArgumentError: heap.out of range", lambda: ctx.put(x, 2)),
            ("NotOnHeapError", lambda: ctx.put(elsewhere[:4], 0)),
            ("ArgumentError", lambda: ctx.put(x, 0, elsewhere)), ("ArgumentError", lambda: ctx.put(x, 0, signal=x[:1])),
            ("ArgumentError", lambda: ctx.put(x, 0, signal=word, op="sub")),
            ("ArgumentError", lambda: ctx.get(x, 0, elsewhere[:4].int())),
            ("ArgumentError", lambda: ctx.signal_wait(word, 0, cmp="==")),
            ("TypeError", lambda: ctx.signal(word, 0, stream=7)),
        ) == []  # fmt: skip
        ctx.barrier()
        assert (x.tolist(), word.tolist()) == ([0.0] * 4, [0])
        call = lambda: (ctx.signal_wait(word, 1), ctx.barrier())
        assert unlike(("DeviceTimeoutError: .*IRIS_DEVICE_TIMEOUT", call)) == []


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_puts_and_signals_arrive_in_order(pool, device, num_ranks):
    for dtype in (torch.int64, torch.int32):
        pool.run(within_a_node, num_ranks, device, dtype)


def test_wrong_calls_are_refused(pool, device):
    pool.run(refused, 2, device)
