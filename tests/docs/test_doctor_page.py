"""docs/doctor.md knows every line and every key of the report, and its example is valid."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from iris_core.cli.doctor.selftest import Job, Outcome
from iris_core.cli.doctor.survey import Survey
from iris_core.diagnosis import Finding, PairCheck, Verdict
from iris_core.registry import Registry
from iris_core.types import PluginKind

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
SOURCES = [
    *(ROOT / "iris_core" / "src" / "iris_core" / "cli" / "doctor").glob("*.py"),
    ROOT / "iris_allocators" / "src" / "iris_allocators" / "diagnosis.py",
    ROOT / "iris_triton" / "src" / "iris_triton" / "_plugin.py",
]
SUBJECTS = sorted({name for path in SOURCES for name in re.findall(r'Finding\("([^"{}]+)"', path.read_text())})


def listed():
    """What the table of lines has in its first column."""
    table = PAGE.partition("## The lines")[2].partition("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return {name.strip() for cell in cells for name in cell.split(",")}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_line_is_on_the_page(subject):
    rare = {"survey", "plugins", "self-test"}  # in the place of lines that could not be made
    assert subject in listed() | rare


def test_there_are_lines():
    assert len(SUBJECTS) > 20


def test_the_keys_of_a_real_report_are_on_the_page():
    variables = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    command = [sys.executable, "-m", "iris_core", "doctor", "--json", "--no-self-test"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    document = json.loads(done.stdout)
    keys = {*document, *document["findings"][0], *(key for gpu in document["gpus"] for key in gpu)}
    keys |= {key for pair in document["pairs"] for key in pair}
    test = Outcome(Job("a", "b", "cpu", 1), [PairCheck("write", 0, 0)]).to_json()
    keys |= {*test, *test["checks"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGE] == []
    assert {field.name for field in dataclasses.fields(Survey)} >= {"gpus", "pairs", "versions"}


def test_the_example_is_a_valid_plugin():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space = {}
    exec(compile(code, "doctor.md", "exec"), space)
    assert space["MyPlugin"]().iris_plugin_diagnose([None]) == [
        Finding("my driver", Verdict.OK, "works on 1 devices", {"version": "1.2"})
    ]
    registry = Registry(search_path=[])
    with pytest.raises(Exception, match="does not implement iris_plugin_info"):  # the hook itself is accepted
        registry.register(PluginKind.ALLOCATOR, space["MyPlugin"](), "mine")
    begun = []
    context = type("Context", (), {"num_ranks": 2, "cur_rank": 0})
    checks = list(space["MyBackend"]().self_test(context, lambda *where: begun.append(where)))
    assert checks == [PairCheck("write", 0, 0), PairCheck("write", 0, 1)]
    assert begun == [("write", 0), ("write", 1)]
