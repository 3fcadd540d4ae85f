"""iris_core.run and the pool: results, failures, and nothing left behind."""

import multiprocessing
import os

import jobs_launch as jobs
import pytest
import torch

import iris_core
from iris_core.errors import CollectiveTimeoutError, PeerLostError
from iris_core.testing import RankPool
from iris_core.world.launch import RankError


def left_behind():
    return [p for p in multiprocessing.active_children() if p.name.startswith("iris rank")]


def test_results_come_back_in_the_order_of_ranks():
    assert iris_core.run(jobs.describe, 3, "hello") == [("hello", r, 3, str(r), str(r)) for r in range(3)]
    assert left_behind() == []


@pytest.mark.parametrize("wanted", [False, True])
def test_torch_distributed_is_there_if_it_is_asked_for(wanted):
    assert iris_core.run(jobs.initialised, 2, torch_distributed=wanted) == [wanted] * 2


def test_variables_reach_the_ranks_and_not_us():
    assert iris_core.run(jobs.variable, 1, "IRIS_X_TEST", environ={"IRIS_X_TEST": "7"}) == ["7"]
    assert "IRIS_X_TEST" not in os.environ


def test_the_cause_is_shown_not_its_consequences():
    with pytest.raises(RankError, match="deliberate, on 1") as caught:
        iris_core.run(jobs.raise_on, 3, 1)
    assert caught.value.rank == 1
    assert left_behind() == []


def test_a_rank_that_dies_is_named():
    with pytest.raises(PeerLostError, match="rank 0 ended with exit code 7") as caught:
        iris_core.run(jobs.die_on, 2, 0)
    assert caught.value.ranks == (0,)
    assert left_behind() == []


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankError, match="unpicklable"):
        iris_core.run(jobs.unpicklable, 1)


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match="at least 1"):
        iris_core.run(jobs.process_id, 0)


def test_the_pool_keeps_its_processes(pool):
    first = pool.run(jobs.process_id, 2)
    assert pool.run(jobs.describe, 4, "x")[3] == ("x", 3, 4, "3", "3")
    assert pool.run(jobs.process_id, 2) == first


def test_workers_take_variables_at_their_start_and_have_addresses_of_their_own(pool, monkeypatch):
    """Also where one server forks them."""
    pool.run(jobs.process_id, 1)  # the server runs
    monkeypatch.setenv("IRIS_X_TEST", "later")
    with RankPool(environ={"IRIS_Y_TEST": "given"}) as another:
        assert another.run(jobs.variable, 2, "IRIS_X_TEST") == ["later"] * 2
        assert another.run(jobs.variable, 2, "IRIS_Y_TEST") == ["given"] * 2
        first, second = another.run(jobs.address, 2)
        assert first != second


def test_the_pool_survives_failures(monkeypatch):
    monkeypatch.setattr("iris_core.testing.pool._LAST_WORDS_S", 0.5)
    with RankPool(timeout_s=60) as pool:
        with pytest.raises(RankError, match="deliberate, on 0"):
            pool.run(jobs.raise_on, 2, 0)
        with pytest.raises(PeerLostError, match=r"\[1\]"):
            pool.run(jobs.die_on, 2, 1)
        pool.run(jobs.process_id, 2)  # the new worker has started
        with pytest.raises(CollectiveTimeoutError, match="job hang_on: rank 1 of 2 still ran after 1 s") as caught:
            pool.run(jobs.hang_on, 2, 1, timeout_s=1.0)
        assert caught.value.missing_ranks == (1,)
        with pytest.raises(RankError, match="cannot be sent"):
            pool.run(jobs.unpicklable, 1)
        assert pool.run(jobs.describe, 2, "y") == [("y", r, 2, str(r), str(r)) for r in range(2)]


@pytest.mark.parametrize("num_ranks", [2])
def test_ranks_of_mp_spawn(tmp_path, num_ranks, device):
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(
        jobs.spawned, args=(num_ranks, device, str(tmp_path / "store"), answers), nprocs=num_ranks
    )
    assert sorted(answers.get() for _ in range(num_ranks)) == [(0, 2, 0.0), (1, 2, 4.0)]


def test_ranks_may_start_processes():
    assert iris_core.run(jobs.start_a_process, 1) == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize("num_ranks", [2])
def test_a_forked_child_is_refused_and_disturbs_nothing(pool, num_ranks, device):
    assert pool.run(jobs.fork_and_use, num_ranks, device) == [("([], [])", 3.0)] * num_ranks
