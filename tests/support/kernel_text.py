"""Kernels of a few statements, which stand in a table next to what comes of them."""

import itertools
import linecache
import textwrap

import torch
import triton
import triton.language as tl

_numbers = itertools.count()


def kernel_of(jit, parameters, text, **names):
    """Make a kernel with the decorator of its language, parameters as in `def`, statements, and names they refer to."""
    source = f"def kernel({parameters}):\n{textwrap.indent(text, '    ')}\n"
    file = f"kernel_{next(_numbers)}.py"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # where `inspect` looks for it
    scope = {"__name__": __name__, **names}
    exec(compile(source, file, "exec"), scope)
    return jit(scope["kernel"])


def _places(shape):
    """Offsets of the elements of a contiguous block, in the language."""
    if len(shape) == 2:
        return f"tl.arange(0, {shape[0]})[:, None] * {shape[1]} + tl.arange(0, {shape[1]})[None, :]"
    return f"tl.arange(0, {shape[0]})" if shape else "0"


def check(expression, expected, *, atol=0.0, rtol=0.0, **values):
    """Look at what an expression is in a kernel in Triton; tensors among the values stand for their contents."""
    out, tensors = torch.zeros_like(expected), {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    lines = [f"{name} = tl.load({name} + {_places(each.shape)})" for name, each in tensors.items()]
    lines += [f"tl.store(out + {_places(out.shape)}, {expression})"]
    names = {name: value for name, value in values.items() if name not in tensors}
    kernel_of(triton.jit, ", ".join([*tensors, "out"]), "\n".join(lines), tl=tl, **names)[(1,)](*tensors.values(), out)
    found, wanted = out.double(), expected.double()  # torch compares not all types
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol, equal_nan=True, msg=lambda s: f"{expression}: {s}")
