"""All orders of synchronisation: known numbers of them, and mistakes that need a certain one."""

import itertools
import json

import jobs_exploration
import pytest
from litmus_programs import Litmus, Program, Runner

from iris_core import Iris
from iris_core.cli.all_orders import name_of, walk


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
    test = Litmus("orders", "", True, (0,) * 4, text)
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
    ranks, results = jobs_exploration.CASES[name].ranks, []

    def run(order):
        told = pool.run(jobs_exploration.run_case, ranks, name, bug, [order], str(path), jobs_exploration.journal)
        results.append([result for ((result, _),) in told])
        return told[0][0][1]

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
