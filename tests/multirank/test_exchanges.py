"""Exchanges between hosts: every kind and size; ranks that are in different ones are told, and can go on."""

import re

import jobs_exchanges as jobs
import pytest

from iris_core.testing import RankPool


@pytest.fixture(scope="module")
def plain_pool():
    """Ranks without torch.distributed."""
    with RankPool(timeout_s=300.0) as pool:
        yield pool


@pytest.fixture(params=["torch.distributed", "plain"])
def any_pool(request):
    """The ranks find each other by way of torch.distributed's store, and through their launcher's folder."""
    return request.getfixturevalue("pool" if request.param == "torch.distributed" else "plain_pool")


def test_every_kind_and_size(any_pool):
    assert any_pool.run(jobs.exchanges, 3) == [[], [], []]


@pytest.mark.parametrize("pair", [
    ("two", "three"), ("two", "object"), ("barrier", "two"), ("object", "barrier"), ("broadcast", "object"),
    ("broadcast", "another root"),
])  # fmt: skip
def test_ranks_in_different_exchanges(plain_pool, pair):
    for (kind, _, text), after in plain_pool.run(jobs.out_of_step, 2, pair):
        assert kind == "RankMismatchError"
        assert "rank 0" in text
        assert "rank 1" in text
        assert after == [0, 1]


def test_a_broadcast_that_one_rank_cannot_send(pool):
    assert pool.run(jobs.broadcast_what_cannot_be_sent, 2) == [
        ("IrisError", "broadcast: rank 1's object cannot be sent: cannot be sent", 7),
        ("RuntimeError", "cannot be sent", 7),
    ]


def test_ranks_in_different_calls_of_a_context(pool):
    for (kind, _, text), result in pool.run(jobs.different_calls, 3):
        assert kind == "RankMismatchError"
        assert "ranks 0, 2: matmul_all_reduce()\n" in text
        assert "rank 1: barrier()\n" in text
        assert result == [24.0]


def test_time_outs_name_the_missing_ranks_and_say_where_the_others_are(plain_pool, tmp_path):
    first, second, third = plain_pool.run(jobs.late, 3, tmp_path)
    assert first[:2] == ("CollectiveTimeoutError", (1, 2))
    assert "rank 0 waits in barrier(), among ranks 0, 2, 1\n" in first[2]
    assert "rank 1 waits in barrier(), among ranks 1, 0\n" in first[2]
    assert "rank 2 waits in no exchange with rank 0" in first[2]
    assert second[:2] == ("CollectiveTimeoutError", (0,))
    assert third is None


def test_exchanges_of_several_threads(plain_pool):
    assert plain_pool.run(jobs.threads, 2) == ["passed"] * 2


@pytest.mark.parametrize("num_ranks", [pytest.param(3, marks=pytest.mark.exhaustive), 4])
def test_groups_in_any_order_with_random_delays(plain_pool, some, num_ranks):
    calls = len(some(range(1500), 5))
    assert plain_pool.run(jobs.stress, num_ranks, 7, calls) == [[]] * num_ranks


def test_more_descriptors_than_one_message_holds(plain_pool):
    assert plain_pool.run(jobs.many_descriptors, 3) == [([], 0)] * 3


@pytest.mark.parametrize("refused", [False, True])
def test_worlds_that_are_closed_or_that_one_rank_refuses_to_open(any_pool, refused):
    """No descriptor stays of them."""
    results = any_pool.run(jobs.open_and_close, 2, 4, refused)
    assert [more for _, more in results] == [0, 0]
    for rank, (((kind, text),), _) in enumerate(results):
        assert kind == ("IrisError" if refused else "nothing")
        start = rf"rank {rank}: (rank \d: )?cannot open the world: \[Errno 24\] Too many open files; the limit of open"
        assert re.match(start if refused else "$", text)


def test_ranks_on_another_host_are_another_node(pool):
    assert pool.run(jobs.elsewhere, 3) == [(((0, 2), (1,)), node, [0, 1, 2]) for node in (0, 1, 0)]
