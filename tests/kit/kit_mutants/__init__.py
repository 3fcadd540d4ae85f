"""Plugins that are wrong on purpose, one mistake each.  Found through entry points that test_mutants installs."""

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import time


@functools.cache
def mutated(factory, edits):
    """Return "module:class" with pieces of the module's source replaced: (piece, its replacement, piece, ...).

    Replacements are indented as the piece's line, and may use `replace` of dataclasses, `time`, and `leaks`, which live
    as long as the process.
    """
    module, _, name = factory.partition(":")
    source = inspect.getsource(importlib.import_module(module))
    for piece, replacement in zip(edits[::2], edits[1::2], strict=True):
        assert source.count(piece) == 1, f"{module} has {source.count(piece)} of what is to be changed: {piece}"
        line = source[: source.index(piece)].rpartition("\n")[2]
        indentation = re.match(" *", line)[0]
        first, *others = replacement.splitlines(keepends=True)
        source = source.replace(piece, first + textwrap.indent("".join(others), indentation))
    names = {"__name__": module, "replace": dataclasses.replace, "time": time, "leaks": []}
    exec(compile(source, f"mutated {module}", "exec"), names)
    return names[name]
