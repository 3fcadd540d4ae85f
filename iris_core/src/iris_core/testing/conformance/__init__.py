"""The conformance kit: test suites that a plugin's author inherits from, `iris_core.testing` names them.

`plugin`, `allocator`, `backend`, `collective` and `stack` have a suite each; `*_jobs` is what they run on ranks, where
there may be no pytest, and what must come of it; `oracle` reads and writes memory without the code under test.
docs/conformance_kit.md shows how to use it.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # not in rank processes, which only run jobs
    import pytest

    # an installed package's assertions say nothing unless pytest rewrites them, which it does at import
    suites = ("plugin", "allocator", "backend", "collective", "stack")
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in suites))
