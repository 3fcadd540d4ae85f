"""Worlds of several nodes: IRIS_NODES divides CPU ranks, so that peers of other nodes are not mapped."""

import ast
import os
import socket

import jobs_network as network
import jobs_nodes as jobs
import pytest
import torch
from jobs_node_collectives import reduce_until

from iris_core.errors import PeerLostError
from iris_core.testing import RankPool


def nodes_of(*sizes):
    """What each rank sees: its node, how many there are, its node's ranks, and its rail."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    nodes = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    rails = lambda place: tuple(ranks[place] for ranks in nodes if place < len(ranks))
    return [
        (number, len(nodes), ranks, rails(place)) for number, ranks in enumerate(nodes) for place in range(len(ranks))
    ]


@pytest.mark.parametrize(("nodes", "sizes"), [
    ("2x2", (2, 2)), ("3x2", (2, 2, 2)), ("2x4", (4, 4)), ("3+1", (3, 1)), ("1x2", (2,)),
])  # fmt: skip
def test_the_heap_is_symmetric_and_mapped_within_nodes(pool, nodes, sizes):
    assert pool.run(jobs.divided, sum(sizes), nodes, jobs.heap) == nodes_of(*sizes)


def test_closed_worlds_leave_nothing(pool, tmp_path):
    """No descriptors, ranges, folders, or keys in torch's store but for one counter."""
    assert pool.run(jobs.divided, 4, "2x2", jobs.open_and_close, 3, str(tmp_path)) == [[0, 0, 0, 0]] * 4


@pytest.mark.multigpu(2, shared=False)
def test_a_kernel_on_a_gpu_names_the_rank_that_it_cannot_reach():
    with RankPool(torch_distributed=True) as ranks:
        for me, said in enumerate(ranks.run(jobs.divided, 2, "2x1", jobs.kernel_on_a_gpu)):
            assert said[:3] == ("DeviceError", me, 1 - me), said
            assert f"kernel store_there: rank {1 - me} " in said[3]


def test_only_ranks_of_torch_are_divided():
    with RankPool() as plain:
        plain.run(jobs.divided, 2, "1+1", jobs.opening_without_torch)


ALONE, NODE = (3,), (2, 3)
DEATHS = [
    *((victims, jobs.use, phase, 600.0 if victims == ALONE else 4.0)  # of a node one can say only that it is missing
      for phase in ("opening", "allocation", "barrier", "kernel") for victims in (ALONE, NODE)),
    (ALONE, reduce_until, "in the middle", None), (ALONE, reduce_until, "before", None),
    (ALONE, reduce_until, "before", [1, 2, 3]), (NODE, reduce_until, "before", None),
    (NODE, reduce_until, "silent", None), (ALONE, reduce_until, "connecting", None),
]  # fmt: skip
SELDOM = [(NODE, jobs.use, phase, 4.0) for phase in ("kernel", "allocation")]  # survivors wait as in the barrier


@pytest.mark.parametrize("death", [
    pytest.param(each, marks=[pytest.mark.exhaustive] * (each in SELDOM), id=f"{each[2]}-{len(each[0])}-{each[3]}")
    for each in DEATHS
])  # fmt: skip
def test_all_survivors_name_who_died(pool, tmp_path, tmp_path_factory, monkeypatch, death):
    """And leave no files; nobody is left to remove those of a node that is gone."""
    (victims, use, phase, bound), run = death, tmp_path_factory.mktemp("run")
    monkeypatch.setattr(pool, "_grace_s", 300.0)  # more than the bound of the survivors' waits
    with pytest.raises(PeerLostError) as caught:
        pool.run(jobs.divided, 4, "2x2", jobs.lose, victims, str(tmp_path), str(run), use, phase, bound)
    assert set(caught.value.ranks) <= set(victims)
    if phase != "opening" and use is jobs.use:  # where who has not said yet on which node it is might still come
        assert sum(len(os.listdir(folder)) for folder in run.iterdir()) == len(victims) - 1
    survivors = [rank for rank in range(4) if rank not in victims]
    assert sorted(os.listdir(tmp_path)) == [str(rank) for rank in survivors]
    for rank in survivors:
        kind, named, text = ast.literal_eval((tmp_path / str(rank)).read_text())
        if victims == ALONE or (use is reduce_until and phase != "silent"):
            assert (kind, sorted(named)) == ("PeerLostError", sorted(victims)), text
            of = "all" if victims == NODE else "rank 3"
            assert phase == "opening" or f"[{of} of node 1 ({socket.gethostname()})]" in text, text
        else:  # on its rail, or another one, whose end has published it
            assert kind in ("CollectiveTimeoutError", *(["PeerLostError"] if phase != "silent" else [])), text
            assert named, text
            assert set(named) <= set(victims), text


TURNS, DELAY_S = 8, 0.1
"""So much longer than a turn takes: what comes too early then is seen."""


@pytest.mark.parametrize(("nodes", "job", "args", "answer"), [
    *((nodes, jobs.exchanges, (), None) for nodes in ("2x2", "3+1")), ("3+1", jobs.kernels, (), None),
    *(("2x2", job, (), None) for job in (
        jobs.cannot_map, jobs.broadcasts, jobs.stay_away, jobs.exchanges_that_fail, jobs.opening)),
    ("2x2", network.exchanges, ("cpu", TURNS, 1, "put_signal", 0, DELAY_S), 0),
    ("2x2", network.exchanges, ("cpu", TURNS, 2, "put and signal", 0, DELAY_S), 0),
    ("2x2", network.put_shapes, (torch.int64,), []), ("2x2", network.put_shapes, (torch.bool,), []),
    ("2x2", network.everyone, ("cpu", 3), True), ("2x1", network.refusals, (), None),
    ("2x1", jobs.divided_otherwise, (), None),
    ("2x1", network.host_rounds, ("cpu", 6, 1), None), ("3x2", network.host_rounds, ("cpu", 6, 2), None),
    *(("2x2", network.host_refusals, (allocator,), ([], 0, [0.0])) for allocator in ("host", "nccl")),
    # nothing is different with another allocator, and on one node
    ("2x1", network.without_network, ("host",), ({}, 22)), ("1x2", network.without_network, ("nccl",), ({}, 22)),
])  # fmt: skip
def test_every_rank_says(pool, nodes, job, args, answer):
    size = 4 if nodes == "3+1" else int(nodes[0]) * int(nodes[2])
    assert pool.run(jobs.divided, size, nodes, job, *args) == [answer] * size


@pytest.mark.parametrize("careless", ["wait", "flush"])
def test_a_missing_wait_and_a_missing_flush_are_seen(pool, careless):
    """What was put has not arrived, or is what the source was changed to."""
    assert all(pool.run(jobs.divided, 2, "2x1", network.exchanges, "cpu", 1, 1, "put_signal", 1, 1.0, careless))
