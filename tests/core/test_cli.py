"""The command `iris`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from iris_core import cli
from iris_core.cli import doctor
from iris_core.cli._output import print_table
from iris_core.registry import reset_default_registry
from iris_core.testing.dist_info import provider_source


@pytest.fixture(autouse=True)
def fresh_registry():
    """Other tests of this process may have created plugins."""
    reset_default_registry()
    yield
    reset_default_registry()


def run(capsys, *arguments):
    """Status, standard output and standard error of one command line."""
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# -- the frame --------------------------------------------------------------------------------------------------------
def test_every_subcommand_has_the_same_shape(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in cli.COMMANDS:
        assert f"\n    {command} " in out
        module = sys.modules[f"iris_core.cli.{command}"]
        assert module.__doc__.startswith(f"`iris {command}`")
        assert module.add_parser.__doc__
        assert module.run.__doc__


@pytest.mark.parametrize("arguments", [[], ["nope"], ["plugins", "--nope"], ["plugins", "nope"]])
def test_wrong_usage_is_status_2(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "usage: iris" in err


def test_version(capsys):
    from iris_core import __version__

    assert run(capsys, "--version") == (0, f"iris-core {__version__}\n", "")


def test_an_error_of_iris_is_a_message_without_traceback(capsys, site, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    for command in ("plugins", "config"):
        status, out, err = run(capsys, command)
        assert (status, out) == (1, "")
        assert err.startswith("iris: IRIS_HEAP_SIZE='big' (from the environment) is not valid")


def test_only_the_chosen_subcommand_is_imported():
    program = "import sys; from iris_core.cli import main; main(['plugins', '--help']);"
    program += "print(*[m for m in sys.modules if m.startswith('iris_core.cli.')], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["iris_core.cli.plugins"]


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -c 'import iris_core.cli as c; raise SystemExit(c.main([\"config\"]))' | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "V"
    assert "Traceback" not in done.stderr


# -- tables -----------------------------------------------------------------------------------------------------------
def test_a_table_in_a_pipe_is_aligned_and_complete(capsys):
    long = "word " * 60
    print_table(("A", "LONG", "B"), [("1", long, "[x]"), ("22", "a\nb", "")])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"A   LONG{' ' * (len(long) - 5)}  B"
    assert second == f"1   {long.strip()}  [x]"
    assert third == "22  a b"


def test_a_table_on_a_terminal_takes_brackets_literally(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("A", "B"), [("[bold]", "options['s'][/x]")])
    out = capsys.readouterr().out
    assert "[bold]" in out
    assert "options['s'][/x]" in out


# -- iris plugins -----------------------------------------------------------------------------------------------------
def states(capsys):
    status, out, _ = run(capsys, "plugins", "--json")
    return status, {(each["kind"], each["name"], each["distribution"]): each for each in json.loads(out)}


def test_plugins_lists_the_installed_ones(capsys, clean_environment):
    status, out, _ = run(capsys, "plugins")
    assert status == 0
    rows = {tuple(line.split()[:6]) for line in out.splitlines()}
    assert ("KIND", "NAME", "DISTRIBUTION", "VERSION", "API", "STATE") in rows
    assert ("allocator", "host", "iris-allocators", "0.2.0", "1.0", "loaded") in rows
    assert ("backend", "triton", "iris-triton", "0.2.0", "1.0", "loaded") in rows
    assert ("backend", "gluon", "iris-gluon", "0.2.0", "1.0", "unavailable") in rows
    assert "use backend='triton'" in out


def test_plugins_shows_every_state_and_fails_only_for_broken(capsys, site, monkeypatch):
    site.provider("absent", probe="return Availability.no('no driver')")
    site.provider("future", info="devices=frozenset({DeviceType.CPU}), api=(99, 0)")
    site.provider("stopped")
    site.provider("twice", distribution="iris-one")
    site.provider("twice", distribution="iris-two")
    monkeypatch.setenv("IRIS_BLOCK", "stopped")
    status, found = states(capsys)
    assert status == 0
    assert found["allocator", "absent", "iris-absent"]["state"] == "unavailable"
    assert found["allocator", "absent", "iris-absent"]["reason"] == "no driver"
    assert found["allocator", "future", "iris-future"]["state"] == "incompatible"
    assert found["allocator", "stopped", "iris-stopped"]["state"] == "blocked"
    assert found["allocator", "twice", "iris-one"]["state"] == "conflicting"
    assert found["allocator", "twice", "iris-two"]["state"] == "conflicting"

    site.provider("bad", source="raise RuntimeError('boom')")
    reset_default_registry()
    status, found = states(capsys)
    assert status == 1
    assert found["allocator", "bad", "iris-bad"]["state"] == "broken"
    assert "boom" in found["allocator", "bad", "iris-bad"]["reason"]
    assert found["allocator", "host", "iris-allocators"]["state"] == "loaded"


# -- iris config ------------------------------------------------------------------------------------------------------
def test_config(capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "2MiB")
    monkeypatch.setenv("IRIS_HEAPSIZE", "2MiB")
    monkeypatch.setenv("IRIS_TRITON__BOUNDS_CHECK", "0")
    status, out, _ = run(capsys, "config")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["IRIS_HEAP_SIZE", "size", "2.0", "MiB", "environment"] in [row[:5] for row in rows]
    assert ["IRIS_TRITON__BOUNDS_CHECK", "bool", "False", "environment"] in [row[:4] for row in rows]
    assert ["IRIS_HOST__HUGE_PAGES", "bool", "False", "default"] in [row[:4] for row in rows]

    status, out, _ = run(capsys, "config", "--json")
    document = json.loads(out)
    assert status == 0
    values = {row["variable"]: (row["value"], row["source"], row["plugin"]) for row in document["settings"]}
    assert values["IRIS_HEAP_SIZE"] == (2 << 20, "environment", "")
    assert values["IRIS_TRITON__BOUNDS_CHECK"] == (False, "environment", "triton")
    assert values["IRIS_BLOCK"] == ([], "default", "")
    assert len(document["warnings"]) == 1
    assert "did you mean IRIS_HEAP_SIZE?" in document["warnings"][0]


def test_config_names_a_typo_in_a_plugins_variable(capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_TRITON__BOUND_CHECK", "0")
    status, _, err = run(capsys, "config")
    assert status == 1
    assert "did you mean IRIS_TRITON__BOUNDS_CHECK?" in err


def test_config_leaves_out_the_settings_of_a_broken_plugin(capsys, site):
    site.provider("bad", source="raise RuntimeError('boom')")
    status, out, _ = run(capsys, "config")
    assert status == 0
    assert "IRIS_HOST__HUGE_PAGES" in out
    assert "IRIS_BAD" not in out


# -- iris doctor ------------------------------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch):
    """The doctor without its self-test, which has tests of its own."""
    monkeypatch.setattr(doctor, "self_test", lambda: doctor.Finding("self-test", doctor.OK, "not run here"))


def verdicts(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    document = json.loads(out)
    assert document["ok"] == (status == 0)
    return status, {each["subject"]: (each["verdict"], each["text"]) for each in document["findings"]}


def test_doctor_on_a_healthy_machine(capsys, quick, clean_environment):
    import torch

    from iris_triton._compat import TESTED, version

    status, found = verdicts(capsys)
    assert status == 0
    assert found["torch"] == ("ok", torch.__version__)
    assert found["memfd"][0] == "ok"
    assert found["triton"][0] == ("ok" if version() in TESTED else "note")
    assert found["backend gluon"][0] == "note"
    assert found["allocator host"] == ("ok", "iris-allocators 0.2.0: loaded")
    assert "backend triton@iris-triton" in found["choice"][1]
    for subject in ("python", "platform", "CPUs", "memory", "/dev/shm", "settings"):
        assert found[subject][0] == "ok", subject
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert out.endswith("nothing is broken\n")


def test_doctor_names_a_broken_plugin_a_wrong_setting_and_a_choice_that_fails(capsys, quick, site, monkeypatch):
    site.provider("bad", source="raise RuntimeError('boom')")
    monkeypatch.setenv("IRIS_BACKEND", "tritn")
    monkeypatch.setenv("IRIS_TRITON__CPU_TIMEOUT", "soon")
    status, found = verdicts(capsys)
    assert status == 1
    assert found["allocator bad"][0] == "broken"
    assert "boom" in found["allocator bad"][1]
    assert found["settings"][0] == "broken"
    assert "IRIS_TRITON__CPU_TIMEOUT='soon'" in found["settings"][1]
    assert found["choice"][0] == "broken"
    assert "did you mean 'triton'" in found["choice"][1]


def test_doctor_goes_on_where_a_core_setting_is_wrong(capsys, quick, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    status, found = verdicts(capsys)
    assert status == 1
    assert "IRIS_HEAP_SIZE='big'" in found["settings"][1]
    assert found["backend triton"][0] == "ok"
    assert "choice" not in found


def test_doctor_tells_an_untested_triton(quick, clean_environment, monkeypatch):
    from iris_triton import _compat

    monkeypatch.setattr(_compat, "TESTED", ((1, 0),))
    (finding,) = doctor._triton()
    assert finding.verdict == "note"
    assert "tested with (1.0)" in finding.text


def test_self_test_runs_a_kernel(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")  # what the caller's environment says plays no part
    monkeypatch.setenv("WORLD_SIZE", "2")
    finding = doctor.self_test()
    assert finding.verdict == "ok", finding.text
    assert "kernel stored through the symmetric heap" in finding.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no heap')", "ended with 1\nTraceback"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9"),
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
    ],
)
def test_self_test_reports_failure(site, monkeypatch, source, text):
    (site.folder / "failing_selftest.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    finding = doctor.self_test("failing_selftest", timeout_s=0.5 if "sleep" in source else 60)
    assert finding.verdict == "broken"
    assert text.splitlines()[0] in finding.text
    assert ("no heap" in finding.text) == ("no heap" in source)


def test_self_test_without_the_backend():
    finding = doctor.self_test("no_such_package.selftest")
    assert (finding.verdict, finding.text) == ("note", "left out: no_such_package is not installed")


def test_a_plugin_that_prints_json_breaking_text_is_escaped(capsys, site):
    site.provider("odd", source=provider_source("odd", probe="return Availability.no('say \"[no]\"\\n\\tnow')"))
    _, found = states(capsys)
    assert found["allocator", "odd", "iris-odd"]["reason"] == 'say "[no]"\n\tnow'
