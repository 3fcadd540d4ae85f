"""Ranks that wait for each other for ever are told so soon, all of them; ranks that are only slow are left in peace."""

import jobs_deadlocks as jobs
import pytest

from iris_core.errors import PeerLostError

SOON_S = 6.0  # ranks are told after one second; the rest is for machines that are busy


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("opened", [False, True])
def test_different_sets_of_members(pool, num_ranks, device, opened):
    sets = ([0, 1], [0, 1, 2], [0, 1, 2])
    results = pool.run(jobs.different_sets, num_ranks, device, sets, sets[:2], opened)
    for rank, (said, sums) in enumerate(results):
        for kind, text, seconds in said:
            assert kind == "RankMismatchError", text
            assert "rank 0 waits in all_reduce(), called at jobs_deadlocks.py:" in text
            assert ", among ranks 0, 1\n" in text
            for other in (1, 2):
                assert f"rank {other} waits in all_reduce(), called at jobs_deadlocks.py:" in text
            assert text.count(", among ranks 0, 1, 2\n") == 2
            assert seconds < SOON_S
        assert sums == ([[3.0] * 4] if rank < 2 else []) + [[6.0] * 4]


@pytest.mark.parametrize("num_ranks", [3])
def test_two_sets_that_share_one_rank(pool, num_ranks, device):
    """Rank 2 is in no set that anybody else names, and the two others wait for it."""
    sets = ([0, 2], [1, 2], [0, 1, 2])
    for said, _ in pool.run(jobs.different_sets, num_ranks, device, sets, sets, False):
        for kind, text, seconds in said:
            assert kind == "RankMismatchError", text
            assert "among ranks 0, 2\n" in text
            assert "among ranks 1, 2\n" in text
            assert "among ranks 0, 1, 2\n" in text
            assert seconds < SOON_S


@pytest.mark.parametrize("num_ranks", [3])
def test_a_group_against_the_world(pool, num_ranks, device):
    for ((kind, text, seconds),) in pool.run(jobs.group_against_world, num_ranks, device):
        assert kind == "RankMismatchError"
        assert text.count("waits in barrier(), called at jobs_deadlocks.py:") == 3
        assert "among ranks 0, 1\n" in text
        assert seconds < SOON_S


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_that_wait_round_about(pool, num_ranks):
    for (kind, text, seconds), after in pool.run(jobs.round_about, num_ranks):
        assert kind == "RankMismatchError"
        assert text.count(" waits in ") == num_ranks
        assert seconds < SOON_S
        assert after == list(range(num_ranks))


def test_a_rank_that_comes_when_the_others_have_given_up(pool):
    results = pool.run(jobs.comes_late, 3)
    for rank, ((kind, text, seconds), after) in enumerate(results):
        assert kind == "RankMismatchError"
        assert text.count(" waits in ") == 2
        assert seconds < SOON_S
        assert after == ([0, 1, 2, 0, 1] if rank < 2 else [0, 1, 2])
    assert "rank 2 came to an exchange that rank 0 had given up" in results[2][0][1]


@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_waits_for_nobody(pool, num_ranks, device):
    (kind, text, _), other = pool.run(jobs.busy, num_ranks, device)
    assert kind == "CollectiveTimeoutError"
    assert (
        "did not arrive:\n  rank 1 is in no exchange between hosts: its last one, barrier(), called at jobs_dead"
        in text
    )
    assert text.count(", is finished\n") == 1
    assert other is None


def test_a_rank_that_has_left_with_an_error(pool):
    (kind, text, _), _ = pool.run(jobs.busy_after_an_error, 2)
    assert kind == "CollectiveTimeoutError"
    assert "rank 1 has left subworld(), called at jobs_deadlocks.py:" in text
    assert ", with an error\n" in text


def test_a_group_that_is_opened_at_the_second_attempt(pool):
    """The ranks count its exchanges alike, or one would look as if it still waited there for the other."""
    results = pool.run(jobs.comes_again, 2)
    assert results == [("CollectiveTimeoutError", ("nothing", "")), ("nothing", ("nothing", ""))]


@pytest.mark.parametrize("where", ["opening", "exchange"])
def test_a_rank_that_dies(pool, where):
    with pytest.raises(PeerLostError) as caught:
        pool.run(jobs.dies, 3, where)
    assert caught.value.ranks == (2,)


def test_several_threads_are_left_in_peace(pool):
    assert pool.run(jobs.threads, 2) == ["passed"] * 2


@pytest.mark.parametrize("num_ranks", [3])
def test_a_slow_rank_is_left_in_peace(pool, num_ranks, device):
    results = pool.run(jobs.slow_rank, num_ranks, device)
    assert results == [(0, [3.0] * 4), (1, [2.0] * 4), (2, [2.0] * 4)]


def test_many_groups_and_random_delays(pool):
    results = pool.run(jobs.stress, 4, 7, 12.0)
    assert len({calls for calls, _ in results}) == 1
    assert results[0][0] >= 40
    assert max(slow for _, slow in results) > 1.0


def test_closed_worlds_leave_no_descriptors(pool):
    assert pool.run(jobs.open_and_close, 2, 5) == [0, 0]


def test_worlds_that_fail_to_open_leave_no_descriptors(pool):
    assert pool.run(jobs.fail_to_open, 2, 4) == [({"PeerLostError"}, 0)] * 2
