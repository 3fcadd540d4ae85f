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


def test_who_may_not_call_at_all(pool):
    for rank, (stranger, unknown, closed) in enumerate(pool.run(jobs.strangers, 2)):
        assert rank == 1 or f"rank {rank} is not a member of the process group" in stranger
        assert "no group" in unknown
        assert closed.startswith("HeapClosedError")


@three_ranks
def test_ranks_that_call_differently_are_told(pool, num_ranks, device):
    for found in pool.run(jobs.different, num_ranks, device):
        for (words, _), (said, product, sums) in zip(jobs.DIFFERING, found, strict=True):
            assert re.match(f"RankMismatchError.*{words}", said, re.DOTALL)
            assert (product, sums) == ([12.0], [[6.0]] * 4)


@two_ranks
@pytest.mark.parametrize(("what", "words"), [
    ("bits", "deterministic"), ("workspace", "IRIS_CCL_WORKSPACE: 1048576 on rank 0; 2097152 on rank 1"),
])  # fmt: skip
def test_contexts_that_differ(pool, num_ranks, device, what, words):
    for said in pool.run(jobs.opens_differently, num_ranks, device, what):
        assert re.match(f"RankMismatchError.*{words}", said, re.DOTALL)


@two_ranks
@pytest.mark.parametrize("engine", ["ccl", "ops"])
def test_tables_that_differ_in_the_launch_are_noticed(pool, num_ranks, engine, tmp_path):
    for said, sums in pool.run(jobs.tables_that_differ, num_ranks, "cpu", str(tmp_path), engine):
        assert re.match("RankMismatchError.*config: .*sms=1 on rank 0.*sms=2 on rank 1", said, re.DOTALL)
        assert sums == [2.0 if engine == "ccl" else 128.0]


@two_ranks
def test_what_is_refused_on_later_calls_too(pool, num_ranks, device):
    for said, sums, untouched, strided in pool.run(jobs.refused_later, num_ranks, device):
        assert said[:4] == [""] * 4
        words = ["the input is a lazy conjugate", "the input is lazily negated", "the output is lazily negated"]
        words += ["is a lazy conjugate", *["input and output overlap"] * 2]
        assert all(part in text for part, text in zip(words, said[4:], strict=True))
        assert (sums, untouched, strided) == ([4.0] * 4, [0j] * 4, [1.0, 2.0])


@two_ranks
@pytest.mark.parametrize(
    ("where", "reason"), [("before", "out of memory"), ("after", "out of memory"), ("no room", "no room")]
)
def test_all_prepare_or_none(pool, num_ranks, device, where, reason):
    results = pool.run(jobs.one_cannot_prepare, num_ranks, device, where)
    kind = "UnsupportedError" if where == "no room" else "IrisError"
    for said, *sums in results:
        assert said == f"{kind}: rank 1 could not prepare 'two_shot' for all_reduce: {reason} here"
        assert sums == [[3.0], [3.0]]


@two_ranks
def test_what_has_no_room_on_one_rank_is_left_out_on_all(pool, num_ranks, device):
    for rank, result in enumerate(pool.run(jobs.next_candidate, num_ranks, device)):
        first, second, text, sums, warnings = result
        assert second not in ("", first)
        assert f"{first} (triton): no, rank 1 could not prepare '{first}' for all_reduce: no room here" in text
        assert sums == [[2.0], [2.0]]
        assert len(warnings) == (rank == 0)  # once, of the group's first member
        assert all("group of ranks 0, 1: all_reduce does without" in text for text in warnings)


@two_ranks
def test_messages_that_differ_are_reported_and_taken_out(pool, num_ranks, device):
    (sender, nothing), (receiver, wrong) = pool.run(jobs.messages_that_differ, num_ranks, device)
    assert (nothing, wrong) == ([], [])
    assert sender == [text.replace("DeviceError: ", "DeviceError: rank 1 has reported: ") for text in receiver]
    first = "DeviceError: rank 1 received from rank 0 and expected 5 elements of float32, but 10 elements of float32"
    assert receiver[0].startswith(first)
    parts = [
        "",
        "expected 10 elements of int32, but 10 elements of float32 were sent",
        "expected 7 elements of float32",
    ]
    parts += ["but 3 elements of float32 were sent", "expected 0 elements of float32, but 5 elements"]
    parts += ["expected 5 elements of float32, but 0 elements"]
    assert all(part in text for part, text in zip(parts, receiver, strict=True))


@two_ranks
def test_split_sizes_that_differ_are_reported(pool, num_ranks, device):
    first, second = pool.run(jobs.splits_that_differ, num_ranks, device)
    for number, (own, *_) in enumerate((first, second)):
        assert f"this rank, number {number} of the group, has 3 rows for itself" in own
    assert "rank 0 takes 12 elements from rank 1 (output_split_sizes), which gives it 9" in first[1]
    assert "rank 1 takes 9 elements from rank 0" not in first[1]
    assert (first[2], second[2]) == ([1.0] * 2 + [2.0] * 3, [1.0] * 4 + [2.0] * 2)
    assert first[3] == second[3] == ""


@two_ranks
def test_arguments_as_torch_and_numpy_have_them(pool, num_ranks, device):
    for rank, found in enumerate(pool.run(jobs.accepted, num_ranks, device)):
        equal = [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
        assert found == {
            "object": [2.0], "root": [1.0] * 3, "expanded": [1.0] * 4, "no tensor": "TypeError",
            "no splits": equal, "one side": equal,
            "average": [72, 72],  # as NCCL: integers wrap around before they are divided
        }  # fmt: skip


@two_ranks
def test_kinds_without_end(pool, num_ranks, device):
    for wrong, most in pool.run(jobs.kinds_without_end, num_ranks, device):
        assert wrong == []
        assert most <= 2 * 8


@two_ranks
def test_a_member_that_refuses_a_later_call_waits_for_none(pool, num_ranks, device, tmp_path):
    first, second = pool.run(jobs.refused_by_one_that_is_ahead, num_ranks, device, str(tmp_path))
    assert first == (True, ["ArgumentError"] * 2, [[3.0]] * 3)
    assert second == (True, ["RankMismatchError", "ArgumentError"], [[3.0]] * 3)


@two_ranks
def test_tensors_that_lie_otherwise_on_one_rank(pool, num_ranks, device, tmp_path):
    first, second = pool.run(jobs.laid_out_otherwise, num_ranks, device, str(tmp_path))
    for served, came, _, sums, both in (first, second):
        assert came
        assert sums == [[2.0]] * 3
        assert re.match(f"RankMismatchError.*algorithm: {served} on rank 0; ", both, re.DOTALL)
        assert "in_stride=(9, 1), out_stride=(8, 1), aligned=True on rank 1" in both
    assert first[2] == "RankMismatchError"
    assert second[2].startswith("RankMismatchError: all_reduce: ")
    assert f"served by {second[0]!r} with in_stride=(8, 1)" in second[2]
    assert "in_stride=(9, 1)" in second[2]


# -- without ranks ----------------------------------------------------------------------------------------------------
def test_another_algorithm_serves_in_graphs(monkeypatch):
    """A launch that a graph captures is not kept less long than the graph may need it."""
    capturing, launched = [False], []
    monkeypatch.setattr(bind, "MAY_BE_WATCHED", set())

    class Order:
        def run(self, launch, plan, *tensors):
            return launch(plan, *tensors)

    def bound(name, drops_plans):
        algorithm = SimpleNamespace(
            name=name, drops_plans=drops_plans, launch=lambda plan, *tensors: launched.append((name, plan, tensors))
        )
        team = SimpleNamespace(reports=SimpleNamespace(alarm=[0], heard=0))
        return bind.Bound(algorithm, f"plan of {name}", Order(), team, None, SimpleNamespace(op="all_reduce"))

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
            dropped += known.keep("often", known.recall("often") or often)
        dropped += known.keep(number, Launch())
    assert known["staying"] is staying
    assert (known.get("often") or known.recall("often")) is often
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
    assert all(known.get(name) or known.recall(name) for name in (3, "other 0", "other 2"))


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
