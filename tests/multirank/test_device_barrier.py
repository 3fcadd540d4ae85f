"""ctx.device_barrier() on CPU ranks and on GPUs; the kit tries the world and sorted groups, with either order."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from jobs_common import unlike
from rank_counts import rank_counts

import iris_triton as iris
from iris_core import Iris


@triton.jit(do_not_specialize=["value", "peer"])
def tell(box, value, context, peer, world_size: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    ctx.store(box + ctx.rank, value, peer)


class Exchange:
    """Ranks tell each other numbers, in rounds; `step` can be captured."""

    def __init__(self, ctx, barrier, peers=()):
        self._ctx, self._barrier, self._peers = ctx, barrier, peers or range(ctx.num_ranks)
        self._box, self._total = (ctx.zeros(n, dtype=torch.int64) for n in (ctx.num_ranks, 1))

    def step(self, value):
        """A round, in which rank r tells 10^r times the value; the total grows by the numbers of all."""
        ctx = self._ctx
        for peer in self._peers:
            tell[(1,)](self._box, value * 10**ctx.cur_rank, ctx.get_device_context(), peer, ctx.num_ranks)
        self._barrier()
        self._total += self._box.sum()
        self._barrier()

    def check(self, values, times=1):
        assert int(self._total.item()) == times * sum(values) * sum(10**peer for peer in self._peers)


def groups(device: str, sets: list[list[int]], rounds: int) -> None:
    """Every group counts by itself; a rank that is in none of them does nothing at all."""
    made = [dist.new_group(members) for members in sets]
    with Iris("1MiB", device=device) as ctx:
        exchanges = [
            Exchange(ctx, partial(ctx.device_barrier, group), members)
            for members, group in zip(sets, made, strict=True)
        ]
        ctx.barrier()
        for members, exchange in zip(sets, exchanges, strict=True):
            if ctx.cur_rank in members:
                for value in range(rounds):
                    exchange.step(value)
                exchange.check(range(rounds))
        ctx.barrier()


def refused() -> None:
    other = dist.new_group([1])
    alone = dist.new_group([0, 1], backend="gloo")
    with Iris("1MiB", device="cpu") as ctx:
        is_first = ctx.cur_rank == 0
        assert unlike(
            ("GroupError: .*rank 0 " if is_first else "GroupError: .*no group",
             lambda: ctx.device_barrier(other if is_first else "no group")),
            ("ValueError: must be: sem", lambda: ctx.device_barrier(sem="acquire")),
            ("TypeError: must be: stream", lambda: ctx.device_barrier(stream=3)),
        ) == []  # fmt: skip
        ctx.device_barrier(alone)
        ctx.barrier(group=range(2))
    assert unlike(("HeapClosedError", ctx.device_barrier)) == []


def bound_in_order() -> list[str]:
    """Barriers whose launches come from threads, the later one first; returns in what order they were over."""
    over = []
    with Iris("1MiB", device="cpu") as ctx:
        ctx.device_barrier()
        first, dropped, second = (ctx._device_barriers.bind(None, "release") for _ in range(3))
        thread = threading.Thread(target=lambda: (second.launch(None), over.append("second")))
        thread.start()
        dropped.drop()
        time.sleep(0.3)
        first.launch(None)
        over.append("first")
        thread.join(60)
        ctx.barrier()
    return over


GROUPS = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0]]


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[8]))
def test_any_ranks_form_a_group_and_the_others_take_no_part(pool, num_ranks, device):
    assert pool.run(groups, num_ranks, device, GROUPS, 3 if device == "cpu" else 20) == [None] * num_ranks


def test_wrong_calls_are_refused_before_anything_is_launched(pool):
    pool.run(refused, 2)


def test_barriers_come_in_the_order_of_the_calls_whoever_launches_them(pool):
    assert pool.run(bound_in_order, 3) == [["first", "second"]] * 3
