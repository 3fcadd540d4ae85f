"""`Iris(options=...)`: every option is checked, and none is ignored without a word."""

from __future__ import annotations

import pytest
from tables import table

from iris_core import Iris
from iris_core.errors import PluginLoadError, SettingsError
from iris_core.hooks import hookimpl
from iris_core.registry import Registry
from iris_core.registry.select import check_options
from iris_core.settings import IrisSettingsWarning, PluginSettings
from iris_core.types import Availability, PluginInfo, PluginKind

pytestmark = pytest.mark.usefixtures("clean_environment")


def open_with(options):
    Iris("1MiB", device="cpu", allocator="host", backend="triton", options=options).close()


@table(("options", "complaint"), [
    ({"vmem": {"granul": "4MiB"}}, r"options\['vmem'\] has 'granul', .*; did you mean granule\?"),
    ({"vmem": {"granule": "3MiB"}}, r"options\['vmem'\]\['granule'\]='3MiB' is not valid: .* power of two"),
    ({"host": {"granul": 1}}, r"options\['host'\] has 'granul', .*; known are huge_pages"),
    ({"torch": {"pool": 1}}, r"options\['torch'\] has 'pool', .*; there are none"),
    ({"vmemm": {}}, "'vmemm', which is not installed; did you mean vmem"),
    ({"vmem": "4MiB"}, r"options\['vmem'\] must map names of settings to values"),
])  # fmt: skip
def test_wrong_options_are_refused_also_for_plugins_that_are_not_chosen(options, complaint):
    with pytest.raises(SettingsError, match=complaint):
        open_with(options)


def test_options_without_effect_are_told(recwarn):
    with pytest.warns(
        IrisSettingsWarning, match="'vmem', which have no effect: another allocator was chosen"
    ) as caught:
        open_with({"vmem": {"granule": "4MiB"}, "triton": {"bounds_check": False}})
    assert [each.filename for each in caught] == [__file__]
    recwarn.clear()
    open_with({"host": {"huge_pages": True}, "triton": {"bounds_check": False}, "gluon": {}})
    assert not [each for each in recwarn if each.category is IrisSettingsWarning]


class Chunk(PluginSettings):
    chunk: int = 1


class Plugin:
    def __init__(self, name, settings=Chunk):
        self.name, self.settings = name, settings

    @hookimpl
    def iris_plugin_info(self):
        return PluginInfo(self.name, PluginKind.COLLECTIVE, "for tests")

    @hookimpl
    def iris_plugin_settings(self):
        if self.settings is None:
            raise OSError("no settings today")
        return self.settings

    @hookimpl
    def iris_plugin_probe(self, target):
        return Availability(True)

    @hookimpl
    def iris_plugin_create(self, request):
        raise AssertionError("never created here")


class Watches:
    @hookimpl
    def iris_opened(self, context):
        raise AssertionError("never opened here")


@pytest.fixture
def registry():
    return Registry(search_path=[])


def test_collectives_are_made_later_so_their_options_have_an_effect(registry, recwarn):
    registry.register(PluginKind.COLLECTIVE, Plugin("rings"), "rings")
    check_options(registry, {"rings": {"chunk": 3}}, [])
    assert not recwarn.list
    with pytest.raises(SettingsError, match="did you mean chunk"):
        check_options(registry, {"rings": {"chunks": 3}}, [])


def test_a_plugin_that_cannot_be_asked_is_told_with_its_reason(registry):
    record = registry.register(PluginKind.COLLECTIVE, Plugin("rings", settings=None), "rings")
    with pytest.raises(PluginLoadError):
        registry.settings_class(record)
    with pytest.warns(IrisSettingsWarning, match="which have no effect: .*no settings today"):
        check_options(registry, {"rings": {"chunk": 3}}, [])
    registry.block(["rings"])
    with pytest.warns(IrisSettingsWarning, match="which have no effect: .* is blocked"):
        check_options(registry, {"rings": {"chunk": 3}}, [])


def test_observers_have_no_options(registry):
    registry.register(PluginKind.OBSERVER, Watches(), "watches")
    with pytest.raises(SettingsError, match="'watches', which is an observer"):
        check_options(registry, {"watches": {}}, [])
