"""The published verdicts of RMARaceBench: each race with its two lines, and no report where there is none."""

import importlib.util
import re

import jobs_corpus
import pytest
from rmaracebench import CASES, ranks_of, source_of

from iris_core import Iris
from iris_triton.checker.reports import Report


def _run(path, found):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with jobs_corpus.checking(found), Iris("1MiB", device="cpu") as ctx:
        module.run(ctx)


MARKS = {
    title: pytest.mark.exhaustive if title.startswith("misc") or number % 3 else ()
    for number, title in enumerate(CASES)
}
"""Two of three, and those that differ in the way that a pointer takes, come with --exhaustive."""


@pytest.mark.parametrize("title", [pytest.param(title, marks=marks) for title, marks in MARKS.items()])
def test_the_verdict_is_the_published_one(pool, tmp_path, title):
    path, found = tmp_path / f"{re.sub('[^a-z0-9]', '_', title)}.py", tmp_path / "found"
    path.write_text(source_of(title))
    pool.run(_run, ranks_of(title), path, found)
    reports = [Report.from_json(line) for line in found.read_text().splitlines()] if found.exists() else []
    if title.endswith("-no"):
        assert [str(each) for each in reports] == []
        return
    assert reports != []
    lines = path.read_text().splitlines()
    for each in reports:
        assert each.kind == "race"
        sides = [lines[side.line - 1].partition("  # ")[2] for side in (each.access, each.other)]
        assert sorted(sides) == ["A", "B"], str(each)


def test_all_cases_are_there():
    verdicts = [title.rpartition("-")[2] for title in CASES]
    assert (verdicts.count("yes"), verdicts.count("no")) == (72, 48)
