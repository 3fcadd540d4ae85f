"""Collectives of groups on several nodes: CPU ranks that IRIS_NODES divides, with gloo between the nodes."""

from functools import partial

import jobs_node_collectives as jobs
import jobs_norm
import pytest
from jobs_nodes import divided
from test_attention import DECODES, RINGS, decodes, rings, there_and_back

BY_LEVELS = {"all_reduce", "reduce", "broadcast", "reduce_scatter", "scatter", "all_gather", "gather"}
GROUPS = {
    "a grid": ("2x2", None, BY_LEVELS | {"all_to_all"}),
    "three nodes": ("3x2", None, BY_LEVELS | {"all_to_all"}),
    "large nodes": ("2x4", None, BY_LEVELS | {"all_to_all"}),
    "a permuted grid": ("2x2", [3, 0, 2, 1], BY_LEVELS | {"all_to_all"}),
    "node after node": ("2x2", [0, 2, 1, 3], BY_LEVELS | {"all_to_all"}),
    "unequal nodes": ("3+1", None, {"all_to_all"}),
    "a mixture": ("2x2", [2, 0, 1], {"all_to_all"}),
    "a rail": ("2x2", [3, 1], set()),
}
FLAT = {"gloo", "nccl", "exchanged"}


def of_levels(served):
    """The operations of which calls were served by levels; all others by what is flat."""
    assert {name for _, name in served} <= FLAT | {"hierarchical"}
    return {op for op, name in served if name == "hierarchical"}


@pytest.mark.parametrize("group", GROUPS)
def test_collectives_are_right(pool, group, some):
    """All calls in one world; the groups have different ones, and together every one."""
    nodes, members, levels = GROUPS[group]
    number, size = list(GROUPS).index(group), {"3x2": 6, "2x4": 8}.get(nodes, 4)
    every = len(GROUPS) // len(some(GROUPS, len(GROUPS)))
    call = jobs.collectives, members, "elements, shapes, ways", every, number % every, 2 if every == 1 else 1
    for wrong, (served, chunks) in pool.run(divided, size, nodes, *call):
        assert wrong == []
        assert not served or of_levels(served) == levels  # a rank that is no member has none
        assert chunks > 3 or not levels & BY_LEVELS or not served


@pytest.mark.parametrize("group", ["a permuted grid", "unequal nodes", "a mixture"])
def test_parts_for_other_nodes_go_as_lists(pool, group, some):
    """As NCCL takes them: gloo, in whose place they are, has them copied."""
    (nodes, members, _), number = GROUPS[group], list(GROUPS).index(group)
    every = 3 // len(some(range(3), 3))
    call = jobs.collectives, members, "lists", every, number % every, 2 if every == 1 else 1
    for wrong, (served, _) in pool.run(divided, 4, nodes, *call):
        assert wrong == []
        assert served <= {("all_to_all", "hierarchical")}


@pytest.mark.parametrize("nodes", ["2x2", pytest.param("3x2", marks=pytest.mark.exhaustive)])
def test_a_config_says_how_many_chunks(pool, nodes):
    ops, size = ("all_reduce", "reduce_scatter", "all_gather"), {"2x2": 4, "3x2": 6}[nodes]
    for wrong, (found, tried, told) in pool.run(divided, size, nodes, jobs.chunked, ops, (1, 3, 8)):
        assert wrong == []
        assert found == {(op, number): number for op in ops for number in (1, 3, 8)}
        assert tried == [{}, {"chunks": 2}, {"chunks": 4}]  # the request has one chunk, and too little for eight
        assert all("has no use for chunks" in each for each in told)


OVER_NCCL = {2: pytest.mark.multigpu(2, shared=False), 4: pytest.mark.multigpu(4, shared=False)}


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "nodes", "members"), [
    pytest.param(2, "2x1", None, marks=OVER_NCCL[2]),
    *(pytest.param(4, "2x2", each, marks=OVER_NCCL[4]) for each in (None, [3, 1], [2, 0, 1], [1, 0])),
])  # fmt: skip
def test_collectives_over_nccl_are_right(pool, num_ranks, nodes, members):
    is_by_levels, every = nodes == "2x2" and members is None, 3 if members is None else 9
    for which in ("elements", "shapes", "ways"):
        call = jobs.collectives, members, which, every, 1, 4, "cuda"
        for rank, (wrong, (served, _)) in enumerate(pool.run(divided, num_ranks, nodes, *call)):
            assert wrong == []
            if members is None:  # which of them, first calls measure
                assert bool(of_levels(served)) == is_by_levels
                assert is_by_levels or "nccl" in {name for _, name in served}
            assert bool(served) == (members is None or rank in members)


@pytest.mark.parametrize("job", [
    pytest.param(each, marks=OVER_NCCL[4], id=each.__name__) for each in (jobs.captured, jobs.pairs)
])  # fmt: skip
def test_graphs_and_messages_over_nccl_are_right(pool, job):
    assert pool.run(divided, 4, "2x2", job) == [None] * 4


@pytest.mark.parametrize(("members", "device"), [
    (None, "cpu"), ([0, 2, 3], "cpu"),
    *(pytest.param(each, "cuda", marks=OVER_NCCL[4]) for each in (None, [0, 2, 3])),
])  # fmt: skip
def test_no_rank_leaves_a_barrier_before_all_have_come(pool, members, device):
    for spans in zip(*filter(None, pool.run(divided, 4, "2x2", jobs.barriers, members, device)), strict=True):
        assert max(begin for begin, _ in spans) <= min(end for _, end in spans)


@pytest.mark.parametrize(("nodes", "job", "args"), [
    ("3+1", jobs.messages, ()), ("2x1", jobs.begun_together, ()), ("2x1", jobs.groups_of_torch, ()),
    ("2x1", jobs.too_long, ()),
    *(("2x2", job, ()) for job in (jobs.beside_each_other, jobs.bits)),
    *(("2x2", jobs.node_refuses, (how,)) for how in ("supports", "no room", "broken")),
    *(("2x2", jobs.order_of_chunks, (op,)) for op in ("matmul_all_reduce", "all_gather_matmul")),
])  # fmt: skip
def test_on_every_rank(pool, nodes, job, args):
    size = {"2x1": 2}.get(nodes, 4)
    assert pool.run(divided, size, nodes, job, *args) == [None] * size


@pytest.mark.parametrize(("nodes", "members", "names", "served"), [
    ("2x2", None, ("overlapped",), {"overlapped"}),
    ("2x2", [1, 2, 3], ("overlapped", ""), {"overlapped", "unfused"}), ("2x2", [3, 2], ("",), None),
])  # fmt: skip
def test_products_are_right(pool, nodes, members, names, served):
    for rank, (wrong, (found, _)) in enumerate(pool.run(divided, 4, nodes, jobs.products, members, names)):
        assert wrong == []
        found = {name for op, name in found if "matmul" in op}
        assert served is None or found == (served if members is None or rank in members else set())


def test_norms_and_ulysses_between_nodes(pool):
    """A collective and what belongs to it, one after the other."""
    case = partial(jobs_norm.Case, "", (33, 64))
    cases = [case("bfloat16", place="heap"), case("float32", place="ordinary")]
    assert pool.run(divided, 4, "2x2", jobs_norm.run_cases, "cpu", cases) == [[]] * 4
    assert pool.run(divided, 4, "2x2", there_and_back, "cpu", None, (1, 2), "float32") == [None] * 4


@pytest.mark.parametrize(("nodes", "job", "group", "case", "device"), [
    ("2x2", decodes, None, DECODES[0][2], "cpu"), ("3+1", decodes, [3, 1, 0], DECODES[1][2], "cpu"),
    ("2x2", rings, None, RINGS[0][2], "cpu"), ("3+1", rings, [3, 1, 0], RINGS[1][2], "cpu"),
    ("2x1", rings, None, RINGS[2][2], "cpu"),
    pytest.param("2x2", decodes, None, DECODES[0][2], "cuda", marks=OVER_NCCL[4]),
    pytest.param("2x2", rings, None, RINGS[0][2], "cuda", marks=OVER_NCCL[4]),
])  # fmt: skip
def test_attention_between_nodes(pool, nodes, job, group, case, device):
    size = 2 if nodes == "2x1" else 4
    assert pool.run(divided, size, nodes, job, device, group, case, 2) == [None] * size
