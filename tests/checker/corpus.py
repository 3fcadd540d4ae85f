"""What the modules of planted mistakes share: the registry of cases, kernels of a few statements, and launches.

A case is a function (ctx, bug) that every rank calls; with `bug` it makes its mistake, without it is the twin that is
right, and the kernels are the same but for that.  It returns nothing.  Comments `A` and `B` mark the two lines of the
report of a case; several lines may have the same mark.
"""

import functools
import importlib
import inspect
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from kernel_text import kernel_of

from iris_triton.context import DeviceContext
from iris_triton.language.address import translate
from iris_triton.language.blocks import lanes
from iris_triton.testing.languages import in_gluon

N = 64


@triton.jit
def fence(SCOPE: tl.constexpr):
    if SCOPE == "gpu":
        text: tl.constexpr = "fence.acq_rel.gpu; mov.u32 $0, 0;"
    else:
        text: tl.constexpr = "fence.acq_rel.sys; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


_BEGIN = """ctx = DeviceContext.initialize(context, RANK, WORLD)
i, x, pid, peer = lanes(N), lanes(N).to(tl.float32), tl.program_id(0), 1 - RANK
"""
_NAMES = {"tl": tl, "DeviceContext": DeviceContext, "lanes": lanes, "translate": translate, "fence": fence}


@functools.cache
def kernel(text, *parameters, **names):
    """Make a kernel that also knows its context, the `N` lanes `i`, as floats `x`, its program, and the other rank."""
    parameters = ", ".join(["context", *parameters, "RANK: tl.constexpr", "WORLD: tl.constexpr"])
    return kernel_of(triton.jit, parameters, f"{_BEGIN}{text.strip()}", N=tl.constexpr(N), **_NAMES, **names)


class Case(NamedTuple):
    """A case, the number of ranks that it needs, the kind of its report, and the lines with a mark, by letter."""

    run: object
    ranks: int
    kind: str
    marks: dict


def marks(source, first):
    """The lines with each mark, of a text whose first line has that number."""
    lines = [(number, line.partition("  # ")[2].split()) for number, line in enumerate(source.splitlines(), first)]
    return {letter: {number for number, words in lines if letter in words} for letter in "AB"}


def marks_in_kernel(text):
    return marks(text.strip(), 2 + _BEGIN.count("\n"))


def registry():
    """Return a dict of cases by name, the decorator that enters a function there, and what enters a launch."""
    cases = {}

    def case(ranks=2, kind="race"):
        def register(function):
            source, first = inspect.getsourcelines(function)
            cases[function.__name__] = Case(function, ranks, kind, marks("".join(source), first))
            return function

        return register

    def planted(*rows):
        """Enter launches between two barriers: rows of the arguments of `_launched`."""
        cases.update({name: _launched(name, about, text, mistake, **how) for name, about, text, mistake, how in rows})

    return cases, case, planted


def _launched(name, about, text, mistake, ranks=2, kind="race", programs=1, **arguments):
    """A case that is one launch.

    Args:
        mistake: what is wrong, by what is right in the kernel's text; None if it is in the arguments.
        **arguments: by the kernel's parameters, beside `out`; functions of the context make tensors, and what is a pair
            has the right value and the mistake.
    """
    wrong, arguments = text, {"out": out, **arguments}
    for old, new in (mistake or {}).items():
        assert wrong.count(old) == 1, (name, old)
        wrong = wrong.replace(old, new)

    def run(ctx, bug):
        chosen = [each[bug] if isinstance(each, tuple) else each for each in arguments.values()]
        made = [each(ctx) if callable(each) else each for each in chosen]
        ctx.barrier()
        launch(ctx, kernel(wrong if bug else text, *arguments), *made, programs=programs)
        ctx.barrier()

    run.__doc__ = about
    return Case(run, ranks, kind, marks_in_kernel(wrong))


def given(**how):
    """The last column of a row: the arguments of `_launched` that have names."""
    return how


def launch(ctx, kernel, *tensors, programs=1):
    """Launch a kernel that knows its context, in the language of the backend."""
    if ctx.plugin_names["backend"] == "gluon":
        kernel = in_gluon(kernel, DeviceContext=importlib.import_module("gluon_kernels"))
    kernel[(programs,)](ctx.get_device_context(), *tensors, RANK=ctx.cur_rank, WORLD=ctx.num_ranks)


def heap(*shape, dtype=torch.float32):
    return lambda ctx: ctx.zeros(shape, dtype=dtype)


def flags(count=1):
    return heap(count, dtype=torch.int32)


def local(*shape, dtype=torch.float32):
    """Makes a tensor of zeros that is no memory of the heap."""
    return lambda ctx: torch.zeros(shape, dtype=dtype)


kept = None
"""Where results are kept, for tests that look at them: a list."""


def out(ctx):
    made = torch.zeros(N)
    if kept is not None:
        kept.append(made)
    return made


PROGRAM = """
    import sys
    import corpus
    import planted_programs
    from iris_core import Iris

    with Iris("4MiB", device="cpu") as ctx:
        corpus.kept = []
        planted_programs.CASES["programs_without_flag"].run(ctx, sys.argv[1] != "right")
        assert sys.argv[1] != "assert" or corpus.kept[0][1] == 1, "the result is wrong"
    print("output")
    sys.exit(int(sys.argv[2]))
"""
"""For `iris check`: what it does, which may be to look at a result that is seldom right, and its status."""
