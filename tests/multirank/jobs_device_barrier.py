"""Rank jobs of test_device_barrier; they run on CPU ranks and on GPUs."""

import threading
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from jobs_common import environment, said

import iris_triton as iris
from iris_core import Iris
from iris_core.device.barrier import Place


@triton.jit(do_not_specialize=["value", "peer"])
def tell(box, value, context, peer, world_size: tl.constexpr):
    """Store a value into this rank's place of a peer's box."""
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    ctx.store(box + ctx.rank, value, peer)


@triton.jit
def add_up(box, total, num_ranks, LANES: tl.constexpr):
    """total += what the box holds."""
    lanes = tl.arange(0, LANES)
    tl.store(total, tl.load(total) + tl.sum(tl.load(box + lanes, mask=lanes < num_ranks, other=0), axis=0))


def tell_all(ctx, box, value, members):
    for peer in members:
        tell[(1,)](box, value, ctx.get_device_context(), peer, ctx.num_ranks)


def sum_box(ctx, box, total):
    add_up[(1,)](box, total, ctx.num_ranks, LANES=triton.next_power_of_2(ctx.num_ranks))


def groups(device: str, sets: list[list[int]], rounds: int) -> list[int]:
    """Every group counts by itself; a rank that is in none of them does nothing at all."""
    made = [dist.new_group(members) for members in sets]
    with Iris("1MiB", device=device) as ctx:
        box, total = ctx.zeros(ctx.num_ranks, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
        ctx.barrier()
        sums = []
        for members, group in zip(sets, made, strict=True):
            if ctx.cur_rank not in members:
                continue
            box.zero_()
            total.zero_()
            ctx.device_barrier(group)
            for r in range(rounds):
                tell_all(ctx, box, r + 10 ** members.index(ctx.cur_rank), members)
                ctx.device_barrier(group)
                sum_box(ctx, box, total)
                ctx.device_barrier(group)
            sums.append(int(total.item()))
        ctx.barrier()
        return sums


def refused() -> list[str]:
    """What a wrong call says."""
    other = dist.new_group([1])
    alone = dist.new_group([0, 1], backend="gloo")
    with Iris("1MiB", device="cpu") as ctx:
        found = [
            said(lambda: ctx.device_barrier(other if ctx.cur_rank == 0 else "no group")),
            said(lambda: ctx.device_barrier(sem="acquire")),
            said(lambda: ctx.device_barrier(stream=3)),
        ]
        ctx.device_barrier(alone)
        ctx.barrier()
    return [*found, said(ctx.device_barrier)]


def stays_away(device: str) -> str:
    """Rank 1 does not come; rank 0's wait ends by its bound."""
    with environment(IRIS_DEVICE_TIMEOUT="0.3"), Iris("1MiB", device=device) as ctx:
        ctx.barrier()
        if ctx.cur_rank == 0:
            ctx.device_barrier()
        return said(ctx.barrier).removeprefix("DeviceTimeoutError: ")


def bound_in_order() -> list[str]:
    """Barriers whose launches come from threads, the later one first; returns in what order they were over."""
    over = []
    with Iris("1MiB", device="cpu") as ctx:
        ctx.device_barrier()
        barriers = ctx._device_barriers
        first, dropped, second = (barriers.bind(None, "release") for _ in range(3))

        def launch(name: str, place: Place) -> None:
            place.launch(None)
            over.append(name)

        thread = threading.Thread(target=launch, args=("second", second))
        thread.start()
        dropped.drop()
        time.sleep(0.3)
        launch("first", first)
        thread.join(60)
        ctx.barrier()
    return over


def from_threads(num_calls: int) -> tuple[int, int]:
    """Two threads call as they come; returns how many barriers were counted, and the slots that there are."""
    with Iris("1MiB", device="cpu") as ctx:
        ctx.device_barrier()

        def calls() -> None:
            for _ in range(num_calls):
                ctx.device_barrier()

        threads = [threading.Thread(target=calls) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(100)
        ctx.barrier()
        words = ctx._device_barriers._groups[tuple(range(ctx.num_ranks))]._words
        return int(words[0, -1].item()), len(words)
