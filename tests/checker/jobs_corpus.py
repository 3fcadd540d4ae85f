"""Rank jobs with the checker on: cases of the corpus, also under seeds, and jobs of other folders."""

import contextlib
import importlib
import time
from unittest import mock

import corpus
import planted_memory
import planted_programs
import torch
import torch.distributed as dist
from jobs_common import environment

from iris_core import Iris
from iris_core.errors import DeviceError, DeviceTimeoutError
from iris_core.world import group
from iris_triton.checker.exploration import turns

CHECKS = "races,uninitialised,bounds"


def checking(path, checks=CHECKS, **variables):
    """Contexts that are opened inside are checked, and findings go to a file; without one they are raised."""
    reports = {"IRIS_CHECK_REPORTS": str(path)} if path else {}
    return environment(IRIS_CHECK=checks, **reports, **variables)


def run_cases(cases, bug, folder, backend="triton"):
    """Run cases (module, name); returns the texts of errors that end them.  Findings are in a file for each name."""
    return [_run_case(importlib.import_module(module), name, bug, folder, backend) for module, name in cases]


def _run_case(module, name, bug, folder, backend):
    """A mistake may lose a signal: it waits 5 s."""
    lost = contextlib.suppress(*[DeviceTimeoutError] * bug)
    patience = {"IRIS_DEVICE_TIMEOUT": "5"} if bug else {}
    with lost, checking(folder / name, **patience), Iris("4MiB", device="cpu", backend=backend) as ctx:
        try:
            module.CASES[name].run(ctx, bug)
        except IndexError as error:
            return f"{error}{''.join(getattr(error, '__notes__', ()))}"
    return ""


def checked(path, module, function, *args):
    """Call a rank job of another folder's tests with the checker on."""
    with checking(path):
        return getattr(importlib.import_module(module), function)(*args)


def explored(seeds, path, module, function, *args):
    """Call a rank job of another folder's tests in the schedule of each seed, with the checker on."""
    job, found = getattr(importlib.import_module(module), function), None
    for seed in seeds:
        with exploring(seed, path, f"{CHECKS},schedules"):
            found = job(*args)
    return found


def exploring(seed, path="", checks="schedules"):
    """Contexts that are opened inside run in the schedule of a seed."""
    return checking(path, checks, IRIS_CHECK_SEED=str(seed))


CASES = planted_programs.CASES | planted_memory.CASES


def run_case(name, bug, seeds, path="", look=None):
    """What a case computes, or its error, and what `look` finds, by schedule; with a path, races are looked for."""
    outcomes, checks = [], "races,schedules" if path else "schedules"
    for seed in seeds:
        with exploring(seed, path, checks), mock.patch.object(corpus, "kept", []) as found:
            try:
                with Iris("4MiB", device="cpu") as ctx:
                    CASES[name].run(ctx, bug)
                    seen = look and look()
                    ctx.barrier()
                outcomes.append(([each.tolist() for each in found], seen))
            except DeviceError as error:
                outcomes.append((type(error).__name__, None))
    return outcomes


def control():
    """Decisions, steps and changes until now."""
    return group.watcher.turns.control[turns.DRAWN : turns.CLOCK_NS + 1].tolist()


def journal():
    """What orders the accesses until now."""
    return group.watcher.rows()


def never_signalled(bounded):
    """Wait for what no rank signals; returns the kind of the error."""
    with exploring(1):
        try:
            with Iris("1MiB", device="cpu") as ctx:
                flag = ctx.zeros(1, dtype=torch.int32)
                ctx.barrier()
                look = "while tl.atomic_add(flag, 0, sem='acquire', scope='sys') == 0: pass"
                waiting = "ctx.wait(flag, 1)" if bounded else look
                corpus.launch(ctx, corpus.kernel(waiting, "flag"), flag)
        except DeviceError as error:
            return type(error).__name__
    return ""


def waits_by_torch():
    """Make a group and add up in it, in two schedules, after a kernel that the others wait for; the sums."""
    sums = []
    for seed in (0, 1):
        with exploring(seed, "", "schedules"), Iris("4MiB", device="cpu") as ctx:
            ctx.ccl.all_reduce(x := ctx.ones(4), x)
            dist.all_reduce(x, group=dist.new_group([0, 1]))
            ctx.ccl.all_reduce(x, x)
            sums.append(x.tolist())
    return sums


def waits_outside(done):
    """Let rank 0, which has the turn, wait for a file that the other makes behind a launch; returns whether it came."""
    with mock.patch.object(turns, "_STALL_S", 0.5), exploring(2), Iris("1MiB", device="cpu") as ctx:
        data, end = ctx.zeros(corpus.N), time.monotonic() + 60
        ctx.barrier()
        while ctx.cur_rank == 0 and not done.exists() and time.monotonic() < end:
            time.sleep(0.02)
        came = done.exists() or ctx.cur_rank == 1
        planted_programs.READS[0](ctx, data)
        done.touch()
        ctx.barrier()
        return came
