"""Ranks that do not call alike, plans that only some can make, kinds of calls without end."""

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


@two_ranks
def test_lazy_views_are_refused_on_later_calls_too(pool, num_ranks, device):
    for said, sums, untouched in pool.run(jobs.lazy_views, num_ranks, device):
        assert "the input is a lazy conjugate" in said["conjugate"]
        assert "the input is lazily negated" in said["negative input"]
        assert "the output is lazily negated" in said["negative output"]
        assert "is a lazy conjugate" in said["broadcast"]
        assert (sums, untouched) == ([4.0] * 4, [0j] * 4)


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
def test_orders_of_a_group(pool, num_ranks, device):
    for (call, team), sums in pool.run(jobs.orders_of_a_group, num_ranks, device):
        for said in (call, team):
            assert said.startswith("RankMismatchError")
            assert "group: ranks 0, 1 on rank 0; ranks 1, 0 on rank 1" in said
        assert sums == [[3.0]] * 4


@two_ranks
def test_a_tensor_that_is_empty_on_one_rank_only(pool, num_ranks, device):
    for said, magic, *sums in pool.run(jobs.nothing_on_one, num_ranks, device):
        assert "elements: 4 on rank 0; 0 on rank 1" in said
        assert "there is no algorithm 'magic'" in magic
        assert sums == [[], [3.0]]


@two_ranks
def test_known_kinds_that_differ_are_reported(pool, num_ranks, device):
    for said, sums, after in pool.run(jobs.known_kinds, num_ranks, device):
        assert said.startswith("DeviceError: in the collectives of ranks 0, 1, rank ")
        for rank, count in ((0, 4), (1, 8)):
            assert f"on rank {rank}, operation all_reduce, dtype float32, elements {count}," in said
        assert (sums, after) == ([3.0], "")


@two_ranks
def test_messages_that_differ_are_reported_and_taken_out(pool, num_ranks, device):
    (sender, nothing), (receiver, wrong) = pool.run(jobs.messages_that_differ, num_ranks, device)
    assert (nothing, wrong) == ([], [])
    assert sender == [text.replace("DeviceError: ", "DeviceError: rank 1 has reported: ") for text in receiver]
    first = "DeviceError: rank 1 received from rank 0 and expected 5 elements of float32, but 10 elements of float32"
    assert receiver[0].startswith(first)
    assert "expected 10 elements of int32, but 10 elements of float32 were sent" in receiver[1]
    assert "expected 7 elements of float32, but" in receiver[2]
    assert "but 3 elements of float32 were sent" in receiver[3]
    assert "expected 0 elements of float32, but 5 elements" in receiver[4]
    assert "expected 5 elements of float32, but 0 elements" in receiver[5]


@two_ranks
def test_split_sizes_that_differ_are_reported(pool, num_ranks, device):
    first, second = pool.run(jobs.splits_that_differ, num_ranks, device)
    for number, (own, *_) in enumerate((first, second)):
        assert f"this rank, number {number} of the group, has 3 rows for itself" in own
    text = "rank 0 takes 12 elements from rank 1 (output_split_sizes), which gives it 9 (input_split_sizes)"
    assert text in first[1]
    assert "rank 1 takes 9 elements from rank 0" not in first[1]
    assert (first[2], second[2]) == ([1.0] * 2 + [2.0] * 3, [1.0] * 4 + [2.0] * 2)
    assert first[3] == second[3] == ""


@two_ranks
def test_arguments_as_torch_and_numpy_have_them(pool, num_ranks, device):
    for rank, found in enumerate(pool.run(jobs.accepted, num_ranks, device)):
        assert found["object"] == [2.0]
        assert found["root"] == [1.0] * 3
        assert found["no splits"] == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
        assert found["expanded"] == [1.0] * 4
        assert found["average"] == [72, 72]  # as NCCL: integers wrap around before they are divided
        assert found["no tensor"].startswith("TypeError: send: the input must be a torch tensor")


@two_ranks
def test_kinds_without_end(pool, num_ranks, device):
    for wrong, most in pool.run(jobs.kinds_without_end, num_ranks, device):
        assert wrong == []
        assert most <= 2 * 8


@two_ranks
@pytest.mark.parametrize("engine", ["ccl", "ops"])
def test_tables_that_differ_in_the_launch_are_noticed(pool, num_ranks, engine, tmp_path):
    for said, sums in pool.run(jobs.tables_that_differ, num_ranks, "cpu", str(tmp_path), engine):
        assert said.startswith("RankMismatchError")
        assert "config: " in said
        assert "sms=1 on rank 0" in said
        assert "sms=2 on rank 1" in said
        assert sums == [2.0 if engine == "ccl" else 128.0]


@two_ranks
def test_bounds_of_workspaces_that_differ_are_noticed(pool, num_ranks):
    for said in pool.run(jobs.workspaces_that_differ, num_ranks, "cpu"):
        assert said.startswith("RankMismatchError")
        assert "IRIS_CCL_WORKSPACE: 1048576 on rank 0; 2097152 on rank 1" in said


@pytest.mark.parametrize("num_ranks", [3])
def test_what_one_rank_refuses_all_refuse(pool, num_ranks, device):
    for rows in zip(*pool.run(jobs.refused_by_some, num_ranks, device), strict=True):
        who, name, outcome = rows[0]
        assert [row[2] for row in rows] == [outcome] * num_ranks, rows
        assert (outcome == "") == (who == "none" or not matters(name, who)), rows
        assert outcome not in ("CollectiveTimeoutError", "PeerLostError"), rows


@two_ranks
def test_a_member_that_refuses_a_later_call_waits_for_none(pool, num_ranks, device, tmp_path):
    first, second = pool.run(jobs.refused_later, num_ranks, device, str(tmp_path))
    assert first == (True, ["ArgumentError"] * 2, [[3.0]] * 3)
    assert second == (True, ["RankMismatchError", "ArgumentError"], [[3.0]] * 3)


@two_ranks
def test_tensors_that_lie_otherwise_on_one_rank(pool, num_ranks, device, tmp_path):
    first, second = pool.run(jobs.laid_out_otherwise, num_ranks, device, str(tmp_path))
    for served, came, _, sums, both in (first, second):
        assert came
        assert sums == [[2.0]] * 3
        assert both.startswith("RankMismatchError")
        assert f"algorithm: {served} on rank 0; " in both
        assert "in_stride=(9, 1), out_stride=(8, 1), aligned=True on rank 1" in both
    assert first[2] == "RankMismatchError"
    assert second[2].startswith("RankMismatchError: all_reduce: ")
    assert f"served by {second[0]!r} with in_stride=(8, 1)" in second[2]
    assert "in_stride=(9, 1)" in second[2]


def matters(name, who):
    """Whether a defect is one: what only the root gives is not looked at elsewhere, and all may have another shape."""
    if who == "all" and name in ("empty", "tiles", "columns"):
        return False
    root = {"no output": 0, "scatter": 1, "gather": 2}.get(name)
    return root is None or who in (root, "all")


@two_ranks
def test_strided_tensors_that_overlap_are_refused_later_too(pool, num_ranks, device):
    for said, values in pool.run(jobs.strided_and_known, num_ranks, device):
        assert said[0] == said[3] == ""
        assert "input and output overlap" in said[1]
        assert "input and output overlap" in said[2]
        assert values == [1.0, 2.0]


# -- without ranks ----------------------------------------------------------------------------------------------------
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
