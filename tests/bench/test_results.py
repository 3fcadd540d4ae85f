"""Results, targets, reports: JSON there and back, the console, the exit status."""

import contextlib
import io
import json

import pytest

from iris_core import bench
from iris_core.bench.results import Report, Result, Target
from iris_core.bench.table import show

MACHINE = {
    "cpu": "a CPU", "usable_cores": 2, "load_average_1min": 3.5, "gpu": None, "gpus": 0, "driver": None,
    "versions": {"torch": "2", "triton": "3"}, "date": "2026-01-01",
}  # fmt: skip
MEASURED = Result(
    "rma.pair", "push", {"nbytes": 8}, 2, "graph", 3.5, 3.0, 14.3, (3.5, 3.0, None), (3.4, 3.5, 3.6), 20, True,
    1000, 285.7, 142.8, 2.0, 0.5, "engine", 0.93, "engine", 0.93, {"n": 1.0}, (Target("ratio", 0.9, True, True),),
)  # fmt: skip
WRONG = Result("rma.pair", "pull", {"nbytes": 8}, 2, "graph", error="rank 1: the data is wrong")
MISSED = Result("rma.pair", "engine", {"nbytes": 8}, 2, time_us=9.0, targets=(Target("time_us", 1.0, False, False),))
SKIPPED = Result("rma.pair", "", {"nbytes": 16}, 2, skipped="too large")


def report(*results):
    return Report("rma", MACHINE, {"num_ranks": 2, "seconds": 1.5}, results)


@pytest.mark.parametrize("whole", [report(MEASURED, WRONG, MISSED, SKIPPED), report()], ids=["results", "none"])
def test_json_there_and_back(tmp_path, whole):
    assert Report.read(whole.write(tmp_path / "r.json")) == whole


def test_json_says_what_was_measured_and_where(tmp_path):
    path = report(MEASURED, SKIPPED).write(tmp_path / "new" / "rma.json")
    document = json.loads(path.read_text())
    assert list(document) == ["schema", "name", "machine", "run", "results"]
    assert document["schema"] == 1
    assert document["machine"] == MACHINE
    measured, skipped = document["results"]
    assert measured["time_us"] == 3.5
    assert measured["targets"] == [{"metric": "ratio", "bound": 0.9, "at_least": True, "reached": True}]
    assert "time_us" not in skipped
    assert skipped["skipped"] == "too large"
    assert sum("rma.pair" in line for line in path.read_text().splitlines()) == 2  # a line for each result


@pytest.mark.parametrize(("target", "reached"), [
    (Target("time_us", 3.5, False), True), (Target("time_us", 3.4, False), False),
    (Target("gb_per_s", 285, True), True), (Target("gb_per_s", 286, True), False),
])  # fmt: skip
def test_targets_are_judged(target, reached):
    assert target.judged(MEASURED).reached is reached
    assert target.judged(WRONG).reached is None


def test_what_is_wrong_and_what_is_missed():
    whole = report(MEASURED, WRONG, MISSED, SKIPPED)
    assert whole.errors == [WRONG]
    assert whole.missed == [MISSED]


@pytest.mark.parametrize(("results", "enforce", "status"), [
    ((MEASURED, SKIPPED), True, 0), ((MEASURED, WRONG), False, 1), ((MEASURED, MISSED), False, 0),
    ((MEASURED, MISSED), True, 1),
])  # fmt: skip
def test_exit_status(results, enforce, status, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert bench.finish(report(*results), out=str(out), enforce=enforce) == status
    assert Report.read(out) == report(*results)
    assert str(out) in capsys.readouterr().out


def printed(whole):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show(whole)
    return text.getvalue()


def test_the_list_shows_numbers_verdicts_and_reasons():
    text = printed(report(MEASURED, WRONG, MISSED, SKIPPED))
    for part in (
        "285.7",
        "0.93 x engine",
        "ratio >= 0.9: reached",
        "time_us <= 1: MISSED",
        "WRONG: rank 1",
        "too large",
    ):
        assert part in text
    assert "4 results in 1.5 s; 1 wrong, 1 with a missed target" in text
    assert "the machine was busy" in text
    (wrong,) = [line for line in text.splitlines() if "WRONG" in line]
    assert "285.7" not in wrong


def test_columns_without_content_are_left_out():
    text = printed(report(Result("host.imports", "iris", {}, 0, "cpu", time_us=1.0)))
    assert "time us" in text
    assert "GB/s" not in text
    assert "target" not in text.splitlines()[1]
