"""What the command `iris` says of damaged files and installations: one line that names the file, and a status."""

import json
import pathlib
from dataclasses import replace

import pytest
from dist_info import provider_source
from tables import table

from iris_core.cli import main, tune
from iris_core.cli.doctor import examine_packages
from iris_core.diagnosis import Verdict
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.tuning.tuner import Tuned
from iris_core.world import launch

pytestmark = pytest.mark.usefixtures("fresh_registry")


def refused(capsys, *arguments):
    """The line of a command that ends with status 1."""
    assert main(list(map(str, arguments))) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("iris: ")
    return line


@table("field", ["level: int", "level: int = 'high'", "level: int = Field(default_factory=lambda: 1 / 0)"])
def test_config_lists_the_others(capsys, site, field):
    source = provider_source("bad").replace('"""No settings."""', field)
    site.provider("bad", source="from pydantic import Field\n" + source)
    assert main(["config"]) == 1
    captured = capsys.readouterr()
    assert "IRIS_HOST__HUGE_PAGES" in captured.out
    (line,) = captured.err.splitlines()
    assert "IRIS_BAD__" in line


def test_doctor_names_a_damaged_distribution(site, monkeypatch):
    (site.install("iris-bad") / "METADATA").write_bytes(b"\xff")
    monkeypatch.syspath_prepend(site.folder)
    finding = examine_packages()
    assert finding.verdict is Verdict.BROKEN
    assert "iris_bad-1.0.dist-info" in finding.text
    assert "iris-core" in finding.text


def test_an_error_of_the_system_is_one_line(capsys, tmp_path, monkeypatch):
    def fail(args):
        (tmp_path / "absent" / "file").write_text("")

    monkeypatch.setattr(tune, "run", fail)
    assert str(tmp_path / "absent" / "file") in refused(capsys, "tune")


# -- iris tune --------------------------------------------------------------------------------------------------------
ENTRY = Entry("all_reduce", "*", (4096,), "fast", 1e-6)
TUNE = ("tune", "--device", "cpu", "--ranks", "2")


@pytest.fixture
def measured(monkeypatch):
    """What was measured, without measuring; the list of how often."""
    calls = []

    def measure(job, ranks, wanted, options, *, environ, torch_distributed):
        calls.append(options)
        return [Tuned("cpu", (ENTRY,), (), ())]

    monkeypatch.setattr(launch, "run", measure)
    return calls


@table("make", [
    lambda path: path.write_text("{}"), lambda path: path.mkdir(), lambda path: path.write_text(""),  # and in a file
    lambda path: write_table(path, "cpu", 4, {}, [ENTRY]), lambda path: write_table(path, "a GPU", 2, {}, [ENTRY]),
])  # fmt: skip
def test_a_table_that_cannot_be_written_is_refused_before_measuring(capsys, tmp_path, measured, make):
    path = tmp_path / "table.json"
    make(path)
    path = path / "table.json" if path.is_file() and not path.read_text() else path
    assert str(tmp_path / "table.json") in refused(capsys, *TUNE, "--out", path)
    assert measured == []


@pytest.mark.parametrize("table", ["damaged", "a model"])
def test_what_was_measured_replaces_another_table_of_the_cache(capsys, tmp_path, measured, monkeypatch, table):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    path = pathlib.Path(tmp_path, "ccl", "cpu-2.json")
    write_table(path, "cpu", 2, {}, [replace(ENTRY, op="broadcast")])
    document = json.loads(path.read_text()) | {"measured": False, "note": "guessed"}
    path.write_text("{}" if table == "damaged" else json.dumps(document))
    assert main(list(TUNE)) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert [entry.algorithm for entry in read_table(path).entries] == ["fast"]
