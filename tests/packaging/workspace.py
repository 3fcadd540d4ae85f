"""Where the four distributions are, and what their pyproject files say."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("iris_core", "iris_allocators", "iris_triton", "iris_gluon")


def pyproject(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def project(folder):
    return pyproject(folder)["project"]


def sources(*folders):
    """All Python files of the distributions (default: all four), sorted."""
    return sorted(path for folder in folders or FOLDERS for path in (ROOT / folder / "src").rglob("*.py"))
