"""What the modules of planted mistakes share: the registry of cases, and launches.

A case is a function (ctx, bug) that every rank calls; with `bug` it makes its mistake, without it is the twin that is
right, and the kernels are the same but for that.  It returns nothing.  A comment `A name` or `B name` marks the two
lines of the report of a case; several lines may have the same mark.
"""

from typing import NamedTuple

import torch

N = 64


class Case(NamedTuple):
    """A case, the number of ranks that it needs, and the kind of its report."""

    run: object
    ranks: int
    kind: str


def registry():
    """Return a dict of cases by name, the decorator that enters a function there, and what enters a launch."""
    cases = {}

    def case(ranks=2, kind="race"):
        def register(function):
            cases[function.__name__] = Case(function, ranks, kind)
            return function

        return register

    def planted(name, about, kernel, *tensors, ranks=2, kind="race", **constants):
        """Enter a launch between two barriers, with tensors that functions of the context make.

        What is a pair has the right value and the mistake; a constant BUG says which one.
        """

        def run(ctx, bug):
            given = [each[bug] if isinstance(each, tuple) else each for each in tensors]
            made = [each(ctx) if callable(each) else each for each in given]
            said = {key: value[bug] if isinstance(value, tuple) else value for key, value in constants.items()}
            ctx.barrier()
            launch(ctx, kernel, *made, **{"BUG": bug, **said})
            ctx.barrier()

        run.__doc__ = about
        cases[name] = Case(run, ranks, kind)

    return cases, case, planted


def launch(ctx, kernel, *tensors, programs=1, **constants):
    """Launch a kernel with the tensors, and with what it has parameters for besides."""
    said = {"context": ctx.get_device_context(), "RANK": ctx.cur_rank, "WORLD": ctx.num_ranks, "N": N, **constants}
    named = {name: value for name, value in said.items() if name in kernel.arg_names}
    first = [named.pop("context")] if "context" in named else []
    kernel[(programs,)](*first, *tensors, **named)


def heap(*shape, dtype=torch.float32):
    """Makes a tensor of zeros on the heap."""
    return lambda ctx: ctx.zeros(shape, dtype=dtype)


def flags(count=1):
    """Makes words for signals."""
    return heap(count, dtype=torch.int32)


def local(*shape):
    """Makes a tensor of zeros that is no memory of the heap."""
    return lambda ctx: torch.zeros(shape)


kept = None
"""Where results are kept, for tests that look at them: a list."""


def out(ctx):
    made = torch.zeros(N)
    if kept is not None:
        kept.append(made)
    return made
