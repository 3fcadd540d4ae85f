"""The example of docs/benchmarks.md runs, and the page knows every field."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

from iris_core.bench import Report, Result
from iris_core.bench.state import TIMERS

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script, out = tmp_path / "copying.py", tmp_path / "copying.json"
    script.write_text(code)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--enforce", "--out", str(out)]
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Report.read(out).results
    assert [each.params["nbytes"] for each in results] == [4096, 4096, 8192, 8192]
    assert all(each.verified for each in results)


def test_every_field_and_timer_is_described():
    for field in dataclasses.fields(Result):
        assert f"`{field.name}`" in PAGE, field.name
    for timer in TIMERS:
        assert f"| `{timer}` |" in PAGE, timer
