"""The conformance kit: test suites that a plugin's author inherits from.

    plugin      static tier of every provider plugin: installed, light to import, valid hooks, settings
    allocator   an allocator alone, with a second one in the same process, and with peers in other processes
    backend     a device backend: context words, attach and detach, device functions, compiling without a GPU
    collective  a collective: what it says of itself, and calls of every kind on several ranks
    stack       an allocator and a backend together: kernels on several ranks, on the CPU and on GPUs

    jobs, oracle, signatures
                what runs on ranks; reading and writing memory without the code under test; comparing signatures
    device_functions, device_jobs
                what the stack suite calls each device function with, and what must come of it; what it runs on ranks
    collective_cases, collective_jobs
                the calls of the collective suite and what they must give; what it runs on ranks

docs/conformance_kit.md shows how to use it.  The suites are imported from `iris_core.testing`.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # not in rank processes, which only run jobs
    import pytest

    # an installed package's assertions say nothing unless pytest rewrites them, which it does at import
    for _suite in ("plugin", "allocator", "backend", "collective", "stack"):
        pytest.register_assert_rewrite(f"{__name__}.{_suite}")
