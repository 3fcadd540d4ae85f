"""Results, targets, reports: JSON there and back, the console, the exit status, comparing; the machine."""

import datetime

import pytest
import torch
from tables import table

from iris_core.bench import finish, results
from iris_core.bench.results import Report, Result, Target, compare, describe
from iris_core.cli import main

MACHINE = {
    "cpu": "a CPU", "usable_cores": 2, "load_average_1min": 3.5, "gpu": None, "gpus": 0, "driver": "1",
    "versions": {"torch": "2", "triton": "3"}, "date": "2026-01-01",
}  # fmt: skip
MEASURED = Result(
    "rma.pair", "push", {"nbytes": 8}, 2, "graph", 3.5, 3.0, 14.3, (3.5, 3.0, None), (3.4, 3.5, 3.6), 20, True,
    1000, 285.7, 142.8, 2.0, 0.5, "engine", 0.93, "engine", 0.93, {"n": 1.0}, (Target("ratio", 0.9, True, True),),
)  # fmt: skip
WRONG = Result("rma.pair", "pull", {"nbytes": 8}, 2, "graph", error="rank 1: the data is wrong")
MISSED = Result("rma.pair", "engine", {"nbytes": 8}, 2, time_us=9.0, targets=(Target("time_us", 1.0, False, False),))
SKIPPED = Result("rma.pair", "", {"nbytes": 16}, 2, skipped="too large")


def report(*results, **about):
    return Report("rma", MACHINE | about, {"num_ranks": 2, "seconds": 1.5}, results)


def result(us=10.0, rounds=(), provider="ours", nbytes=1024, num_ranks=2, **more):
    return Result("b.copy", provider, {"nbytes": nbytes}, num_ranks, time_us=us, rounds_us=rounds or (us,), **more)


@pytest.mark.parametrize(("results", "enforce", "status"), [
    ((MEASURED, SKIPPED), True, 0), ((MEASURED, WRONG), False, 1), ((MEASURED, MISSED), False, 0),
    ((MEASURED, MISSED), True, 1),
])  # fmt: skip
def test_exit_status(results, enforce, status, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert finish(report(*results), out=str(out), enforce=enforce) == status
    assert Report.read(out) == report(*results)
    assert str(out) in capsys.readouterr().out


NEVER = result(None, skipped="no luck")


@table(("old", "new", "verdict"), [
    (result(10), result(10.4), "same"), (result(10), result(11, (10.5, 11, 12)), "slower"),
    (result(10), result(11, (9.9, 11, 12)), "same"),  # it varies by more than that
    (result(10), result(9, (8, 9, 9.5)), "faster"), (result(10), result(9, (8, 9, 10.5)), "same"),
    (result(10), result(None, error="the data is wrong"), "wrong"), (result(10), NEVER, "gone"),
    (NEVER, result(10), "new"), (NEVER, NEVER, "same"),
])  # fmt: skip
def test_verdicts(old, new, verdict):
    (change,) = compare(report(old), report(new), 0.05)
    assert change.verdict == verdict


def test_the_command_compares(tmp_path, capsys):
    files = tmp_path / "old.json", tmp_path / "new.json"
    report(result(provider="a"), result()).write(files[0])
    report(result(20.0, provider="a"), result()).write(files[1])
    arguments = ["bench", "compare", *map(str, files)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("slower", "nbytes=1024", "0.500", "1 slower, 1 same"))
    assert main([*arguments, "--tolerance", "200"]) == 0
    report().write(files[0])
    assert main(["bench", "compare", str(files[0]), str(files[0])]) == 1  # nothing was compared


def test_the_description_is_whole(monkeypatch):
    about = describe()
    assert set(about) == {*MACHINE, "kernel", "switches"}
    assert all((about["cpu"], about["usable_cores"], about["versions"]["torch"], about["versions"]["iris-core"]))
    assert datetime.datetime.fromisoformat(about["date"]).tzinfo is datetime.UTC
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(results, "_found", lambda pattern, path: "580.1.2")
    about = describe()
    assert (about["gpu"], about["gpus"], about["driver"]) == ("NVIDIA H200", 2, "580.1.2")
