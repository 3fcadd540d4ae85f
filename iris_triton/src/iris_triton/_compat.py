"""The one place that knows which Triton versions exist and where their private interfaces lie.

Everything here is private to Triton and may move in any release; the table says for which releases it was tried.
"""

import triton

TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
"""(major, minor) of the Triton releases that the test suite was run with."""


def version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def version_problem() -> str:
    """What is wrong with the installed Triton's version; empty if it is in the table."""
    if version() in TESTED:
        return ""
    known = ", ".join(f"{a}.{b}" for a, b in TESTED)
    return f"Triton {triton.__version__} is not one of the versions that Iris was tested with ({known})"


# `triton.aggregate` is public from 3.8 on; before, only the language's core has it.
if hasattr(triton, "aggregate"):
    aggregate = triton.aggregate
else:
    from triton.language.core import _aggregate as aggregate  # noqa: F401
