"""Every algorithm with every dtype, reduction, shape and place, and in any order, against torch on one process."""

import ccl_cases
import jobs_sequences as jobs
import pytest
from ccl_cases import ENCODINGS, OPS, SMALL, Case, kinds, moving_cases, reducing_cases, served
from devices import unprobed
from jobs_ccl import run_cases
from rank_counts import rank_counts

from iris_core.types import REDUCIBLE

NAMED = ("portable", *ENCODINGS)
FAMILIES = ("", *NAMED, "nvls")
"""Of the last one there is what the CPU emulates: on GPUs it needs a setting that no test sets."""
CASES_OF_A_JOB = 40  # a job on ranks has a limit of time, and the machine may be busy


def families(*ranks, seldom=(), **others):
    """Values of (encoding, num_ranks) for each family: so many ranks, and others for those that are named."""
    others = {"nvls": ([4], [])} | others
    for family in FAMILIES:
        counts, rare = others.get("packets" if family in ENCODINGS else family or "chosen", (ranks, seldom))
        for count in rank_counts(*counts, seldom=rare):
            number, marks = (count, []) if isinstance(count, int) else (*count.values, count.marks)
            yield pytest.param(family, number, marks=marks, id=f"{family or 'chosen'}-{number}")


def check(pool, num_ranks, device, cases, turns=1, members=None, workspace="", family=""):
    if family == "nvls" and device != "cpu":
        pytest.skip("nothing is emulated there")
    cases = served(cases, len(members or range(num_ranks)))
    assert cases
    for begin in range(0, len(cases), CASES_OF_A_JOB):
        part = cases[begin : begin + CASES_OF_A_JOB]
        how = turns, members, workspace, family in ENCODINGS
        assert pool.run(run_cases, num_ranks, device, part, *how, timeout_s=500.0) == [[]] * num_ranks


def thinned(some, num_ranks, device, family, cases, on_cpu=1, named=7):
    """Those that are tried: all that the library chooses for are more than there is time for."""
    if family:
        return some(cases, 2 * named - 1 if device == "cpu" else named, num_ranks)
    cases = some(cases, on_cpu) if device == "cpu" else list(cases)
    if device == "cpu" and num_ranks in (1, 8):  # a rank alone, and more than processors, here and there
        return some(cases, 5 if num_ranks == 1 else 12)
    # each kind of call is a kernel to be compiled, for each number of ranks
    return cases if device == "cpu" else cases[num_ranks % 3 :: {2: 2, 8: 2}.get(num_ranks, 5)]


@pytest.mark.parametrize(("encoding", "num_ranks"), list(families(1, 3, 8, seldom=[2, 4], packets=([3], [2, 8]))))
def test_dtypes_and_reductions(pool, some, encoding, num_ranks, device):
    known = kinds(encoding)
    if encoding:
        reducing = reducing_cases(known=known)
    elif num_ranks == 3 and device == "cpu" and len(some(range(2), 2)) == 1:
        reducing = list(reducing_cases())[::3]  # every dtype with every reduction, by one of the operations
    else:
        reducing = reducing_cases({3: None, 4: 3}.get(num_ranks, 1))
    moving = moving_cases(known)
    if not encoding and device == "cpu":
        moving = some(moving, 2)
    cases = served([*reducing, *moving], num_ranks)
    cases = thinned(some, num_ranks, device, encoding, cases, named=101 if num_ranks == 8 else 13)
    check(pool, num_ranks, device, cases, family=encoding)


def test_lines_of_eight_members(pool):
    """As many members as there can be, on the CPU; on GPUs they are a tier."""
    case = Case("all_reduce", "bfloat16", shape=(203,), config={"algorithm": "ll128_two_shot"})
    check(pool, 8, "cpu", [case], family="ll128")


GENERATED = {
    "shapes": (lambda size, known: ccl_cases.shape_cases(known), {"named": 10}, {"seldom": [8], "packets": ([4], [3])}),
    "places": (lambda size, known: ccl_cases.place_cases(known), {"on_cpu": 5}, {"seldom": [2]}),
    "ways": (ccl_cases.way_cases, {"on_cpu": 5, "named": 5}, {"seldom": [2], "chosen": ([3], [1, 2])}),
}
"""How cases are made, how many of them are tried, and on how many ranks."""


@pytest.mark.parametrize(("what", "encoding", "num_ranks"), [
    pytest.param(what, *each.values, marks=each.marks, id=f"{what}-{each.id}")
    for what, (*_, counts) in GENERATED.items() for each in families(2 if what == "shapes" else 3, **counts)
])  # fmt: skip
def test_generated(pool, some, what, encoding, num_ranks, device):
    make, thinly, _ = GENERATED[what]
    cases = thinned(some, num_ranks, device, encoding, served(make(num_ranks, kinds(encoding)), num_ranks), **thinly)
    check(pool, num_ranks, device, cases, turns=2 if what == "ways" else 1, family=encoding)


@pytest.mark.parametrize(("encoding", "num_ranks"), list(families(3, packets=([2], [3, 8]))))
def test_what_is_larger_than_the_workspace_goes_in_pieces(pool, some, encoding, num_ranks, device):
    cases = served(ccl_cases.piece_cases(kinds(encoding)), num_ranks)
    if encoding in ENCODINGS:
        cases = some(cases, 23 if num_ranks == 8 else 13 if device == "cpu" else 7, num_ranks)
    elif device == "cpu":
        cases = some(cases, 2)
    turns = 2 if encoding in ENCODINGS or device != "cpu" else 1
    check(pool, num_ranks, device, cases, turns, None, SMALL if encoding in ENCODINGS else "4KiB", encoding)


@pytest.mark.parametrize("num_ranks", [4])
@pytest.mark.parametrize("members", [pytest.param((2, 0), marks=pytest.mark.exhaustive(device="cpu")), (3, 1, 0)])
@pytest.mark.parametrize("encoding", FAMILIES[1:])
def test_groups_of_named_algorithms(pool, num_ranks, encoding, members, device):
    cases = [ccl_cases.of(kind, shape=(77,)) for kind in kinds(encoding)]
    check(pool, num_ranks, device, cases, 1 if device == "cpu" else 2, members, "", encoding)


@pytest.mark.parametrize("family", NAMED)
def test_what_each_algorithm_serves(family):
    """All that is tried above, but for what sentinels cannot tell from nothing, and sparse tensors for copy engines."""
    known = kinds(family)
    assert len(known) == {"portable": 6, "ll": 8, "ll128": 9, "sentinel": 5}[family]
    cases = [*reducing_cases(known=known), *moving_cases(known), *ccl_cases.shape_cases(known)]
    cases += [*ccl_cases.place_cases(known), *ccl_cases.way_cases(4, known), *ccl_cases.piece_cases(known)]
    if family == "sentinel":
        splits = ("heap", "skewed", "output only")
        cases = [case for case in cases if case.dtype in REDUCIBLE[:3]]
        cases = [case for case in cases if "split" not in case.config["algorithm"] or case.place in splits]
    sparse = "strided", "strided ordinary", "gaps", "transposed"
    cases = [case for case in cases if case.config["algorithm"] != "copy_engine" or case.place not in sparse]
    assert served(cases, 4) == cases


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0], [2]]
    assert pool.run(jobs.in_groups, num_ranks, device, sets, 5 if device == "cuda" else 3) == [[]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "slow"), [
    (3, False), *(pytest.param(n, False, marks=pytest.mark.exhaustive(device="cpu")) for n in (2, 8)), (4, True),
])  # fmt: skip
def test_back_to_back(pool, num_ranks, slow, device):
    many, few = ((500, 10), (20, 8)) if slow else ((10_000, 24), (30, 10))
    calls, kinds = many if device == "cuda" else few
    found = pool.run(jobs.back_to_back, num_ranks, device, calls, kinds, slow, timeout_s=300.0)
    assert found == [[]] * num_ranks


@pytest.mark.parametrize(("job", "num_ranks"), [
    *((jobs.in_tiles, n) for n in (1, 3)), *((jobs.freed_and_asked_for, n) for n in (1, 3)),
    *((jobs.leaves, n) for n in (1, 2)), (jobs.observed, 2), (jobs.messages, 3),
    pytest.param(jobs.messages, 2, marks=pytest.mark.exhaustive(device="cpu")),
])  # fmt: skip
def test_a_few_ranks(pool, job, num_ranks, device):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[4]))
def test_barriers_finish_calls_and_frees_wait_for_them(pool, some, num_ranks, device):
    rounds = 12 if device == "cuda" else len(some(range(12), 2))
    assert pool.run(jobs.nobody_waits, num_ranks, device, num_ranks, rounds) == [None] * num_ranks


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    *((jobs.fails, 3, each) for each in (("barrier", 3), ("close", 3), ("group", 2), ("collective", 1), ("wait", 1))),
    (jobs.keeps_errors, 2, ()),
])  # fmt: skip
def test_errors_of_calls_that_no_caller_waits_for(pool, job, num_ranks, args):
    assert pool.run(job, num_ranks, *args) == [None] * num_ranks


@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("encoding", ["", *ENCODINGS])
def test_replays_with_changing_data(pool, encoding, num_ranks):
    """Each algorithm of packets in one piece and in several, with a workspace in which few messages go at once."""
    if reason := unprobed("cuda", [encoding]):
        pytest.skip(reason)
    places = ("heap", "ordinary", "skewed")
    cases = [Case(op, "bfloat16", shape=(4099,), place=place) for op in OPS for place in places]
    for algorithm in ("one_shot", "two_shot"):
        cases.append(Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": algorithm}))
    cases += [ccl_cases.of(kind, "bfloat16", shape=(4099,)) for kind in kinds("portable")]
    if encoding:
        how = {"comm_sms": 2, "num_warps": 4}
        cases = [ccl_cases.of(kind, shape=(count,), config=how) for kind in kinds(encoding) for count in (77, 9001)]
    how = cases, 50, SMALL if encoding else ""
    assert pool.run(jobs.captured, num_ranks, "cuda", *how, timeout_s=300.0) == [[]] * num_ranks
