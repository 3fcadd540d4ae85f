"""The example of docs/benchmarks.md runs, and the page knows every field."""

import dataclasses
import pathlib
import re
import runpy
import sys

import pytest

from iris_core.bench import Report, Result
from iris_core.bench.timers import TIMERS

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, forked_ranks):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script, out = tmp_path / "copying.py", tmp_path / "copying.json"
    script.write_text(code)
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--enforce", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    results = Report.read(out).results
    assert [each.params["nbytes"] for each in results] == [4096, 4096, 8192, 8192]
    assert all(each.verified for each in results)


def test_every_field_and_timer_is_described():
    for field in dataclasses.fields(Result):
        assert f"`{field.name}`" in PAGE, field.name
    for timer in TIMERS:
        assert f"| `{timer}` |" in PAGE, timer
