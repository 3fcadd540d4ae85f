"""What the tests of pages share."""

import runpy

import jobs_examples
import pytest

import iris_core


@pytest.fixture
def run_program(pool, monkeypatch, capsys):
    """Returns a function (path): run a program as python does, on CPU ranks of the pool; returns what it prints."""
    monkeypatch.setenv("IRIS_DEVICE", "cpu")

    def run(path):
        def on_pool(fn, num_ranks, *args):
            return pool.run(jobs_examples.call, num_ranks, str(path), fn.__name__, args, "cpu")

        monkeypatch.setattr(iris_core, "run", on_pool)
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run
