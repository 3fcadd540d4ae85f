"""Imports stay light, and what is imported is required."""

import ast
import sys

import forked
from packaging.requirements import Requirement
from tables import table

from .workspace import FOLDERS, project, sources


def entry_point_modules():
    """Modules of all entry points, scripts included; torch's own are asked for where it is imported already."""
    for folder in FOLDERS:
        about = project(folder)
        groups = {name: each for name, each in about.get("entry-points", {}).items() if name.startswith("iris.")}
        for points in (about.get("scripts", {}), *groups.values()):
            yield from (value.partition(":")[0] for value in points.values())


LIGHT = sorted({*FOLDERS, *entry_point_modules(), "iris_core.errors", "iris_core.testing", "iris_core.types"})
PROGRAM = f"""
import sys
import {", ".join(LIGHT)}
heavy = {{"torch", "triton", "numpy"}}
print([*sys.modules.keys() & {{*heavy, "pydantic", "pytest", "iris_core.testing.conformance"}}])
from iris_core.bench import *
from iris_core.cli import main
from iris_core.registry import default_registry
from iris_core.registry.select import select
from iris_core.settings import load_settings
from iris_core.types import DeviceTarget, DeviceType
assert main(["plugins"]) == main(["config"]) == 0
select(default_registry(), load_settings(), targets=[DeviceTarget(DeviceType.CPU)])
print({{"iris_triton._plugin", "iris_triton.settings"}} <= sys.modules.keys())
print([*sys.modules.keys() & heavy])
"""


def test_light_modules_and_listing_and_choosing_plugins_import_nothing_heavy():
    light, *_, is_listed, chosen = forked.fresh(PROGRAM).stdout.splitlines()
    assert (light, is_listed, chosen) == ("[]", "True", "[]")


def imported(*paths):
    """Top-level names of modules that files import at run time, whenever that is."""
    waiting, found = [ast.parse(path.read_text()) for path in paths], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if for_types else ast.iter_child_nodes(node)
    return found


# Brought by torch's GPU wheels, or by ROCm's: never required (test_who_requires_whom_and_nobody_triton).
OF_TORCH = {"triton", "cuda"}
DISTRIBUTIONS = {"hip": "hip-python"}  # where the name is another one
# Found by entry point: with a backend, `Iris()` has to find an allocator, too.
PLUGINS = {"iris_triton": {"iris-allocators"}}


@table("folder", FOLDERS)
def test_what_is_imported_is_required(folder):
    about = project(folder)
    names = imported(*sources(folder)) - set(sys.stdlib_module_names) - OF_TORCH - {folder}
    needed = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in names}
    extras = [text for texts in about.get("optional-dependencies", {}).values() for text in texts]
    required = {Requirement(text).name for text in about["dependencies"]}
    offered = {Requirement(text).name for text in extras}
    assert needed - required - offered == set()
    assert required - needed == PLUGINS.get(folder, set()), "required and not imported"
