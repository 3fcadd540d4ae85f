"""Every planted mistake and every race of RMARaceBench is reported with its two lines, and nothing else is."""

import re

import jobs_corpus
import planted_gluon
import planted_memory
import planted_programs
import planted_trackers
import pytest
import rmaracebench
from corpus import marks_in_kernel
from rmaracebench import CASES, ranks_of, text_of

from iris_core import Iris
from iris_triton.checker.reports import Report


def reports(path):
    return [Report.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


MODULES = planted_memory, planted_programs, planted_trackers
PLANTED = [(module, name) for module in MODULES for name in module.CASES]
IN_GLUON = [(planted_programs, name) for name in planted_programs.IN_GLUON]
IN_GLUON += [(planted_gluon, name) for name in planted_gluon.CASES]


def problems(module, name, bug, found, error):
    case = module.CASES[name]
    if not bug:
        return [str(each) for each in found] + [error] * bool(error)
    kinds = {each.kind for each in found}
    if kinds != {case.kind} and not {case.kind} <= kinds <= {"race", "counter"}:
        return [f"{kinds} and not {case.kind}"]
    return [str(each) for each in found if not fits(each, case, module)]


def fits(report, case, module):
    """Whether a report has the two lines that are marked, or for what has one side only, that one."""
    sides = [side for side in (report.access, report.other) if side is not None]
    wanted = [case.marks[letter] for letter in "AB"]
    if case.kind not in ("race", "counter") and report.other is None:
        del wanted[0]
    here = [side.line for side in sides]
    return (
        all(side.file == module.__file__ or re.fullmatch(r"kernel_\d+\.py", side.file) for side in sides)
        and len(here) == len(wanted)
        and any(all(line in marks for line, marks in zip(order, wanted, strict=True)) for order in (here, here[::-1]))
    )


@pytest.mark.parametrize("bug", [True, False], ids=["mistakes", "twins"])
@pytest.mark.parametrize(("backend", "num_ranks"), [*(("triton", n) for n in (1, 2, 3)), ("gluon", 1), ("gluon", 2)])
def test_mistakes_are_reported_with_their_lines_and_twins_are_not(pool, tmp_path, backend, num_ranks, bug):
    planted = PLANTED if backend == "triton" else IN_GLUON
    chosen = [(module, name) for module, name in planted if module.CASES[name].ranks == num_ranks]
    given = [(module.__name__, name) for module, name in chosen]
    errors = pool.run(jobs_corpus.run_cases, num_ranks, given, bug, tmp_path, backend)
    wrong = {}
    for (module, name), said in zip(chosen, zip(*errors, strict=True), strict=True):
        wrong[name] = problems(module, name, bug, reports(tmp_path / name), "".join(said))
    assert {name: found for name, found in wrong.items() if found} == {}


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
