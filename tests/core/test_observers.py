"""Observers: told what happens, and harmless when they fail."""

from __future__ import annotations

import logging
import sys

import pytest

from iris_core.registry import MAY_BE_WATCHED, Registry, default_registry, notify

SOURCE = """
from iris_core.hooks import hookimpl
seen = []
class P:
    @hookimpl
    def iris_opened(self, context):
        seen.append(("opened", context))
        {opened}
    @hookimpl
    def iris_allocated(self, offset_bytes, nbytes):
        seen.append(("allocated", offset_bytes, nbytes))
plugin = P()
"""


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    """What Iris logs, visible to pytest."""
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    return caplog


def add(site, name, source=None, opened="pass", distribution=None):
    distribution = distribution or f"iris-{name}"
    module = f"observer_{distribution}_{name}".replace("-", "_")
    text = SOURCE.format(opened=opened) if source is None else source
    site.install(distribution, entry_points={"iris.plugins": {name: f"{module}:plugin"}}, modules={module: text})
    return module


def test_only_implemented_hooks_are_called_with_only_the_wanted_arguments(site):
    module = add(site, "watch")
    watching = site.registry()
    watching.notify("iris_opened", context="ctx")
    watching.notify("iris_allocated", context="ctx", offset_bytes=256, nbytes=64)
    watching.notify("iris_closing", context="ctx")
    assert sys.modules[module].seen == [("opened", "ctx"), ("allocated", 256, 64)]


def test_one_that_raises_is_logged_and_does_not_stop_the_others(site, log):
    modules = [add(site, "aa"), add(site, "bad", opened="raise RuntimeError('in the hook')"), add(site, "zz")]
    site.registry().notify("iris_opened", context=1)
    assert [sys.modules[module].seen for module in modules] == [[("opened", 1)]] * 3
    assert "observer 'bad' (iris-bad 1.0) raised in iris_opened" in log.text
    assert "RuntimeError: in the hook" in log.text
    assert "'aa'" not in log.text


def test_broken_conflicting_and_blocked_ones_are_left_out(site, log):
    good = add(site, "good")
    add(site, "broken", source="import there_is_no_such_module")
    add(site, "twice", distribution="iris-one")
    add(site, "twice", distribution="iris-two")
    blocked = add(site, "blocked")
    site.registry(block=["blocked"]).notify("iris_opened", context=1)
    assert sys.modules[good].seen == [("opened", 1)]
    assert "there_is_no_such_module" in log.text
    assert "observer 'twice' (iris-one 1.0) is not the only one" in log.text
    assert blocked not in sys.modules


def test_a_name_that_is_no_hook_is_a_mistake_of_the_caller(site):
    with pytest.raises(KeyError):
        site.registry().notify("iris_oepned", context=1)


def test_notify_follows_blocking(site):
    module = add(site, "watch")
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


def test_a_change_while_observers_are_loaded_is_not_lost(site, monkeypatch):
    load = Registry._load_observers

    def slow(registry):
        found = load(registry)
        registry.block(["watch"])
        return found

    add(site, "watch")
    monkeypatch.setattr(Registry, "_load_observers", slow)
    notify("iris_opened", context=1)
    assert "iris_collective" in MAY_BE_WATCHED
