"""Fixtures of the checker's tests: `iris check` in the tests' own process; only the program that it runs has one."""

import pathlib
import runpy
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import forked
import pytest

from iris_core.cli import main

FOLDER = pathlib.Path(__file__).parent


def _program(command):
    sys.argv[:] = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture
def check(monkeypatch, capfd, tmp_path):
    """Runs `iris check` on a program's text, in a forked process that has imported what it needs, or a started one."""
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{FOLDER.parent / 'support'}", prepend=":")

    def fork(command, env, stdout=None, stderr=None):
        done = forked.run(_program, command, environ=env)
        out, err = (done.stdout + done.stderr, "") if stderr == subprocess.STDOUT else (done.stdout, done.stderr)
        if stdout != subprocess.PIPE:
            print(out, end="", file=stdout or sys.stdout)
            print(err, end="", file=sys.stderr)
        return subprocess.CompletedProcess(command, done.returncode, out.encode())

    def run(program, options="", arguments="", forked=True):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        with monkeypatch.context() as patch:
            if forked:
                patch.setattr("iris_core.cli.check._ended", fork)
            try:
                status = main(["check", *options.split(), str(path), *arguments.split()])
            except SystemExit as error:  # of wrong usage
                status = error.code
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run
