"""The registry, with distributions on a temporary path, some of them damaged."""

import re
import sys

import forked
import pytest
from dist_info import provider_source
from tables import raises, says, table

from iris_core import errors
from iris_core.hooks import hookimpl
from iris_core.registry import MAY_BE_WATCHED, default_registry, notify
from iris_core.registry.records import REGISTERED
from iris_core.settings import PluginSettings
from iris_core.types import PLUGIN_API, CreateRequest, DeviceTarget, DeviceType, PluginKind, PluginState

ALLOCATOR, BACKEND, OBSERVER = PluginKind.ALLOCATOR, PluginKind.BACKEND, PluginKind.OBSERVER
CPU = DeviceTarget(DeviceType.CPU)
REQUEST = CreateRequest(target=CPU, rank=0, world_size=1, heap_nbytes=4096, settings=PluginSettings())
ABSENT = {"iris.allocators": {"bad": "there_is_no_such:plugin"}}
HOOK = "from iris_core.hooks import hookimpl\nclass P:\n    @hookimpl\n    def {}: yield\nplugin = P()\n"
CPU_ONLY = "devices=frozenset({DeviceType.CPU})"


def test_discovery_imports_nothing_and_reads_all_four_groups_and_no_others(site):
    module = site.provider("mine")
    points = {"iris.allocators": {"a": "m:x"}, "iris.backends": {"b": "m:x"}, "iris.collectives": {"c": "m:x"}}
    points |= {"iris.plugins": {"o": "m:x"}, "iris.unknown": {"u": "m:x"}, "console_scripts": {"s": "m:x"}}
    site.install("iris-all", entry_points=points)
    records = site.registry().records()
    found = [f"{record.kind.value} {record.name}" for record in records]
    assert found == ["allocator a", "allocator mine", "backend b", "collective c", "observer o"]
    mine = records[1]
    assert (mine.distribution, mine.version, mine.entry_point) == ("iris-mine", "1.0", f"{module}:plugin")
    assert (mine.state, mine.api) == (PluginState.DISCOVERED, "")
    assert module not in sys.modules


def source(**change):
    return provider_source(**{"name": "bad", **change})


@table(("text", "key", "cause"), [
    ("import there_is_no_such_module", "any", ModuleNotFoundError), ("def plugin(:", "any", SyntaxError),
    ("raise RuntimeError('at import')", "any", RuntimeError), ("raise SystemExit(3)", "any", SystemExit),
    ("other = 1", "any", AttributeError), ("plugin = object()", "registry.no hook", None),
    *((each, "registry.no instance", None) for each in ("plugin = None", "class plugin: pass")),
    (HOOK.format("iris_plugin_inof(self)"), "registry.misspelt", None),
    (HOOK.format("iris_plugin_probe(self, device)"), "registry.parameter", ...),
    (HOOK.format("iris_plugin_info(self)"), "registry.incomplete", None),
    (HOOK.format("iris_opened(self)"), "registry.other kind", None),
    (HOOK.format("iris_plugin_info(self)").replace("@hookimpl", "@hookimpl(wrapper=True)"), "registry.wrapper", None),
    (source(name="other"), "registry.other name", None), (source(kind="BACKEND"), "registry.group", None),
    (source(info="devices=frozenset()"), "registry.no device", None),
    (source(info="devices={'cpu'}"), "registry.devices", None), (source(info="api='1.0'"), "registry.version", None),
    *((source(info=f"{CPU_ONLY}, priority={each}"), "registry.priority", None) for each in ("float('nan')", "True")),
    (source(info=CPU_ONLY).replace("'a test'", "5"), "registry.summary", None),
    (source(info=CPU_ONLY).replace("name='bad'", "name=5"), "registry.letters", None),
    (source(info=f"{CPU_ONLY}, provides={{Capability.GROWTH}}"), "registry.provides", None),
    (source(info=f"{CPU_ONLY}, demos=frozenset({{1}})"), "registry.demos", None),
    (f"{source()}\nclass Odd:\n    def __dir__(self): exit(3)\nplugin = Odd()\n", "any", SystemExit),
    (source().replace("return PluginInfo(", "return type('I', (PluginInfo,), {'api': property(exit)})("), "any", ...),
])  # fmt: skip
def test_a_plugin_that_is_not_right_is_broken_and_no_other(site, text, key, cause):
    site.provider("bad", source=text)
    site.provider("good")
    registry = site.registry()
    bad = registry.resolve(ALLOCATOR, "bad")
    for _ in range(2):
        with raises(errors.PluginLoadError, key, "registry.bad", other="other") as caught:
            registry.load(bad)
        assert caught.value is bad.error
    assert cause is ... or isinstance(caught.value.__cause__, cause or type(None))
    for names in (["bad"], []):  # which heals nothing
        registry.block(names)
    assert (bad.state, bad.reason) == (PluginState.BROKEN, str(caught.value))
    assert registry.load(registry.resolve(ALLOCATOR, "good")).state is PluginState.LOADED


@table(("api", "key"), [
    (PLUGIN_API, ""), ((PLUGIN_API[0], PLUGIN_API[1] + 1), "registry.upgrade"), ((PLUGIN_API[0] - 1, 9), "names"),
])  # fmt: skip
def test_the_plugin_api_is_checked(site, api, key):
    site.provider("mine", info=f"api={api}, {CPU_ONLY}")
    registry = site.registry()
    (record,) = registry.records()
    if not key:
        assert registry.load(record).api == f"{api[0]}.{api[1]}"
        return
    with raises(errors.PluginAPIVersionError, key, name="0.9"):
        registry.load(record)
    assert record.state is PluginState.INCOMPATIBLE


def test_a_misspelt_block_is_told(site, log):
    site.provider("mine")
    site.registry(block=["mime"])
    assert re.search(says("names", "mean", name="'mime'", near="mine"), log.text)


@table(("kind", "name", "key", "close"), [
    (ALLOCATOR, "rnig", "any", ("ring",)), (BACKEND, "triton", "registry.to install", ()),
    (ALLOCATOR, "ring@iris-two", "any", ("ring@iris-ring", "tree@iris-tree")), (BACKEND, "thing", "registry.point", ()),
])  # fmt: skip
def test_not_found_lists_what_is_there_and_says_how_to_install(site, kind, name, key, close):
    site.provider("ring")
    site.provider("tree")
    with raises(errors.PluginNotFoundError, key) as caught:
        site.registry().resolve(kind, name)
    assert caught.value.close_matches == close


def noted():
    """The object of a plugin that nothing installs."""
    names = {}
    create = "from unittest.mock import Mock; return Mock(world_size=request.world_size)"
    exec(provider_source("noted", create=create), names)
    return names["plugin"]


class Nameless:
    @hookimpl
    def iris_opened(self): ...


def test_register_and_unregister(site):
    site.provider("noted")
    registry = site.registry(block=["noted@iris-noted"])  # in whose place it comes
    (blocked,), revision = registry.records(), registry.revision
    record = registry.register(ALLOCATOR, noted())
    assert (record.name, record.distribution, record.state) == ("noted", REGISTERED, PluginState.LOADED)
    assert registry.revision > revision
    assert registry.resolve(ALLOCATOR, "noted") is record
    assert registry.probe(record, CPU)
    assert registry.create(record, REQUEST).world_size == 1
    with raises(errors.PluginConflictError, name="noted"):
        registry.register(ALLOCATOR, noted())
    registry.unregister(record)
    for key, kind, plugin, name in (
        ("own kind", BACKEND, noted(), None), ("other name", ALLOCATOR, noted(), "other"),
        ("no hook", ALLOCATOR, object(), None), ("nameless", OBSERVER, Nameless(), None),
    ):  # fmt: skip
        with raises(errors.PluginLoadError, f"registry.{key}", other="noted"):
            registry.register(kind, plugin, name)
    assert registry.records() == (blocked,)
    assert registry.register(OBSERVER, Nameless(), name="quiet").api == ""


@table("body", ["raise SystemExit(3)", "raise RuntimeError('in the hook')"])
def test_one_that_raises_or_cannot_be_used_is_reported_once_and_does_not_stop_the_others(site, log, body):
    log.clear()
    modules = [site.observer("aa"), site.observer("bad", opened=body), site.observer("zz")]
    site.observer("broken", source="import there_is_no_such_module")
    for distribution in ("iris-one", "iris-two"):
        site.observer("twice", distribution=distribution)
    blocked = site.observer("blocked")
    registry = site.registry(block=["blocked"])
    for context in range(3):
        registry.notify("iris_opened", context=context)
    assert [sys.modules[module].seen for module in modules] == [[("opened", context) for context in range(3)]] * 3
    assert blocked not in sys.modules
    broken, *twice, warning = log.messages
    assert "there_is_no_such_module" in broken
    assert all("twice" in text for text in twice)
    assert re.search(says("registry.bad"), warning)
    assert body.split("(")[0].split()[1] in log.text


def test_notify_follows_blocking(site):
    module = site.observer("watch")
    notify("iris_opened", context=1)
    notify("iris_opened", context=2)
    assert sorted(MAY_BE_WATCHED) == ["iris_allocated", "iris_opened"]
    default_registry().block(["watch"])
    assert "iris_collective" in MAY_BE_WATCHED
    notify("iris_opened", context=3)
    assert not MAY_BE_WATCHED
    default_registry().block([])
    notify("iris_opened", context=4)
    assert [context for _, context in sys.modules[module].seen] == [1, 2, 4]


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
    assert isinstance(bad.error, errors.PluginLoadError)


@table("what", ["a folder", "a circle"])
def test_entry_points_that_cannot_be_read_are_warned_about_once(site, log, what):
    """Nothing tells whether they are Iris's."""
    log.clear()
    info = site.install("iris-bad", entry_points=ABSENT)
    damage(info, "entry_points.txt", what)
    site.provider("good")
    assert [record.name for record in site.registry().load_all()] == ["good"]
    (warning,) = log.messages
    assert str(info) in warning


BODIES = [
    "raise SystemExit(3)", "import sys; sys.exit('stop')", "raise GeneratorExit", "raise StopIteration",
    "raise KeyError('inside')", "raise KeyboardInterrupt", "return None", "return 5", "return Availability('yes')",
    "raise type('Own', (Exception,), {'__str__': lambda self: 1 / 0})()",  # an error without a text
    "return type('Own', (), {'__repr__': lambda self: 1 / 0})()",  # and a wrong type without one
]  # fmt: skip


@table("hook", ["info", "settings", "probe", "create"])
@table("body", BODIES)
def test_whatever_a_hook_raises_or_returns_is_an_error_of_its_plugin_unless_it_is_an_interrupt(site, hook, body):
    arguments = {"probe": "self, target", "create": "self, request"}.get(hook, "self")
    head = f"def iris_plugin_{hook}({arguments}):\n"
    assert head in provider_source("bad")
    site.provider("bad", source=provider_source("bad").replace(head, f"{head}        {body}\n"))
    site.provider("good")
    registry = site.registry()
    record = registry.resolve(ALLOCATOR, "bad")
    use = {"info": "load", "settings": "settings_class"}.get(hook, hook)
    given = {"probe": [CPU], "create": [REQUEST]}.get(hook, [])
    with pytest.raises((errors.PluginError, KeyboardInterrupt)) as caught:
        getattr(registry, use)(record, *given)
    assert isinstance(caught.value, KeyboardInterrupt) == ("Interrupt" in body)
    if "Interrupt" in body:
        return
    assert "iris-bad" in str(caught.value)
    assert hook == "create" or f"iris_plugin_{hook}" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError) == ("KeyError" in body)
    broken = {each.name for each in registry.load_all() if each.state is PluginState.BROKEN}
    assert broken == ({"bad"} if hook != "create" or body == "return None" else set()), body


PROGRAM = """
from iris_core import Iris

with Iris("1MiB") as ctx:
    x, out = ctx.ones(64), ctx.zeros(64)
    ctx.ccl.all_reduce(out, x)
    ctx.barrier()
    found = ctx.ccl.explain("all_reduce", out, x).candidates
    print(out.tolist() == [1.0] * 64, [each.reason for each in found if each.name == "odd"])
"""
ODD_ALGORITHM = """
        class Odd:
            info, op, name = self.iris_plugin_info(), "all_reduce", "odd"
            cost = prepare = launch = print
            def supports(self, request):
                raise SystemExit(3)
        return Odd()"""


def test_a_program_opens_and_computes_beside_all_of_it(site):
    (site.install("iris-gone", entry_points={"iris.backends": {"gone": "a:b"}}) / "METADATA").unlink()
    first = f"{CPU_ONLY}, provides=frozenset({{Capability.REMOTE_LOAD_STORE}}), priority=10**9"
    site.provider("leaves", info=first, probe="raise SystemExit(3)")
    site.provider("numbered", info=first, settings="5")
    site.provider("odd", "COLLECTIVE", create=ODD_ALGORITHM)
    site.provider("quits", "COLLECTIVE", create="raise SystemExit(3)")
    site.provider("unset", "COLLECTIVE", settings="type('S', (PluginSettings,), {'__init__': exit})")
    site.observer("watch", opened="raise SystemExit(3)")
    done = forked.python(PROGRAM, path=[site.folder])
    assert done.stdout == "True ['its `supports` raised SystemExit: 3']\n", done.stderr
    warned = [line for line in done.stderr.splitlines() if "WARNING" in line or "ERROR" in line]
    for name in ("iris_gone", "iris-leaves", "iris-numbered", "odd", "iris-quits", "'unset'", "iris-watch"):
        assert sum(name in line for line in warned) == 1, (name, done.stderr)
