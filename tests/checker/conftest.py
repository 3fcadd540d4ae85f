"""Fixtures of the checker's tests: `iris check` in the tests' own process; only the program that it runs has one."""

import os
import pathlib
import runpy
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from iris_core.cli import main

FOLDER = pathlib.Path(__file__).parent


def _program(command, env, paths):
    """Be a process that runs a program; its output goes to files."""
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture
def check(monkeypatch, capfd, tmp_path, server):
    """Runs `iris check` on the text of a program, which can import the modules of this folder.

    Its process is forked from one that has imported what it needs, or is really started.
    """
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")

    def fork(command, env, stdout=None, stderr=None):
        paths = [str(tmp_path / name) for name in ("out", "out" if stderr == subprocess.STDOUT else "err")]
        process = server.Process(target=_program, args=(command, env, paths))
        process.start()
        process.join()
        texts = [(tmp_path / name).read_text() if (tmp_path / name).exists() else "" for name in ("out", "err")]
        for path in {*paths}:
            os.unlink(path)
        if stdout != subprocess.PIPE:
            print(texts[0], end="", file=stdout or sys.stdout)
            print(texts[1], end="", file=sys.stderr)
        return subprocess.CompletedProcess(command, process.exitcode, texts[0].encode())

    def run(program, options="", arguments="", forked=True):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        with monkeypatch.context() as patch:
            if forked:
                patch.setattr("iris_core.cli.check.subprocess.run", fork)
            try:
                status = main(["check", *options.split(), str(path), *arguments.split()])
            except SystemExit as error:  # of wrong usage
                status = error.code
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run
