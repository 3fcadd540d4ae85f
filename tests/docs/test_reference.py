"""The reference has everything public, and what pages name is there: modules and what is in them, files, variables."""

import importlib.util
import pkgutil
import re
import sys
import tomllib

from tables import table

from iris_core.settings import IrisSettings

from .excerpts import ROOT, links

sys.path.insert(0, str(ROOT / "docs"))
import inventory
import settings_tables


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


PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
HOLDERS = {
    "ctx": ("iris_core.api:Iris", "iris_triton.context:DeviceContext"), "ctx.ccl": ("iris_core.ccl.api:Collectives",),
    "ctx.ops": ("iris_core.ops.api:Operations",), "ctx.heap": ("iris_core.heap.heap:SymmetricHeap",),
}  # fmt: skip
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
    for holder, name in re.findall(r"`(ctx(?:\.ccl|\.ops|\.heap)?)\.(\w+)\(", PAGES[page]):
        assert any(hasattr(pkgutil.resolve_name(each), name) for each in HOLDERS[holder]), f"{holder}.{name}"
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
