"""Wheels of the distributions, and environments that have nothing but wheels: no checkout, no editable installation."""

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .workspace import FOLDERS, ROOT, project

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
    """A virtual environment with wheels, and with those distributions of other people that they require.

    Args:
        folder: an empty folder.
        wheels: folder with wheels.
        requirements: what to install from them; pip finds what they require, or fails.
    """

    def __init__(self, folder, wheels, *requirements):
        self.folder = folder
        venv.create(folder / "venv", symlinks=True)
        self.scripts = folder / "venv" / "bin"
        self.site_packages = pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
        third_party = _third_party(folder / "third_party", requirements)
        (self.site_packages / "third_party.pth").write_text(f"{third_party}\n")
        python = ("--python", self.scripts / "python")
        command = [*_PIP, *python, "install", "--no-compile", "--no-index", "--find-links", wheels, *requirements]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # this environment alone
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr

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


_UNDECLARED = ("triton",)  # ROCm's has another name, so nobody requires it; users have it from torch's GPU wheels


def _third_party(folder, requirements):
    """A folder with links to other people's distributions: what the requirements lead to, and nothing else.

    So an import of what nobody requires fails there, though the package is installed here.
    """
    folder.mkdir()
    for distribution in _closure([*requirements, *_UNDECLARED]):
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "/") and not (folder / top).exists():
                (folder / top).symlink_to(pathlib.Path(distribution.locate_file(top)))
    return folder


def _closure(requirements):
    """The installed distributions, other people's, that requirements lead to; ours are read from their pyproject files.

    What is declared and not installed here is left out: pip then says that it is missing.
    """
    ours = {project(each)["name"]: project(each) for each in (*FOLDERS, EXAMPLE.relative_to(ROOT))}
    waiting = [Requirement(text) for text in requirements]
    seen, found = set(), {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        if (name, *sorted(extras)) in seen:
            continue
        seen.add((name, *sorted(extras)))
        if name in ours:
            about = ours[name]
            optional = about.get("optional-dependencies", {})
            texts = [*about["dependencies"], *(text for extra in requirement.extras for text in optional[extra])]
        else:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            texts = found[name].requires or ()
        for each in map(Requirement, texts):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(each)
    return found.values()
