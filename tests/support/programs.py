"""Programs as a reader runs them."""

import pathlib
import runpy
import sys

import jobs_examples
import pytest

import iris_core


@pytest.fixture
def run_program(pool, monkeypatch, capsys):
    """Returns a function (path, *arguments, device): run a script, with the pool's processes for `iris_core.run`.

    Everything else is as a reader has it: its arguments, the number of ranks that it asks for, what it prints.  Returns
    the lines.
    """

    def run(path, *arguments, device="cpu"):
        def on_pool(fn, num_ranks, *args):
            return pool.run(jobs_examples.call, num_ranks, str(path), fn.__name__, args, device)

        monkeypatch.setenv("IRIS_DEVICE", device)
        monkeypatch.setattr(iris_core, "run", on_pool)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "examples"))
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run
