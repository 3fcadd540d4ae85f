"""Which tests are about the mistake of each allocator, plugin and backend: these have to fail.

Those of the other mutants stand beside them.
"""

import os

RUN_ALL = "KIT_MUTANTS_RUN_ALL" in os.environ
"""Whether mutants run the whole suite, and not only what is about them and what they pass."""


def functions_about(killers):
    """Names of test functions, from the ids of their cases."""
    return {f"test_{killer.partition('[')[0]}" for killer in killers}


ALLOCATORS = {
    "crooked-base": ["host_size_and_alignment[4096]"],
    "short-heap": ["host_size_and_alignment[4096]"],
    "odd-granularity": ["host_size_and_alignment[1]"],
    "restless-generation": ["host_description_never_changes"],
    "one-memory": ["host_heaps_do_not_overlap"],
    "swapped-parameters": ["static_protocol"],
    "untold-capability": ["static_optional_protocol[decommit]"],
    "plain-error": ["host_impossible_size_is_an_error"],
    "shifted-tensor": ["host_tensor_lies_where_it_was_asked_for", "host_tensor_is_the_memory"],
    "shared-storage": ["host_tensor_lies_where_it_was_asked_for"],
    "copied-tensor": ["host_tensor_is_the_memory", "host_tensors_outlive_close"],
    "overlapping-tensors": ["host_tensor_lies_where_it_was_asked_for"],
    "release-twice": ["host_release_is_told_once_after_the_last_view"],
    "release-never": ["host_release_is_told_once_after_the_last_view"],
    "release-early": ["host_release_is_told_once_after_the_last_view"],
    "release-at-close": ["host_release_is_told_once_after_the_last_view", "host_tensors_outlive_close"],
    "release-by-place": ["host_release_is_told_once_after_the_last_view"],
    "commit-clears": ["host_commit_is_idempotent"],
    "decommit-too-much": ["host_decommit_gives_memory_back"],
    "close-once": ["host_close_is_idempotent[0]", "host_close_is_idempotent[1]"],
    "usable-after-close": ["host_use_after_close_is_an_error"],
    "close-takes-memory": ["host_tensors_outlive_close"],
    "leaky-descriptor": ["host_nothing_leaks"],
    "leaky-mapping": ["host_nothing_leaks"],
    "short-export": ["peers_export_describes_the_whole_heap", "peers_in_other_processes"],
    "export-opens": ["peers_export_describes_the_whole_heap"],
    "wrong-peer": ["peers_in_other_processes"],
    "own-peer": ["peers_in_other_processes"],
    "shifted-peer": ["peers_in_other_processes"],
    "snapshot-peer": ["peers_in_other_processes"],
    "import-again": ["peers_in_this_process"],
    "leaky-import": ["peers_in_this_process", "host_nothing_leaks"],
    "kept-descriptors": ["peers_in_this_process", "peers_nonsense_is_refused"],
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
    "no-signal": ["static_device_functions"],
    "swapped-ranks": ["static_device_functions"],
    "swapped-method": ["static_device_methods"],
    "deaf-tracing": ["host_trace_is_set_in_place"],
    "own-words": ["static_optional_protocol[SupportsSelfTest]"],
}
