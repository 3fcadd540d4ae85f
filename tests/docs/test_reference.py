"""The reference has everything public: names, members, errors, hooks, settings, commands.  Needs no Sphinx."""

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest

from iris_core import hooks
from iris_core.cli import COMMANDS, build_parser

from .excerpts import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import inventory
import settings_tables


def test_every_public_name_has_a_place():
    assert inventory.lacking(inventory.objects()) == [], "say where, in docs/reference"
    names = ["Iris", "errors.HeapError"]
    names = [*(f"iris_core.{name}" for name in names), "iris_triton.load", "iris_triton.rocm_iris.x.gather"]
    for name in names:  # one that lacks is noticed
        assert name in inventory.lacking(inventory.objects() - {name, inventory.home(name)})
    member = "iris_triton.DeviceContext.put_signal"
    assert inventory.lacking(inventory.objects() - {member}) == [member]


def test_what_is_shown_exists_and_says_something():
    """Sphinx leaves out what has no docstring."""
    assert len(inventory.shown()) > 250
    for name in inventory.shown():
        assert inventory.is_defined(inventory.home(name)), name
        node = inventory.definition(inventory.home(name))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            assert ast.get_docstring(node), name


def test_a_module_with_public_names_is_public():
    """Also the packages that load their names on first use; and what runs says the same as the sources."""
    for module in ("iris_core", "iris_core.bench", "iris_triton", "iris_gluon", "iris_triton.tiles"):
        names = importlib.import_module(module).__all__
        assert {f"{module}.{name}" for name in names if name != "__version__"} <= set(inventory.public_names())


def test_errors_hooks_and_what_users_get_have_a_place():
    """The latter are classes in the annotations of what is public."""
    homes = {inventory.home(name) for name in inventory.shown()}
    for names, some in (
        (set(inventory.errors()), {"iris_triton.interpreter.errors.DeadlockError"}),
        (inventory.annotated(), {"iris_core.dispatch.choice.Explanation", "iris_core.tracing.events.Events"}),
    ):
        assert some <= names <= homes
    assert len(inventory.errors()) > 25
    every = {*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS, *hooks.OBSERVER_HOOKS}
    assert every <= {name.rpartition(".")[2] for name in inventory.objects() if name.startswith("iris_core.hooks.")}


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


# -- with Sphinx -----------------------------------------------------------------------------------------------------
needs_sphinx = pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="Sphinx is not installed: make docs")
WRITTEN = """
Does it; IRIS_HOST__ begins a name.

As in:

    f(x)

| a | b |
|---|---|
| 1 | 2 |

Example:
    kernel[grid](x)
    kernel[grid](y)
"""
READ = """
Does it; IRIS\\_HOST\\_\\_ begins a name.

As in::

    f(x)

.. list-table::
   :header-rows: 1

   * - a
     - b
   * - 1
     - 2

Example:
    ::

        kernel[grid](x)
        kernel[grid](y)
"""


@needs_sphinx
def test_docstrings_become_what_sphinx_reads():
    import reference_tools

    lines = WRITTEN.strip().splitlines()
    reference_tools.tidy(None, "function", "f", None, None, lines)
    assert lines == READ.strip().splitlines()


@needs_sphinx
def test_a_page_with_a_wrong_link_is_an_error(tmp_path):
    """What `make docs` relies on: warnings end the build."""
    (tmp_path / "index.md").write_text("# Title\n\n[nowhere](nowhere.md)\n")
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\n')
    rule = re.search(r"-m sphinx (.*) -d", (ROOT / "Makefile").read_text()).group(1).split()
    command = [sys.executable, "-m", "sphinx", *rule, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
