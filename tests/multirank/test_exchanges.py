"""Exchanges between hosts: every kind and size; ranks that are in different ones are told, and can go on."""

import contextlib
import gc
import os
import random
import re
import threading
import time
from unittest import mock

import pytest
from jobs_common import refusal

from iris_core import Iris
from iris_core.errors import IrisError
from iris_core.testing import RankPool
from iris_core.testing.conformance import oracle
from iris_core.types import Segment
from iris_core.world import connect, rendezvous


def in_world(job, *args):
    with contextlib.closing(connect(None, 30.0)) as world:
        return job(world, *args)


def exchanges(world):
    rank, size = world.rank, world.world_size
    for number in (0, 1, 14, 15, 40):
        rows = world.all_gather_ints([rank - (1 << 62)] * number)
        assert rows == [(r - (1 << 62),) * number for r in range(size)]
    for length in (0, 90, 113, 5000, 3 << 20):  # the last one is more than a socket holds
        assert world.all_gather_object(["\xff" * (length + rank)]) == [["\xff" * (length + r)] for r in range(size)]
        given = b"\0" * length + bytes([rank])
        assert world.broadcast_object(given, size - 1) == b"\0" * length + bytes([size - 1])
    world.barrier()


def out_of_step(world, pair):
    """What ranks are told that are in different exchanges; afterwards they can go on."""
    calls = {
        "two": lambda: world.all_gather_ints([1, 2]), "three": lambda: world.all_gather_ints([1, 2, 3]),
        "object": lambda: world.all_gather_object("x" * 500), "broadcast": lambda: world.broadcast_object("x", 0),
        "another root": lambda: world.broadcast_object("x", 1), "barrier": world.barrier,
    }  # fmt: skip
    return refusal(calls[pair[world.rank % 2]]), world.all_gather_object(world.rank)


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("stubborn")


def broadcast_what_cannot_be_sent():
    """One rank's object refuses to be pickled: all raise, and can go on."""
    with Iris("1MiB", device="cpu") as ctx:
        kind, _, text = refusal(lambda: ctx.broadcast(Stubborn(), src=1), (IrisError, RuntimeError))
        return kind, ctx.broadcast(7, src=1), text


def late(world, folder):
    """Rank 1 is in a world that rank 0 is not waiting in, and rank 2 in none; what ranks 0 and 1 are told."""
    rank = world.rank
    world.barrier()
    said = None
    if rank < 2:
        world.timeout_s = 1.0
        members = (0, 2, 1) if rank == 0 else (1, 0)
        said = refusal(world.subworld(members).barrier)
        world.timeout_s = 30.0
        (folder / str(rank)).touch()
    while not {"0", "1"} <= {*os.listdir(folder)}:  # which no exchange may tell rank 2
        time.sleep(0.01)
    world.barrier()  # all come here, and are in step again
    if rank < 2:
        world.subworld((1, 0)).barrier() if rank == 0 else None  # where rank 1 has been already
    world.barrier()
    return said


def threads(world):
    """Rank 1 waits in one exchange of each of two threads."""
    pair, other = world.subworld((0, 1)), world.subworld((1, 0))
    if world.rank == 0:
        pair.barrier()  # rank 1 comes here in its thread, while it waits in `other`
        other.barrier()
    else:
        thread = threading.Thread(target=lambda: (time.sleep(1), pair.barrier()))
        thread.start()
        other.barrier()
        thread.join()


def stress(world, seed=7, calls=300):
    """Many groups in any order, with ranks that are late by anything; descriptors now and then."""
    world.timeout_s = 60.0
    rank, size = world.rank, world.world_size
    shared, own = random.Random(seed), random.Random(seed + 1 + rank)
    for call in range(calls):
        members = tuple(shared.sample(range(size), shared.randint(2, size)))
        kind = shared.randrange(4)
        if own.random() < 0.1:
            time.sleep(own.expovariate(100))
        if rank not in members:
            continue
        part = world.subworld(members)
        if kind == 0:
            part.barrier()
        elif kind == 1:
            assert part.all_gather_ints([rank, call]) == [(member, call) for member in members]
        elif kind == 2:
            assert part.all_gather_object("x" * 300 + str(rank)) == ["x" * 300 + str(each) for each in members]
        else:
            pass_descriptors(part, members)
    world.barrier()


def pass_descriptors(part, members, each=lambda rank: rank % 3):
    """Every member sends some descriptors."""
    rank = members[part.rank]
    mine = []
    for index in range(each(rank)):
        mine.append(os.memfd_create("stress"))
        os.write(mine[-1], f"{rank} {index}".encode())
    segments = [Segment(index, 1, bytes([rank]), fd) for index, fd in enumerate(mine)]
    got = part.exchange_segments([*segments, Segment(9, 9, b"plain")])
    for index, (*row, plain) in enumerate(got):
        contents = [(os.pread(each.fd, 99, 0).decode(), os.get_inheritable(each.fd)) for each in row]
        assert contents == [(f"{members[index]} {number}", False) for number in range(each(members[index]))]
        assert plain == Segment(9, 9, b"plain")
        if index != part.rank:
            for segment in row:
                os.close(segment.fd)
    for fd in mine:
        os.close(fd)


def many_descriptors(world):
    gc.collect()  # earlier jobs may have left descriptors to the collector
    before = num_descriptors()
    pass_descriptors(world, tuple(range(world.world_size)), lambda rank: (0, 1, 450)[rank])
    assert num_descriptors() == before


def open_and_close(times, refused):
    """What is said where rank 1 refuses to open worlds, or may not, and how many more descriptors are open then."""
    said, kept, before = set(), [], 0

    def refuse(*_):
        raise OSError(24, "Too many open files")

    def use():
        world = connect(None, 30.0)
        world.subworld((1, 0)).barrier()
        world.barrier()
        world.close()
        kept.append(world)

    refuses = mock.patch.object(rendezvous.Opening, "_look_after", refuse)
    for number in range(times + 2):
        with refuses if refused and int(os.environ["RANK"]) == 1 else contextlib.nullcontext():
            said.add(refusal(use)[::2])
        if number == 1:
            before = num_descriptors()
    return said, num_descriptors() - before


def num_descriptors():
    """How many descriptors are open; without the sockets of gloo, which closes them when it likes."""
    return sum(" socket:" not in each for each in oracle.open_descriptors())


@pytest.fixture(scope="module")
def plain_pool():
    with RankPool(timeout_s=300.0) as pool:
        yield pool


@pytest.fixture(params=["torch.distributed", "plain"])
def any_pool(request):
    """The ranks find each other by way of torch.distributed's store, and through their launcher's folder."""
    return request.getfixturevalue("pool" if request.param == "torch.distributed" else "plain_pool")


@pytest.mark.parametrize(("num_ranks", "job"), [(3, exchanges), (2, threads), (3, many_descriptors), (4, stress)])
def test_exchanges(any_pool, num_ranks, job):
    any_pool.run(in_world, num_ranks, job)


@pytest.mark.parametrize("pair", [
    ("two", "three"), ("two", "object"), ("barrier", "two"), ("object", "barrier"), ("broadcast", "object"),
    ("broadcast", "another root"),
])  # fmt: skip
def test_ranks_in_different_exchanges(plain_pool, pair):
    for (kind, _, text), after in plain_pool.run(in_world, 2, out_of_step, pair):
        assert kind == "RankMismatchError"
        assert "rank 0" in text
        assert "rank 1" in text
        assert after == [0, 1]


def test_a_broadcast_that_one_rank_cannot_send(pool):
    (*first, text), second = pool.run(broadcast_what_cannot_be_sent, 2)
    assert (first, second) == (["IrisError", 7], ("RuntimeError", 7, "stubborn"))
    assert re.match("broadcast: rank 1.* stubborn$", text)


def test_time_outs_name_the_missing_ranks_and_say_where_the_others_are(plain_pool, tmp_path):
    first, second, third = plain_pool.run(in_world, 3, late, tmp_path)
    assert first[:2] == ("CollectiveTimeoutError", (1, 2))
    assert "rank 0 waits in barrier(), among ranks 0, 2, 1\n" in first[2]
    assert "rank 1 waits in barrier(), among ranks 1, 0\n" in first[2]
    assert "rank 2 waits in no exchange with rank 0" in first[2]
    assert second[:2] == ("CollectiveTimeoutError", (0,))
    assert third is None


@pytest.mark.parametrize("refused", [False, True])
def test_worlds_that_are_closed_or_that_one_rank_refuses_to_open(any_pool, refused):
    """No descriptor stays of them."""
    results = any_pool.run(open_and_close, 2, 4, refused)
    assert [more for _, more in results] == [0, 0]
    for rank, (((kind, text),), _) in enumerate(results):
        assert kind == ("IrisError" if refused else "nothing")
        assert re.match(rf"rank {rank}: .*\[Errno 24\] Too many open files; " if refused else "$", text)
