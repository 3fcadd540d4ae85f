"""Settings and entry points with anything in them: used as they are or refused by name, and nothing else is lost."""

import contextlib
import os
import pathlib
import sys
import tempfile

import pytest
from dist_info import install_distribution, provider_source
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iris_core.errors import IrisError, SettingsError
from iris_core.logs import logger
from iris_core.registry import Registry
from iris_core.settings import IrisSettings, PluginSettings, load_plugin_settings, load_settings

FIELDS = sorted(IrisSettings.model_fields)
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.sampled_from(["64MiB", "-1", "1e400", "nan", "inf", "0x10", "[1", "{}", "null", "true", "9" * 5000, "1GiB "])
)  # fmt: skip


class Sample(PluginSettings):
    count: int = 1
    ratio: float = 1.0
    names: tuple[str, ...] = ()
    deep: bool = True


@contextlib.contextmanager
def environment(variables):
    """These variables of Iris and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith("IRIS_")]:
            patch.delenv(name)
        for name, text in variables.items():
            patch.setenv(name, text)
        yield


def attempt(load, *args):
    """What is loaded, or the text of the error."""
    try:
        return load(*args), ""
    except SettingsError as error:
        return None, str(error)


@settings(deadline=None, max_examples=100)
@given(field=st.sampled_from(FIELDS), text=TEXTS)
def test_a_variable_counts_or_is_named(field, text):
    """And other variables count as before."""
    name, other = f"IRIS_{field.upper()}", ("device_timeout" if field != "device_timeout" else "barrier_timeout")
    with environment({name: text, f"IRIS_{other.upper()}": "7.5"}):
        found, refused = attempt(load_settings)
        if refused:
            assert name in refused
            return
        assert getattr(found, other) == 7.5
        assert found.source(field) == ("environment" if text else "default")


@settings(deadline=None, max_examples=100)
@given(field=st.sampled_from(sorted(Sample.model_fields)), text=TEXTS, given_value=st.booleans())
def test_a_setting_of_a_plugin_counts_or_is_named(field, text, given_value):
    name = f"IRIS_MY_PLUGIN__{field.upper()}"
    with environment({} if given_value else {name: text}):
        found, refused = attempt(load_plugin_settings, "my-plugin", Sample, {field: text} if given_value else {})
        if refused:
            assert field in refused.lower()
            return
        assert isinstance(getattr(found, field), type(Sample.model_fields[field].default))


LINES = [
    "[iris.allocators]", "[iris.backends]", "[ iris.backends ]", "[iris.plugins", "[other]", "good = a:b", "bad = ",
    "= a:b", "x = a b c", "x = a:b [extra]", "x = :", "x = ..:..", "x = os:system", "\0", "\ufeff[iris.backends]",
    "good = no", "x" * 5000, "[iris.backends]\r", "\t[iris.backends]", "x==y", "%(x)s = %(y)s", "é = é:é", "#", ";",
]  # fmt: skip
ENTRY_POINTS = st.binary(max_size=200) | st.lists(st.sampled_from(LINES), max_size=8).map(
    lambda lines: "\n".join(lines).encode()
)


@settings(deadline=None, max_examples=80)
@given(content=ENTRY_POINTS)
@example(content=b"[iris.allocators]\nmine = os:system\n")
def test_entry_points_are_read_or_warned_about(content):
    """Nothing is imported meanwhile, and the plugins of other distributions stay."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        warned = []
        patch.setattr(logger, "warning", lambda text, *args: warned.append(text % args))
        info = install_distribution(pathlib.Path(folder), "iris-strange", entry_points={"iris.backends": {"x": "a:b"}})
        (info / "entry_points.txt").write_bytes(content)
        points = {"iris.allocators": {"mine": "module_of_mine:plugin"}}
        modules = {"module_of_mine": provider_source("mine")}
        install_distribution(pathlib.Path(folder), "iris-fine", entry_points=points, modules=modules)
        patch.syspath_prepend(folder)
        patch.setattr(os, "system", lambda command: pytest.fail(f"{command} was run"))
        before = set(sys.modules)
        registry = Registry(search_path=[folder])
        records = registry.records()
        assert "module_of_mine" not in set(sys.modules) - before
        (mine,) = [each for each in records if each.distribution == "iris-fine"]
        for each in records:
            if each is not mine:
                with contextlib.suppress(IrisError):
                    registry.load(each)
        registry.load(mine)
        sys.modules.pop("module_of_mine", None)
        assert all("\n" not in each for each in warned)
