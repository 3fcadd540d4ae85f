"""Iris itself has no races: collectives, fused operations, tile collectives and examples give no report."""

import contextlib
import io
import json
import os
import runpy
import sys

import jobs_corpus
import jobs_examples
import pytest
from ccl_cases import kinds, moving_cases, of, place_cases, reducing_cases, served, shape_cases, way_cases
from jobs_norm import Case as Norm
from jobs_tiles import OPS, Case
from ops_cases import all_cases, scaled_cases, thinned
from test_attention import DECODE_SMALL, RING_SMALL, decodes, rings
from test_examples import EXPECTED

import iris_core
from iris_core.testing import RankPool

EXAMPLES = jobs_examples.EXAMPLES
exhaustive = pytest.mark.exhaustive
RANKS = [pytest.param(2, marks=exhaustive), 3, pytest.param(4, marks=exhaustive)]


def switch_cases():
    known = kinds("nvls")
    return served([*place_cases(known), *shape_cases(known)], 3)


def texts(path):
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row["text"] for row in rows]


def run(pool, path, num_ranks, module, function, *args):
    results = pool.run(jobs_corpus.checked, num_ranks, str(path), module, function, *args, timeout_s=900.0)
    assert texts(path) == []
    return results


UNDER_SCHEDULES = (
    "05_atomic_add.py", "12_message_passing_context.py", "13_message_passing_gluon.py",
    "22_gemm_all_scatter_specialised.py", "27_gemm_all_reduce_one_shot.py", "28_gemm_all_reduce_ring.py",
    "30_all_gather_gemm_push.py", "32_ring_attention.py", "33_moe.py", "34_norm.py", "40_overlap.py",
)  # fmt: skip
"""Examples that run under schedules always: they signal other ranks.  38 does, too, but waits hundreds of times."""


@exhaustive
@pytest.mark.parametrize("name", ["50_ddp.py", "51_fsdp2.py", "52_tensor_parallel.py"])
def test_training(tmp_path, name):
    path = tmp_path / "found"
    with RankPool(timeout_s=300.0, environ={"IRIS_DEVICE": "cpu", "IRIS_TUNE": "off"}) as ranks:
        ranks.run(jobs_corpus.checked, 2, str(path), "jobs_examples", "train", name, 2, jobs_examples.free_port())
    assert texts(path) == []


def fused_cases(num_ranks, some):
    gathered = [case for case in scaled_cases(num_ranks) if case.op == "all_gather_matmul"]  # scales travel, too
    return [*some(all_cases(num_ranks), 36), *some(gathered, 4)]


NORMS = [
    Norm(algorithm, (rows, hidden), "float32", out=out, programs=2)
    for algorithm in ("one_shot", "two_shot")
    for rows, hidden, out in ((5, 24, ""), (1, 16, "float8_e4m3fn"), (5, 24, ""))
]
"""Other shapes follow each other in the same memory, the largest first, with no other operation between them."""

# so large that the workspace is on the heap, where what was never written is known
ON_HEAP = of(("all_reduce", "nvls_two_shot"), "float32", shape=(1_250_001,), place="ordinary")
OPERATIONS = {
    "moving": ("jobs_ccl", lambda num_ranks, some: some(moving_cases(), 24)),
    "reducing": ("jobs_ccl", lambda num_ranks, some: some(reducing_cases(), 36)),
    "ways": ("jobs_ccl", lambda num_ranks, some: some(way_cases(num_ranks), 14)),
    "places": ("jobs_ccl", lambda num_ranks, some: some(place_cases(), 24)),
    "shapes": ("jobs_ccl", lambda num_ranks, some: some(shape_cases(), 24)),
    "switch": ("jobs_ccl", lambda num_ranks, some: [*some(switch_cases(), 8), ON_HEAP]),
    "fused": ("jobs_ops", fused_cases),
    "norms": ("jobs_norm", lambda num_ranks, some: NORMS),
}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations(pool, some, tmp_path, kind, num_ranks):
    module, cases = OPERATIONS[kind]
    wrong = run(pool, tmp_path / "found", num_ranks, module, "run_cases", "cpu", cases(num_ranks, some), 2)
    assert wrong == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("language", ["triton", pytest.param("gluon", marks=exhaustive)])
def test_tile_collectives(pool, tmp_path, language, num_ranks):
    cases = [Case(op, "float32") for op in OPS]
    run(pool, tmp_path / "found", num_ranks, "jobs_tiles", "run_cases", language, cases, "cpu")


COUNT = int(os.environ.get("SEEDS", "20"))
"""SEEDS=200 python -m pytest --exhaustive tests/checker/test_clean.py -k under_schedules: all of it under 200 seeds."""

SEEDS = [4, *(pytest.param(seed, marks=exhaustive) for seed in range(COUNT) if seed != 4)]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_under_schedules(pool, some, tmp_path, seed, num_ranks):
    """Collectives, fused operations and tile collectives in other orders, with weak memory; seeds share the cases."""
    how = [seed], str(tmp_path / "found")

    def explored(module, *args):
        return pool.run(jobs_corpus.explored, num_ranks, *how, module, "run_cases", *args, timeout_s=900.0)

    fused = thinned(all_cases(num_ranks), 3)
    for module, cases, every in (
        ("jobs_ccl", moving_cases(), 24), ("jobs_ccl", reducing_cases(), 48), ("jobs_ccl", switch_cases(), 8),
        ("jobs_ops", fused, max(len(fused) // 2, 1)),
    ):  # fmt: skip
        part = some(list(cases)[seed % every :: every], 2)
        assert explored(module, "cpu", part, 2) == [[]] * num_ranks
    tiles = some([Case(op, "float32") for op in OPS][seed % 2 :: 2], 2)
    explored("jobs_tiles", "triton", tiles, "cpu")
    assert texts(tmp_path / "found") == []


AT_ONCE = 20
"""Seeds of one test with --exhaustive; without, each example has one of as many."""


FIRSTS = [0, *(pytest.param(each, marks=exhaustive) for each in range(AT_ONCE, COUNT, AT_ONCE))]
NAMES = [pytest.param(each, marks=[exhaustive] * (each not in UNDER_SCHEDULES)) for each in EXPECTED]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("name", NAMES)
def test_examples_under_schedules(request, pool, monkeypatch, tmp_path, name, first, num_ranks):
    seeds = range(first, min(first + AT_ONCE, COUNT))
    if not request.config.getoption("exhaustive"):
        seeds = [[*EXPECTED].index(name) % AT_ONCE]
    path, found = EXAMPLES / name, tmp_path / "found"

    def on_pool(fn, ranks, *args):
        job = seeds, str(found), "jobs_examples", "call", str(path), fn.__name__, args, "cpu"
        return pool.run(jobs_corpus.explored, ranks, *job, timeout_s=3600.0)

    monkeypatch.setattr(iris_core, "run", on_pool)
    monkeypatch.setattr(sys, "argv", [name, str(num_ranks)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    assert texts(found) == []


@pytest.mark.parametrize("num_ranks", RANKS)
def test_attention(pool, tmp_path, num_ranks):
    for job, case in ((decodes, DECODE_SMALL), (rings, RING_SMALL)):
        run(pool, tmp_path / "found", num_ranks, job.__module__, job.__name__, "cpu", None, case, 3)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_tokens_of_experts(pool, tmp_path, num_ranks):
    case, scaled = (2, 2, 16, 4, "float32", 0), (2, 2, 16, 4, "float8_e4m3fn", 3)
    for job in (("passes", "cpu", None, scaled, 2), ("differentiates", "cpu", None, case, 2), ("keeps", "cpu", 2)):
        assert run(pool, tmp_path / "found", num_ranks, "test_experts", *job) == [[]] * num_ranks
    unread, unsent = ("in give_back by", "in gather by"), ("in send by", "is not ordered before")
    for job, wanted in ((("unmet",), [("in merge_back by", unread[1])]), (("unawaited", case), [unread, unsent])):
        found = tmp_path / job[0]
        pool.run(jobs_corpus.checked, num_ranks, str(found), "test_experts", *job)
        assert all(any(one in text and other in text for text in texts(found)) for one, other in wanted), texts(found)
