"""Calls that are bound to their tensors: `ctx.ccl.bind` and `ctx.ops.bind`."""

import random
import time
import unittest.mock
from types import SimpleNamespace

import pytest
import torch
from ccl_cases import OPS, Case
from jobs_ccl import jobs_of, on_heap
from jobs_common import unlike
from jobs_norm import Case as Norm
from ops_cases import Case as Product

from iris_core import Iris
from iris_core.dispatch import PRODUCTS
from iris_core.dispatch.products import GATHERING
from iris_triton import launcher
from iris_triton.backend import TritonBackend


class Binding:
    """A face of a context whose operations return bound calls."""

    def __init__(self, face):
        self._face = face

    def __getattr__(self, op):
        def bind(*tensors, async_op=False, workspace=None, **options):
            return self._face.bind(op, *tensors, **options)

        return bind


def calls(device, group, turns=5):
    """Bound calls of every operation, in turn with plain ones, at random times and on new data."""
    with Iris("64MiB", device=device) as ctx:
        size, late = ctx.num_ranks if group is None else len(group), random.Random(ctx.cur_rank)
        if group is not None and ctx.cur_rank not in group:
            return
        rank = ctx.cur_rank if group is None else group.index(ctx.cur_rank)
        faces = {"ccl": Binding(ctx.ccl), "ops": Binding(ctx.ops)}
        binding = SimpleNamespace(**faces, num_ranks=ctx.num_ranks, cur_rank=ctx.cur_rank)
        places, products = ("heap", "ordinary"), (24 * size, 16, 16 * size)
        cases = [Case(op, "int32", shape=(48, 10), place=places[number % 2]) for number, op in enumerate(OPS)]
        cases += [Product(op, "", products, dim=0 if op in GATHERING else None) for op in PRODUCTS]
        cases += [Norm("", (7, 64))]
        bound = []
        for case in cases:
            tensors = jobs_of(case).Tensors(ctx, case, rank, size)
            bound.append((case, tensors, jobs_of(case).call(binding, case, tensors, group, group)))
        for turn in range(turns):
            for case, tensors, call in bound:
                time.sleep(late.choice([0, 0, 0.003]))
                given = tensors.fill(turn)
                how = ("bound", "started", "plain")[(turn + len(case.op)) % 3]
                if how == "bound":
                    call()
                elif how == "started":
                    call.start().wait()
                else:
                    jobs_of(case).call(ctx, case, tensors, group, group)
                assert jobs_of(case).verify(case, tensors, given, f" ({how})") == []


def found_in_c(device, group):
    """How often one of `calls`, which are looked for in the cache of GPUs' calls, was found."""
    hits = []

    def counting(backend, *about):
        cache = launcher.call_cache(*about)
        look = lambda tensors, how: hits.append(cache(tensors, how)) or hits[-1]
        look.keep, look.clear = cache.keep, cache.clear
        return look

    with unittest.mock.patch.object(TritonBackend, "call_cache", counting):
        calls(device, group, turns=6)
    return sum(map(bool, hits))


def refused():
    """What is refused when a call is bound, and when it is called after the end."""
    with Iris("1MiB", device="cpu") as ctx:
        x, bind = torch.ones(4), ctx.ccl.bind
        wrong = unlike(
            ("ArgumentError: ccl.operations", lambda: bind("all_sum", x, x)),
            ("ArgumentError: names: start()", lambda: bind("all_reduce", x, x, async_op=True)),
            ("ArgumentError: names: start()", lambda: ctx.ops.bind("matmul_all_reduce", x, x, x, workspace=object())),
            ("ArgumentError", lambda: bind("all_reduce", x, torch.ones(5))),
        )
        call = bind("all_reduce", x, x)
        call()
        assert x.tolist() == [float(ctx.num_ranks)] * 4
    assert wrong + unlike(("HeapClosedError", call)) == []


@on_heap("64MiB")
def replays(ctx):
    """A graph keeps bound calls that are dropped after the capture."""
    x, y = ctx.empty(1000), torch.zeros(1000, device=ctx.device)
    a, b = torch.empty(64, 32, device=ctx.device), torch.ones(32, 16, device=ctx.device)
    c, graph = ctx.empty(64, 16), torch.cuda.CUDAGraph()
    calls = [ctx.ccl.bind("all_reduce", y, x), ctx.ops.bind("matmul_all_reduce", c, a, b)]
    for call in calls:
        call()
    ctx.barrier()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    del calls, call
    torch.cuda.empty_cache()
    for turn in range(5):
        x.fill_(turn)
        a.fill_(turn)
        graph.replay()
        assert (y.unique().tolist(), c.unique().tolist()) == ([2.0 * turn], [64.0 * turn])


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("group", [None, [2, 0]])
def test_bound_calls_are_right(pool, group, device, num_ranks):
    assert pool.run(calls, num_ranks, device, group) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", [3])
def test_calls_that_the_cache_in_c_finds_are_right(pool, num_ranks):
    if launcher.call_cache(0, 0, False) is None:
        pytest.skip("there is no C compiler here, or torch is older than 2.11")
    kinds = len(OPS) + len(PRODUCTS) + 1  # each is called twice, but for what binds it
    assert pool.run(found_in_c, num_ranks, "cpu", None) == [kinds] * num_ranks


def test_what_is_refused(pool):
    assert pool.run(refused, 2) == [None] * 2


@pytest.mark.multigpu(2)
def test_a_graph_keeps_what_it_captured(pool):
    assert pool.run(replays, 2, "cuda") == [None] * 2
