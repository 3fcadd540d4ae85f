"""What new users do wrong: each is one line that says so, and no traceback."""

import os
import subprocess
import sys

import pytest

RUN = "import sys; from iris_core.cli import main; sys.exit(main(sys.argv[1:]))"
HIDE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else found(name, package)
sys.modules[{name!r}] = None  # an import raises ModuleNotFoundError
"""
OLD = """
import importlib.metadata
found = importlib.metadata.version
importlib.metadata.version = lambda name: "3.5.1" if name == "triton" else found(name)
"""


def run(tmp_path, *arguments, before="", **variables):
    """Status, and the lines on standard error, of `iris` in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")} | variables
    command = [sys.executable, "-c", before + RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr.splitlines(), done.stdout


MISTAKES = {
    "wrong option": (("doctor", "--jsn"), {}, "--jsn"),
    "wrong command": (("plugin",), {}, "did you mean plugins?"),
    "wrong file": (("bench", "compare", "nothing.json", "nothing.json"), {}, "nothing.json"),
    "no GPU": (("demo", "--device", "cuda"), {"CUDA_VISIBLE_DEVICES": ""}, "torch sees no GPU"),
    "wrong ranks": (("demo", "--ranks", "0"), {}, "--ranks must be at least 1"),
    "unknown plugin": (("demo", "--backend", "tritn"), {}, "triton"),
    "unknown allocator": (("demo", "--allocator", "vmm"), {}, "vmem"),
    "bad variable": (("config",), {"IRIS_HEAP_SIZE": "big"}, "IRIS_HEAP_SIZE='big'"),
    "wrong program": (("check", "nothing.py"), {}, "nothing.py"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_one_line(tmp_path, mistake):
    arguments, variables, said = MISTAKES[mistake]
    status, lines, out = run(tmp_path, *arguments, **variables)
    assert (status in (1, 2), out) == (True, "")
    assert len(lines) == 1
    assert said in lines[0]


def test_no_permission_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ("tune", "--device", "cpu", "--ranks", "2", "--out", "file/table.json")
    status, lines, out = run(tmp_path, *arguments)
    assert (status, out, len(lines)) == (1, "", 1)
    assert "file" in lines[0]


WITHOUT = {
    "torch": (HIDE.format(name="torch"), "torch is not installed for"),
    "triton": (HIDE.format(name="triton"), "Triton is not installed"),
    "old triton": (OLD, "triton 3.5.1 is too old"),
}


@pytest.mark.parametrize("lacking", WITHOUT)
def test_an_environment_that_is_not_complete_is_named_with_what_to_install(tmp_path, lacking):
    before, said = WITHOUT[lacking]
    status, lines, out = run(tmp_path, "demo", "--device", "cpu", before=before)
    assert (status, out, len(lines)) == (1, "", 1)
    assert said in lines[0]
    assert "install" in lines[0]
