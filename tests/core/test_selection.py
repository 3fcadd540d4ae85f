"""Choice of allocator and backend: argument > environment > auto, with reasons."""

from __future__ import annotations

import logging

import pytest

from iris_core.errors import (
    CapabilityError,
    NoUsablePluginError,
    PluginAPIVersionError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
)
from iris_core.registry.select import select
from iris_core.settings import load_settings
from iris_core.types import DeviceTarget, DeviceType

CPU, GPU = DeviceTarget(DeviceType.CPU), DeviceTarget(DeviceType.CUDA, 1)
BOTH_DEVICES = "devices=frozenset({DeviceType.CPU, DeviceType.CUDA})"
ATOMICS = "frozenset({Capability.REMOTE_ATOMICS})"


def choose(registry, *, targets=(CPU,), **names):
    return select(registry, load_settings(**names), targets=targets)


def chosen(plan):
    return plan.allocator.name, plan.backend.name, plan.target.torch_device


def reason(plan_or_error, name):
    """The one reason about a plugin; reasons of an error are a mapping."""
    if hasattr(plan_or_error.reasons, "items"):
        texts = [text for key, text in plan_or_error.reasons.items() if f" {name}@" in key]
    else:
        texts = [each.text for each in plan_or_error.reasons if each.name.startswith(f"{name}@")]
    assert len(texts) == 1, texts
    return texts[0]


@pytest.fixture
def pair(site):
    """One allocator and one backend that fit together on the CPU."""
    site.provider("pool", "ALLOCATOR")
    site.provider("lang", "BACKEND")
    return site


def test_auto_takes_what_is_there(pair):
    plan = choose(pair.registry())
    assert chosen(plan) == ("pool", "lang", "cpu")
    assert [each.chosen for each in plan.reasons] == [True, True]
    assert "allocator pool@iris-pool on cpu: chosen: automatic" in plan.explain()
    assert plan.explain().startswith("allocator 'pool' (iris-pool 1.0) and backend 'lang' (iris-lang 1.0) on cpu")


def test_auto_goes_by_priority_and_then_by_name(pair):
    needs = f"devices=frozenset({{DeviceType.CPU}}), requires={ATOMICS}"
    pair.provider("zz", "BACKEND", info=f"{needs}, priority=5")
    pair.provider("aa", "BACKEND", info=f"{needs}, priority=5")
    plan = choose(pair.registry())
    assert plan.backend.name == "aa"
    assert reason(plan, "zz") == reason(plan, "lang") == "aa comes first by priority and name"


def test_argument_beats_environment_beats_auto(pair, monkeypatch):
    pair.provider("second", "BACKEND")
    pair.provider("third", "BACKEND")
    assert choose(pair.registry()).backend.name == "lang"
    monkeypatch.setenv("IRIS_BACKEND", "second")
    plan = choose(pair.registry())
    assert plan.backend.name == "second"
    assert reason(plan, "second") == "IRIS_BACKEND names it"
    plan = choose(pair.registry(), backend="third")
    assert plan.backend.name == "third"
    assert reason(plan, "third") == "the argument backend='third' names it"
    assert len([each for each in plan.reasons if each.kind.value == "backend"]) == 1  # others were not looked at


def test_arguments_given_through_the_settings_are_told_from_the_environment(pair, monkeypatch):
    monkeypatch.setenv("IRIS_BACKEND", "other")
    settings = load_settings(backend="lang")
    plan = select(pair.registry(), settings, targets=[CPU])
    assert reason(plan, "lang") == "the argument backend='lang' names it"


def test_only_what_is_chosen_explicitly_is_imported(pair):
    pair.provider("bad", "BACKEND", source="raise RuntimeError('must not be imported')")
    assert choose(pair.registry(), backend="lang", allocator="pool").backend.name == "lang"


def test_auto_passes_over_what_cannot_be_used_and_says_why(pair, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    first = "devices=frozenset({DeviceType.CPU}), priority=9"
    pair.provider("broken", "BACKEND", source="raise RuntimeError('boom')")
    pair.provider("absent", "BACKEND", info=first, probe="return Availability.no('not on this machine')")
    pair.provider("raising", "BACKEND", info=first, probe="raise KeyError('probe')")
    pair.provider("future", "BACKEND", info=f"{first}, api=(99, 0)")
    pair.provider("gpuonly", "BACKEND", info="devices=frozenset({DeviceType.CUDA}), priority=9")
    pair.provider("greedy", "BACKEND", info=f"{first}, requires=frozenset({{Capability.GROWTH}})")
    pair.provider("stopped", "BACKEND", info=first)
    monkeypatch.setenv("IRIS_BLOCK", "stopped")
    plan = choose(pair.registry())
    assert plan.backend.name == "lang"
    assert "RuntimeError: boom" in reason(plan, "broken")
    assert reason(plan, "absent") == "unavailable: not on this machine"
    assert "KeyError" in reason(plan, "raising")
    assert "99.0" in reason(plan, "future")
    assert reason(plan, "gpuonly") == "it works on cuda only"
    assert reason(plan, "greedy") == "it needs growth, which pool lacks"
    assert reason(plan, "stopped") == "blocked: IRIS_BLOCK names it"
    assert all(each.name.split("@")[0] in plan.explain() for each in plan.reasons)
    for name in ("broken", "raising", "future"):
        assert f"backend '{name}'" in caplog.text
    assert "absent" not in caplog.text


def test_auto_leaves_out_conflicting_plugins(pair):
    for distribution in ("iris-one", "iris-two"):
        pair.provider(
            "twice", "BACKEND", distribution=distribution, info="devices=frozenset({DeviceType.CPU}), priority=9"
        )
    plan = choose(pair.registry())
    assert plan.backend.name == "lang"
    assert "twice@iris-one: not chosen: conflicting" in plan.explain()


def test_an_allocator_that_fits_is_preferred_to_one_that_does_not(pair):
    pair.provider("poor", "ALLOCATOR", info="devices=frozenset({DeviceType.CPU}), priority=9")
    plan = choose(pair.registry())
    assert plan.allocator.name == "pool"
    assert reason(plan, "poor") == "lang needs remote-atomics, remote-load-store, which it lacks"


# -- devices ----------------------------------------------------------------------------------------------------------
def test_the_first_device_for_which_both_are_usable(pair):
    plan = choose(pair.registry(), targets=[GPU, CPU])
    assert chosen(plan) == ("pool", "lang", "cpu")
    assert "allocator pool@iris-pool on cuda:1: not chosen: it works on cpu only" in plan.explain()
    assert "backend lang@iris-lang on cuda:1: not chosen: it works on cpu only" in plan.explain()


def test_a_device_with_only_one_of_the_two_is_skipped(pair):
    pair.provider("wide", "BACKEND", info=f"{BOTH_DEVICES}, priority=9")
    plan = choose(pair.registry(), targets=[GPU, CPU])
    assert chosen(plan) == ("pool", "wide", "cpu")
    assert "backend wide@iris-wide on cuda:1: not chosen: no usable allocator there" in plan.explain()


def test_the_preferred_device_is_taken_when_it_works(pair):
    pair.provider("wide", "BACKEND", info=BOTH_DEVICES)
    pair.provider("gpupool", "ALLOCATOR", info="devices=frozenset({DeviceType.CUDA})")
    assert chosen(choose(pair.registry(), targets=[GPU, CPU])) == ("gpupool", "wide", "cuda:1")


# -- explicit choices fail loudly -------------------------------------------------------------------------------------
def test_unknown(pair):
    with pytest.raises(PluginNotFoundError, match="did you mean 'lang'"):
        choose(pair.registry(), backend="lnag")


def test_broken(pair):
    pair.provider("bad", "BACKEND", source="raise RuntimeError('boom')")
    with pytest.raises(PluginLoadError) as caught:
        choose(pair.registry(), backend="bad")
    assert str(caught.value.__cause__) == "boom"


def test_broken_probe(pair):
    pair.provider("bad", "BACKEND", probe="raise RuntimeError('boom')")
    with pytest.raises(PluginLoadError) as caught:
        choose(pair.registry(), backend="bad")
    assert str(caught.value.__cause__) == "boom"


def test_incompatible(pair):
    pair.provider("future", "BACKEND", info="devices=frozenset({DeviceType.CPU}), api=(99, 0)")
    with pytest.raises(PluginAPIVersionError):
        choose(pair.registry(), backend="future")


def test_conflicting_and_resolved(pair):
    pair.provider("twice", "BACKEND", distribution="iris-one")
    pair.provider("twice", "BACKEND", distribution="iris-two")
    with pytest.raises(PluginConflictError, match="twice@iris-one"):
        choose(pair.registry(), backend="twice")
    assert choose(pair.registry(), backend="twice@iris-two").backend.distribution == "iris-two"


def test_blocked(pair, monkeypatch):
    monkeypatch.setenv("IRIS_BLOCK", "lang")
    with pytest.raises(NoUsablePluginError, match="take it out of IRIS_BLOCK"):
        choose(pair.registry(), backend="lang")


def test_unavailable_says_why_and_takes_no_substitute(pair):
    pair.provider("absent", "BACKEND", probe="return Availability.no('no driver')")
    with pytest.raises(NoUsablePluginError, match=r"backend 'absent' .* cannot be used on cuda:1, cpu") as caught:
        choose(pair.registry(), backend="absent", targets=[GPU, CPU])
    assert caught.value.reasons["backend absent@iris-absent cpu"] == "unavailable: no driver"
    assert caught.value.reasons["backend absent@iris-absent cuda:1"] == "it works on cpu only"
    assert "lang@" not in str(caught.value)


def test_a_missing_capability_of_two_explicit_choices(pair):
    pair.provider("poor", "ALLOCATOR", info="devices=frozenset({DeviceType.CPU})")
    with pytest.raises(CapabilityError, match=r"'lang'.* needs remote-atomics, remote-load-store, which .*'poor'"):
        choose(pair.registry(), allocator="poor", backend="lang")


def test_two_explicit_choices_without_a_common_device_type(pair):
    pair.provider("gpupool", "ALLOCATOR", info="devices=frozenset({DeviceType.CUDA}), provides=frozenset(Capability)")
    with pytest.raises(CapabilityError, match=r"'gpupool'.* works on cuda and .*'lang'.* on cpu"):
        choose(pair.registry(), allocator="gpupool", backend="lang")


def test_nothing_usable_lists_every_candidate(site):
    site.provider("absent", "ALLOCATOR", probe="return Availability.no('no driver')")
    site.provider("lang", "BACKEND")
    with pytest.raises(NoUsablePluginError, match="no allocator and backend can be used together on cpu") as caught:
        choose(site.registry())
    assert reason(caught.value, "absent") == "unavailable: no driver"
    assert reason(caught.value, "lang") == "no usable allocator there"
    assert "iris doctor" in str(caught.value)


def test_nothing_installed(site):
    with pytest.raises(NoUsablePluginError, match="none is installed"):
        choose(site.registry())


def test_the_real_plugins_on_the_cpu(clean_environment):
    from iris_core.registry import Registry

    plan = choose(Registry(), targets=[CPU])
    assert chosen(plan) == ("host", "triton", "cpu")
