"""The first call of a kind measures algorithms on its own tensors (IRIS_TUNE=first), on all members alike."""

from unittest import mock

import jobs_first_calls as jobs
import pytest
from jobs_first_calls import HERE, WATCHED
from tables import table

from iris_core.dispatch import first_calls
from iris_core.dispatch.tables import read_table

ONE_IS_GOOD = "the cheapest by its model"
two_ranks = pytest.mark.parametrize("num_ranks", [2])


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path)


# -- results ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "members", "mode"), [
    (3, (0, 1, 2), "first"), (3, (2, 0), "first"), (2, (0, 1), "exhaustive"),
])  # fmt: skip
def test_results_are_right_after_measuring_also_in_place(pool, num_ranks, device, members, mode, cache):
    found = pool.run(jobs.results, num_ranks, device, cache, members, mode)
    for rank, reasons in enumerate(found):
        assert len(reasons) == 4 * (rank in members)
        alone = {ONE_IS_GOOD} if device == "cuda" and members == (2, 0) else set()  # NCCL knows no other order
        assert set(reasons) - alone == ({HERE} if rank in members else set())


# -- what is kept -----------------------------------------------------------------------------------------------------
@two_ranks
def test_a_later_context_measures_nothing(pool, num_ranks, tmp_path):
    """What was measured is in the cache, the fastest first, and no first member's times are written twice."""
    path = tmp_path / "ccl" / "cpu-2.json"
    for first, second in pool.run(jobs.twice, num_ranks, str(tmp_path), "first", ({}, {"comm_sms": 2})):
        launched, before, after = first
        assert launched == WATCHED
        assert before[1] != HERE
        assert after == ("two_shot", HERE)
        why = ("two_shot", f"measured as the fastest in {path}")
        assert second == ({"two_shot"}, why, why)
    entries = read_table(path).entries
    assert entries[0].algorithm == "two_shot"
    assert {each.algorithm for each in entries} == WATCHED
    assert {(each.op, each.dtype, each.size, each.place) for each in entries} == {
        ("all_reduce", "float32", (1024,), "ordinary")
    }
    assert [each.seconds for each in entries] == [jobs.SECONDS, *[jobs.SLOW_SECONDS] * 3]
    assert [each.config for each in entries] == [{}] * 4


@two_ranks
def test_what_a_config_says_is_measured_for_itself(pool, num_ranks, tmp_path):
    assert pool.run(jobs.with_a_config, num_ranks, str(tmp_path)) == [None] * 2
    assert len(read_table(tmp_path / "ccl" / "cpu-2.json").entries) == len(WATCHED)


@two_ranks
def test_all_is_measured_again_with_the_launches_of_the_best(pool, num_ranks, tmp_path):
    for found in pool.run(jobs.twice, num_ranks, str(tmp_path), "exhaustive", ({}, {"comm_sms": 2})):
        for launched, _, after in found:
            assert (launched, after) == (WATCHED, ("two_shot", HERE))
    entries = read_table(tmp_path / "ccl" / "cpu-2.json").entries
    assert len(entries) == 5
    assert {tuple(each.config.items()) for each in entries if each.algorithm == "two_shot"} == {(), (("comm_sms", 2),)}


@two_ranks
@pytest.mark.parametrize(("names", "group", "chosen"), [
    (("one_shot", ""), None, "one_shot"), (("one_shot", "third"), None, "one_shot"),
    (("one_shot", "third"), (1, 0), "third"), (("", "third"), None, ""),
])  # fmt: skip
def test_members_whose_tables_differ_follow_the_first_one(pool, num_ranks, tmp_path, names, group, chosen):
    assert pool.run(jobs.caches_that_differ, num_ranks, str(tmp_path), names, group, chosen) == [None] * 2


@table("rounds, seconds", [
    # a single call of some microseconds is not timed well enough to leave an algorithm out
    (([4e-6] * 3, [90e-6, 2e-6, 2e-6]), [4e-6, 2e-6]),
    # those that are close are measured longer
    (([4.2e-6] * 4 + [3.7e-6] * 2, [4e-6] * 6, [4.8e-6] * 3), [3.7e-6, 4e-6, 4.8e-6]),
    # none could be launched: the choice stays
    ((), []),
])  # fmt: skip
def test_how_long_algorithms_are_measured(monkeypatch, rounds, seconds):
    """Of launches that take what is given, round by round, and not a round more."""
    times = {(lambda each=each: each): iter(each) for each in map(tuple, rounds)}
    monkeypatch.setattr(first_calls, "_cpu_seconds", lambda launch, _calls: next(times[launch]))
    alone = mock.Mock(all_gather_ints=lambda numbers: [list(numbers)])
    assert first_calls.measure(list(times), alone, on_gpu=False) == seconds


@two_ranks
def test_what_not_all_members_offer_is_not_measured(pool, num_ranks, cache):
    assert pool.run(jobs.offered_by_some, num_ranks, cache) == [None] * 2


@two_ranks
@table(
    ("what", "launched"),
    [
        ("off", 1), ("named", {"third"}), ("named by variant", {"one_shot"}), ("a message", set()), ("splits", set()),
        ("a group of one", 1), ("nothing", set()),
    ],
)  # fmt: skip
def test_calls_for_which_nothing_is_measured(pool, num_ranks, cache, what, launched):
    assert pool.run(jobs.not_measured, num_ranks, cache, what, launched) == [None] * 2


@two_ranks
@pytest.mark.parametrize(("mib", "launched"), [(7, WATCHED), (13, WATCHED - {"two_shot"})])
def test_half_of_what_is_free_stays_free(pool, num_ranks, cache, mib, launched):
    assert pool.run(jobs.little_room, num_ranks, cache, mib << 20, launched) == [None] * 2


# -- what goes wrong --------------------------------------------------------------------------------------------------
@two_ranks
@pytest.mark.parametrize(("where", "who"), [
    ("launch", "all"), ("prepare", 1), ("no room", "all"), ("no room", 1), ("launch", 0),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("prepare", 0), ("launch", 1))),
])  # fmt: skip
def test_an_algorithm_that_cannot_serve_the_call(pool, num_ranks, cache, where, who):
    assert pool.run(jobs.odd_one, num_ranks, cache, where, who) == [None] * 2


@two_ranks
@pytest.mark.parametrize(("what", "text"), [
    ("dtype", "RankMismatchError: all_reduce: the members of the group call differently:\n  dtype: float32 on rank"),
    ("named", "RankMismatchError: all_reduce: the members of the group call differently:\n  algorithm: measured at"),
    ("refused", "ArgumentError: "),
])  # fmt: skip
def test_calls_that_differ_raise_on_all_and_are_not_measured(pool, num_ranks, cache, what, text):
    assert pool.run(jobs.calls_that_differ, num_ranks, cache, what, text) == [None] * 2
