"""Which kernel languages run on the CPU, and what runs them.

A language on top of Triton brings a subclass of `iris_triton.interpreter.frontend.calls.Dialect` in its own
distribution and names it here; it is imported when the first kernel in that language is launched.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    from iris_triton.interpreter.frontend.calls import Dialect

_factories = {"triton": "iris_triton.interpreter.frontend.calls:triton_dialect"}


def register_dialect(language: str, factory: str) -> None:
    """Name the function that makes the dialect of a language.

    Args:
        language: name of the language, see `iris_triton._compat.language_of`.
        factory: "module:function"; the function takes nothing and returns a `Dialect`, the same one every time.
    """
    _factories[language] = factory
    _dialect.cache_clear()


@functools.cache
def _dialect(language: str) -> Dialect:
    module, _, function = _factories[language].partition(":")
    made: Dialect = getattr(importlib.import_module(module), function)()
    return made


def dialect_of(function: Any) -> Dialect:
    """Return what runs a jitted kernel.

    Raises:
        UnsupportedError: nothing here runs kernels of its language.
    """
    from iris_triton import _compat

    language = _compat.language_of(function)
    if language not in _factories:
        raise UnsupportedError(
            f"kernel {function.__name__!r} is written in {language.capitalize()}, which nothing that is loaded runs on "
            f"the CPU: install iris-{language} and import iris_{language}.interpreter"
        )
    return _dialect(language)
