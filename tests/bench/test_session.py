"""Runs on ranks, and benchmarks as programs."""

import dataclasses
import json
import pathlib
import runpy
import sys
import types

import pytest
import torch

from iris_core import bench
from iris_core.bench import registry
from iris_core.bench.runner import DEVICE_TIMEOUT_S
from iris_core.errors import PeerLostError

HERE = pathlib.Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
RMA = BENCHMARKS / "rma.py"
OPTIONS = bench.RunOptions(
    num_ranks=2, device="cpu", heap_size="16MiB", rounds=3, batch_ms=0.2, quick=True,
    axes={"algorithm": ["one_shot"], "op": ["all_gather_matmul"]},
)  # fmt: skip


@pytest.fixture
def on_ranks(monkeypatch):
    """Run benchmarks of rank_benchmarks.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench.load(str(HERE / "rank_benchmarks.py"))
    return lambda pattern="", options=OPTIONS: bench.run(bench.registered(pattern=pattern), options, name="ranks")


@pytest.fixture(scope="module")
def report(fork_ranks):
    """Of one run with all benchmarks of several files: starting ranks takes longer than what they measure here."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.setattr(registry, "BENCHMARKS", {})
        patch.setattr(sys, "path", list(sys.path))
        for path in (HERE / "rank_benchmarks.py", HERE / "rank_signals.py", RMA):
            bench.load(path)
        for name in ("ccl_launch", "ops_launch", "torch_backend"):
            bench.load(BENCHMARKS / f"{name}.py")
        return bench.run([*bench.registered(), *bench.registered(pattern="resets")], OPTIONS, name="ranks")


def of_file(report, name):
    """The results of one file's benchmarks."""
    return [each for each in report.results if each.benchmark.startswith(f"{name}.")]


def test_two_ranks(report):
    assert report.run["num_ranks"] == 2
    assert (report.run["allocator"], report.run["device"]) == ("host", "cpu")
    assert report.run["device_timeout_s"] == DEVICE_TIMEOUT_S
    right, wrong, alone, *frees, _ = of_file(report, "rank_benchmarks")
    assert right.params == {"nbytes": 8}
    assert right.local_us == (2000, 4000)
    assert (right.time_us, right.min_us, right.skew_pct) == (4000, 2000, 50)
    assert right.verified
    assert right.gb_per_s == pytest.approx(8 / right.time_us / 1e3, rel=1e-4)
    assert wrong.error == "rank 1: the data is wrong"
    assert wrong.time_us is None
    assert alone.local_us[0] is None
    assert alone.skew_pct is None
    assert alone.ratio == 1
    assert [each.params for each in frees] == [{"point": 0}, {"point": 1}]
    assert all(each.verified for each in frees)
    assert bench.finish(report) == 1


def test_a_preamble_waits_for_the_last_call_of_all_ranks(report):
    (result,) = (each for each in report.results if each.benchmark == "rank_benchmarks.resets")
    assert (result.error, result.verified) == ("", True)


def test_a_rank_that_hangs_ends_the_run(on_ranks, capfd):
    options = bench.RunOptions(device="cpu", heap_size="1MiB", limit_s=20.0)
    with pytest.raises(PeerLostError, match="rank 0"):
        on_ranks("hangs", options)
    assert "rank_benchmarks.py" in capfd.readouterr().err  # where it was


def test_rma_on_cpu_ranks(report):
    results = of_file(report, "rma")
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


@pytest.mark.parametrize("name", ["ccl_launch", "ops_launch"])
def test_a_repeated_call_is_measured_up_to_the_launcher(report, name):
    """What launches cost the CPU: on CPU ranks, Python's part."""
    (result,) = (each for each in of_file(report, name) if each.provider == "iris, to the launcher")
    assert result.time_us > 0


def test_the_backend_of_torch_beside_gloo(report):
    results = of_file(report, "torch_backend")
    skipped = {each.provider: each.skipped for each in results if not each.verified}
    assert skipped == {"nccl async-tp": "it needs GPUs"}
    assert [(each.benchmark.partition(".")[2], each.provider) for each in results if each.verified] == [
        *[("all_reduce", provider) for _ in ("ordinary", "heap") for provider in ("iris", "ctx.ccl", "gloo")],
        *[("tensor_parallel", provider) for provider in ("iris", "gloo")],
        *[("fsdp2", provider) for provider in ("gloo", "gloo heap", "iris", "iris heap")],
    ]


def test_collectives_between_two_nodes(fork_ranks, monkeypatch):
    fork_ranks(monkeypatch)
    monkeypatch.setattr(registry, "BENCHMARKS", {})
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench.load(BENCHMARKS / "nodes.py")
    how = {"num_ranks": 4, "context": "nodes:two_nodes", "axes": {"op": ["all_to_all"], "nbytes": [8192]}}
    found = bench.run(bench.registered(pattern="between"), dataclasses.replace(OPTIONS, **how), name="nodes").results
    assert [(each.provider, each.verified) for each in found] == [
        (provider, True) for provider in ("iris", "iris hierarchical", "iris gloo", "gloo")
    ]
    how["axes"] = {"op": ["all_reduce", "all_gather"], "nbytes": [8192]}
    found = bench.run(bench.registered(pattern="chunks"), dataclasses.replace(OPTIONS, **how), name="nodes").results
    assert [(each.provider, each.verified, each.baseline) for each in found] == 2 * [
        (provider, True, "1 chunk") for provider in ("1 chunk", "2 chunks", "4 chunks", "8 chunks")
    ]


def test_wrong_sums_and_gradients_are_noticed(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    module = runpy.run_path(str(BENCHMARKS / "torch_backend.py"), run_name="torch_backend")
    sample = module["Sample"].of_bytes("all_reduce", torch.float32, 0, 1, 1024)
    x, integers = sample.tensors(types.SimpleNamespace(empty=torch.empty, device="cpu"))
    calls = []
    run = module["InPlace"](sample, x, integers, lambda: calls.append(1))
    run.prepare()
    assert run.is_right()  # a rank alone: its input is the sum
    assert calls
    for index, wrong in ((0, 1.0), (1, 0.0), (2, float("inf"))):
        run.prepare()
        x[index] = wrong
        assert not run.is_right()
    task = module["Task"](1, 32, 2, 4, torch.device("cpu"))
    wanted, steps = task.gradients(), sys.modules["training_steps"]
    step = steps.TrainingStep(task.net(), *task.data())
    step.check(wanted)
    part = {name: each * (1 - 0.125) for name, each in wanted.items()}  # as if one rank of eight were missing
    with pytest.raises(AssertionError, match=r"0\.norm\.weight"):
        step.check(part)
    monkeypatch.setattr(step, "_optimizer", torch.optim.SGD(task.net().parameters()))
    with pytest.raises(AssertionError, match="no parameter has changed"):
        step.check(wanted)


def test_signals_by_copies_come_in_turn(report):
    """The protocol of the copy engine's latency, whose copies need a GPU."""
    (result,) = of_file(report, "rank_signals")
    assert (result.error, result.verified) == ("", True)
    assert [us is not None for us in result.local_us] == [True, True]


def test_rma_without_gpus_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [str(RMA)])
    monkeypatch.setattr(sys, "path", [str(RMA.parent), *sys.path])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(RMA), run_name="__main__")
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert "torch sees 0" in said
    assert "--device cpu" in said


def test_a_file_of_benchmarks_is_a_program(tmp_path, capsys):
    @bench.register(ranks=False)
    def local(state, ctx):
        """Runs here."""
        assert ctx is None
        state.set_timer("reported")
        state.provider("a", lambda: 2e-6, check=lambda: True)
        state.target("a", "time_us", at_most=1)

    out = tmp_path / "local.json"
    arguments = ["--rounds", "2", "--out", str(out)]
    suite = bench.suite("local", "About.", source=__file__)
    assert suite.main(arguments) == 0
    captured = capsys.readouterr()
    assert "measuring test_session.local: Runs here." in captured.err
    assert "time_us <= 1: MISSED" in captured.out
    (result,) = json.loads(out.read_text())["results"]
    assert result["rounds_us"] == [2, 2]
    assert result["num_ranks"] == 0
    assert suite.main(["--enforce"]) == 1
    assert suite.main(["--only", "global"]) == 2
    assert "no benchmark matches 'global'" in capsys.readouterr().err
