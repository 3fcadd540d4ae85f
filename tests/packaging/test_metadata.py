"""What is installed agrees with the pyproject files, and the four distributions with each other.

Entry points and requirements are frozen at installation, also of an editable one: after a change of a pyproject file
these tests fail until `pip install -e` has run again.
"""

import importlib.metadata
import re

from packaging.requirements import Requirement
from packaging.version import Version
from tables import table

from .workspace import FOLDERS, ROOT, project

VERSION = project("iris_core")["version"]


def requirements(texts):
    return sorted(str(Requirement(text)) for text in texts)


def names(folder):
    return {Requirement(text).name for text in project(folder)["dependencies"]}


@table("folder", FOLDERS)
def test_what_is_installed_is_what_pyproject_says(folder):
    about = project(folder)
    assert about["name"] == folder.replace("_", "-")
    assert about["version"] == importlib.import_module(folder).__version__ == VERSION
    installed = importlib.metadata.distribution(about["name"])
    assert installed.version == VERSION
    groups = {"console_scripts": about.get("scripts", {}), **about.get("entry-points", {})}
    points = {(group, name, value) for group, points in groups.items() for name, value in points.items()}
    assert {(point.group, point.name, point.value) for point in installed.entry_points} == points
    declared = list(about["dependencies"])
    for extra, texts in about.get("optional-dependencies", {}).items():
        declared += [f'{text}; extra == "{extra}"' for text in texts]
    assert requirements(installed.requires) == requirements(declared)


def test_who_requires_whom_and_nobody_triton():
    """Siblings of this minor version; ROCm's Triton has another name, and torch's GPU wheels bring the right one."""
    ours = {project(folder)["name"] for folder in FOLDERS}
    assert {folder: names(folder) & ours for folder in FOLDERS} == {
        "iris_core": set(), "iris_allocators": {"iris-core"}, "iris_triton": {"iris-core", "iris-allocators"},
        "iris_gluon": {"iris-core", "iris-triton"},
    }  # fmt: skip
    version = Version(VERSION)
    pin = Requirement(f"x>={version.major}.{version.minor}.0,<{version.major}.{version.minor + 1}").specifier
    for folder in FOLDERS:
        assert "triton" not in names(folder)
        for requirement in map(Requirement, project(folder)["dependencies"]):
            assert requirement.name not in ours or requirement.specifier == pin, requirement


def test_the_extra_for_cpus_is_the_pair_of_the_demo_and_of_torch_s_own_metadata():
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    torch, triton = (Version(line.partition("==")[2]) for line in pins)
    extras = map(Requirement, project("iris_triton")["optional-dependencies"]["cpu"])
    extra = {each.name: each.specifier for each in extras}
    assert torch in extra["torch"]
    assert extra["triton"] == Requirement(f"triton=={triton}").specifier
    readme = (ROOT / "README.md").read_text()
    head, _, row = re.search(r"torch and triton, by .*? -->\n(.*?)<!-- end", readme, re.DOTALL)[1].splitlines()
    required = dict(zip(re.findall(r"torch ([\d.]+)", head), re.findall("`(.*?)`", row), strict=True))
    assert required[f"{torch.major}.{torch.minor}"] == f"=={triton}"
