"""Which kernel languages run on the CPU, and what runs them.

A language on top of Triton brings a subclass of `iris_triton.interpreter.frontend.calls.Dialect` in its own
distribution and names it here; it is imported when the first kernel in that language is launched.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from iris_core.errors import UnsupportedError

FACTORIES = {"triton": "iris_triton.interpreter.frontend.calls:triton_dialect"}
"""Functions that make dialects, as "module:function", by the language of `iris_triton._compat.language_of`; they take
nothing and return the same `Dialect` every time."""


def dialect_of(function: Any) -> Any:
    """Return what runs a jitted kernel.

    Raises:
        UnsupportedError: no dialect here runs kernels of its language.
    """
    from iris_triton import _compat

    language = _compat.language_of(function)
    if language not in FACTORIES:
        raise UnsupportedError(
            f"kernel {function.__name__!r} is written in {language.capitalize()}, which nothing that is loaded runs on "
            f"the CPU: install iris-{language} and import iris_{language}.interpreter"
        )
    return pkgutil.resolve_name(FACTORIES[language])()
