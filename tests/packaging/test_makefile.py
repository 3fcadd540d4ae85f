"""Which Python `make gpu-test` takes, and what it says where there is none yet."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Cannot import what is in LACKING, nor make environments; everything else it does.
PYTHON = """#!/bin/sh
for module in $LACKING; do case "$2" in *"import"*" $module"*) exit 1;; esac; done
test "$1" != -m
"""


def gpu_python(tmp_path, lacking):
    """Run `make gpu-python` with a Python that lacks modules; returns exit status, what it chose and what it said."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "gpu-python", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    environ = {"PATH": "/usr/bin:/bin", "LACKING": lacking}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.replace(str(tmp_path), "")


def test_a_python_with_everything_is_taken_and_what_another_lacks_is_named_before_the_index_is_asked(tmp_path):
    assert gpu_python(tmp_path, "") == (0, str(tmp_path / "python"), "")
    status, chosen, said = gpu_python(tmp_path, "pluggy setuptools")
    assert status != 0
    assert chosen == ""
    assert said.startswith("/python cannot import: pluggy setuptools. /venv is made from the package index instead")
