"""Wheels of the distributions, and environments that have nothing but wheels: no checkout, no editable installation."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from .workspace import FOLDERS, ROOT

EXAMPLE = ROOT / "examples" / "plugins" / "iris_example_backend"

_LEFTOVERS = shutil.ignore_patterns("*.egg-info", "build", "dist", "__pycache__", ".pytest_cache")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_TIMEOUT_S = 300


def build_wheels(folder):
    """Build wheels of the four distributions and of the example in an empty folder; returns the folder that has them.

    From copies of their sources; no index is asked.
    """
    for module in ("pip", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed, so no wheel can be built")
    copies = []
    for source in (*(ROOT / name for name in FOLDERS), EXAMPLE):
        copies.append(folder / "sources" / source.name)
        shutil.copytree(source, copies[-1], ignore=_LEFTOVERS)  # building writes next to the sources
    wheels = folder / "wheels"
    command = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", wheels, *copies)
    done = subprocess.run([*_PIP, *command], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return wheels


class Environment:
    """A virtual environment with our wheels, in front of the distributions of other people that are installed here.

    Args:
        folder: an empty folder.
        wheels: folder with wheels; what they require must be installed, or be among them.
    """

    def __init__(self, folder, wheels):
        self.folder = folder
        venv.create(folder / "venv", symlinks=True)
        self.scripts = folder / "venv" / "bin"
        self.site_packages = pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
        (self.site_packages / "third_party.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # this environment alone
        names = (wheel.name.partition("-")[0] for wheel in wheels.glob("*.whl"))
        options = ("--no-compile", "--no-index", "--find-links", wheels, "--no-deps", "--force-reinstall")
        install = ("install", *options, *names)
        for command in (install, ("check",)):
            run = [*_PIP, "--python", self.scripts / "python", *command]
            done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environ)
            assert done.returncode == 0 or command == ("check",), done.stdout + done.stderr
        self.problems = done.stdout.splitlines()

    def output(self, program, *arguments, **variables):
        """What one of the environment's programs prints; it must succeed.

        It runs outside the checkout, with none of this process's settings.

        Args:
            program: "python", "iris", or the source of a program.
            *arguments: its arguments.
            **variables: environment variables of it.
        """
        if "\n" in program:
            (self.folder / "program.py").write_text(program)
            program, arguments = "python", ("program.py", *arguments)
        ours = ("IRIS_", "PYTHON", "PYTEST_", "COV_", "COVERAGE_", "VIRTUAL_ENV")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", **variables}
        command = [self.scripts / program, *map(str, arguments)]
        options = {"capture_output": True, "text": True, "cwd": self.folder, "env": environ, "timeout": _TIMEOUT_S}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
