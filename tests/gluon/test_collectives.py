"""all_gather, all_to_all and all_reduce in Gluon: the calls and expectations of tests/ccl, and Triton beside them."""

from dataclasses import replace

import pytest
import torch
from ccl_cases import Case, moving_cases, place_cases, reducing_cases, shape_cases, way_cases, with_config
from collectives_jobs import ALGORITHMS, asynchronous, in_gluon, mixed, one_of_each, said_of, same_bits, stays_away
from rank_counts import rank_counts
from tables import table
from triton.runtime import _allocation

from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType
from iris_gluon.collectives import collectives
from iris_gluon.gemm.launch import WithScratch
from iris_gluon.info import GLUON_INFO
from iris_triton.launcher import BoundKernel


def ours(cases):
    """Those calls that an algorithm here serves."""
    for case in cases:
        if case.op in ALGORITHMS:
            yield replace(case, config=case.config | {"use_gluon": True, "algorithm": ALGORITHMS[case.op]})


def all_right(results):
    for wrong in results:
        assert wrong == []


def check(pool, num_ranks, device, cases, turns=1):
    cases = list(cases)
    if device == "cuda":  # each kind of call is a kernel to be compiled, for each number of ranks
        cases = cases[num_ranks % 3 :: 3]
    all_right(pool.run(in_gluon, num_ranks, "jobs_ccl", "run_cases", device, cases, turns, timeout_s=500.0))


# -- against torch ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 3, 4]))
def test_dtypes_and_reductions(pool, some, num_ranks, device):
    cases = list(ours([*reducing_cases(4 if num_ranks == 2 else 1), *moving_cases()]))
    if device == "cpu":
        cases = some(cases, 2 if num_ranks == 2 else 5, num_ranks)
    check(pool, num_ranks, device, cases)


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[4]))
def test_shapes(pool, some, num_ranks, device):
    cases = list(ours(shape_cases()))
    check(pool, num_ranks, device, some(cases, 3) if device == "cpu" else cases)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_places(pool, some, num_ranks, device):
    cases = list(ours(place_cases()))
    check(pool, num_ranks, device, some(cases, 6) if device == "cpu" else cases[num_ranks % 2 :: 2])


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2]))
def test_ways(pool, some, num_ranks, device):
    cases = list(ours(way_cases(num_ranks)))
    check(pool, num_ranks, device, some(cases, 9, num_ranks) if device == "cpu" else cases[num_ranks % 2 :: 2], 2)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_columns(pool, some, num_ranks, device):
    """Rows that are whole vectors and rows that are not, on the heap and off it, of every width of elements."""
    cases = [
        Case("all_to_all", dtype, shape=(rows, columns), layout="columns", place=place)
        for dtype, rows, columns in (
            ("bfloat16", 5, 16), ("float32", 7, 4), ("int8", 3, 48), ("int8", 3, 24), ("complex128", 4, 3),
            ("int64", 1, 6),
        )
        for place in ("heap", "ordinary", "skewed", "strided", "transposed", "output only")
    ]  # fmt: skip
    programs = with_config(cases[::5], comm_sms=3, block_size_m=2, block_size_n=8)
    cases = list(ours([*cases, *programs][num_ranks - 2 :: num_ranks - 1]))
    check(pool, num_ranks, device, some(cases, 3) if device == "cpu" else cases)


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
    all_right(pool.run(in_gluon, num_ranks, "jobs_sequences", "in_pieces", device, cases, "4KiB"))


# -- beside Triton ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_the_same_bits_as_in_triton(pool, num_ranks, device):
    dtypes = ("bfloat16", "int8") if device == "cpu" else ("float32", "bfloat16", "int8")
    results = pool.run(same_bits, num_ranks, device, dtypes, ("product", "avg"), 1003)
    assert [wrong for wrong, _ in results] == [[]] * num_ranks
    assert len({tuple(digests) for _, digests in results}) == 1


@pytest.mark.parametrize("num_ranks", [3])
def test_calls_in_both_languages_follow_each_other(pool, num_ranks, device):
    calls, kinds = (2000, 24) if device == "cuda" else (30, 8)
    all_right(pool.run(mixed, num_ranks, "back_to_back", device, calls, kinds, False, timeout_s=300.0))


@pytest.mark.parametrize("num_ranks", [4])
def test_slow_ranks(pool, num_ranks, device):
    all_right(pool.run(mixed, num_ranks, "back_to_back", device, 500 if device == "cuda" else 12, 5, True))


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    all_right(pool.run(mixed, num_ranks, "in_groups", device, [[0, 3], [3, 1], [2, 0, 1], [1, 2, 3, 0], [2]], 4))


@pytest.mark.parametrize("num_ranks", [2])
def test_every_operation_works_with_this_backend(pool, num_ranks, device):
    for wrong, messages in pool.run(one_of_each, num_ranks, device):
        assert wrong == messages == []


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.multigpu
def test_replays_of_a_graph(pool, num_ranks):
    cases = [
        Case(op, "bfloat16", shape=(4099,), place=place, config={"algorithm": algorithm})
        for op, algorithm in ALGORITHMS.items()
        for place in ("heap", "ordinary", "skewed")
    ]
    cases += [Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": "gluon_two_shot"})]
    for said, wrong in pool.run(in_gluon, num_ranks, "jobs_sequences", "captured", "cuda", cases, 50, timeout_s=300.0):
        assert len(said) == 1
        assert wrong == []


# -- time -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [3])
def test_a_rank_that_stays_away_is_named(pool, num_ranks, device):
    first, second, third = pool.run(stays_away, num_ranks, device)
    assert [sums for _, sums in (first, second, third)] == [[3.0, 3.0]] * 3
    assert "has reported: " in second[0]
    for said, _ in (first, second, third):
        assert said.startswith("DeviceTimeoutError")
        assert "rank 1 signals program 0 that it has arrived" in said
        assert "was all_reduce 6 x 4 x float32 (gluon_two_shot)" in said


@pytest.mark.parametrize("num_ranks", [2])
def test_asynchronous_calls(pool, num_ranks, device):
    for outputs, gathered in pool.run(asynchronous, num_ranks, device):
        assert outputs == [[1.0], [3.0], [5.0], [7.0]]
        assert gathered == [0.0, 1.0]


# -- choice -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [2])
def test_what_is_chosen_and_said(pool, num_ranks, device):
    for said in pool.run(said_of, num_ranks, device):
        for name in ("gluon", "warps", "lanes"):
            assert said[name].startswith("all_reduce: gluon_two_shot, "), said[name]
        assert said["named"].startswith("all_reduce: gluon_two_shot, named by algorithm='gluon_two_shot'")
        assert "two_shot (triton): no, it is not written in Gluon" in said["gluon"]
        assert said["gather"] == "gluon_push"
        for name, reason in {
            "triton": "it is not written in Gluon",
            "stages": "it has no use for num_stages of the config",
            "waves": "waves_per_eu speaks of AMD GPUs",
            "swizzle": "it has no use for swizzle_size of the config",
            "no gluon": "it is not written in Gluon",
        }.items():
            assert ": no algorithm, " in said[name]
            assert reason in said[name]
        assert "gluon_two_shot (gluon): " in said["free"]
        assert "no, " not in said["free"].partition("gluon_two_shot (gluon): ")[2].partition("\n")[0]


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


def test_launches_have_scratch_of_their_own(monkeypatch):
    """A kernel's launches get the same memory each time, and others what they had before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype))
    asked = []

    def launch(bound, stream, *tensors):
        asked.append(_allocation._allocator.get()(*sizes[len(asked)], 128, None))

    sizes = [(256,), (256,), (512,)]
    monkeypatch.setattr(BoundKernel, "__call__", launch)
    before = _allocation._allocator.get()
    bound = WithScratch.__new__(WithScratch)  # no GPU is asked for
    bound._index = 0
    for _ in sizes:
        bound(None)
        assert _allocation._allocator.get() is before
    assert [each.numel() for each in asked] == [256, 256, 512]
    assert asked[0] is asked[1]
