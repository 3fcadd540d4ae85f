"""Rank jobs: groups that the ranks do not name alike, and ranks that wait for each other for ever."""

import contextlib
import gc
import os
import random
import time

import torch
import torch.distributed as dist
from jobs_common import environment

from iris_core import Iris
from iris_core.bootstrap import TorchWorld, connect
from iris_core.errors import CollectiveTimeoutError, IrisError, PeerLostError


def attempt(call):
    """What a call raises, as (kind, text, seconds)."""
    begin = time.monotonic()
    try:
        call()
    except IrisError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def different_sets(device, sets, again, opened):
    """Each rank names its own set of members, twice; with `opened`, all of these groups have been used before."""
    with environment(IRIS_BARRIER_TIMEOUT="60"), Iris("1MiB", device=device) as ctx:
        rank = ctx.cur_rank
        x, y = ctx.full((4,), rank + 1.0), ctx.zeros(4)
        if opened:
            for number, group in enumerate(sorted({tuple(each) for each in sets})):
                if rank in group:
                    part = slice(0, number + 1)
                    ctx.ccl.all_reduce(y[part], x[part], group=group)
            ctx.barrier()
        said = [attempt(lambda: ctx.ccl.all_reduce(y, x, group=sets[rank])) for _ in range(2)]
        ctx.barrier()
        sums = []
        for group in again:
            if rank in group:
                ctx.ccl.all_reduce(y, x, group=group)
                ctx.barrier(group=group)
                sums.append(y.tolist())
        ctx.barrier()
        return said, sums


def group_against_world(device):
    """One rank is in a barrier of the world, the others in a group's; then in one of the same group."""
    with environment(IRIS_BARRIER_TIMEOUT="60"), Iris("1MiB", device=device) as ctx:
        rank, said = ctx.cur_rank, []
        if rank != 2:
            ctx.barrier(group=[0, 1])
        if rank == 1:
            said.append(attempt(ctx.barrier))
        else:
            said.append(attempt(lambda: ctx.barrier(group=[0, 1] if rank == 0 else None)))
        ctx.barrier()
        if rank != 2:
            ctx.barrier(group=[0, 1])
        return said


def round_about():
    """Each rank waits for the next one, in a group of its own with it; no two of them name the same."""
    world = connect(None, 60.0)
    rank, size = world.rank, world.world_size
    said = attempt(lambda: world.subworld(tuple(sorted((rank, (rank + 1) % size)))).barrier())
    after = world.all_gather_object(rank)
    world.close()
    return said, after


def comes_late():
    """Ranks 0 and 1 are stuck, in an exchange of all to which rank 2 comes when they have given it up."""
    world = connect(None, 60.0)
    rank = world.rank
    pair = world.subworld((0, 1)) if rank < 2 else world
    if rank == 2:
        time.sleep(3)
    said = attempt(pair.barrier if rank == 0 else world.barrier)
    after = world.all_gather_object(rank)
    if rank < 2:
        after += pair.all_gather_object(rank)
    world.close()
    return said, after


def busy(device):
    """Rank 1 computes for long, rank 2 has never been in the group, and rank 0 waits for both in turn."""
    with environment(IRIS_BARRIER_TIMEOUT="1.5"), Iris("1MiB", device=device) as ctx:
        ctx.barrier()
        ctx.barrier(group=list(range(ctx.num_ranks)))
        said = None
        if ctx.cur_rank == 0:
            said = attempt(ctx.barrier)
        else:
            time.sleep(3)
        return said


def busy_after_an_error():
    """Rank 1 has left its last exchange with an error and is somewhere else when rank 0 waits for it."""
    world = connect(None, 1.0)
    if world.rank == 1:
        try:
            world.subworld((1, 0)).barrier()  # to which rank 0 does not come
        except CollectiveTimeoutError:
            time.sleep(2.5)
        return None
    time.sleep(1.2)
    return attempt(world.subworld((0, 1, 2) if world.world_size > 2 else (0, 1)).barrier)


def comes_again():
    """Rank 0 gives up opening a group, as rank 1 is late, and tries again; later it computes while rank 1 waits."""
    world = connect(None, 30.0)
    rank, members = world.rank, (1, 0)
    said = "nothing"
    if rank == 0:
        world._timeout_s = 0.3
        said = attempt(lambda: world.subworld(members))[0]
        world._timeout_s = 30.0
    else:
        time.sleep(1)
    pair = world.subworld(members)
    if rank == 1:
        time.sleep(1.2)  # rank 0 has looked for it
    pair.barrier()
    if rank == 0:
        time.sleep(2)
    after = attempt(world.barrier)[:2]
    world.close()
    return said, after


def dies(where):
    """The last rank dies while the others wait for it: when they open a group's world, or in an exchange."""
    world = connect(None, 30.0)
    last = world.world_size - 1
    members = (last, *range(last))
    if where == "exchange":
        world.subworld(members).barrier()
    if world.rank == last:
        time.sleep(1)
        os._exit(3)
    begin = time.monotonic()
    try:
        world.subworld(members).barrier()
    except PeerLostError as error:
        return list(error.ranks), str(error), time.monotonic() - begin
    return "no error"


def threads():
    """Rank 1 waits in one exchange of each of two threads: that looks like being stuck, but is not."""
    import threading

    world = connect(None, 30.0)
    rank = world.rank
    pair, other = world.subworld((0, 1)), world.subworld((1, 0))
    if rank == 0:
        pair.barrier()  # rank 1 comes here in its thread, while it waits in `other`
        other.barrier()
        return "passed"
    thread = threading.Thread(target=lambda: (time.sleep(3), pair.barrier()))
    thread.start()
    other.barrier()
    thread.join()
    return "passed"


def stress(seed, seconds):
    """Many groups in one order, with ranks that are late by anything; returns how many calls there were."""
    world = connect(None, 60.0)
    rank, size = world.rank, world.world_size
    shared, own = random.Random(seed), random.Random(seed + 1 + rank)
    end, calls, slow = time.monotonic() + seconds, 0, 0.0
    while True:
        if calls % 20 == 0 and max(world.all_gather_object(time.monotonic() > end)):
            break
        members = tuple(shared.sample(range(size), shared.randint(2, size)))
        kind = shared.randrange(3)
        if own.random() < 0.02:
            pause = own.uniform(0.3, 2.0)
            slow = max(slow, pause)
            time.sleep(pause)
        if rank in members:
            part = world.subworld(members)
            if kind == 0:
                part.barrier()
            elif kind == 1:
                assert part.all_gather_ints([rank, calls]) == [(member, calls) for member in members]
            else:
                assert part.all_gather_object("x" * 300 + str(rank)) == ["x" * 300 + str(each) for each in members]
        calls += 1
    world.barrier()
    world.close()
    return calls, slow


def open_and_close(times):
    """How many more descriptors are open after worlds and their groups were opened and closed, though they are kept."""
    before, kept = 0, []
    for number in range(times + 2):
        world = connect(None, 30.0)
        world.subworld((1, 0)).barrier()
        world.barrier()
        world.close()
        kept.append(world)
        if number == 1:
            before = _num_descriptors()
    return _num_descriptors() - before


def fail_to_open(times):
    """How many more descriptors are open after worlds failed to open, at their very last exchange."""
    watch, said, before = TorchWorld._watch, [], 0
    TorchWorld._watch = _fail
    try:
        for number in range(times + 2):
            said.append(attempt(lambda: connect(None, 30.0))[0])
            gc.collect()
            if number == 1:
                before = _num_descriptors()
    finally:
        TorchWorld._watch = watch
    return set(said), _num_descriptors() - before


def _fail(*_):
    raise PeerLostError("gone", ranks=[0])


def _num_descriptors():
    """Without the sockets, which gloo closes when it likes."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def slow_rank(device):
    """Rank 1 is late by several seconds, again and again, in calls of different groups; all is well."""
    with environment(IRIS_BARRIER_TIMEOUT="60"), Iris("1MiB", device=device) as ctx:
        rank = ctx.cur_rank
        x, y = torch.ones(4, device=ctx.device), ctx.zeros(4)
        for group in ([0, 1], [0, 1, 2], [1, 2]):
            if rank == 1:
                time.sleep(2.5)
            if rank in group:
                ctx.ccl.all_reduce(y, x, group=group)
            ctx.barrier()
        return dist.get_rank(), y.tolist()
