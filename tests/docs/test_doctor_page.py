"""docs/doctor.md knows every line and every key of the report."""

import inspect
import pathlib
import re

import pytest

from iris_core.cli import doctor
from iris_core.diagnosis import PairCheck

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
SOURCES = [
    ROOT / "iris_core" / "src" / "iris_core" / "cli" / "doctor.py",
    ROOT / "iris_allocators" / "src" / "iris_allocators" / "_plugin.py",
    ROOT / "iris_triton" / "src" / "iris_triton" / "_plugin.py",
]
SUBJECTS = sorted(
    {name for path in SOURCES for name in re.findall(r'(?:Finding|diagnose)\(\s*"([^"{}]+)"', path.read_text())}
)


def listed():
    """What the table of lines has in its first column."""
    table = PAGE.partition("## The lines")[2].partition("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return {name.strip() for cell in cells for name in cell.split(",")}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_line_is_on_the_page(subject):
    rare = {"plugins", "self-test"}  # in the place of lines that could not be made
    assert subject in listed() | rare


def test_there_are_lines():
    assert len(SUBJECTS) > 14


def test_the_keys_of_a_report_are_on_the_page(monkeypatch):
    monkeypatch.setattr(doctor, "apart", lambda *args: ([], "failed"))
    document = doctor.examine(self_test=False)
    test = doctor.SelfTest("a", "b", "cpu", 1, checks=[PairCheck("write", 0, 0)]).to_json()
    keys = {*document, *document["findings"][0], *test, *test["checks"][0]}
    keys |= set(re.findall(r'"([a-z_]+)"[]:]', inspect.getsource(doctor.survey_gpus)))
    assert keys >= {"arch", "access", "cuda_of_torch", "gpus"}
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGE] == []
