"""Results, targets, reports: JSON there and back, the console, the exit status."""

import contextlib
import io
import json

import pytest

from iris_core import bench
from iris_core.bench.results import SCHEMA, Report, Result, Target
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
    assert document["schema"] == SCHEMA
    assert document["machine"] == MACHINE
    measured, skipped = document["results"]
    assert measured["time_us"] == 3.5
    assert measured["targets"] == [{"metric": "ratio", "bound": 0.9, "at_least": True, "reached": True}]
    assert "time_us" not in skipped
    assert skipped["skipped"] == "too large"
    assert sum("rma.pair" in line for line in path.read_text().splitlines()) == 2  # a line for each result


@pytest.mark.parametrize(
    ("target", "reached"),
    [
        (Target.make("time_us", at_most=3.5), True),
        (Target.make("time_us", at_most=3.4), False),
        (Target.make("gb_per_s", at_least=285), True),
        (Target.make("gb_per_s", at_least=286), False),
    ],
)
def test_targets_are_judged(target, reached):
    assert target.judged(MEASURED).reached is reached
    assert target.judged(WRONG).reached is None


def test_what_is_wrong_and_what_is_missed():
    whole = report(MEASURED, WRONG, MISSED, SKIPPED)
    assert whole.errors == [WRONG]
    assert whole.missed == [MISSED]


@pytest.mark.parametrize(
    ("results", "enforce", "status"),
    [
        ((MEASURED, SKIPPED), True, 0),
        ((MEASURED, WRONG), False, 1),
        ((MEASURED, MISSED), False, 0),
        ((MEASURED, MISSED), True, 1),
    ],
)
def test_exit_status(results, enforce, status, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert bench.finish(report(*results), out=str(out), enforce=enforce) == status
    assert Report.read(out) == report(*results)
    assert str(out) in capsys.readouterr().out


def printed(whole, matrices=None):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show(whole, matrices or {})
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


def test_a_matrix_has_a_cell_for_each_pair():
    def pair(rank, peer, **values):
        return Result("rma.pairs", "push", {"rank": rank, "peer": peer}, 2, nbytes=8, **values)

    own = Result("rma.pairs", "", {"rank": 0, "peer": 0}, 2, skipped="no pair")
    text = printed(
        report(own, pair(0, 1, gb_per_s=371.5), pair(1, 0, error="rank 0: wrong")), {"rma.pairs": ("rank", "peer")}
    )
    title, heading, first, second = (line.split() for line in text.splitlines()[:4])
    assert title == ["rma.pairs,", "2", "ranks,", "push,", "GB/s"]
    assert heading == ["rank", "\\", "peer", "0", "1"]
    assert first == ["0", "-", "371.5"]
    assert second == ["1", "WRONG", "-"]
    assert "rank 0: wrong" in text


def test_a_matrix_for_each_value_of_the_other_axes():
    def pair(size, num_ranks=2, **values):
        return Result("rma.pairs", "push", {"nbytes": size, "rank": 0, "peer": 1}, num_ranks, **values)

    text = printed(
        report(pair(8, time_us=2.5), pair(16, 4, time_us=9.0, nbytes=16, gb_per_s=371.5)),
        {"rma.pairs": ("rank", "peer")},
    )
    lines = [" ".join(line.split()) for line in text.splitlines()[:6]]
    assert lines == [
        *("rma.pairs, nbytes 8, 2 ranks, push, us", r"rank \ peer 1", "0 2.5"),
        *("rma.pairs, nbytes 16, 4 ranks, push, GB/s", r"rank \ peer 1", "0 371.5"),
    ]
