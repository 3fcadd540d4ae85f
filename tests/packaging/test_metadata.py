"""What is installed agrees with the pyproject files, and the four distributions with each other.

Entry points and requirements are frozen at installation, also of an editable one: after a change of a pyproject file
these tests fail until `pip install -e` has run again.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re

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


def test_the_extra_for_cpus_is_the_pair_of_the_demo_and_of_torch_s_own_metadata():
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    torch, triton = (Version(line.partition("==")[2]) for line in pins)
    extra = {
        each.name: each.specifier for each in map(Requirement, project("iris_triton")["optional-dependencies"]["cpu"])
    }
    assert torch in extra["torch"]
    assert extra["triton"] == Requirement(f"triton=={triton}").specifier
    head, _, row = re.search(
        r"torch and triton, by .*? -->\n(.*?)<!-- end", (ROOT / "README.md").read_text(), re.DOTALL
    )[1].splitlines()
    required = dict(zip(re.findall(r"torch ([\d.]+)", head), re.findall("`(.*?)`", row), strict=True))
    assert required[f"{torch.major}.{torch.minor}"] == f"=={triton}"


def test_the_installed_torch_requires_what_the_readme_says():
    spec = importlib.util.spec_from_file_location("triton_versions", ROOT / "docs" / "triton_versions.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.required(importlib.metadata.requires("torch"))
    torch = Version(importlib.metadata.version("torch"))
    if not found:
        pytest.skip("this torch is for CPUs: it requires no Triton")
    assert f"| torch {torch.major}.{torch.minor} |" in (ROOT / "README.md").read_text()
    assert script.table({"2.0": found}) == f"| | torch 2.0 |\n|---|---|\n| requires triton | `{found}` |\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_long_description_stands_alone(folder):
    """It is read without the repository: it says what it is, how to begin, where it runs, and links to no file."""
    text = (ROOT / folder / "README.md").read_text()
    assert text.startswith(f"# {folder.replace('_', '-')}\n")
    assert "```python" in text
    assert "MIT licence" in text
    assert "](" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("folder", FOLDERS)
def test_common_metadata(folder):
    about = project(folder)
    assert about["requires-python"] == ">=3.11"
    assert (about["license"], about["license-files"]) == ("MIT", ["LICENSE"])
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(about["classifiers"])
    assert about["keywords"]
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
