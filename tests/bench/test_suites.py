"""Files of benchmarks as programs: what they run on, and what is refused."""

import argparse
import csv
import json
import sys

import pytest
import torch
from tables import table

from iris_core import bench
from iris_core.bench.registry import parse_axis
from iris_core.bench.suites import Suite, add_options
from iris_core.errors import BenchmarkError

FILE = """
from iris_core import bench

@bench.register(ranks=False)
@bench.axis("n", [1, 2])
def quick(state, ctx):
    "Reports a time."
    state.set_timer("reported")
    state.set_bytes(1000 * state["n"])
    state.add_counter("half", state["n"] / 2)
    state.provider("a", lambda: 1e-6 * state["n"], check=lambda: True)

@bench.register(ranks=False, by_default=False)
def extra(state, ctx):
    "By name only."
    state.set_timer("reported")
    state.provider("b", lambda: 1e-6, check=lambda: True)

@bench.register
def ranks(state, ctx):
    "On ranks."
    import os
    state.add_counter("variable", float(os.environ["IRIS_TEST_SUITE"]))
    state.provider("c", lambda: ctx.barrier(), check=lambda: True)

SUITE = bench.suite("{name}", __doc__, source=__file__, device="cpu", min_ranks=2, heap_size="1MiB",
                    environ={{"IRIS_TEST_SUITE": "7"}}, results={results!r})
"""


@pytest.fixture
def program(tmp_path, request, monkeypatch):
    """The program that a file of benchmarks is, whose names nobody else has."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"suite_of_{abs(hash(request.node.name))}.py"
    path.write_text(FILE.format(name="files", results=str(tmp_path / "kept-{ranks}.json")))
    bench.load(path)
    return sys.modules[f"iris_bench_{path.stem}"].SUITE.main


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def gpus(monkeypatch, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(
    ("text", "values"),
    [("n=1,2.5,name", [1, 2.5, "name"]), ("n=pow2:4:16", [4, 8, 16]), ("n=lin:1:9:4", [1, 5, 9]), ("n=7", [7])],
)
def test_axes(text, values):
    assert parse_axis(text) == ("n", values)


@table("text", ["n", "n=", "=1", "two words=1", "n=pow2:4", "n=lin:1:2", "n=pow2:a:b", "n=pow2:3:4"])
def test_what_is_no_axis(text):
    with pytest.raises(BenchmarkError):
        parse_axis(text)


def test_ranks_on_gpus(monkeypatch):
    options = {"device": "cuda", "allocator": "torch", "heap_size": "2GiB"}
    suite = Suite(name="s", about="", source="s.py", min_ranks=2, max_ranks=4, **options)
    gpus(monkeypatch, 8)
    (found,) = suite.runs(parsed())
    assert (found.num_ranks, found.allocator, found.heap_size, found.device) == (4, "torch", "2GiB", "cuda")
    assert [each.num_ranks for each in suite.runs(parsed("--ranks", "2,8"))] == [2, 8]
    for wrong in ("1", "9", "2,9", "two"):
        with pytest.raises(BenchmarkError):
            suite.runs(parsed("--ranks", wrong))
    gpus(monkeypatch, 1)
    with pytest.raises(
        BenchmarkError, match=r"2 ranks need as many GPUs, and 2 at least; torch sees 1 here.*--device cpu"
    ):
        suite.runs(parsed())


def test_ranks_on_the_cpu(monkeypatch):
    gpus(monkeypatch, 0)
    suite = Suite(
        name="s", about="", source="s.py", device="cuda", allocator="torch", environ={"A": "1"}, min_ranks=3,
        on_cpu={"heap_size": "1MiB", "environ": {"B": "2"}},
    )  # fmt: skip
    (options,) = suite.runs(parsed("--device", "cpu", "--axis", "n=3", "--backend", "gluon"))
    assert (options.num_ranks, options.allocator, options.heap_size) == (3, "auto", "1MiB")
    assert (options.environ, options.axes, options.backend) == ({"B": "2"}, {"n": [3]}, "gluon")


def test_a_part(program, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert program(["--only", "quick", "--rounds", "1", "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [(row["n"], row["time_us"], row["half"]) for row in rows] == [("1", "1.0", "0.5"), ("2", "2.0", "1.0")]
    assert rows[1]["bytes_per_operation"] == "2000"
    capsys.readouterr()
    assert program(["--only", "quick", "--axis", "n=5", "--format", "json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["params"] == {"n": 5}
    assert program(["--only", "quick", "--axis", "m=5"]) == 2
    assert "no chosen benchmark has an axis 'm'" in capsys.readouterr().err
    assert not list(tmp_path.glob("kept*"))  # parts are no result to be kept


def test_each_number_of_ranks(program, tmp_path, monkeypatch, capsys, forked_ranks):
    monkeypatch.delenv("IRIS_TEST_SUITE", raising=False)
    assert program(["--ranks", "1,2", "--rounds", "1"]) == 0
    capsys.readouterr()
    report = bench.Report.read(tmp_path / "kept-1-2.json")
    assert report.run["num_ranks"] == [1, 2]
    assert [(each.provider, each.num_ranks) for each in report.results] == [("a", 0), ("a", 0), ("c", 1), ("c", 2)]
    assert all(each.counters["variable"] == 7 for each in report.results if each.provider == "c")
