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
    """Return a dict of cases by name, and the decorator that enters a function there."""
    cases = {}

    def case(ranks=2, kind="race"):
        def register(function):
            cases[function.__name__] = Case(function, ranks, kind)
            return function

        return register

    return cases, case


def launch(ctx, kernel, *tensors, programs=1, **constants):
    said = {"RANK": ctx.cur_rank, "WORLD": ctx.num_ranks, **constants}
    kernel[(programs,)](ctx.get_device_context(), *tensors, **said)


def flags(ctx, count=1, dtype=torch.int32):
    return ctx.zeros(count, dtype=dtype)


kept = None
"""Where results are kept, for tests that look at them: a list."""


def out(ctx):
    made = torch.zeros(N)
    if kept is not None:
        kept.append(made)
    return made
