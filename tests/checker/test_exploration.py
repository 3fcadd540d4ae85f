"""Schedules and weak memory under a seed: what a GPU may show is shown, what it may not is not, and again if asked."""

import json

import jobs_corpus
import jobs_exploration
import pytest
from corpus import PROGRAM
from ops_cases import Case as Product

SEEDS = list(range(12))

SHOWN = (
    "missing_wait", "missing_release", "missing_acquire", "gpu_signal", "add_scope", "volatile_poll", "flag_not_reset",
    "several_senders", "passed_on", "programs_without_flag", "barrier_of_one_program", "kernels_without_barrier",
    "put_without_wait", "relaxed_overwrites",
)  # fmt: skip
"""Planted mistakes that change what the programs compute; of fences and orders, the litmus tests have more."""


def results(pool, name, bug, seeds):
    ranks = jobs_exploration.CASES[name].ranks
    told = pool.run(jobs_exploration.run_case, ranks, name, bug, seeds)
    return [[result for result, _ in each] for each in zip(*told, strict=True)]


@pytest.mark.parametrize("name", SHOWN)
def test_a_mistake_changes_results_and_its_twin_does_not(pool, name):
    """x86 hides most of these: without a seed they are right nearly always."""
    right = results(pool, name, False, SEEDS[:3])
    assert all(each == right[0] for each in right)
    assert any(results(pool, name, True, SEEDS[n : n + 2]) != right[:2] for n in range(0, len(SEEDS), 2))


@pytest.mark.parametrize("name", ["passed_on", "flag_not_reset", "barrier_of_one_program", "programs_without_flag"])
def test_a_seed_makes_the_same_run_again(pool, tmp_path, name):
    """Down to the number of decisions, steps and changes, and the text of what is found."""
    ranks = jobs_exploration.CASES[name].ranks
    runs = []
    for turn in range(2):
        path = tmp_path / f"found {turn}"
        told = pool.run(jobs_exploration.run_case, ranks, name, True, [4, 7], str(path), jobs_exploration.control)
        runs.append((told, path.read_text()))
    assert runs[0] == runs[1]
    assert len({repr(each) for each in runs[0][0][0]}) == 2  # and another seed another one


def test_a_rank_with_work_gets_the_turn_where_others_wait_with_higher_priorities(pool, tmp_path):
    """Two ranks handed the turn to each other for ever, each because of a program of the other that only waited."""
    sizes = {"num_sms": 3, "block_size_m": 16, "block_size_n": 16, "block_size_k": 32}
    case, path = Product("all_gather_matmul", "fetch", (17, 33, 29), "float32", dim=1, config=sizes), tmp_path / "found"
    job = "jobs_ops", "run_cases", "cpu", [case], 1
    assert pool.run(jobs_corpus.explored, 4, [5], str(path), *job, timeout_s=120.0) == [[]] * 4


def test_a_wait_that_nobody_ends_is_found_at_once(pool):
    """Also where waits are bounded: time passes where nothing else happens."""
    for bounded, kind in ((False, "DeadlockError"), (True, "DeviceTimeoutError")):
        assert pool.run(jobs_exploration.never_signalled, 2, bounded, timeout_s=60.0) == [kind] * 2


def test_a_rank_that_waits_for_something_else_loses_its_turn(pool, tmp_path):
    assert pool.run(jobs_exploration.waits_outside, 2, tmp_path / "done") == [True, True]
    assert pool.run(jobs_exploration.waits_by_torch, 2, timeout_s=60.0) == [[[8.0] * 4] * 2] * 2


def test_the_command_line_runs_seeds_and_replays_one(check):
    done = check(PROGRAM, "--seeds 2 --json", "assert 0")
    printed = json.loads(done.out)
    assert (done.status, printed["findings"][0]["seeds"]) == (1, [0, 1])
    assert "the result is wrong" in done.err
    seed = printed["failed"][0]["seed"]
    again = check(PROGRAM, f"--only schedules --replay {seed}", "assert 0")
    assert again.status == 1
    assert "the result is wrong" in again.err
    assert f"--replay {seed}" in again.out
    fails_once = "import os, sys; sys.exit(3 * (os.environ['IRIS_CHECK_SEED'] == '0'))"
    assert check(fails_once, "--seeds 2").status == 3


def test_the_command_line_walks_all_orders_and_replays_one(check):
    done = check(PROGRAM, "--all-orders 6 --json", "assert 0")
    printed = json.loads(done.out)
    assert done.status == 1
    assert printed["orders"] == {"orders": 1, "runs": 1, "is_whole": True}  # nothing is synchronised: one order
    assert printed["findings"][0]["seeds"] == ["order:"]
    assert "data race" in check(PROGRAM, "--replay order:", "assert 0").out
