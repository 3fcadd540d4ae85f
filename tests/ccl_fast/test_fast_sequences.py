"""Calls one after the other, in groups, and without a rank that should take part."""

import pytest
from ccl_cases import ENCODINGS, Case, kinds, of, sequence_cases
from jobs_fast import SMALL, call_in_other_order, leave_one_out, plan_again, run_mixed, run_overlapping
from rank_counts import rank_counts

SELDOM = pytest.mark.exhaustive(device="cpu")
MIXED = [([each], rank_counts(seldom=[2, 3, 4, 8])) for each in ENCODINGS]
MIXED += [(list(ENCODINGS), rank_counts(3, seldom=[2, 4, 8])), (["portable"], [3])]


@pytest.mark.parametrize(("encodings", "num_ranks"), [
    pytest.param(encodings, *getattr(count, "values", [count]), marks=getattr(count, "marks", ()))
    for encodings, counts in MIXED for count in counts
])  # fmt: skip
def test_in_any_order_with_ranks_out_of_step(pool, some, encodings, num_ranks, device):
    if encodings == ["portable"]:
        cases = [of(kind, "bfloat16", shape=(701,)) for kind in kinds("portable")]
        cases += [Case("all_reduce", place="ordinary"), Case("all_gather", place="ordinary"), Case("reduce_scatter")]
    else:
        cases = [case for encoding in encodings for case in sequence_cases(encoding)]
        few = 11 if device == "cpu" else 7
        cases = some(cases, 11 if num_ranks == 8 else few if len(encodings) > 1 else 4, num_ranks)
    calls = (8 if num_ranks > 3 else 14) if device == "cpu" else 2000
    assert pool.run(run_mixed, num_ranks, device, cases, calls, len(encodings), SMALL) == [[]] * num_ranks


def test_switch_in_any_order_with_ranks_out_of_step(pool):
    cases = [of(kind, "bfloat16", shape=(701,), place=each) for kind in kinds("nvls") for each in ("heap", "ordinary")]
    cases += [of(kind, shape=(5003,), place="skewed") for kind in kinds("nvls")]
    cases += [Case("all_reduce", place="ordinary"), Case("all_gather", place="ordinary")]
    assert pool.run(run_mixed, 3, "cpu", cases, 14, 1, SMALL) == [[]] * 3


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize(("encoding", "epoch"), [
    ("ll", -1), ("ll128", -1), ("sentinel", 2**31 - 3),
    *(pytest.param(*each, marks=SELDOM) for each in (("ll", 2**31 - 3), ("ll128", 2**31 - 3), ("sentinel", -1))),
])  # fmt: skip
def test_epochs_wrap_around(pool, some, encoding, epoch, num_ranks, device):
    """Places that nothing was sent to are not taken for packets where the counters pass 0."""
    # all sizes, and of each algorithm one or two with the two epochs together
    cases = some(sequence_cases(encoding), 4 if device == "cpu" else 2, epoch)
    for wrong in pool.run(run_mixed, num_ranks, device, cases, 8 if device == "cpu" else 12, 3, SMALL, epoch):
        assert wrong == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_member_plans_again(pool, encoding, device):
    names = [algorithm for op, algorithm in kinds(encoding) if op == "all_reduce"]
    assert pool.run(plan_again, 2, device, names) == [[], []]


@pytest.mark.parametrize(("op", "form", "encoding"), [  # all encodings in one form, and all forms in one at least
    ("all_reduce", "two_shot", "ll128"), ("reduce_scatter", "mailbox", "ll"), ("all_reduce", "split", "sentinel"),
    pytest.param("all_reduce", "two_shot", "sentinel", marks=SELDOM),
    *(pytest.param("reduce_scatter", "mailbox", encoding, marks=SELDOM) for encoding in ("ll128", "sentinel")),
])  # fmt: skip
def test_a_rank_that_is_late_is_reported(pool, op, form, encoding, device):
    texts = pool.run(leave_one_out, 3, device, f"{encoding}_{form}", op)
    # of pairs, one program waits for the data and the other for the arrival: on a GPU, either may report first
    said = ["where the data of rank 0 arrives, in the"]
    said += ["where rank 0 signals program"] * (form == "split")
    for rank in (1, 2):
        assert texts[rank].startswith("DeviceTimeoutError")
        assert f"rank {rank}, program " in texts[rank]
        assert "IRIS_DEVICE_TIMEOUT" in texts[rank]
        assert any(each in texts[rank] for each in said)
        assert op in texts[rank]


@pytest.mark.parametrize("algorithm", [
    "sentinel_split", "one_shot", "gluon_two_shot",
    *(pytest.param(f"{each}_shot", marks=pytest.mark.exhaustive) for each in ("ll_one", "sentinel_one", "ll128_two")),
])  # fmt: skip
def test_launches_at_the_same_time_are_reported(pool, algorithm):
    """Two graphs on two streams do the same on GPUs: see tests/multigpu."""
    assert pool.run(run_overlapping, 2, "cpu", algorithm) == [None] * 2


@pytest.mark.parametrize(("num_ranks", "algorithm"), [
    (3, "sentinel_one_shot"), pytest.param(4, "ll128_two_shot", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_ranks_that_call_in_different_orders_are_told(pool, num_ranks, algorithm):
    """Replays of graphs in different orders do the same on GPUs: the kernels compare, not the hosts."""
    assert pool.run(call_in_other_order, num_ranks, "cpu", algorithm) == [None] * num_ranks
