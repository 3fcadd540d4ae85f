"""Every planted mistake is reported with its two lines, and no twin that is right is."""

import inspect
import pathlib

import jobs_corpus
import planted_gluon
import planted_memory
import planted_messages
import planted_programs
import planted_trackers
import pytest

from iris_triton.checker.reports import Report
from iris_triton.gemm import flash_decode

FLASH_DECODE = pathlib.Path(flash_decode.__file__)


def marked(module, letter, name):
    """Lines of a module with a mark: `# A name other_name B third_name`."""
    found = set()
    for number, line in enumerate(inspect.getsource(module).splitlines(), 1):
        side = last = ""
        for word in line.partition("  # ")[2].split():
            if word in ("A", "B"):
                side = side + word if side and last in ("A", "B") else word
            elif word == name and letter in side:
                found.add(number)
            last = word
    return found


def reports(path):
    return [Report.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


MODULES = planted_memory, planted_messages, planted_programs, planted_trackers
PLANTED = [(module, name) for module in MODULES for name in module.CASES]
planted = pytest.mark.parametrize(("module", "name"), PLANTED, ids=[name for _, name in PLANTED])


def check(pool, module, name, bug, path, backend="triton"):
    _, ranks, kind = module.CASES[name]
    errors = pool.run(jobs_corpus.run_case, ranks, module.__name__, name, bug, str(path), backend)
    found = reports(path)
    if not bug:
        assert [str(each) for each in found] == []
        assert set(errors) == {""}
        return
    lines = [marked(module, letter, name) for letter in "AB"]
    kinds = {each.kind for each in found}
    assert kinds == {kind} or {kind} <= kinds <= {"race", "counter"}
    for each in found:
        here = [side.line for side in (each.access, each.other) if side is not None]
        assert all(side.file == module.__file__ for side in (each.access, each.other) if side is not None)
        wanted = lines if kind in ("race", "counter") or each.other is not None else lines[1:]
        assert len(here) == len(wanted)
        fits = any(
            all(line in marks for line, marks in zip(order, wanted, strict=True)) for order in (here, here[::-1])
        )
        assert fits, f"{each}\nwanted lines {wanted}"


@planted
def test_the_mistake_is_reported_with_its_lines(pool, tmp_path, module, name):
    check(pool, module, name, True, tmp_path / "found")


@planted
def test_the_twin_is_not_reported(pool, tmp_path, module, name):
    check(pool, module, name, False, tmp_path / "found")


@pytest.mark.parametrize("bug", [True, False])
@pytest.mark.parametrize("name", sorted(planted_gluon.CASES))
def test_in_gluon(pool, tmp_path, name, bug):
    check(pool, planted_gluon, name, bug, tmp_path / "found", "gluon")


def as_it_was(source, bug=True):
    """The source of the kernel of flash decode, with one counter for all senders if `bug`; see a2791c6."""
    for now, before in (
        (
            "            signal_members(ctx, arrived + me * rows + row, turn, members, SIZE)",
            '                ctx.signal(arrived + row, 1, peer, op="add")',
        ),
        ("await_members(ctx, arrived + row, turn, members, me, SIZE, rows)", "ctx.wait(arrived + row, turn * SIZE)"),
    ):
        assert source.count(now) == 1
        source = source.replace(now, before) if bug else source
    return source


@pytest.mark.parametrize("bug", [True, False])
def test_flash_decode_as_it_was(pool, tmp_path, bug):
    """One counter for all senders, in three launches in a row.  The library has one for each."""
    source = as_it_was(FLASH_DECODE.read_text(), bug)
    kernel, path = tmp_path / "kernel.py", tmp_path / "found"
    kernel.write_text(source)
    pool.run(jobs_corpus.decode_in_a_row, 3, str(kernel), str(path))
    found = reports(path)
    assert ({"counter", "race"} >= {each.kind for each in found} and found != []) == bug
    for each in found:
        lines = source.splitlines()
        sides = [lines[side.line - 1] for side in (each.access, each.other)]
        if each.kind == "counter":
            assert "ctx.signal(arrived" in sides[0]
            assert "ctx.wait(arrived" in sides[1]


def test_the_corpus_is_large_and_marked():
    assert len(PLANTED) >= 70
    assert len(planted_trackers.CASES) >= 12
    assert len({name for _, name in PLANTED}) == len(PLANTED)
    for module, name in PLANTED:
        assert marked(module, "B", name), name
        assert module.CASES[name].kind != "race" or marked(module, "A", name), name
