"""`iris check`, the fixture, errors that end a program, and ranges that are declared benign."""

import json
import os
import signal
import subprocess
import sys
import time

import jobs_corpus
import planted_programs
import pytest
import torch
from corpus import PROGRAM, N, kernel, launch
from tables import raises

from iris_core import Iris
from iris_core.errors import SettingsError
from iris_triton.checker import CheckError, DataRaceError, FreedMemoryError, benign_race
from iris_triton.checker.reports import RACE, benign_ranges

pytest_plugins = ["iris_triton.testing.checked"]


def test_the_command_line_has_a_status_and_a_picture_of_nothing(check, tmp_path):
    done = check(PROGRAM, f"--timeline {tmp_path}/none.json", "right 3", forked=False)
    assert (done.status, "output" in done.out, "data race" in done.out) == (3, True, False), done.err
    assert json.loads((tmp_path / "none.json").read_text())["traceEvents"] == []


def test_a_picture_shows_both_programs(check, tmp_path):
    path = tmp_path / "picture.json"
    done = check(PROGRAM, f"--timeline {path}", "bug 0")
    assert all(text in done.out for text in ("data race", "output", "bounds): 1 finding\n", "shows 1 of them"))
    assert done.status == 1
    picture = json.loads(path.read_text())
    events = picture["traceEvents"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {name.partition(", ")[2] for name in names.values()} == {"program 0", "program 1"}
    assert all(name.startswith(f"rank {pid}, ") for (pid, _), name in names.items())
    begin, end = (next(each for each in events if each["ph"] == kind) for kind in "sf")
    assert begin["id"] == end["id"]
    for flow, what, program in ((begin, "store", "rank 0, program 0"), (end, "load", "rank 0, program 1")):
        same = [each for each in events if each["ph"] == "X" and each["ts"] == flow["ts"]]
        assert [(each["name"], names[each["pid"], each["tid"]]) for each in same] == [(what, program)]
        assert same[0]["args"]["line"].startswith("kernel_")
    marks = [each for each in events if each["ph"] == "i"]
    assert {each["args"]["text"] for each in marks} == set(picture["metadata"]["findings"])
    assert "data race" in marks[0]["args"]["text"]


@pytest.mark.parametrize("options", ["", "--json", "--seeds 2", "--all-orders 2"])
@pytest.mark.parametrize("program", ["print('output')", "Iris('4MiB', device='cpu', check='')"])
def test_what_checks_nothing_fails(check, options, program):
    done = check(f"from iris_core import Iris\n{program}", options)
    assert done.status == 1
    assert '"checked": false' in done.out or "opened no context that could be checked" in done.out


def test_wrong_options_are_refused(check, monkeypatch, tmp_path):
    with pytest.raises(SettingsError):
        Iris("1MiB", device="cpu", check="race")
    for options, said in {
        f"--timeline {tmp_path}": "a folder, where", f"--timeline {tmp_path}/no/where.json": "no/where.json",
        "--only ,": "at least one of", "--only bounds --all-orders 2": "needs races", "--all-orders 0": "positive",
        "--seeds 0": "positive", "--seeds 2 --replay 1": "not allowed with", "--replay foo": "not 'foo'",
        "--replay -3": "--replay needs a seed, such as 7, or an order",
    }.items():  # fmt: skip
        done = check(PROGRAM, options, "bug 0")
        assert done.status != 0
        assert said in done.err
        assert "output" not in done.out
    for seed, checks, key in (("5", "races", "memory.schedules"), ("-1", "schedules", "names")):
        monkeypatch.setenv("IRIS_CHECK_SEED", seed)
        with raises(SettingsError, key, name="SEED"):
            Iris("1MiB", device="cpu", check=checks)


def test_seeds_are_numbers_and_ranks_are_counted(check):
    again = "    " + PROGRAM[PROGRAM.index("with Iris") : PROGRAM.index("    print(")]
    twice = PROGRAM.replace("    print(", f"{again}    print(")
    (found,) = json.loads(check(twice, "--json --replay 1", "bug 0").out)["findings"]
    assert (found["seeds"], found["count"], found["ranks"]) == ([1], 2, 1)
    assert "ranks)" not in check(twice, "", "bug 0").out


def test_a_signal_ends_the_program_too(tmp_path):
    started, program = tmp_path / "started", tmp_path / "program.py"
    program.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    command = [sys.executable, "-m", "iris_core", "check", str(program)]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as running:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert {each.name for each in tmp_path.iterdir()} == {"started", "program.py"}


def test_a_report_names_the_freed_tensor_and_the_bytes_of_a_view():
    with jobs_corpus.checking("", "uninitialised"), Iris("1MiB", device="cpu") as ctx:
        kept, data = ctx.zeros(4), ctx.zeros((4, N))
        part = data[1]
        ctx.free(data)
        with raises(FreedMemoryError, "memory.freed") as found:
            part.add_(1)
        assert (found.value.report.first, found.value.report.last) == (4 * N, 8 * N - 1)
        assert kept.sum() == 0


def _case(name, bug):
    with Iris("4MiB", device="cpu") as ctx:
        planted_programs.CASES[name].run(ctx, bug)


def test_the_fixture_finds_and_forgives(checked):
    _case("programs_without_flag", True)
    assert {each.kind for each in checked.take()} == {RACE}
    _case("programs_without_flag", False)
    with open(os.environ["IRIS_CHECK_REPORTS"], "a") as file:
        file.write('{"kind": "order", "rows": [], "ranks": 1}\n')
    assert checked.take() == []


NOT_ACQUIRED = """
tl.store(data + pid * N + i, x)
if tl.atomic_add(flag, 1, sem="release") == 2:
    tl.load(data + i)
"""
TOO_WIDE = """
if pid == 0:
    tl.store(data + i, x)
    tl.atomic_add(flag + tl.arange(0, 8192), 1)
else:
    ctx.wait(flag + tl.arange(0, 8192), 1)
    tl.load(data + i)
"""


@pytest.mark.parametrize(("text", "said"), [(NOT_ACQUIRED, "does not acquire"), (TOO_WIDE, "more than 4096 lanes")])
def test_a_report_says_why_an_atomic_orders_nothing(checked, text, said):
    with Iris("4MiB", device="cpu") as ctx:
        data, flag = ctx.zeros(3 * N), ctx.zeros(8192, dtype=torch.int32)
        launch(ctx, kernel(text, "data", "flag"), data, flag, programs=3)
    assert [said in each.missing for each in checked.take()] == [True]


def _learned():
    with Iris("4MiB", device="cpu", check=["races"]) as ctx:
        data, flag = ctx.zeros(N), ctx.zeros(2, dtype=torch.int32)
        ctx.barrier()
        try:
            relaxed = planted_programs.SIGNAL.replace("1)", "1, sem='relaxed')")
            message = planted_programs.MESSAGE.replace(planted_programs.SIGNAL, relaxed)
            launch(ctx, kernel(message, "data", "flag", "out"), data, flag, torch.zeros(N))
            end = time.monotonic() + 60
            while time.monotonic() < end:
                launch(ctx, kernel("tl.load(flag)", "flag"), flag)
        except CheckError as error:
            return type(error), getattr(error.report, "rank", None)
    return None


def test_the_first_finding_ends_the_check_and_the_other_ranks_learn_of_it(pool):
    (other, _), first = pool.run(_learned, 2)
    assert (other, first) == (CheckError, (DataRaceError, 1))


def _benign(path):
    with jobs_corpus.checking(path), Iris("4MiB", device="cpu") as ctx:
        data = ctx.zeros(N)
        declared = benign_race(data, "for this test")
        ctx.barrier()
        launch(ctx, kernel("ctx.store(data + i, tl.load(data + i), peer)", "data"), data)
        ctx.barrier()
        listed = benign_ranges.copy()
    return declared.count, listed == [declared], benign_ranges


def test_benign_races_are_counted_and_listed(pool, tmp_path):
    path = tmp_path / "found"
    counts = pool.run(_benign, 2, str(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(count for count, *_ in counts) > 0
    assert [rest for _, *rest in counts] == [[True, []]] * 2  # the next context may have the addresses
    assert {row["kind"] for row in rows} == {"benign"}
    assert {row["reason"] for row in rows} == {"for this test"}


def test_what_cannot_be_declared_benign_and_what_is_without_the_checker():
    for tensor, reason, name in ((torch.zeros(2), " ", "reason"), (torch.zeros(4)[::2], "none", "contiguous")):
        with raises(ValueError, name=name):
            benign_race(tensor, reason)
    assert benign_race(torch.zeros(2), "a checked context may have these addresses later").count == 0
    assert benign_ranges == []
