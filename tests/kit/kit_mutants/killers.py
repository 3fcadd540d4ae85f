"""All mutants: their names, and by test of the kit those whose mistake it is about: there the test has to fail.

Imports nothing, for plugins have to be light.
"""


def functions_about(killers):
    return {f"test_{killer.partition('[')[0]}" for killer in killers}


def _by_mutant(killed):
    """Turn mutants by test into tests by mutant."""
    found = {}
    for test, mutants in killed.items():
        for mutant in mutants.split():
            found.setdefault(mutant, []).append(test)
    return found


ALLOCATORS = _by_mutant({
    "host_size_and_alignment[4096]": "crooked-base short-heap one-memory",
    "host_size_and_alignment[1]": "odd-granularity",
    "static_protocol": "swapped-parameters undeclared-capability",
    "host_impossible_size_is_an_error": "plain-error",
    "host_tensor_is_the_memory_asked_for": "shifted-tensor shared-storage overlapping-tensors copied-tensor",
    "host_tensors_outlive_close": "copied-tensor release-at-close close-takes-memory",
    "host_release_is_told_once_after_the_last_view":
        "release-twice release-never release-early release-at-close release-by-place",
    "host_commit_is_idempotent": "commit-clears",
    "host_decommit_gives_memory_back": "decommit-too-much",
    "host_close_is_final[0]": "close-once usable-after-close",
    "host_close_is_final[1]": "close-once usable-after-close",
    "host_nothing_leaks": "leaky-descriptor leaky-mapping leaky-import",
    "peers_export_describes_the_whole_heap": "short-export export-opens restless-generation",
    "peers_in_other_processes": "short-export wrong-peer own-peer shifted-peer snapshot-peer",
    "peers_in_this_process": "import-again leaky-import kept-descriptors",
    "peers_nonsense_is_refused": "kept-descriptors leaky-error",
})  # fmt: skip
GROWING = _by_mutant({
    "peers_growth": "quiet-commit loud-exchange hasty-export moving-peer unsaid-rest endless-export",
    "host_import_is_the_same_memory":
        "copied-import shifted-import odd-extent lost-import remembered-import silent-import",
    "host_import_refuses_other_memory": "credulous-import",
    "peers_import_is_seen": "unannounced-import",
})  # fmt: skip
PLUGINS = _by_mutant({
    "static_settings_have_defaults_and_descriptions": "required-settings undescribed-settings",
    "static_probe_answers_for_every_device": "no-reason wrong-argument",
    "static_entry_point_names_the_plugin": "other-name",
    "static_info_is_complete": "no-summary",
    "host_diagnosis": "raising-diagnosis wordless-diagnosis",
    "static_import_is_light": "heavy",
})  # fmt: skip
BACKENDS = _by_mutant({
    "host_context_words[third-of-four]": "swapped-words no-timeout",
    "host_context_words[alone]": "swapped-words",
    "host_context_refuses_contradictions": "credulous",
    "host_attach_and_detach": "detach-once",
    "static_protocol": "renamed-parameter own-words",
    "compile_cases_are_described": "no-cases",
    "compile_cases_compile[sm_90]": "vain-hope",
    "compile_cases_compile[gfx942]": "vain-hope",
    "static_device_functions": "no-signal swapped-ranks",
    "static_device_methods": "swapped-method",
    "host_trace_is_set_in_place": "deaf-tracing",
})  # fmt: skip
OPTIONAL = _by_mutant({
    "world_wait_that_gives_up[host]": "secret-waits",
    "world_device_barrier_of_the_host[host]": "open-barrier",
    "world_self_test_passes[host]": "half-tested hypochondriac secretive",
})  # fmt: skip
COLLECTIVES = _by_mutant({
    "world_calls[host-results]":
        "wrong-order swapped-chunks first-chunk root-zero dropped-last nothing-for-nothing half-precision "
        "own-first once no-entry no-exit",
    "world_calls[host-bits]": "last-first rounded-twice",
    "world_calls[host-agreement]": "own-rounding",
    "world_calls[host-surroundings]": "one-too-far",
    "world_calls[host-input]": "scratch-input",
    "world_calls[host-work]": "never-done",
    "world_is_ordered[host]": "peeks",
    "world_calls[host-memory]": "takes-memory borrows-memory",
    "world_plans_do_not_pile_up[host]": "plans-pile-up",
    "world_of_a_group[host]": "whole-world other-peers",
    "host_supports_always_answers": "raises silent-no yes-man",
    "host_supports_something": "never",
    "host_cost_is_positive_and_grows": "free-of-charge cheaper-by-the-dozen",
    "static_protocol": "other-names",
})  # fmt: skip
FAMILIES = ["mute", "near", "blind", "returns", "torn", "mute-methods"]
"""Those of device.py, of device functions and methods."""
