"""The conformance kit: test suites that a plugin's author inherits from, `iris_core.testing` names them.

`plugin`, `allocator`, `backend`, `collective` and `stack` have a suite each; `*_jobs` is what they run on ranks, where
there may be no pytest, and what must come of it; `oracle` reads and writes memory without the code under test.
docs/conformance_kit.md shows how to use it.
"""
