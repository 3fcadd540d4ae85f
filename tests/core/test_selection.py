"""Choice of allocator and backend: argument > environment > auto, with reasons."""

import re

import pytest
from tables import raises

from iris_core import errors
from iris_core.registry.select import select
from iris_core.settings import load_settings
from iris_core.types import DeviceTarget, DeviceType, PluginKind, PluginState

CPU, GPU = DeviceTarget(DeviceType.CPU), DeviceTarget(DeviceType.CUDA, 1)
CPU_ONLY, GPU_ONLY = "devices=frozenset({DeviceType.CPU})", "devices=frozenset({DeviceType.CUDA})"
BOTH_DEVICES = "devices=frozenset({DeviceType.CPU, DeviceType.CUDA})"


def choose(registry, *, targets=(CPU,), **names):
    return select(registry, load_settings(**names), targets=targets)


def chosen(plan):
    return plan.allocator.name, plan.backend.name, plan.target.torch_device


def reason(plan_or_error, name):
    """The one reason about a plugin; reasons of an error are a mapping."""
    reasons = plan_or_error.reasons
    pairs = reasons.items() if hasattr(reasons, "items") else [(f" {each.name}", each.text) for each in reasons]
    (text,) = (text for key, text in pairs if f" {name}@" in key)
    return text


@pytest.fixture
def pair(site):
    site.provider("pool", "ALLOCATOR")
    site.provider("lang", "BACKEND")
    return site


@pytest.fixture
def crowd(pair, monkeypatch):
    """The same, and others that cannot be used, each for a reason of its own."""
    first = f"{CPU_ONLY}, priority=9"
    pair.provider("poor", "ALLOCATOR", info=first)
    pair.provider("broken", "BACKEND", source="raise RuntimeError('boom')")
    pair.provider("absent", "BACKEND", info=first, probe="return Availability.no('not on this machine')")
    pair.provider("raising", "BACKEND", info=first, probe="raise KeyError('probe')")
    pair.provider("future", "BACKEND", info=f"{first}, api=(99, 0)")
    pair.provider("gpuonly", "BACKEND", info=f"{GPU_ONLY}, priority=9")
    pair.provider("greedy", "BACKEND", info=f"{first}, requires=frozenset({{Capability.GROWTH}})")
    pair.provider("stopped", "BACKEND", info=first)
    for distribution in ("iris-one", "iris-two"):
        pair.provider("twice", "BACKEND", distribution=distribution, info=first)
    monkeypatch.setenv("IRIS_BLOCK", "stopped")
    return pair


def test_argument_beats_environment_beats_priority_and_name(pair, monkeypatch):
    needs = f"{CPU_ONLY}, requires=frozenset({{Capability.REMOTE_ATOMICS}}), priority=5"
    pair.provider("zz", "BACKEND", info=needs)
    pair.provider("aa", "BACKEND", info=needs)
    plan = choose(pair.registry())
    assert plan.backend.name == "aa"
    assert reason(plan, "zz") == reason(plan, "lang") == "aa comes first by priority and name"
    monkeypatch.setenv("IRIS_BACKEND", "zz")
    for names, name, why in (
        ({}, "zz", "IRIS_BACKEND names it"), ({"backend": "lang"}, "lang", "the argument backend='lang' names it"),
    ):  # fmt: skip
        plan = choose(pair.registry(), **names)
        assert plan.backend.name == name
        assert reason(plan, name) == why
        assert len([each for each in plan.reasons if each.kind.value == "backend"]) == 1  # others were not looked at


def test_auto_passes_over_what_cannot_be_used_and_says_why(crowd, log):
    plan = choose(crowd.registry())
    assert chosen(plan) == ("pool", "lang", "cpu")
    assert sum(each.chosen for each in plan.reasons) == 2
    assert "allocator pool@iris-pool on cpu: chosen: automatic" in plan.explain()
    assert plan.explain().startswith("allocator 'pool' (iris-pool 1.0) and backend 'lang' (iris-lang 1.0) on cpu")
    for name, why in {
        "poor": "^lang needs remote-atomics, remote-load-store, ", "broken": "RuntimeError: boom",
        "absent": "^unavailable: not on this machine$", "raising": "KeyError", "future": "99.0",
        "gpuonly": "^it works on cuda only$", "greedy": "^it needs growth, which pool lacks$",
        "stopped": "^blocked: IRIS_BLOCK ",
    }.items():  # fmt: skip
        assert re.search(why, reason(plan, name)), name
        assert f"{name}@" in plan.explain()
        assert (f"backend '{name}'" in log.text) == (name in ("broken", "raising", "future")), name
    assert "twice@iris-one: not chosen: conflicting" in plan.explain()


def test_the_first_device_for_which_both_are_usable(pair):
    plan = choose(pair.registry(), targets=[GPU, CPU])
    assert chosen(plan) == ("pool", "lang", "cpu")
    for name in ("allocator pool@iris-pool", "backend lang@iris-lang"):
        assert f"{name} on cuda:1: not chosen: it works on cpu only" in plan.explain()
    pair.provider("wide", "BACKEND", info=f"{BOTH_DEVICES}, priority=9")
    plan = choose(pair.registry(), targets=[GPU, CPU])
    assert chosen(plan) == ("pool", "wide", "cpu")
    assert "backend wide@iris-wide on cuda:1: not chosen: no usable allocator there" in plan.explain()
    pair.provider("gpupool", "ALLOCATOR", info=GPU_ONLY)
    assert chosen(choose(pair.registry(), targets=[GPU, CPU])) == ("gpupool", "wide", "cuda:1")


def test_an_explicit_choice_that_cannot_be(crowd):
    crowd.provider("gpupool", "ALLOCATOR", info=f"{GPU_ONLY}, provides=frozenset(Capability)")
    for name, error, key, cause in (
        ("lnag", errors.PluginNotFoundError, "mean", None),
        ("broken", errors.PluginLoadError, "any", "boom"), ("raising", errors.PluginLoadError, "any", "'probe'"),
        ("future", errors.PluginAPIVersionError, "any", None), ("twice", errors.PluginConflictError, "names", None),
        ("stopped", errors.NoUsablePluginError, "any", None),
        ("poor", errors.CapabilityError, "registry.needs", None),
        ("gpupool", errors.CapabilityError, "registry.other device", None),
    ):  # fmt: skip
        names = {"backend": "lang", "allocator": name} if error is errors.CapabilityError else {"backend": name}
        with raises(error, key, name="twice@iris-one", near="lang") as caught:
            choose(crowd.registry(), **names)
        assert str(caught.value.__cause__) == str(cause)
    assert choose(crowd.registry(), backend="twice@iris-two").backend.distribution == "iris-two"
    registry = crowd.registry()
    assert registry.resolve(PluginKind.BACKEND, "twice@iris-two").state is PluginState.CONFLICTING
    registry.block(["twice@Iris_One"])
    record = registry.resolve(PluginKind.BACKEND, "twice")
    assert (record.distribution, record.state) == ("iris-two", PluginState.DISCOVERED)


def test_nothing_usable_lists_every_candidate(site):
    with pytest.raises(errors.NoUsablePluginError) as caught:
        choose(site.registry())
    assert caught.value.reasons == {}
    site.provider("absent", "ALLOCATOR", probe="return Availability.no('no driver')")
    site.provider("lang", "BACKEND")
    with pytest.raises(errors.NoUsablePluginError) as caught:
        choose(site.registry())
    assert reason(caught.value, "absent") == "unavailable: no driver"
