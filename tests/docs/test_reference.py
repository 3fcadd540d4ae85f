"""The reference has everything public, and what pages name is there: modules and what is in them, files, variables."""

import argparse
import importlib.util
import os
import re
import sys
import tomllib

from tables import table

from iris_core.cli import COMMANDS, build_parser
from iris_core.settings import IrisSettings

from .excerpts import ROOT, links

sys.path.insert(0, str(ROOT / "docs"))
import inventory
import settings_tables


def test_every_public_name_has_a_place():
    """Hooks, errors and classes in annotations, too; that Sphinx finds what is shown, `make docs` checks."""
    assert inventory.lacking(inventory.objects()) == [], "say where, in docs/reference"
    names = ["Iris", "errors.HeapError"]
    names = [*(f"iris_core.{name}" for name in names), "iris_triton.load", "iris_triton.rocm_iris.x.gather"]
    for name in names:  # one that lacks is noticed
        assert name in inventory.lacking(inventory.objects() - {name, inventory.home(name)})
    member = "iris_triton.DeviceContext.put_signal"
    assert inventory.lacking(inventory.objects() - {member}) == [member]


def test_every_setting_is_in_a_table():
    """Every plugin that the distributions declare, and every class of settings in the sources."""
    directive = r"^\.\. iris-settings:: (\S+)(?: (\S+))?$"
    shown = {plugin: cls for cls, plugin in re.findall(directive, inventory.pages(), re.MULTILINE)}
    declared = {""}
    for package in inventory.PACKAGES:
        groups = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"].get("entry-points", {})
        declared |= {name for group, names in groups.items() if group.startswith("iris.") for name in names}
    assert set(shown) == declared
    classes = {inventory.home(name) for name in inventory.public_names() if name.endswith("Settings")}
    assert classes - {"iris_core.settings.PluginSettings"} == set(shown.values())
    for plugin, cls in shown.items():
        module, _, name = cls.rpartition(".")
        fields = vars(importlib.import_module(module))[name].model_fields
        rows = settings_tables.rows(cls, plugin)
        prefix = f"IRIS_{plugin.upper()}__" if plugin else "IRIS_"
        assert [row[0] for row in rows] == [f"{prefix}{field.upper()}" for field in fields]
        assert all(each for row in rows for each in row), "every setting has a type, a default and a description"


def test_tables_do_not_depend_on_the_environment(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "3GiB")
    monkeypatch.setenv("IRIS_VMEM__GRANULE", "nonsense")
    assert "1.0 GiB" in settings_tables.rows("iris_core.settings.IrisSettings")[0]
    assert settings_tables.rows("iris_allocators.settings.VmemSettings", "vmem")[0][2] == "unset"
    assert os.environ["IRIS_HEAP_SIZE"] == "3GiB"


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def test_the_command_line_is_made_from_its_parser():
    (options,) = [options for kind, _, options in inventory.directives() if kind == "sphinx_argparse_cli"]
    assert ":module: iris_core.cli" in options
    assert f":func: {build_parser.__name__}" in options
    found = list(parsers(build_parser()))
    assert {parser.prog.split()[1] for parser in found if " " in parser.prog} == set(COMMANDS)
    for parser in found:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help for choice in action._choices_actions}
                assert set(helps) == set(action.choices), parser.prog
                assert all(helps.values()), parser.prog
            else:
                assert action.help or action.metavar, f"{parser.prog}: {action.dest} is not explained"


# -- names, files and links -------------------------------------------------------------------------------------------
sys.path.insert(0, str(ROOT / "docs"))

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
OTHERS = ("IRIS_EXAMPLE", "IRIS_MY", "IRIS_SIMULATION", "IRIS_HEAP_BASES_PREFIX")  # of examples, of AMD's Iris


def is_there(name):
    """Whether a dotted name is a module of ours, something in one, or a member of a class."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:count]), parts[count:]
        if module not in inventory.sources():
            continue
        source = inventory.sources()[module]
        if not rest:
            return True
        if rest[0] not in {*source.defined, *source.imported, *source.public}:
            return False
        return len(rest) == 1 or rest[1] in inventory.attributes(inventory.home(f"{module}.{rest[0]}"))
    return False


@table("page", PAGES)
def test_names_files_and_links(page):
    assert not is_there("iris_core.heap.heap.SymmetricHeap.teleport")
    for name in set(re.findall(r"(?<![\w/.-])(iris_(?:core|triton|gluon|allocators)(?:\.\w+)+)", PAGES[page])):
        assert is_there(name), name
    for name in set(re.findall(r"`((?:tests|examples|benchmarks|docs)/[\w/.-]+\w/?)`", PAGES[page])):
        assert (ROOT / name).exists(), name
    for link in links(PAGES[page]):
        assert ((ROOT / page).parent / link).exists(), link


def test_variables():
    known = {f"IRIS_{name.upper()}" for name in IrisSettings.model_fields}
    for kind, argument, _ in inventory.directives():
        if kind == "iris-settings":
            plugin = re.search(rf"{re.escape(argument)} (\w+)", inventory.pages())
            known |= {row[0] for row in settings_tables.rows(argument, plugin.group(1) if plugin else "")}
    for page, text in PAGES.items():
        for name in set(re.findall(r"\bIRIS_[A-Z]\w*[A-Z]\b", text)):
            assert name in known or name.startswith(OTHERS), f"{page}: {name}"
