"""The kit on every mutant and on the right plugins; test_mutants runs parts of it in processes of their own."""

import pathlib
import sys

import pytest
from kit_mutants import heavy, mutants, plugins

from iris_core import testing
from iris_core.testing.conformance import collective
from iris_core.types import PluginKind

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # behind all else: its folders are called as packages
from allocators.fake_driver import make_importable


def tests_of(base):
    """Names of a class's tests; that of light imports costs a process, so it runs where it is what a mutant fails."""
    return {name for name in dir(base) if name.startswith("test_")} - {"test_static_import_is_light"}


def functions_about(mutant):
    """Names of the tests of the kit that have to fail, without their parameters."""
    return {f"test_{killer.partition('[')[0]}" for killer in mutant[0].split()}


def enter(base, name, tests, plugin=None, **attributes):
    """A third party's test class, as docs/conformance_kit.md shows it, with some of the tests."""
    if plugin is not None:
        attributes["plugin"] = pytest.fixture(lambda self: plugin)
    left_out = {test for test in dir(base) if test.startswith("test_")} - tests
    globals()[f"Test_{name}"] = type(f"Test_{name}", (base,), {**dict.fromkeys(left_out), **attributes})


PASSED = {"test_static_info_is_complete", "test_static_probe_answers_for_every_device", "test_host_size_and_alignment"}
"""What mutants pass, if it is not about their mistakes."""
OF_ALLOCATORS = tests_of(testing.AllocatorConformance)
ABOUT_GROWTH = "test_peers_growth", "test_peers_import_is", "test_host_import"
"""What only allocators that grow and import do; the rest of "vmem" passes in tests/allocators."""

for _name, _plugin in plugins.ALLOCATORS.items():
    _tests = PASSED | functions_about(mutants.ALLOCATORS[_name]) if _name in mutants.ALLOCATORS else OF_ALLOCATORS
    enter(testing.AllocatorConformance, _name, _tests, _plugin, num_cycles=20)
for _name, _plugin in plugins.GROWING.items():
    _made = {"heap_nbytes": 4 << 20, "make_importable": pytest.fixture(lambda self: make_importable)}
    _tests = {test for test in OF_ALLOCATORS if test.startswith(ABOUT_GROWTH)}
    enter(testing.AllocatorConformance, _name, _tests, _plugin, num_cycles=20, **_made)
for _name, _plugin in {**plugins.PLUGINS, "heavy": heavy.plugin}.items():
    _tests = PASSED | functions_about(mutants.PLUGINS[_name])
    enter(testing.PluginConformance, _name, _tests, _plugin, kind=PluginKind.ALLOCATOR)

OF_STACKS = {name for name in tests_of(testing.StackConformance) if name.startswith("test_world_")}
BARRIER = "test_world_device_barrier_of_the_host"
"""What most pass."""


def stack(name, backend, tests, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    enter(testing.StackConformance, name, tests, **attributes)


for _name, _plugin in plugins.BACKENDS.items():
    _tests = tests_of(testing.BackendConformance)
    if _name in mutants.BACKENDS:
        _tests &= {"test_static_info_is_complete"} | functions_about(mutants.BACKENDS[_name])
    _cases = pytest.fixture(lambda self, backend: backend.compile_cases()[:1])
    enter(testing.BackendConformance, _name, _tests, _plugin, cases=_cases)
for _name in plugins.OPTIONAL:
    _passed = {"test_world_wait_that_gives_up" if _name == "open-barrier" else BARRIER}
    stack(_name, _name, functions_about(mutants.OPTIONAL[_name]) | _passed)
for _name in plugins.FAMILIES:
    _test = f"test_world_device_{'methods' if _name == 'mute-methods' else 'functions'}"
    _ranks = 3 if _name == "near" else 2  # a near copy is right where the rank after the next is this one
    _bound = 0.6 if _name == "near" else 0.2 if _name in ("mute", "blind", "mute-methods") else 20.0
    stack(_name, _name, {_test}, num_ranks=_ranks, timeout_s=_bound)
stack("right-stack", "right-backend", OF_STACKS, num_ranks=3)
stack("crossed-stack", "right-backend", {BARRIER}, "own-peer", timeout_s=0.3)

ALWAYS = {"test_static_protocol", "test_static_info_is_complete"}
OF_OPS = ALWAYS | {"test_host_supports_always_answers", "test_world_calls"}
"""What shows that an operation is computed right; the rest is the same for all of them."""
OF_RIGHT = {
    "right-AllReduce": tests_of(testing.CollectiveConformance),
    "right-Push": OF_OPS | {"test_world_of_a_group"},
}


class Few(testing.CollectiveConformance):
    """What mistakes and operations are about: an everyday call, no elements and one, other roots, halves, in place."""

    @pytest.fixture(autouse=True)
    def few_cases(self, monkeypatch, every=collective.cases):
        def is_about(each):
            plain = each == collective.Case(each.op)
            return plain or max(each.shape) < 2 or each.root or each.in_place or "16" in each.dtype

        monkeypatch.setattr(collective, "cases", lambda op, size: list(filter(is_about, every(op, size))))


for _name, _plugin in plugins.COLLECTIVES.items():
    if _name in mutants.COLLECTIVES:
        _tests = ALWAYS | functions_about(mutants.COLLECTIVES[_name])
    else:
        _tests = OF_RIGHT.get(_name, OF_OPS)
    _base = testing.CollectiveConformance if _name == "right-AllReduce" else Few
    enter(_base, _name, _tests, _plugin, allocator="host", backend="triton")
