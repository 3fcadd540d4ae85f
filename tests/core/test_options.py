"""`Iris(options=...)`: every option is checked, and none is ignored without a word."""

import pytest
from tables import table

from iris_core import Iris
from iris_core.errors import SettingsError
from iris_core.registry.select import check_options
from iris_core.settings import IrisSettingsWarning

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
    words = "'vmem', which have no effect: another allocator was chosen"
    with pytest.warns(IrisSettingsWarning, match=words) as caught:
        open_with({"vmem": {"granule": "4MiB"}, "triton": {"bounds_check": False}})
    assert [each.filename for each in caught] == [__file__]
    recwarn.clear()
    open_with({"host": {"huge_pages": True}, "triton": {"bounds_check": False}, "gluon": {}})
    assert not [each for each in recwarn if each.category is IrisSettingsWarning]


CREATE = "raise AssertionError('never created here')"
CHUNK = "type('Chunk', (PluginSettings,), {'__annotations__': {'chunk': int}, 'chunk': 1})"


def test_collectives_are_made_later_so_their_options_have_an_effect(site, recwarn):
    site.provider("rings", "COLLECTIVE", settings=CHUNK, create=CREATE)
    check_options(site.registry(), {"rings": {"chunk": 3}}, [])
    assert not recwarn.list
    with pytest.raises(SettingsError, match="did you mean chunk"):
        check_options(site.registry(), {"rings": {"chunks": 3}}, [])


def test_a_plugin_that_cannot_be_asked_is_told_with_its_reason(site):
    site.provider("rings", "COLLECTIVE", settings="open('/absent/settings')", create=CREATE)
    registry = site.registry()
    with pytest.warns(IrisSettingsWarning, match="which have no effect: .*No such file"):
        check_options(registry, {"rings": {"chunk": 3}}, [])
    registry.block(["rings"])
    with pytest.warns(IrisSettingsWarning, match="which have no effect: .* is blocked"):
        check_options(registry, {"rings": {"chunk": 3}}, [])


def test_observers_have_no_options(site):
    site.observer("watches")
    with pytest.raises(SettingsError, match="'watches', which is an observer"):
        check_options(site.registry(), {"watches": {}}, [])
