"""Fixtures of the checker's tests: `iris check` in the tests' own process; only the program that it runs has one."""

import pathlib
import textwrap
from types import SimpleNamespace

import pytest

from iris_core.cli import main

FOLDER = pathlib.Path(__file__).parent


@pytest.fixture
def check(monkeypatch, capfd, tmp_path):
    """Runs `iris check` on the text of a program, which can import the modules of this folder."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")

    def run(program, options="", arguments=""):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        try:
            status = main(["check", *options.split(), str(path), *arguments.split()])
        except SystemExit as error:  # of wrong usage
            status = error.code
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run
