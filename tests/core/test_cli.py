"""The command `iris`."""

import json
import subprocess
import sys

import pytest
from dist_info import provider_source

from iris_core import __version__, cli
from iris_core.cli._output import print_table
from iris_core.registry import reset_default_registry

pytestmark = pytest.mark.usefixtures("fresh_registry")


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
    assert run(capsys, "--version") == (0, f"iris-core {__version__}\n", "")
    status, out, err = run(capsys)
    assert (status, out, err[:11]) == (2, "", "usage: iris")


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
    assert first == f" A  LONG{' ' * (len(long) - 5)}  B"
    assert second == f" 1  {long.strip()}  [x]"
    assert third == "22  a b"


def test_a_table_on_a_terminal_takes_brackets_literally_and_has_colours_unless_they_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for variable, coloured in ((None, 1), ("NO_COLOR", 0)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if variable:
            monkeypatch.setenv(variable, "1")
        print_table(("A", "B"), [("[bold]", "options['s'][/x]"), ("broken", ""), ("not broken", "")])
        out = capsys.readouterr().out
        assert "[bold]" in out
        assert "options['s'][/x]" in out
        assert out.count("\x1b[1;31m") == coloured


# -- iris plugins -----------------------------------------------------------------------------------------------------
def states(capsys):
    status, out, _ = run(capsys, "plugins", "--json")
    return status, {(each["kind"], each["name"], each["distribution"]): each for each in json.loads(out)}


def test_plugins_lists_the_installed_ones(capsys, clean_environment):
    status, out, _ = run(capsys, "plugins")
    assert status == 0
    rows = {tuple(line.split()[:6]) for line in out.splitlines()}
    assert ("KIND", "NAME", "DISTRIBUTION", "VERSION", "API", "STATE") in rows
    for kind, name, distribution in (("allocator", "host", "allocators"), ("backend", "gluon", "gluon")):
        assert (kind, name, f"iris-{distribution}", __version__, "1.0", "loaded") in rows


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
    for broken in (False, True):
        if broken:
            site.provider("bad", source="raise RuntimeError('boom')")
            reset_default_registry()
            expected["bad", "bad"] = ("broken", "boom")
        status, found = states(capsys)
        assert status == broken
        for (name, distribution), (state, reason) in expected.items():
            row = found["allocator", name, f"iris-{distribution}"]
            assert row["state"] == state
            assert reason in row["reason"]


# -- iris config ------------------------------------------------------------------------------------------------------
def test_config(capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "2MiB")
    monkeypatch.setenv("IRIS_HEAPSIZE", "2MiB")
    monkeypatch.setenv("IRIS_TRITON__BOUNDS_CHECK", "0")
    status, out, _ = run(capsys, "config")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["IRIS_HEAP_SIZE", "2.0", "MiB", "environment"] in [row[:4] for row in rows]
    assert ["IRIS_TRITON__BOUNDS_CHECK", "False", "environment"] in [row[:3] for row in rows]
    assert ["IRIS_HOST__HUGE_PAGES", "False", "default"] in [row[:3] for row in rows]

    status, out, _ = run(capsys, "config", "--json")
    document = json.loads(out)
    assert status == 0
    values = {row["variable"]: (row["value"], row["source"], row["plugin"]) for row in document["settings"]}
    assert values["IRIS_HEAP_SIZE"] == (2 << 20, "environment", "")
    assert values["IRIS_TRITON__BOUNDS_CHECK"] == (False, "environment", "triton")
    assert values["IRIS_BLOCK"] == ([], "default", "")
    assert len(document["warnings"]) == 1
    assert "did you mean IRIS_HEAP_SIZE?" in document["warnings"][0]


def test_config_of_one_name_says_all_of_it(capsys, clean_environment):
    status, out, _ = run(capsys, "config", "heap_size")
    assert (status, out.splitlines()[0]) == (0, "IRIS_HEAP_SIZE")
    assert run(capsys, "config", "IRIS_HEAP_SIZE") == (0, out, "")
    assert len(json.loads(run(capsys, "config", "--json", "heap_size")[1])["settings"]) == 1


def test_config_names_a_typo_in_a_plugins_variable(capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_TRITON__BOUND_CHECK", "0")
    status, _, err = run(capsys, "config")
    assert status == 1
    assert "did you mean IRIS_TRITON__BOUNDS_CHECK?" in err


def test_config_leaves_out_the_settings_of_a_broken_plugin(capsys, site):
    site.provider("bad", source="raise RuntimeError('boom')")
    status, out, _ = run(capsys, "config")
    assert (status, "IRIS_HOST__HUGE_PAGES" in out, "IRIS_BAD" in out) == (0, True, False)
