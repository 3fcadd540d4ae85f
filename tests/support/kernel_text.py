"""Kernels of a few statements, which stand in a table next to what comes of them."""

import itertools
import linecache
import textwrap

_numbers = itertools.count()


def kernel_of(jit, parameters, text, **names):
    """Make a kernel.

    Args:
        jit: the decorator of its language.
        parameters: as in `def`.
        text: its statements.
        **names: what it refers to.
    """
    source = f"def kernel({parameters}):\n{textwrap.indent(text, '    ')}\n"
    file = f"kernel_{next(_numbers)}.py"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # where `inspect` looks for it
    scope = {"__name__": __name__, **names}
    exec(compile(source, file, "exec"), scope)
    return jit(scope["kernel"])
