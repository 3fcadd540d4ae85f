"""What the jobs share."""

import os
import random
import re
import sys
from unittest import mock

from tables import WORDING, says

from iris_core.errors import IrisError
from iris_triton.interpreter.entries import read_clock
from iris_triton.language import asm

NAMING = ("ranks", "missing_ranks", "elsewhere")


def environment(**variables):
    return mock.patch.dict(os.environ, variables)


def in_language(language, job, *args):
    """Run a job with the kernels of its module in a language, with its context and with that backend."""
    if language == "triton":
        return job(*args)
    from gluon_kernels import IrisDeviceCtx, kernels_of

    jobs = sys.modules[job.__module__]
    replaced = mock.patch.multiple(jobs, DeviceContext=IrisDeviceCtx, **kernels_of(jobs))
    with replaced, environment(IRIS_BACKEND=language):
        return job(*args)


def said_by(call, *arguments, **named):
    """What a call raises, as text; empty if nothing."""
    try:
        call(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - of plugins, and what should not be raised, as well
        return f"{type(error).__name__}: {error}"
    return ""


def kind_of(call, *arguments, **named):
    """The type of the error that a call raises; empty if none."""
    return said_by(call, *arguments, **named).partition(":")[0]


def refusal(call, kinds=IrisError):
    """What a call raises, as (kind, ranks that it names, text with notes)."""
    try:
        call()
    except kinds as error:
        of_a_wait = () if getattr(error, "peer", None) is None else (error.peer,)
        named = next(filter(None, (getattr(error, name, ()) for name in NAMING)), of_a_wait)
        return type(error).__name__, tuple(named), "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing", (), ""


def finish(work):
    """Wait for a call that may have returned a handle."""
    if work is not None:
        work.wait()


def pattern(words):
    """For text that begins with the type of an error: `kind: key` of wording.toml, `kind: key: name`, or a pattern."""
    kind, key, name = (*words.split(": ", 2), "", "")[:3]
    return f"{kind}: .*{says(key, name=name)}" if key in WORDING else words


def unlike(*rows):
    """What calls raise that is not as it should be: what `pattern` takes and a call; "" for nothing."""
    said = [(words, said_by(call)) for words, call in rows]
    return [(words, text) for words, text in said if not (re.match(pattern(words), text, re.S) if words else not text)]


def in_vain(faster):
    """What waits in the block waits for nothing: on the CPU its bound comes so many times as early as it says.

    Ranks that wait for each other before must come to that within the bound.
    """
    return mock.patch.object(asm, "read_clock", lambda *operands: faster * read_clock(*operands))


def compile_together(ctx, launches):
    """Compile kernels that all ranks are going to launch: each on one rank, the others find it in Triton's cache.

    `launches` are (kernel, positional arguments, keyword arguments), the same on all ranks, so the rank must not be a
    constexpr of theirs.  On the CPU there is nothing to compile.
    """
    if ctx.device == "cpu":
        return
    for index, (kernel, args, kwargs) in enumerate(launches):
        if index % ctx.num_ranks == ctx.cur_rank:
            compiled = kernel.warmup(*args, grid=(1,), **kwargs)
            _ = compiled.run  # some versions of Triton compile a launcher here
    ctx.barrier()


def place_in(ctx, group):
    """Return this rank's place in a group or None, the group's size, and random numbers of the rank's own."""
    members = group or list(range(ctx.num_ranks))
    place = members.index(ctx.cur_rank) if ctx.cur_rank in members else None
    return place, len(members), random.Random(ctx.cur_rank)
