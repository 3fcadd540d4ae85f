"""Settings: precedence, sources, sizes, typos."""

from __future__ import annotations

import logging

import pytest
import torch
from pydantic import ByteSize, ValidationError
from tables import table

from iris_core.errors import SettingsError
from iris_core.settings import (
    IrisSettings,
    IrisSettingsWarning,
    PluginSettings,
    describe,
    load_plugin_settings,
    load_settings,
    plugin_prefix,
    warn_unknown_variables,
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


# -- the core's settings ----------------------------------------------------------------------------------------------
def test_defaults():
    settings = load_settings()
    assert settings.heap_size == 1 << 30
    assert (settings.allocator, settings.backend, settings.device) == ("auto", "auto", None)
    assert (settings.log_level, settings.block) == ("WARNING", ())
    assert (settings.device_timeout, settings.barrier_timeout, settings.watchdog) == (None, 300.0, 60.0)
    assert {settings.source(name) for name in IrisSettings.model_fields} == {"default"}


@table(("name", "text", "value"), [
    ("heap_size", "64MiB", 64 << 20), ("heap_size", "1.5GiB", 3 << 29), ("heap_size", "4096", 4096),
    ("allocator", "vmem@iris-allocators", "vmem@iris-allocators"), ("backend", "gluon", "gluon"),
    ("device", "cuda:1", "cuda:1"), ("log_level", "debug", "DEBUG"), ("block", "a, b@c,", ("a", "b@c")),
    ("device_timeout", "2.5", 2.5), ("barrier_timeout", "10", 10.0), ("watchdog", "0", 0.0),
])  # fmt: skip
def test_environment(monkeypatch, name, text, value):
    monkeypatch.setenv(f"IRIS_{name.upper()}", text)
    settings = load_settings()
    assert getattr(settings, name) == value
    assert settings.source(name) == "environment"


def test_variables_are_read_in_any_case_and_empty_ones_are_unset(monkeypatch):
    monkeypatch.setenv("iris_backend", "gluon")
    monkeypatch.setenv("IRIS_ALLOCATOR", "")
    settings = load_settings()
    assert (settings.backend, settings.allocator) == ("gluon", "auto")
    assert settings.source("allocator") == "default"


def test_an_argument_beats_the_environment_and_none_does_not(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "1MiB")
    assert load_settings(heap_size="2MiB").heap_size == 2 << 20
    assert load_settings(heap_size="2MiB").source("heap_size") == "argument"
    assert load_settings(heap_size=None).heap_size == 1 << 20
    assert load_settings(heap_size=None).source("heap_size") == "environment"


def test_reductions_are_deterministic_as_torchs_operations_where_nothing_else_is_said(monkeypatch):
    assert not load_settings().deterministic
    try:
        torch.use_deterministic_algorithms(True)
        assert load_settings().deterministic
        assert load_settings().source("deterministic") == "default"
        assert not load_settings(deterministic=False).deterministic
        monkeypatch.setenv("IRIS_DETERMINISTIC", "0")
        assert not load_settings().deterministic
        monkeypatch.delenv("IRIS_DETERMINISTIC")
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch goes on with what is not
        assert not load_settings().deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("IRIS_DETERMINISTIC", "1")
    assert load_settings().deterministic


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().heap_size = 1


@table(("name", "text"), [
    ("HEAP_SIZE", "12 parsecs"), ("HEAP_SIZE", "0"), ("HEAP_SIZE", "-1"), ("LOG_LEVEL", "loud"),
    ("DEVICE_TIMEOUT", "0"), ("DEVICE_TIMEOUT", "inf"), ("DEVICE_TIMEOUT", "soon"), ("BARRIER_TIMEOUT", "-3"),
    ("BARRIER_TIMEOUT", "nan"),
])  # fmt: skip
def test_a_wrong_variable_is_named_with_value_and_source(monkeypatch, name, text):
    monkeypatch.setenv(f"IRIS_{name}", text)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"IRIS_{name}={text!r} (from the environment) is not valid: ")
    assert isinstance(caught.value, ValueError)


def test_a_wrong_argument_is_named_with_value_and_source(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "1MiB")
    with pytest.raises(SettingsError, match=r"^argument heap_size='big' is not valid: "):
        load_settings(heap_size="big")
    with pytest.raises(SettingsError, match="argument 'heapsize' is not a setting of Iris; did you mean heap_size"):
        load_settings(heapsize=1)


def test_all_wrong_variables_are_told_at_once(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    monkeypatch.setenv("IRIS_LOG_LEVEL", "loud")
    with pytest.raises(SettingsError, match=r"IRIS_HEAP_SIZE.*; IRIS_LOG_LEVEL"):
        load_settings()


# -- plugins' settings ------------------------------------------------------------------------------------------------
def test_the_prefix_of_a_plugin():
    assert plugin_prefix("my-plugin") == "IRIS_MY_PLUGIN__"


def test_a_settings_class_alone_reads_no_environment(monkeypatch):
    monkeypatch.setenv("IRIS_SAMPLE__PATH", "here")
    monkeypatch.setenv("SAMPLE__PATH", "there")
    assert Sample().path == "default"  # and not PATH, which is always set


def test_plugin_environment_options_and_precedence(monkeypatch):
    monkeypatch.setenv("IRIS_MY_SAMPLE__BOUNDS_CHECK", "false")
    monkeypatch.setenv("iris_my_sample__chunk", "1MiB")
    monkeypatch.setenv("IRIS_MY_SAMPLE__INNER__DEPTH", "7")
    monkeypatch.setenv("IRIS_MY_SAMPLE__NUMBERS", "[1, 2]")
    settings = load_plugin_settings("my-sample", Sample, {"chunk": "2MiB"})
    assert settings == Sample(bounds_check=False, chunk="2MiB", inner=Inner(depth=7), numbers=(1, 2))
    assert type(settings) is Sample
    assert load_plugin_settings("my-sample", Sample, {"inner": {"depth": 9}}).inner.depth == 9
    assert load_plugin_settings("other", Sample) == Sample()


@table(("variable", "text", "complaint"), [
    ("IRIS_S__BOUND_CHECK", "1", "IRIS_S__BOUND_CHECK .* is not a setting of plugin 's'; .*mean IRIS_S__BOUNDS_CHECK"),
    ("IRIS_S__ZZZ", "1", "known are IRIS_S__BOUNDS_CHECK, IRIS_S__CHUNK"),
    ("IRIS_S__BOUNDS_CHECK", "maybe", r"IRIS_S__BOUNDS_CHECK='maybe' \(from the environment\) is not valid"),
    ("IRIS_S__INNER__DEPTH", "deep", r"IRIS_S__INNER__DEPTH='deep' \(from the environment\) is not valid"),
    ("IRIS_S__INNER__DPETH", "1", "IRIS_S__INNER__DPETH='1'"), ("IRIS_S__NUMBERS", "one", "not valid JSON.*numbers"),
])  # fmt: skip
def test_wrong_plugin_variables(monkeypatch, variable, text, complaint):
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingsError, match=complaint):
        load_plugin_settings("s", Sample)


def test_wrong_options():
    with pytest.raises(SettingsError, match=r"options\['s'\] has 'bound_check', .*; did you mean bounds_check"):
        load_plugin_settings("s", Sample, {"bound_check": True})
    with pytest.raises(SettingsError, match=r"options\['s'\]\['chunk'\]='big' is not valid"):
        load_plugin_settings("s", Sample, {"chunk": "big"})


def test_a_plugin_without_settings_refuses_any(monkeypatch):
    with pytest.raises(SettingsError, match="there are none"):
        load_plugin_settings("empty", PluginSettings, {"x": 1})


# -- unknown variables ------------------------------------------------------------------------------------------------
def test_unknown_variables_are_told_with_the_nearest_name(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    monkeypatch.setenv("IRIS_HEAPSIZE", "1")
    with pytest.warns(IrisSettingsWarning, match="IRIS_HEAPSIZE is set, .*; did you mean IRIS_HEAP_SIZE"):
        messages = warn_unknown_variables(["triton"])
    assert len(messages) == 1
    assert messages[0] in caplog.text


def test_a_variable_like_no_other_gets_the_list(monkeypatch):
    monkeypatch.setenv("IRIS_ZZZZ", "1")
    with pytest.warns(IrisSettingsWarning, match="known are IRIS_ALLOCATOR, IRIS_BACKEND"):
        warn_unknown_variables([])


def test_variables_of_installed_plugins_are_known_and_of_others_not(monkeypatch, recwarn):
    monkeypatch.setenv("IRIS_MY_PLUGIN__X", "1")
    monkeypatch.setenv("IRIS_HEAP_SIZE", "1")
    assert warn_unknown_variables(["my-plugin"]) == ()
    assert not recwarn.list
    with pytest.warns(IrisSettingsWarning, match="no plugin of that name is installed; did you mean IRIS_MY_PLUGINS__"):
        warn_unknown_variables(["my-plugins"])


# -- describe ---------------------------------------------------------------------------------------------------------
def test_describe_lists_every_setting_with_its_source(monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "2MiB")
    monkeypatch.setenv("IRIS_SAMPLE__INNER__DEPTH", "3")
    rows = {row.variable: row for row in (*describe(), *describe("sample", Sample))}
    core = [variable for variable, row in rows.items() if not row.plugin]
    assert core == [f"IRIS_{name.upper()}" for name in IrisSettings.model_fields]
    heap = rows["IRIS_HEAP_SIZE"]
    assert (heap.type, heap.value, heap.source) == ("size", 2 << 20, "environment")
    assert heap.help == "Size of each rank's symmetric heap."
    assert (rows["IRIS_DEVICE"].type, rows["IRIS_DEVICE"].source) == ("str | unset", "default")
    assert rows["IRIS_BLOCK"].type == "names, separated by commas"
    assert rows["IRIS_SAMPLE__NUMBERS"].type == "list, as JSON"
    inner = rows["IRIS_SAMPLE__INNER"]
    assert (inner.value, inner.source, inner.plugin) == ({"depth": 3}, "environment", "sample")
    assert rows["IRIS_SAMPLE__BOUNDS_CHECK"].help == "Whether to check."


def test_every_setting_is_described():
    from iris_core.cli.config import survey
    from iris_core.registry import Registry

    rows, problems, _ = survey(Registry())
    assert problems == []
    assert {"IRIS_HEAP_SIZE", "IRIS_HOST__HUGE_PAGES", "IRIS_TRITON__BOUNDS_CHECK"} <= {row.variable for row in rows}
    assert [row.variable for row in rows if not row.help.endswith(".")] == []


def test_one_underscore_too_few(monkeypatch):
    monkeypatch.setenv("IRIS_TRITON_BOUNDS_CHECK", "0")
    with pytest.warns(IrisSettingsWarning, match="settings of that plugin begin with IRIS_TRITON__"):
        warn_unknown_variables(["triton"])
