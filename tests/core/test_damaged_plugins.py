"""Damaged distributions, and plugins whose code raises or says nonsense: reported, left out, harmless to others."""

import os
import pathlib
import sys

import forked
import pytest
from dist_info import provider_source
from table_files import table_file
from tables import table

from iris_core.errors import PluginError, PluginLoadError
from iris_core.registry import Registry
from iris_core.registry.select import select
from iris_core.settings import PluginSettings, load_settings
from iris_core.types import CreateRequest, DeviceTarget, DeviceType, PluginKind, PluginState

ALLOCATOR = PluginKind.ALLOCATOR
CPU, GPU = DeviceTarget(DeviceType.CPU), DeviceTarget(DeviceType.CUDA)
REQUEST = CreateRequest(target=CPU, rank=0, world_size=1, heap_nbytes=4096, settings=PluginSettings())
ABSENT = {"iris.allocators": {"bad": "there_is_no_such:plugin"}}


def rename_to(name):
    return lambda info: info.rename(info.with_name(name))


def metadata(content):
    return lambda info: (info / "METADATA").write_bytes(content)


def entry_points(content):
    return lambda info: (info / "entry_points.txt").write_bytes(content)


def folder_in_place_of(name):
    def damage(info):
        (info / name).unlink()
        (info / name).mkdir()

    return damage


def circle_in_place_of(name):
    def damage(info):
        (info / name).unlink()
        (info / name).symlink_to(name)

    return damage


LISTED = {
    "no METADATA": lambda info: (info / "METADATA").unlink(), "METADATA is a folder": folder_in_place_of("METADATA"),
    "METADATA is a circle of links": circle_in_place_of("METADATA"), "METADATA is empty": metadata(b""),
    "METADATA is no text": metadata(bytes(range(256))), "no Name": metadata(b"Metadata-Version: 2.1\nVersion: 1.0\n"),
    "a Name that is none": metadata(b"Name: iris bad\nVersion: 1.0\n"),
    "no Version": metadata(b"Metadata-Version: 2.1\nName: iris-bad\n"),
    "entry_points.txt without =": entry_points(b"[iris.allocators]\nbad\n"),
    "entry_points.txt is no text": entry_points(b"[iris.allocators]\nbad = m\xff:plugin\n"),
    "an entry that names nothing": entry_points(b"[iris.allocators]\nbad = 1 2 3:::\n"),
    "an entry that names a function": entry_points(b"[iris.allocators]\nbad = os:system\n"),
    "an entry without a value": entry_points(b"[iris.allocators]\nbad =\n"),
    "an invalid version, no module": metadata(b"Name: iris-bad\nVersion: not a version\n"),
    "a folder of another name": metadata(b"Name: iris-other\nVersion: 1.0\n"),
    "left by an installer": rename_to("~ris_bad-1.0.dist-info"), "a folder without a name": rename_to(".dist-info"),
}  # fmt: skip


@table("damage", LISTED.values())
def test_a_damaged_distribution_is_listed_as_broken(site, damage):
    damage(site.install("iris-bad", entry_points=ABSENT))
    site.provider("good")
    states = {record.name: record for record in site.registry().load_all()}
    assert states.pop("good").state is PluginState.LOADED
    (bad,) = states.values()
    assert (bad.kind, bad.state) == (ALLOCATOR, PluginState.BROKEN)
    assert f"IRIS_BLOCK={bad.name}" in bad.reason
    assert isinstance(bad.error, PluginLoadError)


@table("damage", [folder_in_place_of("entry_points.txt"), circle_in_place_of("entry_points.txt"), None])
def test_entry_points_that_cannot_be_read_are_warned_about_once(site, log, monkeypatch, damage):
    """Nothing tells whether they are Iris's."""
    log.clear()
    info, read_text = site.install("iris-bad", entry_points=ABSENT), pathlib.Path.read_text
    site.provider("good")

    def refuse(path, *args, **kwargs):  # root may read everything
        if path.is_relative_to(info):
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    if damage is None:
        monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    else:
        damage(info)
    assert [record.name for record in site.registry().load_all()] == ["good"]
    (warning,) = log.messages
    assert str(info) in warning


@table("strange", [None, 5, b"/tmp", "a\0b", pathlib.Path("/tmp"), "\udcff"])
def test_what_imports_ignore_on_the_path_is_ignored(site, monkeypatch, strange):
    site.provider("good")
    monkeypatch.setattr(sys, "path", [strange, *sys.path])
    assert "good" in Registry().names()


# -- plugins whose code raises, or says nonsense ----------------------------------------------------------------------
BODIES = [
    "raise SystemExit(3)", "import sys; sys.exit('stop')", "raise GeneratorExit", "raise StopIteration",
    "raise KeyError('inside')", "raise KeyboardInterrupt", "return None", "return 5",
    "raise type('Own', (Exception,), {'__str__': lambda self: 1 / 0})()",  # an error without a text
    "return type('Own', (), {'__repr__': lambda self: 1 / 0})()",  # and a wrong type without one
]  # fmt: skip


def with_hook(name, hook, body):
    """The source of a provider in which one hook is something else."""
    arguments = {"probe": "self, target", "create": "self, request"}.get(hook, "self")
    head = f"def iris_plugin_{hook}({arguments}):\n"
    text = provider_source(name)
    assert head in text
    return text.replace(head, f"{head}        {body}\n")


@table("hook", ["info", "settings", "probe", "create"])
@table("body", BODIES)
def test_whatever_a_hook_raises_or_returns_is_an_error_of_its_plugin_unless_it_is_an_interrupt(site, hook, body):
    site.provider("bad", source=with_hook("bad", hook, body))
    site.provider("good")
    registry = site.registry()
    record = registry.resolve(ALLOCATOR, "bad")
    calls = {
        "info": lambda: registry.load(record),
        "settings": lambda: registry.settings_class(record),
        "probe": lambda: registry.probe(record, CPU),
        "create": lambda: registry.create(record, REQUEST),
    }
    with pytest.raises((PluginError, KeyboardInterrupt)) as caught:
        calls[hook]()
    assert isinstance(caught.value, KeyboardInterrupt) == ("Interrupt" in body)
    if "Interrupt" in body:
        return
    assert "iris-bad" in str(caught.value)
    assert hook == "create" or f"iris_plugin_{hook}" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError) == ("KeyError" in body)
    broken = {each.name for each in registry.load_all() if each.state is PluginState.BROKEN}
    assert broken == ({"bad"} if hook != "create" or body == "return None" else set()), body


def test_an_interrupt_passes_while_a_plugin_is_imported(site):
    site.provider("bad", source="raise KeyboardInterrupt")
    registry = site.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.load(registry.resolve(ALLOCATOR, "bad"))


INFO = "devices=frozenset({DeviceType.CPU}), provides=frozenset({Capability.REMOTE_LOAD_STORE})"
BAD_SOURCES = {
    "a priority that is text": provider_source("bad", info=f"{INFO}, priority='high'"),
    "a priority that is no number": provider_source("bad", info=f"{INFO}, priority=float('nan')"),
    "a priority that is a bool": provider_source("bad", info=f"{INFO}, priority=True"),
    "a summary that is no text": provider_source("bad", info=INFO).replace("'a test'", "5"),
    "a name that is no text": provider_source("bad", info=INFO).replace("name='bad'", "name=5"),
    "provides that is a set": provider_source("bad", info=INFO.replace("frozenset({Capa", "set({Capa")),
    "an answer that is no bool": provider_source("bad", info=INFO, probe="return Availability('yes')"),
    "a reason that is no text": provider_source("bad", info=INFO, probe="return Availability(False, 5)"),
    "an info that raises": with_hook(
        "bad", "info", "return type('I', (PluginInfo,), {'api': property(exit)})('bad', 1, 2)"
    ),
    "an object that cannot be looked at": provider_source("bad")
    + "\nclass Odd:\n    def __dir__(self): exit(3)\nplugin = Odd()\n",
}


@table("source", BAD_SOURCES.values())
def test_automatic_choice_warns_once_and_takes_another(site, log, source):
    """However many devices there are, and however often contexts are opened."""
    log.clear()
    site.provider("bad", source=source)
    site.provider("good")
    site.provider("works", "BACKEND")
    registry = site.registry()
    for _ in range(2):
        plan = select(registry, load_settings(), targets=[GPU, CPU])
        assert (plan.allocator.name, plan.backend.name) == ("good", "works")
    assert registry.resolve(ALLOCATOR, "bad").state is PluginState.BROKEN
    (warning,) = log.messages
    assert "iris-bad 1.0" in warning
    assert "IRIS_BLOCK=bad" in warning


# -- all of it at once, on ranks --------------------------------------------------------------------------------------
PROGRAM = """
import iris_core

def job():
    with iris_core.Iris("1MiB") as ctx:
        x, out = ctx.full((64,), float(ctx.cur_rank + 1)), ctx.zeros(64)
        ctx.ccl.all_reduce(out, x)
        ctx.barrier()
        chosen = ctx.ccl.explain("all_reduce", out, x)
        return out.tolist() == [1.0] * 64, {each.name: each.reason for each in chosen.candidates if not each.ok}

if __name__ == "__main__":
    right, left_out = job()
    print(right, left_out.get("odd"))
"""
ODD_ALGORITHM = """
        class Odd:
            info, op, name = self.iris_plugin_info(), "all_reduce", "odd"
            cost = prepare = launch = print
            def supports(self, request):
                raise SystemExit(3)
        return Odd()"""


def test_a_rank_opens_and_computes_beside_all_of_it(site, tmp_path):
    (site.install("iris-gone", entry_points={"iris.backends": {"gone": "a:b"}}) / "METADATA").unlink()
    site.provider("high", info=f"{INFO}, priority='high'")
    site.provider("leaves", info=f"{INFO}, priority=10**9", probe="raise SystemExit(3)")
    site.provider("odd", "COLLECTIVE", create=ODD_ALGORITHM)
    site.provider("quits", "COLLECTIVE", create="raise SystemExit(3)")
    site.provider("unset", "COLLECTIVE", settings="type('S', (PluginSettings,), {'__init__': exit})")
    site.observer("watch", opened="raise SystemExit(3)")
    tables = tmp_path / "cache" / "ccl"
    for size in (0, -1, "2", None):
        table_file(tables, group_size=size)
    environ = os.environ | {"IRIS_CACHE_DIR": str(tmp_path / "cache")}
    done = forked.python(PROGRAM, environ=environ, path=[site.folder])
    assert done.stdout.splitlines() == ["True its `supports` raised SystemExit: 3"], done.stderr
    warned = [line for line in done.stderr.splitlines() if "WARNING" in line or "ERROR" in line]
    for name in ("iris_gone", "iris-high", "iris-leaves", "odd", "iris-quits", "'unset'", "iris-watch", *"0123"):
        word = f"{tables}/{name}.json" if name.isdecimal() else name
        assert sum(word in line for line in warned) == 1, (name, done.stderr)
