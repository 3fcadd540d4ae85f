"""Calls that are refused, ranks that do not call alike, plans that only some can make, kinds of calls without end."""

import re
import threading
from types import SimpleNamespace

import jobs_agreement as jobs
import pytest
import torch

from iris_core.dispatch import bind, members
from iris_core.dispatch.team import ELEMENT_TYPES, control_words
from iris_triton.collectives.parts.barrier import row_words
from iris_triton.collectives.parts.sizes import MOVABLE

two_ranks = pytest.mark.parametrize("num_ranks", [2])
three_ranks = pytest.mark.parametrize("num_ranks", [3])


@three_ranks
def test_what_one_rank_refuses_all_refuse(pool, num_ranks, device):
    for rows in zip(*pool.run(jobs.refused_by_some, num_ranks, device), strict=True):
        who, row, text = rows[0]
        expected, _, *root = jobs.DEFECTS[row]
        kinds, at_root = {said.partition(":")[0] for *_, said in rows}, who in (*root, "all") or not root
        assert len(kinds) == 1, rows
        assert (text != "") == (who != "none" and at_root and (expected != "" or who != "all")), rows
        if text:
            kind, _, words = (expected or "RankMismatchError: ").partition(": ")
            assert kinds == {kind}, rows
            own = [said for rank, (*_, said) in enumerate(rows) if who in (rank, "all")]
            assert any(re.search(words, said, re.DOTALL) for said in own), rows


@three_ranks
def test_ranks_that_call_differently_are_told(pool, num_ranks, device):
    assert pool.run(jobs.different, num_ranks, device) == [None] * num_ranks


@two_ranks
@pytest.mark.parametrize("what", ["bits", "workspace"])
def test_contexts_that_differ(pool, num_ranks, device, what):
    assert pool.run(jobs.opens_differently, num_ranks, device, what) == [None] * num_ranks


@two_ranks
def test_tables_that_differ_in_the_launch_are_noticed(pool, num_ranks, tmp_path):
    assert pool.run(jobs.tables_that_differ, num_ranks, "cpu", str(tmp_path)) == [None] * num_ranks


@two_ranks
@pytest.mark.parametrize("job", [
    jobs.refused_later, jobs.next_candidate, jobs.messages_that_differ, jobs.splits_that_differ, jobs.accepted,
    jobs.kinds_without_end,
])  # fmt: skip
def test_two_ranks(pool, num_ranks, device, job):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


@two_ranks
@pytest.mark.parametrize("job", [jobs.refused_by_one_that_is_ahead, jobs.laid_out_otherwise])
def test_members_that_are_ahead(pool, num_ranks, device, job, tmp_path):
    assert pool.run(job, num_ranks, device, str(tmp_path)) == [None] * num_ranks


# -- without ranks ----------------------------------------------------------------------------------------------------
def test_another_algorithm_serves_in_graphs(monkeypatch):
    """A launch that a graph captures is not kept less long than the graph may need it."""
    capturing, launched = [False], []
    monkeypatch.setattr(bind, "MAY_BE_WATCHED", set())

    def bound(name, drops_plans):
        launch = lambda plan, *tensors: launched.append((name, plan, tensors))
        algorithm = SimpleNamespace(name=name, drops_plans=drops_plans, launch=launch)
        team = SimpleNamespace(reports=SimpleNamespace(alarm=[0], heard=0))
        order = SimpleNamespace(run=lambda launch, plan, *tensors: launch(plan, *tensors), mark=None)
        return bind.Bound(algorithm, f"plan of {name}", order, team, None, SimpleNamespace(op="all_reduce"))

    eager, other = bound("eager", True), bound("captured", False)
    assert eager.droppable
    eager.let_capture(other)
    assert not eager.droppable
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for capturing[0] in (False, True):
        eager.run("out", "inp")
    assert launched == [("eager", "plan of eager", ("out", "inp")), ("captured", "plan of captured", ("out", "inp"))]


class Launch:
    def __init__(self, droppable=True):
        self.droppable = droppable


def test_launches_that_are_used_stay(monkeypatch):
    monkeypatch.setattr(bind, "GENERATION", 3)
    known = bind.Launches()
    staying = Launch(droppable=False)
    assert known.keep("staying", staying) == []
    often = Launch()
    dropped = []
    for number in range(20):
        if "often" not in known:
            dropped += known.keep("often", known.old.pop("often", None) or often)
        dropped += known.keep(number, Launch())
    assert known["staying"] is staying
    assert (known.get("often") or known.old.pop("often", None)) is often
    assert not {staying, often} & set(dropped)
    assert len(dropped) >= 10
    assert len(known) + len(known.old) <= 2 * 3 + 1


def test_another_thread_may_add_launches_meanwhile(monkeypatch):
    """It goes on in the middle of a change of generations."""
    monkeypatch.setattr(bind, "GENERATION", 3)
    known, threads = bind.Launches(), []

    class Slow:
        @property
        def droppable(self):
            threads.append(threading.Thread(target=known.keep, args=(f"other {len(threads)}", Launch())))
            threads[-1].start()
            threads[-1].join(0.05)
            return True

    for number in range(4):
        known.keep(number, Slow())
    for thread in threads:
        thread.join()
    assert all(known.get(name) or known.old.pop(name, None) for name in (3, "other 0", "other 2"))


def test_kinds_are_described():
    agreed = members.Members(None)
    for number, length in enumerate((4, 8), 1):
        agreed.add((0, 1), {"elements": str(length)}, number, {"begin": str(length)})
    assert agreed.knows((0, 1), {"begin": "8"})
    assert not agreed.knows((1, 0), {"begin": "8"})
    assert agreed.describe((0, 1), 1) == "elements 4"
    assert agreed.describe((0, 1), 3) == "a call that is not known here"


def test_kernels_and_hosts_agree_on_words_and_types():
    assert [row_words(size) for size in (1, 2, 8)] == [control_words(size) for size in (1, 2, 8)]
    assert set(MOVABLE) <= set(ELEMENT_TYPES)
