"""Settings and options: precedence, sources, sizes, typos."""

import re
import warnings

import pytest
import torch
from jobs_common import environment
from pydantic import ByteSize
from tables import raises, says, table

from iris_core import Iris
from iris_core.errors import SettingsError
from iris_core.registry.select import check_options
from iris_core.settings import (
    IrisSettingsWarning,
    PluginSettings,
    load_plugin_settings,
    load_settings,
    plugin_prefix,
    unknown_variables,
)

pytestmark = pytest.mark.usefixtures("clean_environment")


class Inner(PluginSettings):
    depth: int = 1


class Sample(PluginSettings):
    bounds_check: bool = True
    """Whether to check."""
    path: str = "default"
    chunk: ByteSize = ByteSize(4096)
    inner: Inner = Inner()
    numbers: tuple[int, ...] = ()


@table(("name", "text", "value"), [
    ("heap_size", "64MiB", 64 << 20), ("heap_size", "1.5GiB", 3 << 29), ("heap_size", "4096", 4096),
    ("allocator", "vmem@iris-allocators", "vmem@iris-allocators"), ("device", "cuda:1", "cuda:1"),
    ("log_level", "debug", "DEBUG"), ("block", "a, b@c,", ("a", "b@c")), ("device_timeout", "2.5", 2.5),
])  # fmt: skip
def test_environment(monkeypatch, name, text, value):
    monkeypatch.setenv(f"IRIS_{name.upper()}", text)
    settings = load_settings()
    assert (getattr(settings, name), settings.source(name)) == (value, "environment")


def test_an_argument_beats_the_environment_and_none_does_not(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "1MiB")
    monkeypatch.setenv("iris_backend", "gluon")  # variables are read in any case
    monkeypatch.setenv("IRIS_ALLOCATOR", "")  # and empty ones are unset
    for argument, value, source in (("2MiB", 2 << 20, "argument"), (None, 1 << 20, "environment")):
        settings = load_settings(heap_size=argument)
        assert (settings.heap_size, settings.source("heap_size")) == (value, source)
        assert (settings.backend, settings.allocator) == ("gluon", "auto")
        assert settings.source("allocator") == "default"


def test_reductions_are_deterministic_as_torchs_operations_where_nothing_else_is_said(monkeypatch):
    assert not load_settings().deterministic
    try:
        torch.set_deterministic_debug_mode("error")  # as torch.use_deterministic_algorithms, which loads the compiler
        assert load_settings().deterministic
        assert load_settings().source("deterministic") == "default"
        assert not load_settings(deterministic=False).deterministic
        monkeypatch.setenv("IRIS_DETERMINISTIC", "0")
        assert not load_settings().deterministic
        monkeypatch.delenv("IRIS_DETERMINISTIC")
        torch.set_deterministic_debug_mode("warn")  # torch goes on with what is not
        assert not load_settings().deterministic
    finally:
        torch.set_deterministic_debug_mode("default")
    monkeypatch.setenv("IRIS_DETERMINISTIC", "1")
    assert load_settings().deterministic


@table(("name", "text"), [
    *(("HEAP_SIZE", text) for text in ("12 parsecs", "0", "-1")), ("SYSTEM_SIZE", "9" * 400 + "MiB"), ("DEVICE", "gpu"),
    ("LOG_LEVEL", "loud"), ("CHECK", "nonsense"), *(("DEVICE_TIMEOUT", text) for text in ("0", "inf", "nan", "soon")),
    *(("NODES", text) for text in ("2x", "0x2", "2+0", "9" * 5000, "999999999x1")),
])  # fmt: skip
def test_a_wrong_variable_is_named_with_value_and_source(monkeypatch, name, text):
    """What is said of sizes, devices and nodes is in tests of the command."""
    monkeypatch.setenv(f"IRIS_{name}", text)
    with raises(SettingsError, "settings.value", name=f"IRIS_{name}", value=repr(text)):
        load_settings()


def test_a_wrong_argument_is_named_with_value_and_source_and_all_wrong_variables_at_once(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "1MiB")
    with raises(SettingsError, "settings.argument"):
        load_settings(heap_size="big")
    with raises(SettingsError, "names", "mean", name="'heapsize'", near="heap_size"):
        load_settings(heapsize=1)
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    monkeypatch.setenv("IRIS_LOG_LEVEL", "loud")
    with raises(SettingsError, "settings.all at once"):
        load_settings()


def test_plugin_environment_options_and_precedence(monkeypatch):
    monkeypatch.setenv("IRIS_MY_SAMPLE__BOUNDS_CHECK", "false")
    monkeypatch.setenv("iris_my_sample__chunk", "1MiB")
    monkeypatch.setenv("IRIS_MY_SAMPLE__INNER__DEPTH", "7")
    monkeypatch.setenv("IRIS_MY_SAMPLE__NUMBERS", "[1, 2]")
    assert plugin_prefix("my-sample") == "IRIS_MY_SAMPLE__"
    settings = load_plugin_settings("my-sample", Sample, {"chunk": "2MiB"})
    assert settings == Sample(bounds_check=False, chunk="2MiB", inner=Inner(depth=7), numbers=(1, 2))
    assert type(settings) is Sample
    assert load_plugin_settings("my-sample", Sample, {"inner": {"depth": 9}}).inner.depth == 9
    assert load_plugin_settings("other", Sample) == Sample()
    assert Sample().path == "default"  # a class alone reads no environment: not PATH, which is always set


@table(("variable", "text", "key"), [
    ("IRIS_S__BOUND_CHECK", "1", "mean"), ("IRIS_S__ZZZ", "1", "known"), ("IRIS_S__NUMBERS", "one", "settings.JSON"),
    ("IRIS_S__BOUNDS_CHECK", "maybe", "settings.value"), ("IRIS_S__INNER__DEPTH", "deep", "settings.value"),
    ("IRIS_S__INNER__DPETH", "1", "names"),
])  # fmt: skip
def test_wrong_plugin_variables(monkeypatch, variable, text, key):
    monkeypatch.setenv(variable, text)
    with raises(SettingsError, key, name=variable, value=repr(text), near="IRIS_S__BOUNDS_CHECK"):
        load_plugin_settings("s", Sample)


@table(("variable", "installed", "key", "near"), [
    ("IRIS_HEAPSIZE", "triton", "mean", "IRIS_HEAP_SIZE"), ("IRIS_ZZZZ", "triton", "known", "IRIS_ALLOCATOR, IRIS"),
    ("IRIS_MY_PLUGIN__X", "my-plugin", None, ""), ("IRIS_HEAP_SIZE", "my-plugin", None, ""),
    ("IRIS_MY_PLUGIN__X", "my-plugins", "mean", "IRIS_MY_PLUGINS__"),
    ("IRIS_TRITON_BOUNDS_CHECK", "triton", "settings.two lines", ""),
])  # fmt: skip
def test_unknown_variables_are_told_with_the_nearest_name(monkeypatch, variable, installed, key, near):
    monkeypatch.setenv(variable, "1")
    found = unknown_variables([installed])
    assert len(found) == (key is not None)
    assert key is None or re.search(says("names", key, name=variable, near=near), found[0])


def warned():
    with environment(IRIS_HEAPSIZE="1"), warnings.catch_warnings(record=True, action="always") as caught:
        Iris("1MiB", device="cpu").close()
    return [each.filename for each in caught if "IRIS_HEAPSIZE" in str(each.message)]


def test_one_rank_of_a_host_warns_of_them_where_the_context_is_made(pool):
    assert pool.run(warned, 2) == [[__file__], []]


def open_with(options):
    Iris("1MiB", device="cpu", allocator="host", backend="triton", options=options).close()


@table(("options", "name", "key", "near"), [
    ({"vmem": {"granul": "4MiB"}}, "options['vmem'] has 'granul'", "mean", "granule"),
    ({"vmem": {"granule": "3MiB"}}, "options['vmem']['granule']='3MiB'", "settings.power", ""),
    ({"host": {"granul": 1}}, "options['host'] has 'granul'", "known", "huge_pages"),
    ({"torch": {"pool": 1}}, "options['torch'] has 'pool'", "settings.none", ""),
    ({"vmemm": {}}, "vmemm", "mean", "vmem"), ({"vmem": "4MiB"}, "options['vmem']", "settings.map", ""),
])  # fmt: skip
def test_wrong_options_are_refused_also_for_plugins_that_are_not_chosen(options, name, key, near):
    with raises(SettingsError, "names", key, name=name, near=near):
        open_with(options)


def test_options_without_effect_are_told(recwarn):
    with pytest.warns(IrisSettingsWarning, match=says("settings.no effect", why="another")) as caught:
        open_with({"vmem": {"granule": "4MiB"}, "triton": {"bounds_check": False}})
    assert [each.filename for each in caught] == [__file__]
    recwarn.clear()
    open_with({"host": {"huge_pages": True}, "triton": {"bounds_check": False}, "gluon": {}})
    assert not [each for each in recwarn if each.category is IrisSettingsWarning]


CREATE = "raise AssertionError('never created here')"
CHUNK = "type('Chunk', (PluginSettings,), {'__annotations__': {'chunk': int}, 'chunk': 1})"


def test_options_of_what_is_made_later_or_cannot_be_asked_or_has_none(site, recwarn):
    """Those of collectives, which are made later, have an effect; observers have none."""
    site.provider("rings", "COLLECTIVE", settings=CHUNK, create=CREATE)
    site.provider("odd", "COLLECTIVE", settings="open('/absent/settings')", create=CREATE)
    site.observer("watches")
    registry = site.registry()
    check_options(registry, {"rings": {"chunk": 3}}, [])
    assert not recwarn.list
    for name, option, key in (("rings", "chunks", "mean"), ("watches", "x", "settings.observer")):
        with raises(SettingsError, key, near="chunk"):
            check_options(registry, {name: {option: 3}}, [])
    for why in ("No such file", "is blocked"):
        with pytest.warns(IrisSettingsWarning, match=says("settings.no effect", why=why)):
            check_options(registry, {"odd": {"chunk": 3}}, [])
        registry.block(["odd"])
