"""Rank jobs of test_collectives: those of tests/ccl with the Gluon backend, and a few of their own."""

import importlib
from dataclasses import replace
from unittest import mock

import jobs_sequences
from jobs_common import environment, soon

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import IrisError

ALGORITHMS = {"all_gather": "gluon_push", "all_to_all": "gluon_push", "all_reduce": "gluon_two_shot"}
"""What the Gluon backend adds, by operation."""


def in_gluon(module, job, *args):
    """Run a job of tests/ccl with the Gluon backend."""
    with environment(IRIS_BACKEND="gluon"):
        return getattr(importlib.import_module(module), job)(*args)


_random_case = jobs_sequences.random_case


def random_mixed_case(generator, size):
    """A call of tests/ccl, in Gluon if there is an algorithm and if it so happens, else in Triton."""
    case = _random_case(generator, size)
    if case.op in ALGORITHMS and generator.random() < 0.6:
        return replace(case, config={"algorithm": ALGORITHMS[case.op]})
    return case


def mixed(job, *args):
    """Run a job of jobs_sequences, in which calls in Triton and in Gluon follow each other in the same teams."""
    with mock.patch.object(jobs_sequences, "random_case", random_mixed_case):
        return in_gluon("jobs_sequences", job, *args)


def stays_away(device):
    """A rank that does not call: what the others are told; then all go on, in both languages."""
    config = Config(algorithm=ALGORITHMS["all_reduce"])
    with environment(IRIS_DEVICE_TIMEOUT=soon(device)), Iris("8MiB", device=device, backend="gluon") as ctx:
        x, y = ctx.ones(6, 4), ctx.zeros(6, 4)
        ctx.ccl.all_reduce(y, x, config=config)
        ctx.barrier()
        if ctx.cur_rank != 1:
            ctx.ccl.all_reduce(y, x, config=config)
        said = ""
        try:
            ctx.barrier()
        except IrisError as e:
            said = f"{type(e).__name__}: {e}"
        ctx.ccl.reset()
        sums = []
        for each in (config, None):
            x.fill_(ctx.cur_rank)
            ctx.ccl.all_reduce(y, x, config=each)
            ctx.barrier()
            sums += y.unique().tolist()
        return said, sums


def said_of(device, configs):
    """What is said of an all_reduce in Gluon by each config, what gathers, and what is said without a config."""
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        x, y, gathered = ctx.zeros(64), ctx.zeros(64), ctx.zeros(64 * ctx.num_ranks)
        said = [str(ctx.ccl.explain("all_reduce", y, x, config=Config(use_gluon=True, **each))) for each in configs]
        gathers = ctx.ccl.explain("all_gather", gathered, x, config=Config(use_gluon=True)).algorithm
        free = str(ctx.ccl.explain("all_reduce", y, x))
        ctx.barrier()
    return said, gathers, free
