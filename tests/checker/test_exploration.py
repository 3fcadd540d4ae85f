"""Schedules and weak memory under a seed, and all orders of synchronisation: what a GPU may show, and nothing else."""

import itertools
import json

import jobs_corpus
import pytest
from corpus import PROGRAM
from ops_cases import Case as Product
from test_litmus import Litmus, Program, Runner

from iris_core import Iris
from iris_core.cli.all_orders import name_of, walk

SEEDS = list(range(12))

SHOWN = (
    "missing_wait", "missing_release", "missing_acquire", "gpu_signal", "add_scope", "volatile_poll", "flag_not_reset",
    "several_senders", "passed_on", "programs_without_flag", "barrier_of_one_program", "kernels_without_barrier",
    "put_without_wait", "relaxed_overwrites",
)  # fmt: skip
"""Planted mistakes that change what the programs compute; of fences and orders, the litmus tests have more."""


def results(pool, name, bug, seeds):
    ranks = jobs_corpus.CASES[name].ranks
    outcomes = pool.run(jobs_corpus.run_case, ranks, name, bug, seeds)
    return [[result for result, _ in each] for each in zip(*outcomes, strict=True)]


@pytest.mark.parametrize("name", SHOWN)
def test_a_mistake_changes_results_and_its_twin_does_not(pool, name):
    """x86 hides most of these: without a seed they are right nearly always."""
    right = results(pool, name, False, SEEDS[:3])
    assert all(each == right[0] for each in right)
    assert any(results(pool, name, True, SEEDS[n : n + 2]) != right[:2] for n in range(0, len(SEEDS), 2))


@pytest.mark.parametrize("name", ["passed_on", "flag_not_reset", "barrier_of_one_program", "programs_without_flag"])
def test_a_seed_makes_the_same_run_again(pool, tmp_path, name):
    """Down to the number of decisions, steps and changes, and the text of what is found."""
    ranks = jobs_corpus.CASES[name].ranks
    runs = []
    for turn in range(2):
        path = tmp_path / f"found {turn}"
        outcomes = pool.run(jobs_corpus.run_case, ranks, name, True, [4, 7], str(path), jobs_corpus.control)
        runs.append((outcomes, path.read_text()))
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
        assert pool.run(jobs_corpus.never_signalled, 2, bounded, timeout_s=60.0) == [kind] * 2


def test_a_rank_that_waits_for_something_else_loses_its_turn(pool, tmp_path):
    assert pool.run(jobs_corpus.waits_outside, 2, tmp_path / "done") == [True, True]
    assert pool.run(jobs_corpus.waits_by_torch, 2, timeout_s=60.0) == [[[8.0] * 4] * 2] * 2


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


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setenv("IRIS_CHECK_SEED", "order:")
    with Iris("1MiB", device="cpu", check="schedules") as ctx:
        yield Runner(ctx)


def outcomes(test):
    """What loads see in all interleavings of a litmus test of stores and loads, by running them one after the other."""
    found, steps = set(), [number for number, thread in enumerate(test.threads) for _ in thread]
    for order in set(itertools.permutations(steps)):
        memory, seen, at = {}, {}, [0] * len(test.threads)
        for thread in order:
            name, word, *value = test.threads[thread][at[thread]].split()
            if name.startswith("st"):
                memory[word] = int(value[0])
            else:
                seen[thread, at[thread]] = memory.get(word, 0)
            at[thread] += 1
        found.add((tuple(seen[key] for key in sorted(seen)), tuple(sorted(memory.items()))))
    return found


@pytest.mark.parametrize(("text", "count"), [
    ("st.rlx.sys x 1 || st.rlx.sys y 1", 1),
    ("st.rlx.sys x 1 || st.rlx.sys x 2", 2),
    ("ld.rlx.sys x || ld.rlx.sys x || st.rlx.sys x 1", 4),
    ("ld.rlx.sys x; ld.rlx.sys x || st.rlx.sys x 1", 3),
    ("st.rlx.sys x 1; st.rlx.sys x 2 || st.rlx.sys x 3; st.rlx.sys x 4", 6),
    ("st.rlx.sys x 1; st.rlx.sys y 1 || ld.rlx.sys y; ld.rlx.sys x", 3),
    ("st.rlx.sys x 1; ld.rlx.sys y || st.rlx.sys y 1; ld.rlx.sys x", 3),
    ("st.rlx.sys x 1 || ld.rlx.sys x; ld.rlx.sys y || ld.rlx.sys y; ld.rlx.sys x || st.rlx.sys y 1", 15),
])  # fmt: skip
def test_each_order_that_differs_is_walked_once(runner, text, count):
    test = Litmus("orders", True, (0,) * 4, text)
    program, found, names = Program(test), set(), []

    def run(order):
        seen, memory = runner.outcome(program, order)
        found.add((tuple(seen), tuple(sorted(memory.items()))))
        names.append(name_of(runner.explorer.rows()))
        return runner.explorer.rows()

    walked = walk(run, 100)
    assert (walked.orders, walked.runs, walked.is_whole) == (count, count, True)
    assert len(set(names)) == count
    assert found == outcomes(test)
    if count > 1:
        assert walk(run, count - 1).is_whole is False


def walk_case(pool, name, bug, most, path):
    """Walk a case of the corpus; returns the walk, the results of all ranks, and the findings."""
    ranks, results = jobs_corpus.CASES[name].ranks, []

    def run(order):
        outcomes = pool.run(jobs_corpus.run_case, ranks, name, bug, [order], str(path), jobs_corpus.journal)
        results.append([result for ((result, _),) in outcomes])
        return outcomes[0][0][1]

    walked = walk(run, most)
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return walked, results, [row for row in rows if row["kind"] not in ("order", "benign")]


@pytest.mark.parametrize("name", ["passed_on", "missing_wait", "wrong_turn", "flag_not_reset", "several_senders"])
def test_a_right_program_is_walked_whole(pool, tmp_path, name):
    walked, (first, *others), findings = walk_case(pool, name, False, 40, tmp_path / "found")
    assert (walked.is_whole, findings, others) == (True, [], [first] * len(others))


@pytest.mark.parametrize("name", ["missing_release", "several_senders", "ticket_relaxed"])
def test_a_mistake_is_found_without_a_seed(pool, tmp_path, name):
    assert walk_case(pool, name, True, 10, tmp_path / "found")[2] != []
