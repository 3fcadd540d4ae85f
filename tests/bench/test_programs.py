"""Files of benchmarks as programs: what they run on, what they print and write, and what is refused."""

import argparse
import csv
import json
import pathlib
import re
import runpy
import sys

import pytest
import torch
from tables import raises

from iris_core import bench
from iris_core.bench.suites import Suite, add_options
from iris_core.errors import BenchmarkError

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
FILE = """
from iris_core import bench

@bench.register(ranks=False)
@bench.axis("n", [1, 2])
def quick(state, ctx):
    "Reports a time."
    assert ctx is None
    state.set_timer("reported")
    state.set_bytes(1000 * state["n"])
    state.add_counter("half", state["n"] / 2)
    state.provider("a", lambda: 1e-6 * state["n"], check=lambda: True)
    state.target("a", "time_us", at_most=1)

@bench.register(by_default=False)
@bench.axis("num_ranks", [2, 1])
def own(state, ctx):
    "With other numbers of ranks than the rest."
    state.provider("d", lambda: None, check=lambda: state["num_ranks"] == ctx.num_ranks)

@bench.register
def ranks(state, ctx):
    "On ranks."
    import os
    assert os.listdir(os.environ["IRIS_CACHE_DIR"]) == []
    state.add_counter("variable", float(os.environ["IRIS_TEST_SUITE"]))
    state.provider("c", lambda: ctx.barrier(), check=lambda: True)

SUITE = bench.Suite(about=__doc__, source=__file__, device="cpu", min_ranks=2, heap_size="1MiB",
                    environ={"IRIS_TEST_SUITE": "7"}, results="kept-{ranks}.json")
"""


@pytest.fixture
def program(tmp_path, request, monkeypatch):
    """The program that a file of benchmarks is, whose names nobody else has."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"suite_of_{abs(hash(request.node.name))}.py"
    path.write_text(FILE)
    bench.load(path)
    return sys.modules[f"iris_bench_{path.stem}"].SUITE.main


def runs(monkeypatch, gpus, suite, *arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parser = argparse.ArgumentParser()
    add_options(parser)
    return suite.options(parser.parse_args(arguments))


def test_ranks_on_gpus_and_on_the_cpu(monkeypatch):
    options = {"device": "cuda", "allocator": "torch", "heap_size": "2GiB"}
    suite = Suite(about="", source="s.py", min_ranks=2, max_ranks=4, **options)
    found = runs(monkeypatch, 8, suite)
    assert (found.num_ranks, found.allocator, found.heap_size, found.device) == (4, "torch", "2GiB", "cuda")
    found = runs(monkeypatch, 8, suite, "--ranks", "2,8")
    assert (found.num_ranks, found.axes) == (2, {"num_ranks": [2, 8]})
    for wrong in ("1", "9", "2,9", "two"):
        with pytest.raises(BenchmarkError):
            runs(monkeypatch, 8, suite, "--ranks", wrong)
    with raises(BenchmarkError, "bench.gpus"):
        runs(monkeypatch, 1, suite)
    on_cpu = {"heap_size": "1MiB", "environ": {"B": "2"}}
    how = {"device": "cuda", "allocator": "torch", "environ": {"A": "1"}, "min_ranks": 3, "on_cpu": on_cpu}
    suite = Suite(about="", source="s.py", **how)
    options = runs(monkeypatch, 0, suite, "--device", "cpu", "--axis", "n=3", "--backend", "gluon")
    assert (options.num_ranks, options.allocator, options.heap_size) == (3, "auto", "1MiB")
    assert (options.environ, options.axes, options.backend) == ({"B": "2"}, {"n": [3]}, "gluon")


def test_a_part(program, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert (program(["--out", str(tmp_path)]), "quick" in capsys.readouterr().err) == (2, False)  # nothing is measured
    assert program(["--only", "quick", "--rounds", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "quick: Reports a time." in printed.err
    assert "time_us <= 1: MISSED" in printed.out
    rows = list(csv.DictReader(out.open()))
    assert [(row["n"], row["time_us"], row["half"]) for row in rows] == [("1", "1.0", "0.5"), ("2", "2.0", "1.0")]
    assert rows[1]["bytes_per_operation"] == "2000"
    assert program(["--only", "quick", "--axis", "n=5", "--rounds", "2", "--format", "json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["params"], result["rounds_us"], result["num_ranks"]) == ({"n": 5}, [5, 5], 0)
    assert program(["--only", "quick", "--enforce"]) == 1
    capsys.readouterr()
    for wrong, text in (
        (["--only", "quick", "--axis", "m=5"], "axis 'm'"), (["--only", "no"], "matches 'no'"),
        (["--backend", "no"], "no backend named 'no'"), (["--heap-size", "1"], "heap_size='1' "),
    ):  # fmt: skip
        assert program(wrong) == 2
        (line,) = capsys.readouterr().err.splitlines()  # before a rank is started
        assert text in line
    assert not list(tmp_path.glob("kept*"))  # parts are no result to be kept


def test_each_number_of_ranks(program, tmp_path, monkeypatch, forked_ranks):
    monkeypatch.delenv("IRIS_TEST_SUITE", raising=False)
    assert program(["--ranks", "1,2", "--rounds", "1"]) == 0
    report = bench.Report.read(tmp_path / "kept-1-2.json")
    assert report.run["num_ranks"] == [1, 2]
    assert [(each.provider, each.num_ranks) for each in report.results] == [("a", 0), ("a", 0), ("c", 1), ("c", 2)]
    assert all(each.counters["variable"] == 7 for each in report.results if each.provider == "c")
    assert program(["--only", "own|ranks", "--rounds", "1", "--out", str(tmp_path / "own.json")]) == 0
    report = bench.Report.read(tmp_path / "own.json")
    assert report.run["num_ranks"] == [2, 1]
    found = [(each.provider, each.num_ranks, each.verified) for each in report.results]
    assert found == [("d", 2, True), ("d", 1, True), ("c", 2, True)]
    assert program(["--only", "ranks", "--ranks", "two"]) == 2


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, forked_ranks):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script, out = tmp_path / "copying.py", tmp_path / "copying.json"
    script.write_text(code)
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--enforce", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    results = bench.Report.read(out).results
    assert [(each.params["nbytes"], each.verified) for each in results] == [(n, True) for n in (4096, 4096, 8192, 8192)]
