"""Observers: told what happens, and harmless when they fail."""

import sys

import pytest
from tables import table

from iris_core.registry import MAY_BE_WATCHED, Registry, default_registry, notify


def test_only_implemented_hooks_are_called_with_only_the_wanted_arguments(site):
    module = site.observer("watch")
    watching = site.registry()
    watching.notify("iris_opened", context="ctx")
    watching.notify("iris_allocated", context="ctx", offset_bytes=256, nbytes=64)
    watching.notify("iris_closing", context="ctx")
    assert sys.modules[module].seen == [("opened", "ctx"), ("allocated", 256, 64)]
    with pytest.raises(KeyError):
        watching.notify("iris_oepned", context=1)  # a mistake of the caller


@table("body", ["raise SystemExit(3)", "raise RuntimeError('in the hook')"])
def test_one_that_raises_is_reported_once_and_does_not_stop_the_others(site, log, body):
    log.clear()
    modules = [site.observer("aa"), site.observer("bad", opened=body), site.observer("zz")]
    registry = site.registry()
    for context in range(3):
        registry.notify("iris_opened", context=context)
    assert [sys.modules[module].seen for module in modules] == [[("opened", context) for context in range(3)]] * 3
    (warning,) = log.messages
    assert "observer 'bad' (iris-bad 1.0) raised in iris_opened" in warning
    assert "IRIS_BLOCK=bad" in warning
    assert body.split("(")[0].split()[1] in log.text


def test_an_interrupt_passes(site):
    site.observer("watch", opened="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.registry().notify("iris_opened", context=1)


def test_broken_conflicting_and_blocked_ones_are_left_out(site, log):
    good = site.observer("good")
    site.observer("broken", source="import there_is_no_such_module")
    site.observer("twice", distribution="iris-one")
    site.observer("twice", distribution="iris-two")
    blocked = site.observer("blocked")
    site.registry(block=["blocked"]).notify("iris_opened", context=1)
    assert sys.modules[good].seen == [("opened", 1)]
    assert "there_is_no_such_module" in log.text
    assert "observer 'twice' (iris-one 1.0) is not the only one" in log.text
    assert blocked not in sys.modules


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


def test_a_change_while_observers_are_loaded_is_not_lost(site, monkeypatch):
    load = Registry._load_observers

    def slow(registry):
        found = load(registry)
        registry.block(["watch"])
        return found

    site.observer("watch")
    monkeypatch.setattr(Registry, "_load_observers", slow)
    notify("iris_opened", context=1)
    assert "iris_collective" in MAY_BE_WATCHED
