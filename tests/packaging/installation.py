"""Wheels of the distributions, and environments that have nothing but wheels: no checkout, no editable installation."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from .workspace import FOLDERS, ROOT, project

EXAMPLE = ROOT / "examples" / "plugins" / "iris_example_backend"

_LEFTOVERS = shutil.ignore_patterns("*.egg-info", "build", "dist", "__pycache__", ".pytest_cache")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_TIMEOUT_S = 300


def build_wheels(folder):
    """Build wheels of the four distributions and of the example from copies of their sources; no index is asked.

    Args:
        folder: an empty folder.

    Returns:
        The folder that has the wheels.
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
    """A virtual environment with wheels, and with what other people's distributions are installed here.

    Args:
        folder: an empty folder.
        wheels: folder with wheels.
        requirements: what to install from them; pip finds what they require, or fails.
    """

    def __init__(self, folder, wheels, *requirements):
        self.folder = folder
        venv.create(folder / "venv", symlinks=True)
        self.scripts = folder / "venv" / "bin"
        where = sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")})
        (pathlib.Path(where) / "third_party.pth").write_text(f"{_third_party(folder / 'third_party')}\n")
        self.site_packages = pathlib.Path(where)
        python = ("--python", self.scripts / "python")
        command = ("install", "--no-index", "--find-links", wheels, *requirements)
        done = subprocess.run(
            [*_PIP, *python, *command], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, program, *arguments, **variables):
        """Run one of the environment's programs outside the checkout, with none of this process's settings.

        Args:
            program: "python", "iris", ...
            *arguments: its arguments.
            **variables: environment variables of it.

        Returns:
            The finished process.
        """
        ours = ("IRIS_", "PYTHON", "PYTEST_", "COV_", "COVERAGE_", "VIRTUAL_ENV")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", **variables}
        return subprocess.run(
            [self.scripts / program, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environ,
            timeout=_TIMEOUT_S,
        )


def _third_party(folder):
    """A folder with links to everything that is installed here but Iris: its editable copies must not be found."""
    folder.mkdir()
    names = {project(each)["name"].replace("-", "_") for each in FOLDERS}
    for root in map(pathlib.Path, sys.path):
        if not root.name.endswith("-packages") or not root.is_dir():
            continue
        for entry in root.iterdir():
            ours = entry.name.startswith(("__editable__", "iris_")) or entry.name.partition("-")[0] in names
            if not ours and entry.suffix != ".pth" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder
