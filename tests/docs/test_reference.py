"""The reference has everything public: names, members, errors, hooks, settings, commands.  Needs no Sphinx."""

import argparse
import importlib.util
import os
import re
import sys
import tomllib

from iris_core.cli import COMMANDS, build_parser

from .excerpts import ROOT

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
