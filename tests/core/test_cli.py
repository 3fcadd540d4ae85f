"""The command `iris`."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import forked
import pytest
import torch
from dist_info import provider_source
from tables import table

import iris_core
from iris_core import __version__, cli
from iris_core.cli import demo, main
from iris_core.cli._output import print_table
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.registry import reset_default_registry
from iris_core.tuning.tuner import Tuned
from iris_core.world import launch
from iris_core.world.scaling import OPS, Level, Machine

pytestmark = pytest.mark.usefixtures("fresh_registry")


def run(capsys, *arguments):
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_every_subcommand(capsys):
    status, out, _ = run(capsys, "--help")
    assert (status, [command for command in cli.COMMANDS if f"\n    {command} " not in out]) == (0, [])
    assert run(capsys, "--version") == (0, f"iris-core {__version__}\n", "")
    status, out, err = run(capsys)
    assert (status, out, err[:11]) == (2, "", "usage: iris")


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -c 'import iris_core.cli as c; raise SystemExit(c.main([\"config\"]))' | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "V"
    assert "Traceback" not in done.stderr


def test_plugins_shows_every_state_and_fails_only_for_broken(capsys, site, monkeypatch):
    site.provider("absent", probe="return Availability.no('no driver')")
    site.provider("future", info="devices=frozenset({DeviceType.CPU}), api=(99, 0)")
    site.provider("stopped")
    site.provider("twice", distribution="iris-one")
    site.provider("twice", distribution="iris-two")
    site.provider("odd", source=provider_source("odd", probe="return Availability.no('say \"[no]\"\\n\\tnow')"))
    monkeypatch.setenv("IRIS_BLOCK", "stopped")
    expected = {
        ("absent", "absent"): ("unavailable", "no driver"), ("future", "future"): ("incompatible", "99.0"),
        ("stopped", "stopped"): ("blocked", ""), ("twice", "one"): ("conflicting", ""),
        ("twice", "two"): ("conflicting", ""), ("odd", "odd"): ("unavailable", 'say "[no]"\n\tnow'),
        ("host", "allocators"): ("loaded", ""),
    }  # fmt: skip
    rows = {tuple(line.split()[:6]) for line in run(capsys, "plugins")[1].splitlines()}
    assert ("KIND", "NAME", "DISTRIBUTION", "VERSION", "API", "STATE") in rows
    assert ("allocator", "host", "iris-allocators", __version__, "1.0", "loaded") in rows
    for broken in (False, True):
        if broken:
            site.provider("bad", settings="5")
            reset_default_registry()
            expected["bad", "bad"] = ("broken", "must return a subclass of PluginSettings, not 5")
        status, out, _ = run(capsys, "plugins", "--json")
        found = {(each["kind"], each["name"], each["distribution"]): each for each in json.loads(out)}
        assert status == broken
        for (name, distribution), (state, reason) in expected.items():
            row = found["allocator", name, f"iris-{distribution}"]
            assert (row["state"], reason in row["reason"]) == (state, True)


def test_config(capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "2MiB")
    monkeypatch.setenv("IRIS_HEAPSIZE", "2MiB")
    monkeypatch.setenv("IRIS_TRITON__BOUNDS_CHECK", "0")
    status, out, _ = run(capsys, "config")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["IRIS_HEAP_SIZE", "2.0", "MiB", "environment"] in [row[:4] for row in rows]
    status, out, _ = run(capsys, "config", "--json")
    document = json.loads(out)
    values = {row["variable"]: (row["value"], row["source"], row["plugin"]) for row in document["settings"]}
    assert values["IRIS_HEAP_SIZE"] == (2 << 20, "environment", "")
    assert values["IRIS_TRITON__BOUNDS_CHECK"] == (False, "environment", "triton")
    assert values["IRIS_BLOCK"] == ([], "default", "")
    (warning,) = document["warnings"]
    assert "did you mean IRIS_HEAP_SIZE?" in warning
    status, out, err = run(capsys, "config", "heap_size")
    assert (status, out.splitlines()[0], err) == (0, "IRIS_HEAP_SIZE", f"iris: {warning}\n")
    assert len(json.loads(run(capsys, "config", "--json", "IRIS_HEAP_SIZE")[1])["settings"]) == 1


@table(("text", "status", "words"), [
    ("raise RuntimeError('boom')", 0, ""),  # `iris plugins` tells that
    *(("from pydantic import Field\n" + provider_source("bad").replace('"""No settings."""', field), 1, "IRIS_BAD__")
      for field in ("level: int", "level: int = 'high'", "level: int = Field(default_factory=lambda: 1 / 0)")),
])  # fmt: skip
def test_config_lists_the_settings_of_others_beside_those_of_a_damaged_plugin(capsys, site, text, status, words):
    site.provider("bad", source=text)
    found, out, err = run(capsys, "config")
    assert (found, "IRIS_HOST__HUGE_PAGES" in out, "IRIS_BAD" in out) == (status, True, False)
    assert err.count("\n") == status
    assert words in err


ENTRY = Entry("all_reduce", "*", (4096,), "fast", 1e-6)
TUNE = ("tune", "--device", "cpu", "--ranks", "2")


@pytest.fixture
def measured(monkeypatch):
    """What was measured, without measuring."""
    run = Mock(spec=[], return_value=[Tuned("cpu", (ENTRY,), (), ())])
    monkeypatch.setattr(launch, "run", run)
    return run


@table("make", [
    lambda path: path.write_text("{}"), lambda path: path.mkdir(), lambda path: path.write_text(""),  # and in a file
    lambda path: write_table(path, "cpu", 4, [], [ENTRY]), lambda path: write_table(path, "a GPU", 2, [], [ENTRY]),
])  # fmt: skip
def test_a_table_that_cannot_be_written_is_refused_before_measuring(capsys, tmp_path, measured, make):
    path = tmp_path / "table.json"
    make(path)
    path = path / "table.json" if path.is_file() and not path.read_text() else path
    status, out, err = run(capsys, *TUNE, "--out", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("iris: ")
    assert str(tmp_path / "table.json") in err
    assert not measured.called


@pytest.mark.parametrize("table", ["damaged", "a model"])
def test_what_was_measured_replaces_another_table_of_the_cache(capsys, tmp_path, measured, monkeypatch, table):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    path = pathlib.Path(tmp_path, "ccl", "cpu-2.json")
    write_table(path, "cpu", 2, [], [replace(ENTRY, op="broadcast")])
    document = json.loads(path.read_text()) | {"measured": False, "note": "guessed"}
    path.write_text("{}" if table == "damaged" else json.dumps(document))
    assert main(list(TUNE)) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert [entry.algorithm for entry in read_table(path).entries] == ["fast"]


# Figures are those of docs/scaling.md, which tests/docs compares.
@table("gpus", [1, 4])  # one GPU alone sends nothing
def test_the_model_of_several_nodes(capsys, gpus):
    assert main(["bench", "model", "--gpus", str(gpus), "--rail-gbs", "12.5"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in OPS] == list(OPS)
    machine = Machine(128, gpus, rail=Level(Machine(1).rail.latency_s, 12.5e9))
    assert f"{machine.seconds('all_to_all', 1 << 30) * 1e6:,.0f}" in out


ROW = {
    **{"name": "heat", "title": "heat solver", "ranks": 2, "backend": "triton", "allocator": "host", "device": "cpu"},
    **{"time_s": 1.0, "error": 1e-6, "tolerance": 1e-5, "detail": "64 x 64", "ok": True},
}


@table(("error", "ok", "status"), [(1e-6, True, 0), (0.5, False, 1), (math.nan, False, 1)])
def test_a_wrong_result_exits_with_1(monkeypatch, capsys, error, ok, status):
    row = ROW | {"time_s": 3.0, "error": error, "ok": ok}
    monkeypatch.setattr(iris_core, "run", lambda *args: [(each, "chosen") for each in ([ROW], [row], [ROW])])
    found, out, _ = run(capsys, "demo", "--ranks", "2", "--device", "cpu")
    assert (found, "WRONG" in out) == (status, not ok)
    found, out, _ = run(capsys, "demo", "--ranks", "2", "--device", "cpu", "--json")
    (shown,) = json.loads(out)["rows"]
    assert (found, shown["time_s"], shown["ok"]) == (status, 3.0, ok)  # the worst rank counts
    assert shown["error"] == (None if math.isnan(error) else max(error, ROW["error"]))


@table(("nodes", "options", "name", "ranks"), [
    ("", ["--ranks", "2"], "message-passing", 2), ("3+1", ["--nodes", "2x2"], "between-nodes", 4),
    ("1+1", [], "between-nodes", 2),
])  # fmt: skip
def test_a_real_run(capsys, monkeypatch, forked_ranks, nodes, options, name, ranks):
    monkeypatch.setenv("IRIS_NODES", nodes)
    assert main(["demo", "--device", "cpu", "--only", name, "--json", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    shown = [row[key] for key in ("name", "ranks", "backend", "allocator", "ok")]
    assert shown == [name, ranks, "triton", "host", True]
    assert row["error"] <= row["tolerance"]


@table(("gpus", "ranks", "device", "expected"), [
    (0, None, None, (4, "cpu")), (0, 2, None, (2, "cpu")), (8, None, None, (4, None)), (2, None, None, (2, None)),
    (1, None, None, (4, "cpu")), (2, 4, None, (4, "cpu")), (8, 3, "cpu", (3, "cpu")), (8, None, "cuda", (4, "cuda")),
    (1, None, "cuda", (1, "cuda")), (2, 4, "cuda", (4, "cuda")), (8, 2, "cuda:1", (2, "cuda:1")),
])  # fmt: skip
def test_where_it_runs(monkeypatch, gpus, ranks, device, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    *chosen, note = demo.choose_ranks(ranks, device)
    assert tuple(chosen) == expected
    assert ("run on the CPU" in note) == (gpus > 0 and expected[1] == "cpu" and device is None)
    assert ("share a GPU" in note) == (expected in [(4, "cuda"), (2, "cuda:1")] and (gpus, ranks) != (8, None))


# Each is one line that says so, before torch is imported, and no traceback.
MISTAKES = {
    "demo --ranks x": "int value: 'x'; iris demo --help says more", "tune --ops --shape 1x0x1": "three numbers such as",
    "demo --ranks 999999": "not 999999: a rank takes about", "demo --device gpu": "device='gpu' is not valid: say cpu,",
    "demo --backend nope": "installed are gluon, triton", "config heepsize": "'heepsize'; did you mean IRIS_HEAP_SIZE?",
    "demo --allocator nope@nobody": "no allocator named 'nope@nobody'", "tune --out /dev/null/t": "made in /dev/null (",
    "demo --allocator vmm": "did you mean 'vmem'?", "--nope demo": "iris: unrecognized arguments: --nope; iris --help",
    "demo --nodes 2x": "nodes='2x' is not valid: IRIS_NODES is like", "demo --nodes 9999x9999": "of all nodes must be",
    "demo --nodes 2x2 --ranks 3": "have 4 ranks, --ranks says 3", "bench model --rail-us nan": "--rail-us must be",
    "tune --ranks 1": "a whole number from 2 to", "tune --dtype bf": "'bf' cannot be measured; known are bfloat16",
    "tune --limit nan": "seconds above 0", "demo --only gemm-scatter": "'gemm-scatter'; did you mean gemm-all-scatter?",
    "tune --backend=": "backend='' is not", "bench compare a b --tolerance nan": "--tolerance nan must be a number",
    "tune --max many": "many: a size is a number of bytes or text", "IRIS_CACHE_DIR=/dev/null tune": "/dev/null/ccl",
    "tune --min 2KiB --max 1KiB": "2048 to 1024 bytes are none", "IRIS_NODES=7x config device": "IRIS_NODES='7x' (from",
    "tune --shape 1x1x1": "give --ops, too", "bench compare /absent/a b": "/absent/a is not a report of benchmarks",
    "tune --ops --max 1MiB": "--max: fused operations have shapes", "tune --ops --dtype tf3": "did you mean tf32?",
    "trace": "invalid choice: 'trace'", "IRIS_NODES=2x2 tune --ranks 2": "have 4 ranks, --ranks says 2",
    "plugin": "did you mean plugins?", "IRIS_HEAP_SIZE=abc demo": "valid: a size is a number of bytes",
    "docter": "did you mean doctor?", "IRIS_CHECK_REPORTS=/dev/null/x demo": "not valid: /dev/null/x cannot be written",
    "plugins --nope": "iris plugins: unrecognized arguments: --nope; iris plugins --help", "bench": "required: ACTION",
    "demo --rnaks 2": "2; did you mean --ranks?", "bench model --gpus 0": "--gpus must be a number above 0",
    "bench compare a b --tolerence=1": "iris bench compare: unrecognized arguments: --tolerence=1; did you mean --to",
    "doctor --timeout soon": "seconds value", "check /proc/self/mem": "/proc/self/mem cannot be read: ",
    "doctor --timeout 0": "0: a bound", "tune --ops --device cpu": "give small ones by --shape",
    "bench run": "'compare', 'model'", "IRIS_BACKEND=nope tune": "named 'nope'", "demo --only=": "no ''; known are ge",
    "bench compare a": "required: new", "check": "required: script; iris check", "check nothing.py": "nothing.py",
    "check /etc/passwd": "/etc/passwd is no program in Python: invalid syntax (passwd, line 1)",
    "check /bin/ls": "no program in", "tune --op all_reduc": "'all_reduc' cannot be measured; did you mean all_reduce?",
    "tune --max 0": "1024 to 0 byte", "bogus demo": "'demo', 'check'", "tune --out /tmp": "/tmp is a folder, where a",
    "IRIS_VMEM__GRANULE=3 config vmem__granule": "GRANULE='3' (from the environment) is not valid: a granule",
    "IRIS_DEVICE=gpu config": "IRIS_DEVICE='gpu' (from the environment) is not valid: say cpu, cuda or cuda:1",
    "tune --device cpu --allocator vmem": "'vmem' names it): it works on cuda, hip only",
    "tune --device tpu": "(choose from 'cpu', 'cuda'); iris tune --help says more",  # cpu is no better guess than cuda
}  # fmt: skip
LATER = {
    "tune": "torch sees no GPU here: --device cpu measures ranks", "tune --device cuda": "2 ranks on cuda need a GPU",
    "IRIS_DEVICE=cuda demo": "torch sees no GPU", "IRIS_DEVICE=cuda:1 tune": "2 ranks on cuda:1 need a GPU each",
    "IRIS_TRITON__BOUNDS_CHECK=perhaps tune --device cpu": "BOUNDS_CHECK='perhaps' (from the environment) is not valid",
    "IRIS_BLOCK=triton,gluon tune --device cpu": "together on cpu: blocked: IRIS_BLOCK names it",
    "IRIS_BLOCK=triton demo --backend triton": "is blocked: take it out of IRIS_BLOCK",
}  # fmt: skip
"""What only torch knows where there are GPUs: likewise, before ranks are started."""
RUN_ALL = """
import contextlib, io, json, os, sys
from unittest import mock
from iris_core.cli import main
from iris_core.world import launch
launch.run = None  # no rank is started
for line in json.loads(sys.argv[1]):
    words = line.split()
    variables = dict(word.split("=") for word in words if word.startswith("IRIS_"))
    with contextlib.redirect_stderr(io.StringIO()) as said, mock.patch.dict(os.environ, variables):
        status = main(words[len(variables):])
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""
HIDE = """import importlib.util, sys; found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else found(name, package)
sys.modules[{name!r}] = None  # an import raises ModuleNotFoundError
"""
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
ENVIRON["CUDA_VISIBLE_DEVICES"] = ""
OLD = """import importlib.metadata; found = importlib.metadata.version
importlib.metadata.version = lambda name: "3.5.1" if name == "triton" else found(name)
"""
WITHOUT = """from iris_core.registry import discovery; installed = discovery.installed
discovery.installed = lambda path: (each for each in installed(path) if each.name not in {!r}.split())
"""


def test_wrong_arguments_are_one_line():
    done = forked.fresh(RUN_ALL, json.dumps([*MISTAKES, *LATER]), environ=ENVIRON)
    assert "Traceback" not in done.stdout + done.stderr
    expected = MISTAKES | LATER
    results = dict(zip(expected, map(json.loads, done.stdout.splitlines()), strict=True))
    for line, (status, said, torch_is_there) in results.items():
        assert (status == 2 or "GPU" in said, said.count("\n"), torch_is_there <= (line in LATER)) == (True, 1, True), (
            line,
            said,
        )
        assert said.startswith("iris")
        assert expected[line] in said
        assert ("did you mean" in said) == ("did you mean" in expected[line]), line


@table(("before", "words"), [
    (HIDE.format(name="torch"), "torch is not installed for.*install"), (OLD, "triton 3.5.1 is too old.*install"),
    (HIDE.format(name="triton"), "Triton is not installed.*install"),
    (WITHOUT.format("iris-allocators"), "no allocator is installed: pip install ./iris_allocators\n"),
    (WITHOUT.format("iris-triton iris-gluon"), "no backend is installed: pip install ./iris_triton\n"),
    (WITHOUT.format("iris-allocators iris-triton iris-gluon"), "no allocator and no backend is .*s ./iris_triton\n"),
])  # fmt: skip
def test_an_environment_that_is_not_complete_is_named_with_what_to_install(before, words):
    lines = [f"{command} --device cpu" for command in ("demo", "tune", f"check {__file__}")]
    done = forked.fresh(before + RUN_ALL, json.dumps(lines), environ=ENVIRON)
    for status, said, torch_is_there in map(json.loads, done.stdout.splitlines()):
        assert (status, said.count("\n"), torch_is_there) == (2, 1, "torch" in words)  # its import takes a second
        assert re.search(words, said)
    assert done.stdout.count("\n") == len(lines)


def test_a_misspelt_variable_is_told_once_also_where_it_warns_itself(tmp_path):
    (tmp_path / "program.py").write_text("from iris_core import Iris\nIris('1MiB', device='cpu')")
    command = [sys.executable, "-m", "iris_core", "check", tmp_path / "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON | {"IRIS_HEAPSIZE": "1"})
    assert re.fullmatch("iris: IRIS_HEAPSIZE is set, but .*\n", done.stderr)


def test_tables_break_at_spaces_only_and_once(capsys):
    cells = ["'iris-allocators[rocm]'", "one two three " * 9]
    print_table(["A", "B"], [cells], most=50)
    lines = capsys.readouterr().out.splitlines()
    assert {word for line in lines for word in line.split()} == {"A", "B", *" ".join(cells).split()}
    assert all(40 < len(line) <= 50 for line in lines[1:-1])  # the last one is what is left


def test_states_have_colours(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = {"loaded": "32", "blocked": "33", "broken": "1;31"}
    print_table(["STATE"], [[state] for state in colours])
    shown = capsys.readouterr().out
    assert [state for state, colour in colours.items() if f"\x1b[{colour}m{state}\x1b[0m" not in shown] == []
