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


def damage(info, file, what):
    """Put something else in the place of a distribution's file: bytes, a folder, a circle of links, or nothing."""
    (info / file).unlink()
    if what == "a folder":
        (info / file).mkdir()
    elif what == "a circle":
        (info / file).symlink_to(file)
    elif what is not None:
        (info / file).write_bytes(what)


@table(("file", "what"), [
    ("METADATA", None), ("METADATA", "a folder"), ("METADATA", "a circle"), ("METADATA", b""),
    ("METADATA", bytes(range(256))), ("METADATA", b"Metadata-Version: 2.1\nVersion: 1.0\n"),
    ("METADATA", b"Name: iris bad\nVersion: 1.0\n"), ("METADATA", b"Metadata-Version: 2.1\nName: iris-bad\n"),
    ("METADATA", b"Name: iris-bad\nVersion: not a version\n"), ("METADATA", b"Name: iris-other\nVersion: 1.0\n"),
    ("entry_points.txt", b"[iris.allocators]\nbad\n"), ("entry_points.txt", b"[iris.allocators]\nbad = m\xff:plugin\n"),
    ("entry_points.txt", b"[iris.allocators]\nbad = 1 2 3:::\n"),
    ("entry_points.txt", b"[iris.allocators]\nbad = os:system\n"), ("entry_points.txt", b"[iris.allocators]\nbad =\n"),
    ("", "~ris_bad-1.0.dist-info"), ("", ".dist-info"),  # left by an installer, and a folder without a name
])  # fmt: skip
def test_a_damaged_distribution_is_listed_as_broken(site, file, what):
    info = site.install("iris-bad", entry_points=ABSENT)
    if file:
        damage(info, file, what)
    else:
        info.rename(info.with_name(what))
    site.provider("good")
    states = {record.name: record for record in site.registry().load_all()}
    assert states.pop("good").state is PluginState.LOADED
    (bad,) = states.values()
    assert (bad.kind, bad.state) == (ALLOCATOR, PluginState.BROKEN)
    assert f"IRIS_BLOCK={bad.name}" in bad.reason
    assert isinstance(bad.error, PluginLoadError)


@table("what", ["a folder", "a circle", "nothing that one may read"])
def test_entry_points_that_cannot_be_read_are_warned_about_once(site, log, monkeypatch, what):
    """Nothing tells whether they are Iris's."""
    log.clear()
    info, read_text = site.install("iris-bad", entry_points=ABSENT), pathlib.Path.read_text
    site.provider("good")

    def refuse(path, *args, **kwargs):  # root may read everything
        if path.is_relative_to(info):
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    if what.startswith("nothing"):
        monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    else:
        damage(info, "entry_points.txt", what)
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


INFO = "devices=frozenset({DeviceType.CPU}), provides=frozenset({Capability.REMOTE_LOAD_STORE})"


@table("how", [
    {"info": f"{INFO}, priority='high'"}, {"probe": "return Availability('yes')"},
    {"probe": "return Availability(False, 5)"},
])  # fmt: skip
def test_automatic_choice_warns_once_and_takes_another(site, log, how):
    """However many devices there are, and however often contexts are opened."""
    log.clear()
    site.provider("bad", **how)
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
