"""The registry, with distributions on a temporary path."""

from __future__ import annotations

import logging
import sys
from unittest.mock import Mock

import pytest
from dist_info import install_distribution, provider_source
from tables import table

from iris_core.errors import (
    HeapExhaustedError,
    NoUsablePluginError,
    PluginAPIVersionError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from iris_core.hooks import hookimpl
from iris_core.registry import Registry, default_registry, reset_default_registry
from iris_core.registry.records import REGISTERED
from iris_core.settings import PluginSettings
from iris_core.types import (
    PLUGIN_API,
    Availability,
    CreateRequest,
    DeviceTarget,
    DeviceType,
    PluginInfo,
    PluginKind,
    PluginState,
)

ALLOCATOR, BACKEND, OBSERVER = PluginKind.ALLOCATOR, PluginKind.BACKEND, PluginKind.OBSERVER
CPU = DeviceTarget(DeviceType.CPU)
REQUEST = CreateRequest(target=CPU, rank=0, world_size=1, heap_nbytes=4096, settings=PluginSettings())


def only(registry):
    (record,) = registry.records()
    return record


def state_of(registry):
    registry.load_all()
    return only(registry).state


# -- discover ---------------------------------------------------------------------------------------------------------
def test_discovery_imports_nothing(site):
    module = site.provider("mine")
    record = only(site.registry())
    assert (record.kind, record.name, record.distribution, record.version) == (ALLOCATOR, "mine", "iris-mine", "1.0")
    assert record.entry_point == f"{module}:plugin"
    assert record.state is PluginState.DISCOVERED
    assert record.api == ""
    assert module not in sys.modules


def test_all_four_groups_and_no_others_are_read(site):
    points = {"iris.allocators": {"a": "m:x"}, "iris.backends": {"b": "m:x"}, "iris.collectives": {"c": "m:x"}}
    points |= {"iris.plugins": {"o": "m:x"}, "iris.unknown": {"u": "m:x"}, "console_scripts": {"s": "m:x"}}
    site.install("iris-all", entry_points=points)
    site.install("unrelated", entry_points={"console_scripts": {"t": "m:x"}})
    found = [(record.kind.value, record.name) for record in site.registry().records()]
    assert found == [("allocator", "a"), ("backend", "b"), ("collective", "c"), ("observer", "o")]


def test_the_installed_plugins_are_found():
    names = {(record.kind, record.name): record.distribution for record in Registry().records()}
    assert names[ALLOCATOR, "host"] == "iris-allocators"
    assert names[BACKEND, "triton"] == "iris-triton"
    assert names[BACKEND, "gluon"] == "iris-gluon"


def test_one_distribution_found_twice_does_not_conflict_with_itself(site, tmp_path):
    site.provider("mine", distribution="iris-mine")
    site.install("unrelated")
    second = tmp_path / "second"
    install_distribution(second, "Iris_Mine", "0.5", entry_points={"iris.allocators": {"mine": "old:plugin"}})
    registry = Registry(search_path=[str(site.folder), str(second)])
    assert only(registry).version == "1.0"
    assert registry.load(registry.resolve(ALLOCATOR, "mine")).state is PluginState.LOADED


def test_a_newer_version_without_plugins_hides_an_older_one_with(site, tmp_path):
    second = tmp_path / "second"
    site.install("iris-mine", "2.0")
    install_distribution(second, "iris-mine", "1.0", entry_points={"iris.allocators": {"mine": "old:plugin"}})
    assert Registry(search_path=[str(site.folder), str(second)]).records() == ()


# -- load: plugins that are not right ---------------------------------------------------------------------------------
@table(("source", "cause"), [
    ("import there_is_no_such_module", ModuleNotFoundError), ("def plugin(:", SyntaxError),
    ("raise RuntimeError('at import')", RuntimeError), ("raise SystemExit(3)", SystemExit),
    ("other = 1", AttributeError),
])  # fmt: skip
def test_a_broken_import_is_chained(site, source, cause):
    site.provider("bad", source=source)
    site.provider("good")
    registry = site.registry()
    bad = registry.resolve(ALLOCATOR, "bad")
    with pytest.raises(PluginLoadError, match=r"iris-bad 1\.0") as caught:
        registry.load(bad)
    assert isinstance(caught.value.__cause__, cause)
    assert "IRIS_BLOCK=bad" in str(caught.value)
    assert bad.state is PluginState.BROKEN
    assert bad.reason == str(caught.value)
    with pytest.raises(PluginLoadError) as again:
        registry.load(bad)
    assert again.value is caught.value
    assert registry.load(registry.resolve(ALLOCATOR, "good")).state is PluginState.LOADED


OWN_HOOK = "from iris_core.hooks import hookimpl\nclass P:\n    @hookimpl\n    def {}: yield\nplugin = P()\n"


@table(("source", "complaint"), [
    ("plugin = object()", "has no method marked with iris_core.hookimpl"),
    ("plugin = None", "is None: name an instance"), ("class plugin: pass", "is a class: name an instance"),
    (OWN_HOOK.format("iris_plugin_inof(self)"), "no hook of the kind allocator: did you mean iris_plugin_info?"),
    (OWN_HOOK.format("iris_plugin_probe(self, device)"), r"device.* can not be found in the hookspec"),
    (OWN_HOOK.format("iris_plugin_info(self)"), "does not implement iris_plugin_settings, iris_plugin_probe"),
    (OWN_HOOK.format("iris_opened(self)"), "iris_opened, which is no hook of the kind allocator"),
    (OWN_HOOK.format("iris_plugin_info(self)").replace("@hookimpl", "@hookimpl(wrapper=True)"), "as a wrapper"),
])  # fmt: skip
def test_hooks_are_checked(site, source, complaint):
    site.provider("bad", source=source)
    registry = site.registry()
    with pytest.raises(PluginLoadError, match=complaint):
        registry.load(only(registry))
    assert only(registry).state is PluginState.BROKEN


@table(("change", "complaint"), [
    ({"name": "other"}, "says that its name is 'other'"),
    ({"kind": "BACKEND"}, "is of kind backend, but stands in the group 'iris.allocators'"),
    ({"info": "devices=frozenset()"}, "names no device type"),
    ({"info": "devices={'cpu'}"}, "devices as a frozenset of DeviceType"),
    ({"info": "devices=frozenset({DeviceType.CPU}), provides=frozenset({'x'})"}, "provides as a frozenset"),
    ({"info": "api='1.0'"}, "api as \\(major, minor\\)"),
])  # fmt: skip
def test_info_is_checked(site, change, complaint):
    site.provider("mine", source=provider_source(**{"name": "mine", **change}))
    registry = site.registry()
    with pytest.raises(PluginLoadError, match=complaint):
        registry.load(only(registry))


@table("hook", ["iris_plugin_info", "iris_plugin_settings", "iris_plugin_probe"])
@table("body", ["raise KeyError('inside')", "return None", "return 5"])
def test_a_hook_that_raises_or_returns_nonsense_breaks_only_its_plugin(site, hook, body):
    text = provider_source("bad")
    marker = f"def {hook}(self" + (", target)" if "probe" in hook else ")") + ":\n"
    assert marker in text
    site.provider("bad", source=text.replace(marker, f"{marker}        {body}\n"))
    site.provider("good")
    registry = site.registry()
    record = registry.resolve(ALLOCATOR, "bad")
    call = {
        "iris_plugin_info": lambda: registry.load(record),
        "iris_plugin_settings": lambda: registry.settings_class(record),
        "iris_plugin_probe": lambda: registry.probe(record, CPU),
    }[hook]
    with pytest.raises(PluginLoadError, match=hook) as caught:
        call()
    assert isinstance(caught.value.__cause__, KeyError) == ("raise" in body)
    assert record.state is PluginState.BROKEN
    states = {each.name: each.state for each in registry.load_all()}
    assert states == {"bad": PluginState.BROKEN, "good": PluginState.LOADED}


@table(("api", "usable"), [
    (PLUGIN_API, True), ((PLUGIN_API[0], PLUGIN_API[1] + 1), False), ((PLUGIN_API[0] + 1, 0), False),
    ((PLUGIN_API[0] - 1, 9), False),
])  # fmt: skip
def test_the_plugin_api_is_checked(site, api, usable):
    site.provider("mine", info=f"api={api}, devices=frozenset({{DeviceType.CPU}})")
    registry = site.registry()
    if usable:
        assert registry.load(only(registry)).api == f"{api[0]}.{api[1]}"
        return
    with pytest.raises(PluginAPIVersionError) as caught:
        registry.load(only(registry))
    ours = ".".join(map(str, PLUGIN_API))
    assert f"{api[0]}.{api[1]}" in str(caught.value)
    assert ours in str(caught.value)
    assert ("upgrade iris-core" in str(caught.value)) == (api > PLUGIN_API)
    assert only(registry).state is PluginState.INCOMPATIBLE


# -- states -----------------------------------------------------------------------------------------------------------
def test_unavailable(site):
    site.provider("mine", probe="return Availability.no('no such device')")
    registry = site.registry()
    assert state_of(registry) is PluginState.UNAVAILABLE
    assert only(registry).reason == "no such device"


def test_available_on_one_of_two_device_types_is_loaded(site):
    site.provider(
        "mine",
        info="devices=frozenset({DeviceType.CPU, DeviceType.CUDA})",
        probe="return Availability(target.type is DeviceType.CUDA, 'only there')",
    )
    registry = site.registry()
    assert state_of(registry) is PluginState.LOADED
    assert not registry.probe(only(registry), CPU)


@table("blocked", ["mine", "mine@iris-mine", "mine@Iris_Mine"])
def test_blocked(site, blocked):
    module = site.provider("mine")
    registry = site.registry(block=[blocked])
    assert state_of(registry) is PluginState.BLOCKED
    assert "IRIS_BLOCK" in only(registry).reason
    with pytest.raises(NoUsablePluginError, match="blocked"):
        registry.load(only(registry))
    assert module not in sys.modules
    registry.block([])
    assert state_of(registry) is PluginState.LOADED
    registry.block(["mine"])
    assert only(registry).state is PluginState.BLOCKED
    registry.block([])
    assert only(registry).state is PluginState.LOADED


def test_blocking_does_not_heal_a_broken_plugin(site):
    site.provider("mine", source="1/0")
    registry = site.registry()
    assert state_of(registry) is PluginState.BROKEN
    registry.block(["mine"])
    registry.block([])
    assert only(registry).state is PluginState.BROKEN
    assert "ZeroDivisionError" in only(registry).reason


def test_a_misspelt_block_is_told(site, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    site.provider("mine")
    site.registry(block=["mime"])
    assert "'mime', which is not installed; did you mean mine?" in caplog.text


def test_conflict(site):
    site.provider("mine", distribution="iris-one")
    site.provider("mine", distribution="iris-two")
    registry = site.registry()
    with pytest.raises(PluginConflictError) as caught:
        registry.resolve(ALLOCATOR, "mine")
    for part in ("iris-one 1.0", "iris-two 1.0", "'mine@iris-one'", "'mine@iris-two'"):
        assert part in str(caught.value)
    assert {record.state for record in registry.load_all()} == {PluginState.CONFLICTING}
    assert "iris-two" in registry.resolve(ALLOCATOR, "mine@iris-one").reason
    chosen = registry.load(registry.resolve(ALLOCATOR, "mine@iris_two"))
    assert (chosen.distribution, chosen.state) == ("iris-two", PluginState.LOADED)


def test_blocking_one_resolves_a_conflict(site):
    site.provider("mine", distribution="iris-one")
    site.provider("mine", distribution="iris-two")
    registry = site.registry(block=["mine@iris-one"])
    assert registry.resolve(ALLOCATOR, "mine").distribution == "iris-two"
    assert [record.state for record in registry.load_all()] == [PluginState.BLOCKED, PluginState.LOADED]
    registry.block([])
    with pytest.raises(PluginConflictError):
        registry.resolve(ALLOCATOR, "mine")


def test_the_same_name_for_different_kinds_is_no_conflict(site):
    site.provider("mine", "ALLOCATOR", distribution="iris-one")
    site.provider("mine", "BACKEND", distribution="iris-two")
    registry = site.registry()
    assert {record.state for record in registry.load_all()} == {PluginState.LOADED}
    assert registry.names() == ("mine",)


# -- names ------------------------------------------------------------------------------------------------------------
def test_not_found_lists_what_is_there_and_close_matches(site):
    site.provider("ring")
    site.provider("tree")
    with pytest.raises(PluginNotFoundError) as caught:
        site.registry().resolve(ALLOCATOR, "rnig")
    assert caught.value.close_matches == ("ring",)
    assert str(caught.value).startswith("no allocator named 'rnig' is installed; installed are ring, tree; did you")


def test_not_found_says_how_to_install(site):
    with pytest.raises(PluginNotFoundError, match=r"no backend is installed at all; .*pip install ./iris_triton"):
        site.registry().resolve(BACKEND, "triton")
    with pytest.raises(PluginNotFoundError, match=r"entry point in the group 'iris\.backends'"):
        site.registry().resolve(BACKEND, "thing")


def test_not_found_in_that_distribution(site):
    site.provider("ring", distribution="iris-one")
    with pytest.raises(PluginNotFoundError) as caught:
        site.registry().resolve(ALLOCATOR, "ring@iris-two")
    assert caught.value.close_matches == ("ring@iris-one",)


# -- create, register -------------------------------------------------------------------------------------------------
def test_create(site):
    site.provider("mine", create="from unittest.mock import Mock; return Mock(request=request)")
    registry = site.registry()
    assert registry.create(only(registry), REQUEST).request is REQUEST
    assert only(registry).state is PluginState.CREATED
    assert state_of(registry) is PluginState.CREATED


def test_create_lets_errors_of_iris_through_and_wraps_others(site):
    error = "from iris_core.errors import HeapExhaustedError as E\n        "
    error += "raise E('full', requested_bytes=1, free_bytes=0, largest_free_bytes=0)"
    site.provider("full", create=error)
    site.provider("failing", create="raise OSError(12, 'no memory')")
    site.provider("nothing", create="return None")
    registry = site.registry()
    with pytest.raises(HeapExhaustedError, match="full"):
        registry.create(registry.resolve(ALLOCATOR, "full"), REQUEST)
    with pytest.raises(PluginError, match=r"'failing'.*could not be created.*no memory") as caught:
        registry.create(registry.resolve(ALLOCATOR, "failing"), REQUEST)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(PluginLoadError, match="iris_plugin_create must return one result"):
        registry.create(registry.resolve(ALLOCATOR, "nothing"), REQUEST)


class Noted:
    """A provider for registration by hand."""

    @hookimpl
    def iris_plugin_info(self):
        return PluginInfo("noted", ALLOCATOR, "by hand", devices=frozenset({DeviceType.CPU}))

    @hookimpl
    def iris_plugin_settings(self):
        return PluginSettings

    @hookimpl
    def iris_plugin_probe(self):
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request):
        return Mock(world_size=request.world_size)


def test_register_and_unregister(site):
    registry = site.registry()
    revision = registry.revision
    record = registry.register(ALLOCATOR, Noted())
    assert (record.name, record.distribution, record.state) == ("noted", REGISTERED, PluginState.LOADED)
    assert registry.revision > revision
    assert registry.resolve(ALLOCATOR, "noted") is record
    assert registry.probe(record, CPU)
    assert registry.create(record, REQUEST).world_size == 1
    with pytest.raises(PluginConflictError, match="noted"):
        registry.register(ALLOCATOR, Noted())
    registry.unregister(record)
    assert registry.records() == ()


def test_register_refuses_what_is_wrong_and_keeps_nothing(site):
    registry = site.registry()
    with pytest.raises(PluginLoadError, match="kind allocator"):
        registry.register(BACKEND, Noted())
    with pytest.raises(PluginLoadError, match="name is 'noted'"):
        registry.register(ALLOCATOR, Noted(), name="other")
    with pytest.raises(PluginLoadError, match="no method marked"):
        registry.register(ALLOCATOR, object())

    class Nameless:
        @hookimpl
        def iris_opened(self): ...

    with pytest.raises(PluginLoadError, match="does not say its name"):
        registry.register(OBSERVER, Nameless())
    assert registry.records() == ()
    assert registry.register(OBSERVER, Nameless(), name="quiet").api == ""


def test_register_in_place_of_a_blocked_plugin(site):
    site.provider("noted")
    registry = site.registry(block=["noted@iris-noted"])
    record = registry.register(ALLOCATOR, Noted())
    assert registry.resolve(ALLOCATOR, "noted") is record


def test_record_as_json(site):
    site.provider("mine")
    registry = site.registry()
    registry.load_all()
    assert only(registry).to_json() == {
        "kind": "allocator",
        "name": "mine",
        "distribution": "iris-mine",
        "version": "1.0",
        "entry_point": "site_iris_mine_mine:plugin",
        "api": ".".join(map(str, PLUGIN_API)),
        "state": "loaded",
        "reason": "",
        "summary": "a test",
    }


def test_the_default_registry_is_one_until_reset(site):
    first = default_registry()
    assert default_registry() is first
    site.provider("late")
    assert "late" not in first.names()
    reset_default_registry()
    assert "late" in default_registry().names()
