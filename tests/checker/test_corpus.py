"""Every planted mistake is reported with its two lines, and no twin that is right is."""

import re

import jobs_corpus
import planted_gluon
import planted_memory
import planted_messages
import planted_programs
import planted_trackers
import pytest

from iris_triton.checker.reports import Report


def reports(path):
    return [Report.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


MODULES = planted_memory, planted_messages, planted_programs, planted_trackers
PLANTED = [(module, name) for module in MODULES for name in module.CASES]
IN_GLUON = [(planted_messages, name) for name in planted_messages.IN_GLUON]
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
