"""The published verdicts of RMARaceBench: each race with its two lines, and no report where there is none."""

import jobs_corpus
import pytest
import rmaracebench
from corpus import marks_in_kernel
from rmaracebench import CASES, ranks_of, text_of
from test_corpus import reports

from iris_core import Iris

SELDOM = {title for number, title in enumerate(CASES) if title.startswith("misc") or number % 3}
"""Two of three, and those that differ in the way that a pointer takes, come with --exhaustive."""


def run_all(titles, folder):
    for number, title in titles:
        with jobs_corpus.checking(folder / str(number)), Iris("1MiB", device="cpu") as ctx:
            rmaracebench.run(ctx, title)


def sides(report, title):
    """The marks of the two lines of a report."""
    text, marks = text_of(title)
    marked = marks_in_kernel(text)
    return [
        marks.get(side.function) or "".join(letter for letter in "AB" if side.line in marked[letter])
        for side in (report.access, report.other)
    ]


@pytest.mark.parametrize("num_ranks", sorted({ranks_of(title) for title in CASES}))
def test_the_verdicts_are_the_published_ones(request, pool, tmp_path, num_ranks):
    every = request.config.getoption("exhaustive")
    titles = [title for title in CASES if ranks_of(title) == num_ranks and (every or title not in SELDOM)]
    pool.run(run_all, num_ranks, [*enumerate(titles)], tmp_path, timeout_s=900.0)
    problems = []
    for number, title in enumerate(titles):
        found = reports(tmp_path / str(number))
        wrong = [str(each) for each in found if each.kind != "race" or sorted(sides(each, title)) != ["A", "B"]]
        if wrong or title.endswith("-yes") != (found != []):
            problems.append(f"{title}: {len(found)} reports, {wrong}")
    assert not problems, "\n".join(problems)


def test_all_cases_are_there():
    verdicts = [title.rpartition("-")[2] for title in CASES]
    assert (verdicts.count("yes"), verdicts.count("no")) == (72, 48)
