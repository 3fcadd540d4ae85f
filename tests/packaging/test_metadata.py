"""What is installed agrees with the pyproject files, and the four distributions with each other.

Entry points and requirements are frozen at installation, also of an editable one: after a change of a pyproject file
these tests fail until `pip install -e` has run again.
"""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from iris_core.registry import Registry
from iris_core.types import PluginKind

from .workspace import FOLDERS, ROOT, project, pyproject

VERSION = project("iris_core")["version"]


def requirements(texts):
    return sorted(str(Requirement(text)) for text in texts)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_and_versions_agree(folder):
    about = project(folder)
    assert about["name"] == folder.replace("_", "-")
    assert about["version"] == VERSION
    assert importlib.import_module(folder).__version__ == VERSION
    assert importlib.metadata.version(about["name"]) == VERSION


@pytest.mark.parametrize("folder", FOLDERS)
def test_installed_entry_points_are_those_of_pyproject(folder):
    about = project(folder)
    declared = {("console_scripts", name, value) for name, value in about.get("scripts", {}).items()}
    for group, points in about.get("entry-points", {}).items():
        declared |= {(group, name, value) for name, value in points.items()}
    installed = importlib.metadata.distribution(about["name"]).entry_points
    assert {(point.group, point.name, point.value) for point in installed} == declared


@pytest.mark.parametrize("folder", FOLDERS)
def test_installed_requirements_are_those_of_pyproject(folder):
    about = project(folder)
    declared = list(about["dependencies"])
    for extra, texts in about.get("optional-dependencies", {}).items():
        declared += [f'{text}; extra == "{extra}"' for text in texts]
    installed = importlib.metadata.requires(about["name"])
    assert requirements(installed) == requirements(declared)


@pytest.mark.parametrize("folder", FOLDERS)
def test_siblings_are_pinned_to_this_minor_version(folder):
    names = {project(each)["name"] for each in FOLDERS}
    version = Version(VERSION)
    pin = f">={version.major}.{version.minor}.0,<{version.major}.{version.minor + 1}"
    for text in project(folder)["dependencies"]:
        requirement = Requirement(text)
        if requirement.name in names:
            assert requirement.specifier == Requirement(f"x{pin}").specifier, text


def test_who_requires_whom():
    names = {project(each)["name"] for each in FOLDERS}
    graph = {
        project(folder)["name"]: {Requirement(text).name for text in project(folder)["dependencies"]} & names
        for folder in FOLDERS
    }
    assert graph == {
        "iris-core": set(),
        "iris-allocators": {"iris-core"},
        "iris-triton": {"iris-core", "iris-allocators"},
        "iris-gluon": {"iris-core", "iris-triton"},
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_triton_is_never_a_hard_requirement(folder):
    """ROCm's Triton is another distribution; torch's GPU wheels bring the right one."""
    assert "triton" not in {Requirement(text).name for text in project(folder)["dependencies"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_common_metadata(folder):
    about = project(folder)
    assert about["requires-python"] == ">=3.11"
    assert about["license"] == {"text": "MIT"}
    assert "Typing :: Typed" in about["classifiers"]
    assert (ROOT / folder / about["readme"]).is_file()
    assert (ROOT / folder / "src" / folder / "py.typed").is_file()
    assert pyproject(folder)["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_with_modules_is_a_package(folder):
    """setuptools' package search leaves out folders without __init__.py."""
    source = ROOT / folder / "src" / folder
    lost = {path.parent for path in source.rglob("*.py") if not (path.parent / "__init__.py").is_file()}
    assert not lost


def test_the_root_has_no_project_table_and_knows_all_members():
    root = pyproject(".")
    assert "project" not in root
    assert root["tool"]["uv"]["workspace"]["members"] == list(FOLDERS)


def test_every_declared_plugin_loads_under_its_name():
    declared = {
        (kind, name, project(folder)["name"])
        for folder in FOLDERS
        for kind in PluginKind
        for name in project(folder).get("entry-points", {}).get(kind.group, {})
    }
    registry = Registry()
    found = {(each.kind, each.name, each.distribution): each for each in registry.records()}
    assert declared
    for key in declared:
        record = registry.load(found[key])
        assert record.info.name == record.name
        assert record.info.summary
        assert registry.settings_class(record).__doc__
