"""Runs on ranks."""

import dataclasses
import pathlib
import sys

import pytest

from iris_core import bench
from iris_core.bench import registry
from iris_core.bench.runner import DEVICE_TIMEOUT_S
from iris_core.errors import PeerLostError

HERE = pathlib.Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
OPTIONS = bench.RunOptions(
    num_ranks=2, device="cpu", heap_size="16MiB", rounds=1, batch_ms=0.2, quick=True,
    axes={"algorithm": ["one_shot"], "op": ["all_gather_matmul"], "layers": [1]},
)  # fmt: skip


@pytest.fixture(scope="module")
def of_file(fork_ranks):
    """Results by file, of one run with all benchmarks of several: starting ranks takes longer than measuring here."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.setattr(registry, "BENCHMARKS", {})
        patch.setattr(sys, "path", list(sys.path))
        bench.load(HERE / "rank_benchmarks.py")
        for name in ("rma", "ccl_launch", "ops_launch", "torch_backend"):
            bench.load(BENCHMARKS / f"{name}.py")
        report = bench.run([*bench.registered(), *bench.registered(pattern="resets")], OPTIONS, name="ranks")
    assert report.run | {"num_ranks": 2, "allocator": "host", "device": "cpu"} == report.run
    assert report.run["device_timeout_s"] == DEVICE_TIMEOUT_S
    assert len(report.errors) == 1
    return lambda name: [each for each in report.results if each.benchmark.startswith(f"{name}.")]


def test_two_ranks(of_file):
    right, wrong, alone, *frees, turns, resets = of_file("rank_benchmarks")
    assert right.params == {"nbytes": 8}
    assert right.local_us == (2000, 4000)
    assert (right.time_us, right.min_us, right.skew_pct) == (4000, 2000, 50)
    assert right.verified
    assert right.gb_per_s == pytest.approx(8 / right.time_us / 1e3, rel=1e-4)
    assert (wrong.error, wrong.time_us) == ("rank 1: the data is wrong", None)
    assert (alone.local_us[0], alone.skew_pct, alone.ratio) == (None, None, 1)
    assert [each.params for each in frees] == [{"point": 0}, {"point": 1}]
    assert all(each.verified for each in (*frees, turns, resets))
    assert None not in turns.local_us  # the protocol of the copy engine's latency, whose copies need a GPU


def test_a_rank_that_hangs_ends_the_run(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench.load(HERE / "rank_benchmarks.py")
    options = bench.RunOptions(device="cpu", heap_size="1MiB", limit_s=5.0)
    with pytest.raises(PeerLostError, match="rank 0"):
        bench.run(bench.registered(pattern="hangs"), options)
    assert "rank_benchmarks.py" in capfd.readouterr().err  # where it was


def test_no_point_begins_near_the_limit(forked_ranks, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench.load(HERE / "rank_benchmarks.py")
    options = dataclasses.replace(OPTIONS, axes={}, limit_s=20.0)
    found = bench.run(bench.registered(pattern="late"), options).results
    said = [(each.params["point"], each.verified, each.skipped) for each in found]
    assert said == [(0, True, ""), (1, False, "too late for the limit of 20 s")]


def test_rma_on_cpu_ranks(of_file):
    results = of_file("rma")
    names = ("pair", "pairs", "ring", "all_to_all", "latency", "latencies", "engine_calls", "barrier")
    assert {each.benchmark for each in results} == {f"rma.{name}" for name in names}
    assert all(each.verified or each.skipped for each in results)
    skipped = {each.provider: each.skipped for each in results if each.skipped and each.provider}
    assert skipped == dict.fromkeys(("engine push", "engine pull", "engine"), "the copy engine needs a GPU")
    measured = [each for each in results if each.time_us]
    assert {each.provider for each in measured} == {"push", "pull", "signal", "barrier"}
    for name in ("pairs", "ring", "all_to_all"):
        assert {each.params["nbytes"] for each in measured if each.benchmark == f"rma.{name}"} == {4096, 16384}
    for name in ("pairs", "latencies"):
        each_way = {(r.params["rank"], r.params["peer"]) for r in measured if r.benchmark == f"rma.{name}"}
        assert each_way == {(0, 1), (1, 0)}


def test_other_benchmarks_on_cpu_ranks(of_file):
    for name in ("ccl_launch", "ops_launch"):  # what launches cost the CPU: on CPU ranks, Python's part
        (result,) = (each for each in of_file(name) if each.provider == "iris, to the launcher")
        assert result.time_us > 0
    results = of_file("torch_backend")
    skipped = {each.provider: each.skipped for each in results if not each.verified}
    assert skipped == {"nccl async-tp": "it needs GPUs"}
    assert [(each.benchmark.partition(".")[2], each.provider) for each in results if each.verified] == [
        *[("all_reduce", provider) for _ in ("ordinary", "heap") for provider in ("iris", "ctx.ccl", "gloo")],
        *[("tensor_parallel", provider) for provider in ("iris", "gloo")],
        *[("fsdp2", provider) for provider in ("gloo", "gloo heap", "iris", "iris heap")],
        *[("ddp", provider) for provider in ("gloo", "iris")],
    ]
