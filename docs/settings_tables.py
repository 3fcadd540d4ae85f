"""Tables of settings, made from the settings classes themselves; needs no Sphinx."""

from __future__ import annotations

import importlib
import os
from unittest import mock

from pydantic import ByteSize


def rows(settings_class: str, plugin: str = "") -> list[tuple[str, str, str, str]]:
    """Variable, what it accepts, default, and meaning of every field.

    Args:
        settings_class: dotted name of a class of settings.
        plugin: the plugin's name; empty for the core's settings.
    """
    from iris_core.settings import describe

    module, _, name = settings_class.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    bare = {name: value for name, value in os.environ.items() if not name.upper().startswith("IRIS_")}
    with mock.patch.dict(os.environ, bare, clear=True):  # the defaults, whatever is set where the pages are made
        described = describe(plugin, cls if plugin else None)
    defaults = [_default(field) for field in cls.model_fields.values()]
    return [(row.variable, row.type, default, row.help) for row, default in zip(described, defaults, strict=True)]


def _default(field: object) -> str:
    if field.default_factory is not None:  # differs from machine to machine; the description says how
        return "depends on the user"
    if field.default is None or field.default == ():
        return "unset"
    if isinstance(field.default, ByteSize):
        return field.default.human_readable(separator=" ")
    return str(field.default)
