"""The kit fails on plugins that are wrong: each mutant at the tests that are about its mistake.

The mutants stand in kit_mutants.  All of them run in three processes, for allocators, backends and collectives; the
tests here look at the reports.  A mutant may fail further tests, but skips none that the right plugin does not skip.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from kit_mutants.backends import OPTIONAL
from kit_mutants.collectives import KILLERS as COLLECTIVES
from kit_mutants.device import FAMILIES
from kit_mutants.growing import KILLERS as GROWING

from iris_core.testing.conformance.device_functions import NAMES
from iris_core.testing.dist_info import install_distribution

HERE = pathlib.Path(__file__).parent

ALLOCATORS = {
    "crooked-base": ["host_size_and_alignment[4096]"],
    "short-heap": ["host_size_and_alignment[4096]"],
    "odd-granularity": ["host_size_and_alignment[1]"],
    "restless-generation": ["host_description_never_changes"],
    "one-memory": ["host_heaps_do_not_overlap"],
    "owns-the-end": ["host_owns_is_exact"],
    "owns-peers": ["peers_mapping_is_not_owned", "peers_in_other_processes"],
    "swapped-parameters": ["static_protocol"],
    "untold-capability": ["static_optional_protocols_match_capabilities"],
    "plain-error": ["host_impossible_size_is_an_error"],
    "shifted-tensor": ["host_tensor_lies_where_it_was_asked_for", "host_tensor_is_the_memory"],
    "shared-storage": ["host_tensor_has_a_storage_of_its_own"],
    "copied-tensor": ["host_tensor_is_the_memory", "host_tensors_outlive_close"],
    "overlapping-tensors": ["host_disjoint_tensors_do_not_touch_each_other"],
    "release-twice": ["host_release_is_told_once_after_the_last_view"],
    "release-never": ["host_release_is_told_once_after_the_last_view"],
    "release-early": ["host_release_is_told_once_after_the_last_view"],
    "release-at-close": ["host_release_is_told_once_after_the_last_view", "host_tensors_outlive_close"],
    "release-by-place": ["host_release_is_told_for_each_tensor"],
    "commit-clears": ["host_commit_is_idempotent"],
    "decommit-too-much": ["host_decommit_gives_memory_back"],
    "close-once": ["host_close_is_idempotent"],
    "usable-after-close": ["host_use_after_close_is_an_error"],
    "close-takes-memory": ["host_tensors_outlive_close"],
    "leaky-descriptor": ["host_nothing_leaks"],
    "leaky-mapping": ["host_nothing_leaks"],
    "short-export": ["peers_export_describes_the_whole_heap", "peers_in_other_processes"],
    "export-opens": ["peers_exported_descriptors_stay_the_allocators"],
    "wrong-peer": ["peers_see_the_same_bytes", "peers_in_other_processes"],
    "own-peer": ["peers_see_the_same_bytes", "peers_in_other_processes"],
    "shifted-peer": ["peers_see_the_same_bytes", "peers_in_other_processes"],
    "snapshot-peer": ["peers_see_the_same_bytes", "peers_in_other_processes"],
    "import-again": ["peers_import_twice_is_harmless"],
    "leaky-import": ["peers_import_twice_is_harmless", "host_nothing_leaks"],
    "kept-descriptors": ["peers_descriptors_are_taken_over", "peers_nonsense_is_refused"],
    "leaky-error": ["peers_nonsense_is_refused"],
}
PLUGINS = {
    "required-settings": ["static_settings_have_defaults_and_descriptions"],
    "undescribed-settings": ["static_settings_have_defaults_and_descriptions"],
    "no-reason": ["static_probe_answers_for_every_device"],
    "wrong-argument": ["static_hooks_are_valid"],
    "other-name": ["static_entry_point_names_the_plugin"],
    "no-summary": ["static_info_is_complete"],
    "raising-diagnosis": ["host_diagnosis"],
    "wordless-diagnosis": ["host_diagnosis"],
    "heavy": ["static_import_is_light"],
}
BACKENDS = {
    "swapped-words": ["host_context_words[third-of-four]", "host_context_words[alone]"],
    "no-timeout": ["host_context_words[third-of-four]"],
    "credulous": ["host_context_refuses_contradictions"],
    "detach-once": ["host_attach_and_detach"],
    "renamed-parameter": ["static_protocol"],
    "no-cases": ["compile_cases_are_described"],
    "vain-hope": ["compile_cases_compile[sm_90]", "compile_cases_compile[gfx942]"],
    "no-signal": ["static_device_functions_exist", "static_device_function[signal]"],
    "swapped-ranks": ["static_device_function[load]", "static_device_function[wait]"],
    "swapped-method": ["static_device_method[store]"],
    "deaf-tracing": ["host_trace_is_set_in_place"],
    "own-words": ["static_optional_protocol[SupportsSelfTest]"],
}
STACKS = {
    "short-put": ["world_ring_put_with_signal[host]"],
    "short-store": ["world_all_to_all_store[host]"],
    "local-store": ["world_all_to_all_store[host]", "world_barrier[host]"],
    "no-barrier": ["world_barrier[host]"],
    "no-wait": ["world_ring_put_with_signal[host]"],
    "no-signal-sent": ["world_ring_put_with_signal[host]"],
    "crossed-stack": ["world_ring_put_with_signal[host]", "world_all_to_all_store[host]"],
    **OPTIONAL,
}
DEVICE = {
    mutant: {f"world_device_{'method' if mutant == 'mute-methods' else 'function'}[host-{name}]" for name in names}
    for mutant, names in FAMILIES.items()
}
_RIGHT = "all-reduce all-gather reduce-scatter all-to-all broadcast reduce gather scatter push"
RIGHT_COLLECTIVES = [f"right-{name}" for name in _RIGHT.split()]


def entry_points():
    """The mutants as an installed distribution names them."""
    from kit_mutants import plugins

    groups = {
        "iris.allocators": ("allocator", plugins.ALLOCATORS | plugins.GROWING | plugins.PLUGINS),
        "iris.backends": ("backend", plugins.BACKENDS | plugins.DEVICE | plugins.OPTIONAL | plugins.FAMILIES),
        "iris.collectives": ("collective", plugins.COLLECTIVES),
    }
    points = {
        group: {name: f"kit_mutants.plugins:{plugins.attribute(kind, name)}" for name in named}
        for group, (kind, named) in groups.items()
    }
    points["iris.allocators"]["heavy"] = "kit_mutants.heavy:plugin"
    return points


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Outcome by mutant and test, from all processes."""
    folder = tmp_path_factory.mktemp("mutants")
    site = folder / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        install_distribution(site, "iris-kit-mutants", entry_points=entry_points())
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), str(HERE), os.environ.get("PYTHONPATH")]))
    running = {}
    for suite in ("suite_allocators", "suite_backends", "suite_collectives"):
        report = folder / f"{suite}.xml"
        # native: pytest's own tracebacks parse the suites' sources again for each failure, and most tests fail here
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=native",
            f"--junitxml={report}",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-c", str(folder / "pytest.ini"), str(HERE / f"{suite}.py")]
        running[report] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = {}
    for report, process in running.items():
        output = process.communicate(timeout=480)[0].decode()
        assert process.returncode == 1, output[-5000:]  # tests failed, and nothing else went wrong
        found |= read_report(report)
    return found


def read_report(path):
    outcomes = {}
    for case in ET.parse(path).iter("testcase"):
        mutant = case.get("classname").rpartition("Test_")[2].replace("_", "-")
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        outcomes.setdefault(mutant, {})[case.get("name").removeprefix("test_")] = outcome
    return outcomes


def with_outcome(report, outcome):
    return {name for name, each in report.items() if each == outcome}


@pytest.mark.parametrize(("mutants", "right"), [
    (ALLOCATORS, "right-allocator"), (GROWING, "right-growing"), (BACKENDS, "right-backend"), (STACKS, "right-stack"),
    *((COLLECTIVES, right) for right in RIGHT_COLLECTIVES),
])  # fmt: skip
def test_the_right_ones_pass(reports, mutants, right):
    assert with_outcome(reports[right], "failed") == set()
    assert len(with_outcome(reports[right], "passed")) >= 4
    assert mutants.keys() <= reports.keys()


def test_every_mutant_is_expected(reports):
    right = {"right-allocator", "right-growing", "right-backend", "right-stack", *RIGHT_COLLECTIVES}
    assert reports.keys() == {*ALLOCATORS, *GROWING, *PLUGINS, *BACKENDS, *STACKS, *DEVICE, *COLLECTIVES, *right}


def check(report, killers, right, may_skip=frozenset()):
    """Return what passed: where nothing does, the failures are not about the mistake."""
    failed = with_outcome(report, "failed")
    missed = set(killers) - failed
    assert not missed, f"these did not notice: {missed}; these did: {failed}"
    assert with_outcome(report, "skipped") <= with_outcome(right, "skipped") | may_skip, "something was skipped"
    return with_outcome(report, "passed")


@pytest.mark.parametrize("mutant", ALLOCATORS)
def test_allocator(reports, mutant):
    untold = {"host_decommit_gives_memory_back"} if mutant == "untold-capability" else set()
    assert check(reports[mutant], ALLOCATORS[mutant], reports["right-allocator"], untold)


@pytest.mark.parametrize("mutant", GROWING)
def test_allocator_that_grows(reports, mutant):
    passed = check(reports[mutant], GROWING[mutant], reports["right-growing"])
    assert passed


@pytest.mark.parametrize("mutant", PLUGINS)
def test_plugin(reports, mutant):
    assert check(reports[mutant], PLUGINS[mutant], reports["right-allocator"])


@pytest.mark.parametrize("mutant", BACKENDS)
def test_backend(reports, mutant):
    assert check(reports[mutant], BACKENDS[mutant], reports["right-backend"])


@pytest.mark.parametrize("mutant", STACKS)
def test_stack(reports, mutant):
    passed = check(reports[mutant], STACKS[mutant], reports["right-stack"])
    assert passed or mutant == "crossed-stack"  # where every message goes astray


@pytest.mark.parametrize("mutant", DEVICE)
def test_device_functions(reports, mutant):
    """Each function is wrong by itself, so its own test fails, and those of the right ones pass."""
    assert with_outcome(reports[mutant], "failed") == DEVICE[mutant]
    assert len(with_outcome(reports[mutant], "failed") | with_outcome(reports[mutant], "passed")) == len(NAMES)


@pytest.mark.parametrize("mutant", COLLECTIVES)
def test_collective(reports, mutant):
    assert check(reports[mutant], COLLECTIVES[mutant], reports["right-all-reduce"])


@pytest.mark.parametrize(("mutants", "right"), [
    ({**ALLOCATORS, **PLUGINS}, "right-allocator"), (GROWING, "right-growing"), (BACKENDS | PLUGINS, "right-backend"),
    (STACKS | DEVICE, "right-stack"), (COLLECTIVES | PLUGINS, "right-all-reduce"),
])  # fmt: skip
def test_every_test_of_the_kit_can_fail(reports, mutants, right):
    """Some mutant is there for it: a test that passes on all of them would be worth nothing."""
    noticed = {name.partition("[")[0] for killers in mutants.values() for name in killers}
    assert {name.partition("[")[0] for name in with_outcome(reports[right], "passed")} <= noticed
