"""all_gather, all_to_all and all_reduce in Gluon: the calls and expectations of tests/ccl, and Triton beside them."""

import importlib
from dataclasses import replace
from unittest import mock

import jobs_sequences
import pytest
from ccl_cases import Case, moving_cases, place_cases, reducing_cases, shape_cases, way_cases, with_config
from jobs_common import environment
from rank_counts import rank_counts
from tables import table

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType
from iris_gluon.collectives import collectives
from iris_gluon.info import GLUON_INFO

# -- rank jobs --------------------------------------------------------------------------------------------------------
ALGORITHMS = {"all_gather": "gluon_push", "all_to_all": "gluon_push", "all_reduce": "gluon_two_shot"}
"""What the Gluon backend adds, by operation."""


def in_gluon(module, job, *args):
    with environment(IRIS_BACKEND="gluon"):
        return getattr(importlib.import_module(module), job)(*args)


_random_case = jobs_sequences.random_case


def random_mixed_case(generator, size):
    """A call of tests/ccl, in Gluon if there is an algorithm and if it so happens, else in Triton."""
    case = _random_case(generator, size)
    if case.op in ALGORITHMS and generator.random() < 0.6:
        return replace(case, config={"algorithm": ALGORITHMS[case.op]})
    return case


def mixed(job, *args):
    """Run a job of jobs_sequences, in which calls in Triton and in Gluon follow each other in the same teams."""
    with mock.patch.object(jobs_sequences, "random_case", random_mixed_case):
        return in_gluon("jobs_sequences", job, *args)


def said_of(device, configs):
    """What is said of an all_reduce in Gluon by each config, what gathers, and what is said without a config."""
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        x, y, gathered = ctx.zeros(64), ctx.zeros(64), ctx.zeros(64 * ctx.num_ranks)
        said = [str(ctx.ccl.explain("all_reduce", y, x, config=Config(use_gluon=True, **each))) for each in configs]
        gathers = ctx.ccl.explain("all_gather", gathered, x, config=Config(use_gluon=True)).algorithm
        free = str(ctx.ccl.explain("all_reduce", y, x))
        ctx.barrier()
    return said, gathers, free


# -- tests ------------------------------------------------------------------------------------------------------------
def ours(cases):
    """Those calls that an algorithm here serves."""
    for case in cases:
        if case.op in ALGORITHMS:
            yield replace(case, config=case.config | {"use_gluon": True, "algorithm": ALGORITHMS[case.op]})


def all_right(results):
    for wrong in results:
        assert wrong == []


# -- against torch ----------------------------------------------------------------------------------------------------
def column_cases():
    """Rows that are whole vectors and rows that are not, on the heap and off it, of every width of elements."""
    cases = [
        Case("all_to_all", dtype, shape=(rows, columns), layout="columns", place=place)
        for dtype, rows, columns in (
            ("bfloat16", 5, 16), ("float32", 7, 4), ("int8", 3, 48), ("int8", 3, 24), ("complex128", 4, 3),
            ("int64", 1, 6),
        )
        for place in ("heap", "ordinary", "skewed", "strided", "transposed", "output only")
    ]  # fmt: skip
    return [*cases, *with_config(cases[::5], comm_sms=3, block_size_m=2, block_size_n=8)]


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2, 4]))
def test_element_types_reductions_shapes_places_and_ways(pool, some, num_ranks, device):
    lists = reducing_cases(4), moving_cases(), shape_cases(), place_cases(), way_cases(num_ranks), column_cases()
    cases = [case for each in lists for case in ours(each)]
    # on a GPU, each kind of call is a kernel to be compiled, for each number of ranks
    cases = some(cases, 5, num_ranks) if device == "cpu" else cases[num_ranks % 5 :: 5]
    all_right(pool.run(in_gluon, num_ranks, "jobs_ccl", "run_cases", device, cases, 2, timeout_s=500.0))


@pytest.mark.parametrize("num_ranks", [3])
def test_what_is_larger_than_the_workspace_goes_in_pieces(pool, some, num_ranks, device):
    cases = [
        Case("all_gather", "int32", shape=(3, 201), place="ordinary"),
        Case("all_to_all", "int32", shape=(3, 201), place="ordinary"),
        Case("all_to_all", splits="uneven", shape=(250, 3), place="ordinary"),
    ]
    for place in ("input only", "ordinary", "output only"):  # results land, both do, inputs do
        cases += [Case("all_reduce", "int32", shape=(3, 501), place=place)]
    programs = with_config(cases[:4], comm_sms=3, block_size_n=2)
    cases += [Case("all_to_all", splits="one way", shape=(250, 3), place="ordinary")]
    cases += [Case("all_to_all", "bfloat16", layout="columns", shape=(30, 40), place="ordinary"), *programs]
    cases = list(ours(cases))
    if device == "cpu":
        cases = some(cases, 3, 1)  # every algorithm, with one program and with several
    all_right(pool.run(in_gluon, num_ranks, "jobs_ccl", "run_cases", device, cases, 2, None, "4KiB"))


# -- beside Triton ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_ranks", "slow"), [(3, False), (4, True)])
def test_calls_in_both_languages_follow_each_other(pool, num_ranks, slow, device):
    many, few = ((500, 5), (12, 5)) if slow else ((2000, 24), (30, 8))
    calls = many if device == "cuda" else few
    all_right(pool.run(mixed, num_ranks, "back_to_back", device, *calls, slow, timeout_s=300.0))


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    all_right(pool.run(mixed, num_ranks, "in_groups", device, [[0, 3], [3, 1], [2, 0, 1], [1, 2, 3, 0], [2]], 4))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.multigpu
def test_replays_of_a_graph(pool, num_ranks):
    cases = [
        Case(op, "bfloat16", shape=(4099,), place=place, config={"algorithm": algorithm})
        for op, algorithm in ALGORITHMS.items()
        for place in ("heap", "ordinary", "skewed")
    ]
    cases += [Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": "gluon_two_shot"})]
    found = pool.run(in_gluon, num_ranks, "jobs_sequences", "captured", "cuda", cases, 50, timeout_s=300.0)
    assert found == [[]] * num_ranks


# -- time -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [3])
def test_a_rank_that_stays_away_is_named(pool, num_ranks, device):
    """And all go on in both languages."""
    job = "test_reports", "gives_up", device, "barrier", "all_reduce gluon_two_shot"
    for said in pool.run(in_gluon, num_ranks, *job):
        assert said in [("DeviceTimeoutError", rank, 1, "all_reduce") for rank in (0, 2)]


# -- choice -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [2])
def test_what_is_chosen_and_said(pool, num_ranks, device):
    ours = "all_reduce: gluon_two_shot, "
    wanted = [
        ({}, ours), ({"algorithm": "gluon_two_shot"}, f"{ours}named by algorithm='gluon_two_shot'"),
        ({"num_warps": 8, "comm_sms": 3, "block_size_m": 8}, ours), ({"threads_per_warp": 32}, ours),
        ({"algorithm": "two_shot"}, "it is not written in Gluon"),
        ({"num_stages": 3}, "it has no use for num_stages of the config"),
        ({"waves_per_eu": 2}, "waves_per_eu speaks of AMD GPUs"),
        ({"swizzle_size": 8}, "it has no use for swizzle_size of the config"),
    ]  # fmt: skip
    for said, gathers, free in pool.run(said_of, num_ranks, device, [config for config, _ in wanted]):
        for text, (_, words) in zip(said, wanted, strict=True):
            assert words in text
            assert (": no algorithm, " in text) == (ours not in words)
        assert gathers == "gluon_push"
        assert "no, " not in free.partition("gluon_two_shot (gluon): ")[2].partition("\n")[0]


@table("algorithm", collectives())
def test_warps_of_the_device(algorithm):
    def answer(target, **config):
        options = {"layout": "torch", "uneven": False, "in_place": False, "in_stride": (1,), "config": config}
        options |= {"reduction": "sum"} if algorithm.op == "all_reduce" else {}
        return algorithm.supports(CollectiveRequest(
            op=algorithm.op, shape=(8,), dtype="float32", nbytes=32, rank=0, group_size=2, target=target,
            options=options,
        ))  # fmt: skip

    nvidia, amd = DeviceTarget(DeviceType.CUDA, 0, "sm_90", 32), DeviceTarget(DeviceType.HIP, 0, "gfx942", 64)
    assert algorithm.info == GLUON_INFO
    assert answer(nvidia)
    assert answer(nvidia, threads_per_warp=32)
    assert not answer(nvidia, waves_per_eu=2)
    assert answer(amd)
    assert "threads_per_warp is 32, and this device has 64" in answer(amd, threads_per_warp=32).reason
    assert answer(amd, waves_per_eu=2)
