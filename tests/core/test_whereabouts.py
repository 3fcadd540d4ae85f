"""Where ranks are, with the pages of several ranks in one process."""

import mmap
import os
import threading

import pytest
import torch.distributed as dist

from iris_core.bootstrap import TorchWorld
from iris_core.whereabouts import Whereabouts

PAIR, ALL, OTHERS = (0, 1), (0, 1, 2), (1, 2)


@pytest.fixture
def ranks():
    made = [Whereabouts(rank) for rank in range(3)]
    addresses = [each.address for each in made]
    assert all(each.connect(addresses) for each in made)
    yield made
    for each in made:
        each.close()


@pytest.fixture
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def come(rank, members, call):
    rank.enter(rank.slot(members), call, b"barrier(), called at train.py:%d" % call)


def look(*ranks):
    return [rank.look() for rank in ranks]


def test_ranks_that_wait_for_each_other_are_found_at_the_second_look(ranks):
    come(ranks[0], PAIR, 1)
    come(ranks[1], ALL, 1)
    come(ranks[2], ALL, 1)
    assert look(*ranks) == [None, None, None]
    ranks[1].look()
    found = ranks[2].look() or ranks[2].look()
    assert found is not None
    assert found.numbers == {0: 1, 1: 1, 2: 1}
    assert found.exchanges == [(PAIR, 1), (ALL, 1)]
    assert "rank 0 waits in barrier(), called at train.py:1, among ranks 0, 1\n" in found.text


def test_what_one_has_found_the_others_take_over(ranks):
    come(ranks[0], PAIR, 1)
    come(ranks[1], ALL, 1)
    come(ranks[2], ALL, 1)
    found = None
    for _ in range(3):
        look(ranks[0], ranks[2])
        found = ranks[1].look() or found
    assert found is not None
    ranks[1].tell(found)
    assert ranks[0].look() == found
    come(ranks[0], PAIR, 2)  # it has gone on
    assert ranks[0].verdicts_of([1]) == []


def test_a_rank_that_has_not_come_yet_is_waited_for(ranks):
    come(ranks[0], ALL, 1)
    come(ranks[1], ALL, 1)
    for _ in range(4):
        assert look(ranks[0], ranks[1]) == [None, None]
    assert ranks[0].missing(ALL, 1) == [2]
    assert ranks[0].describe(2) == "rank 2 has not taken part in any exchange between hosts yet"


def test_a_rank_that_has_been_in_the_exchange_is_not_missed(ranks):
    """Rank 0 has not left yet; rank 1, who has, waits for it in the next one."""
    come(ranks[0], PAIR, 1)
    come(ranks[1], PAIR, 1)
    come(ranks[1], ALL, 1)
    for _ in range(4):
        assert look(ranks[0], ranks[1]) == [None, None]
    assert (
        ranks[1].describe(0)
        == "rank 0 is in no exchange between hosts: its last one, barrier(), called at train.py:1, is finished"
    )


def test_who_waits_for_a_rank_that_is_not_stuck_is_not_stuck(ranks):
    come(ranks[0], PAIR, 1)
    come(ranks[1], OTHERS, 1)  # for rank 2, which computes
    for _ in range(4):
        assert look(ranks[0], ranks[1]) == [None, None]


def test_a_rank_that_has_not_looked_itself_is_not_stuck(ranks):
    """It may have been stopped for a moment: it says itself that it has waited for long."""
    come(ranks[0], PAIR, 1)
    come(ranks[1], ALL, 1)
    come(ranks[2], ALL, 1)
    for _ in range(4):
        assert look(ranks[0], ranks[2]) == [None, None]


def test_a_rank_with_exchanges_in_two_threads_is_not_stuck(ranks):
    thread = threading.Thread(target=come, args=(ranks[1], ALL, 1))
    thread.start()
    thread.join()
    come(ranks[0], PAIR, 1)
    for _ in range(4):
        assert look(ranks[0], ranks[1]) == [None, None]


def test_a_rank_with_another_thread_is_not_stuck(ranks):
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    come(ranks[0], PAIR, 1)
    come(ranks[1], ALL, 1)
    try:
        for _ in range(4):
            assert look(ranks[0], ranks[1]) == [None, None]
    finally:
        go_on.set()
        thread.join()
    look(ranks[0], ranks[1])
    assert any(found is not None for _ in range(2) for found in look(ranks[0], ranks[1]))


def test_a_rank_that_left_with_an_error_is_not_stuck(ranks):
    come(ranks[0], PAIR, 1)
    come(ranks[1], ALL, 1)
    ranks[1].fail()
    for _ in range(4):
        assert look(ranks[0]) == [None]
    assert ranks[0].describe(1) == "rank 1 has left barrier(), called at train.py:1, with an error"


def test_what_was_given_up_counts(ranks):
    come(ranks[0], PAIR, 1)
    ranks[1].give_up(PAIR, 1)
    assert ranks[0].gave_up(PAIR, 1) == [1]
    assert ranks[0].missing(PAIR, 1) == []
    assert ranks[0].gave_up(PAIR, 2) == []


def test_an_address_of_something_else_is_refused(ranks):
    one = Whereabouts(0)
    own = one.address
    assert not one.connect([own, ranks[1].address._replace(token=5)])
    assert not one.connect([own, ranks[1].address._replace(fd=9999)])
    one.close()


def test_groups_without_end():
    one = Whereabouts(0)
    number = 0
    while one.slot((0, number + 1)) is not None:
        number += 1
        assert number < 1 << 17
    assert number > 1000
    assert one.slot((0, 1)) == 0
    one.give_up((0, number + 1), 1)  # of no use, and no error
    one.close()


def test_without_memory_to_share_no_descriptor_is_left(monkeypatch):
    def fail(*_, **__):
        raise OSError(12, "no room")

    descriptors = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: descriptors.append(create(name)) or descriptors[-1])
    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OSError, match="no room"):
        Whereabouts(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*descriptors)


def test_a_python_without_memfd_opens_worlds_all_the_same(monkeypatch, one_rank_group):
    """Python lacks it where it was built for an old C library, as conda's are; GPUs do not need it."""
    monkeypatch.delattr(os, "memfd_create")
    world = TorchWorld(None, 10.0)
    assert world.all_gather_object("here") == ["here"]
    world.close()


def test_places_in_files_with_the_same_lines_are_told_apart():
    def place_in(path):
        names = {"__name__": "__main__"}
        exec(compile("from iris_core.frames import where_called\nsaid = where_called()", path, "exec"), names)
        return names["said"]

    assert place_in("/some/train.py") == "where_called(), called at train.py:2"
    assert place_in("/some/tune.py") == "where_called(), called at tune.py:2"
