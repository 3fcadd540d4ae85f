"""Rank jobs: what `ctx.barrier()`, `ctx.free()` and `close()` know of collectives with async_op=True."""

import contextlib
import functools
import random
import threading
import time

import torch
from jobs_ccl import on_heap, said_by
from jobs_common import environment

from iris_core import Iris
from iris_core.errors import IrisError
from iris_triton.interpreter import configured

NUMEL = 50_000


def nobody_waits(device, seed, rounds):
    """Calls of several teams whose handles are dropped: results are there behind a barrier, and no block is used twice.

    Ranks are late by themselves; all else is the same on all of them.
    """
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        shared, own = random.Random(seed), random.Random(100 * seed + rank)
        reused = 0
        for turn in range(rounds):
            checks, freed = [], set()
            for _ in range(shared.randint(1, 3)):
                group = shared.sample(range(size), shared.randint(2, size))
                fate = shared.choice(["free", "scope", "drop", "keep"])
                with ctx.scope() if fate == "scope" else contextlib.nullcontext() as scope:
                    x, y = ctx.full((NUMEL,), rank + 1.0), ctx.zeros(NUMEL)
                    time.sleep(own.choice([0, 0, 0, 0.02, 0.1]))
                    if rank in group:
                        ctx.ccl.all_reduce(y, x, group=group, async_op=True)
                        ctx.ccl.barrier(group=group, async_op=True)
                    if scope:
                        scope.keep(y)
                    freed.add(x.data_ptr())
                if fate == "free":
                    ctx.free(x)
                    freed.add(y.data_ptr())
                    ctx.free(y)
                elif rank in group:
                    checks.append((y, float(sum(each + 1 for each in group)), fate))
                del x, y
            time.sleep(own.choice([0, 0, 0.05]))
            ctx.barrier()
            wrong += [(turn, fate) for y, total, fate in checks if not bool((y == total).all())]
            new = [ctx.zeros(NUMEL) for _ in range(4)]
            reused += len(freed & {each.data_ptr() for each in new})
            time.sleep(0.03)
            wrong += [(turn, "written after it was freed") for each in new if bool(each.any())]
            for each in new:
                ctx.free(each)
        if device == "cpu" and not reused:
            wrong.append("no block was used again")
    return wrong


@on_heap("8MiB")
def freed_and_asked_for(ctx):
    """A block is freed while a call uses it, and asked for again, as there is no other room."""
    numel = 1_200_000
    y = ctx.zeros(numel)
    time.sleep(0.2 * (ctx.cur_rank == 1))
    ctx.ccl.all_reduce(y, torch.ones(numel, device=ctx.device), async_op=True)
    ctx.free(y)
    again = ctx.zeros(numel)
    same = again.data_ptr() == y.data_ptr()
    time.sleep(0.3)
    return same, again.unique().tolist()


def fails(how):
    """Rank 0 makes calls to which its partner does not come, and waits for none; who learns of it, and what then."""
    ctx, said = Iris("8MiB", device="cpu"), []
    rank, x, y = ctx.cur_rank, ctx.ones(4), ctx.zeros(4)
    reduce = functools.partial(ctx.ccl.all_reduce, y, x, group=[0, 1])
    reduce() if rank < 2 else None
    with configured(timeout_s=1.0):
        works = [reduce(async_op=True) for _ in range(3)] if rank == 0 else []
        if how == "wait":
            said += [said_by(work.wait) for work in works]
        if how == "collective" and rank == 0:
            while not works[-1].is_completed():
                time.sleep(0.01)
            said.append(said_by(reduce))
        if how == "group" and rank < 2:
            said.append(said_by(ctx.barrier, group=[1, 0]))
        if how in ("barrier", "close"):
            said.append(said_by(getattr(ctx, how)))
        if how == "close":
            return said
        ctx.barrier()  # nothing is raised twice
        if rank < 2:
            ctx.ccl.reset(group=[0, 1])
            reduce(async_op=True)
    ctx.close()
    return said, y.tolist()


def keeps_errors():
    """Rank 0 makes barriers that fail before they are launched, and keeps their errors; then all make one."""
    with Iris("8MiB", device="cpu") as ctx:
        x, y = ctx.ones(4), ctx.zeros(4)
        ctx.ccl.all_reduce(y, x)
        ctx.ccl.barrier()
        kept = []
        with configured(timeout_s=1.0):
            if ctx.cur_rank == 0:
                kept += [ctx.ccl.all_reduce(y, x, async_op=True), ctx.ccl.barrier(async_op=True)]
                while not kept[-1].is_completed():
                    time.sleep(0.01)
                try:
                    ctx.ccl.barrier()
                except IrisError as error:
                    kept.append(error)
        ctx.broadcast(0)
        last = threading.Thread(target=ctx.ccl.barrier, daemon=True)
        last.start()
        last.join(30)
        return type(kept[-1]).__name__ if kept else "", last.is_alive()


def leaves(device):
    """The context is left while calls are under way, on all ranks: by close, and with an error."""
    closed, failed = None, None
    with Iris("8MiB", device=device) as ctx:
        time.sleep(0.1 * ctx.cur_rank)
        closed = ctx.zeros(NUMEL)
        ctx.ccl.all_reduce(closed, ctx.ones(NUMEL), async_op=True)
        ctx.ccl.barrier(async_op=True)
    with (
        contextlib.suppress(ZeroDivisionError),
        environment(IRIS_BARRIER_TIMEOUT="20"),
        Iris("8MiB", device=device) as ctx,
    ):
        failed = torch.zeros(NUMEL, device=ctx.device)
        for _ in range(5):
            ctx.ccl.all_reduce(failed, torch.ones(NUMEL, device=ctx.device), async_op=True)
        raise ZeroDivisionError
    return closed.unique().tolist()
