"""Kernels that are written once and compiled as Triton and as Gluon.

Their blocks come from `iris_triton.language.blocks`, which knows who is compiling, and their contexts from
`open_context`; the rest of the language is the same in both.
"""

import functools
from types import FunctionType

import triton
import triton.language as tl


def in_gluon(kernel, **replaced):
    """Return a Triton kernel as a Gluon kernel; `replaced` has other values for globals that it uses."""
    from triton.experimental import gluon

    plain = kernel.fn
    function = FunctionType(plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__)
    functools.update_wrapper(function, plain)
    del function.__wrapped__  # the globals would be looked for there
    made = gluon.jit(function, do_not_specialize=kernel.do_not_specialize)
    made._unsafe_update_src(f"{made.src}\n# in Gluon")  # what Triton compiled before has another name in the cache
    return made


@triton.constexpr_function
def _takes_size(Context):
    return hasattr(Context, "from_tensor")


@triton.jit
def open_context(Context: tl.constexpr, context_tensor, world_size: tl.constexpr):
    """Make a context of either language's class."""
    if _takes_size(Context):
        return Context.from_tensor(context_tensor, world_size)
    else:
        return Context.initialize(context_tensor)


@triton.jit
def invoke(api: tl.constexpr, context, world_size: tl.constexpr, before, as_function, as_method, behind):
    """Call a device function, or the method of the context that has its name.

    `api` is the function, the context's class or None, and the name: with a class the method is called.  The tuples are
    the first arguments of both, the next ones of the function and of the method, and the last ones of both.
    """
    if api[1] is None:
        return api[0](*before, *as_function, *behind)
    else:
        return getattr(api[1], api[2])(open_context(api[1], context, world_size), *before, *as_method, *behind)
