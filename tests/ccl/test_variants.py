"""Portable algorithms by name, with every dtype, reduction, shape and place, against torch on one process."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import variant_cases
from ccl_cases import Case
from jobs_ccl import run_cases
from jobs_sequences import in_pieces
from jobs_variants import in_a_group, inexact, mixed, with_nans
from tables import table
from variant_cases import request

from iris_core.dispatch.choice import Chooser, Tables
from iris_core.errors import DriverError
from iris_core.types import DeviceTarget, DeviceType
from iris_triton import copies
from iris_triton.collectives import collectives

ALGORITHMS = {(each.op, each.name): each for each in variant_cases.algorithms()}

SELDOM = pytest.mark.exhaustive(device="cpu")
CASES_OF_A_JOB = 40  # a job on ranks has a limit of time, and the machine may be busy


def check(pool, num_ranks, job, device, cases, *more):
    cases = list(cases)
    for begin in range(0, len(cases), CASES_OF_A_JOB):
        for wrong in pool.run(job, num_ranks, device, cases[begin : begin + CASES_OF_A_JOB], *more):
            assert wrong == []


@pytest.mark.parametrize(
    ("num_ranks", "number"), [(1, 1), (3, 5), (8, 1), *(pytest.param(*each, marks=SELDOM) for each in ((2, 5), (4, 2)))]
)
def test_calls_of_many_kinds(pool, num_ranks, number, device):
    check(pool, num_ranks, run_cases, device, variant_cases.some_cases(num_ranks, number), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "each"), [(2, 1), (3, 3), (4, 7)])
def test_every_kind_of_call(pool, num_ranks, each, device):
    check(pool, num_ranks, run_cases, device, list(variant_cases.all_cases(num_ranks))[::each], 1)


@pytest.mark.parametrize("num_ranks", [3])
def test_what_is_larger_than_the_workspace_goes_in_pieces(pool, num_ranks, device):
    check(pool, num_ranks, in_pieces, device, variant_cases.piece_cases(), "4KiB")


def test_all_of_them_are_here():
    moves = {(op, name) for op in ("all_gather", "all_to_all") for name in ("push", "persistent", "partitioned")}
    assert set(variant_cases.labels()) == moves


@pytest.mark.parametrize("num_ranks", [3])
def test_all_members_get_the_same_bits_rounded_once(pool, num_ranks, device):
    names, dtypes = ("one_shot", "two_shot"), [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    first, *others = pool.run(inexact, num_ranks, device, names, dtypes)
    assert len(first) == len(names) * len(dtypes)
    for other in others:
        assert other == first
    assert [key for key, (_, close) in first.items() if not close] == []


@pytest.mark.parametrize("num_ranks", [3])
def test_nans_go_on_whichever_rank_they_come_from(pool, num_ranks, device):
    calls = [
        (*algorithm, reduction, dtype)
        for algorithm in (("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "pull"))
        for reduction, dtype in (("MIN", torch.float32), ("MAX", torch.bfloat16), ("SUM", torch.float16))
    ]
    for wrong in pool.run(with_nans, num_ranks, device, calls):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [3])
def test_in_any_order_with_ranks_out_of_step(pool, num_ranks, device):
    cases = [Case(op, "bfloat16", shape=(701,), config={"algorithm": name}) for op, name in variant_cases.labels()]
    cases += [Case("all_reduce", place="ordinary"), Case("all_gather", place="ordinary"), Case("reduce_scatter")]
    for wrong in pool.run(mixed, num_ranks, device, cases, 500 if device == "cuda" else 40, 7):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [4])
def test_in_a_group(pool, num_ranks, device):
    cases = [Case(op, shape=(5, 3), config={"algorithm": name}) for op, name in variant_cases.labels()]
    for wrong in pool.run(in_a_group, num_ranks, device, [3, 0, 2], cases):
        assert wrong == []


# -- what they serve, and what they cost ------------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "name", "changes", "reason"), [
    ("all_gather", "push", {"config": {"swizzle_size": 2}}, "no use for swizzle_size"),
    ("all_gather", "partitioned", {"config": {"comm_sms": 6}}, "comm_sms=6 is no multiple of 4"),
    ("all_to_all", "partitioned", {"config": {"comm_sms": 7}}, "comm_sms=7 is no multiple of 4"),
    ("all_to_all", "push", {"splits": "uneven", "shape": (40, 3)}, "parts of equal size"),
    ("all_to_all", "persistent", {"layout": "columns"}, "serves layout torch"),
])  # fmt: skip
def test_what_is_refused(op, name, changes, reason):
    algorithm = ALGORITHMS[op, name]
    assert algorithm.supports(request(Case(op), 4))
    assert reason in algorithm.supports(request(Case(op, **changes), 4)).reason


MOVES = ("all_gather", "all_to_all")


@pytest.fixture
def chosen(tmp_path):
    """Which algorithm a model chooses, where nothing was measured or probed."""
    chooser = Chooser(collectives(), Tables(tmp_path, [], "a device"), ())

    def choose(op, target, size, nbytes, place="heap"):
        asked = request(Case(op, place=place), size, nbytes=nbytes, target=DeviceTarget(target))
        return chooser.choose(asked, None)[0].name

    return choose


@table("size", [2, 8])
@table("nbytes", [1 << 10, 1 << 30])
@table("target", [DeviceType.CPU, DeviceType.HIP])
def test_what_the_models_choose_among_portable_algorithms(chosen, target, size, nbytes):
    here = target, size, nbytes
    assert chosen("all_reduce", *here) in ("one_shot", "two_shot")
    assert chosen("reduce_scatter", *here) == "pull"
    on_cpu = target is DeviceType.CPU
    for op in MOVES:
        assert chosen(op, *here) == ("pull" if on_cpu else "persistent")
        # off the heap, pulling stages what a member gives, and pushing what it gets: of all_to_all that is as much
        assert chosen(op, *here, "ordinary") == ("pull" if on_cpu or op == "all_gather" else "persistent")
        # wherever the input lies, nothing has to be staged
        assert chosen(op, *here, "output only") == ("push" if on_cpu else "persistent")


@pytest.mark.parametrize("size", [2, 8])
def test_what_the_models_choose_on_nvidia(chosen, size):
    """Packets for small messages and for sums, plain stores over all links at the same time for large moves."""
    for place in ("heap", "ordinary"):
        for op in MOVES:
            assert chosen(op, DeviceType.CUDA, size, 1 << 10, place) == "ll_mailbox"
        for op in ("reduce_scatter", "reduce"):
            assert chosen(op, DeviceType.CUDA, size, 1 << 10, place) == "sentinel_mailbox"
        assert chosen("all_reduce", DeviceType.CUDA, size, 1 << 10, place) == "sentinel_one_shot"
    large = chosen("all_reduce", DeviceType.CUDA, size, 1 << 30)
    assert large == ("sentinel_one_shot" if size == 2 else "sentinel_two_shot")  # two ranks send the same bytes
    for op in MOVES:
        assert chosen(op, DeviceType.CUDA, size, 1 << 30) == "persistent"


@table("target", [DeviceType.CPU, DeviceType.CUDA])
@table(("op", "name"), ALGORITHMS)
def test_cost_grows_with_bytes_and_with_members(op, name, target):
    sizes = [1 << 10, 1 << 20, 1 << 30]
    costs = [
        [
            ALGORITHMS[op, name].cost(request(Case(op), n, nbytes=nbytes, target=DeviceTarget(target)))
            for nbytes in sizes
        ]
        for n in (2, 8)
    ]
    for row in costs:
        assert 0 < row[0] < row[1] < row[2]
    assert all(few < many for few, many in zip(*costs, strict=True))


@table("size", [2, 3, 8])
@table(("op", "name"), ALGORITHMS)
def test_what_is_worth_measuring_is_served(op, name, size):
    asked = request(Case(op), size, nbytes=1 << 24, target=DeviceTarget(DeviceType.CUDA))
    offered = ALGORITHMS[op, name].tunings(asked)
    assert offered[0] == {}
    assert len(offered) > 1
    for config in offered:
        options = {**asked.options, "config": config}
        assert ALGORITHMS[op, name].supports(replace(asked, options=options))


# -- the copy engines -------------------------------------------------------------------------------------------------
def stand_in(monkeypatch, module, name, function, codes):
    """A driver that remembers what it is asked for."""
    asked = []

    def copy(*arguments):
        asked.append(arguments)
        return (codes["answer"],)

    copy.__name__ = function
    package, driver = ModuleType(module.partition(".")[0]), ModuleType(f"{module}.{name}")
    setattr(driver, function, copy)
    for holder, success in codes["success"].items():
        setattr(driver, holder, SimpleNamespace(**success))
    parent = ModuleType(module)
    setattr(parent, name, driver)
    for key, value in ((package.__name__, package), (module, parent), (f"{module}.{name}", driver)):
        monkeypatch.setitem(sys.modules, key, value)
    return asked


class Code(int):
    name = "INVALID_VALUE"


@pytest.mark.parametrize(
    ("device", "module", "name", "function", "success"),
    [
        (DeviceType.CUDA, "cuda.bindings", "driver", "cuMemcpyDtoDAsync", {"CUresult": {"CUDA_SUCCESS": Code(0)}}),
        (DeviceType.HIP, "hip", "hip", "hipMemcpyDtoDAsync", {"hipError_t": {"hipSuccess": Code(0)}}),
    ],
)
def test_copies_of_a_gpu(monkeypatch, device, module, name, function, success):
    codes = {"answer": Code(0), "success": success}
    asked = stand_in(monkeypatch, module, name, function, codes)
    copy = copies.copier(device)
    copy(1 << 40, 1 << 41, 4096, 7)
    assert asked == [(1 << 40, 1 << 41, 4096, 7)]
    codes["answer"] = Code(1)
    with pytest.raises(DriverError, match=f"{function}.*INVALID_VALUE"):
        copy(1 << 40, 1 << 41, 4096, 7)


@pytest.mark.parametrize(
    ("device", "module", "name", "function", "success"),
    [
        (DeviceType.CUDA, "cuda.bindings", "driver", "cuStreamWriteValue32", {"CUresult": {"CUDA_SUCCESS": Code(0)}}),
        (DeviceType.HIP, "hip", "hip", "hipStreamWriteValue32", {"hipError_t": {"hipSuccess": Code(0)}}),
    ],
)
def test_words_behind_copies(monkeypatch, device, module, name, function, success):
    codes = {"answer": Code(0), "success": success}
    asked = stand_in(monkeypatch, module, name, function, codes)
    write = copies.flag_writer(device)
    write(1 << 40, 3, 0, 7)
    assert asked == [(7, 1 << 40, 3, 0)]  # the stream stands first there
    codes["answer"] = Code(1)
    with pytest.raises(DriverError, match=f"{function}.*INVALID_VALUE"):
        write(1 << 40, 3, 0, 7)


def test_words_on_the_host():
    words = torch.zeros(3, dtype=torch.int32)
    copies.flag_writer(DeviceType.CPU)(words.data_ptr() + 4, 5, 0, 0)
    assert words.tolist() == [0, 5, 0]


def test_copies_without_a_driver(monkeypatch):
    monkeypatch.setattr(copies.importlib.util, "find_spec", lambda name: None)
    assert copies.copies_obstacle(DeviceType.CPU) == ""
    assert "cuda-bindings" in copies.copies_obstacle(DeviceType.CUDA)
    assert "hip-python, which is not installed" in copies.copies_obstacle(DeviceType.HIP)
