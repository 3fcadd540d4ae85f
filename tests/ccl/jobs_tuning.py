"""What the ranks of test_tuning do."""

import contextlib
import dataclasses
import tempfile

import torch
from jobs_common import environment

from iris_core import Iris
from iris_core.bench import RunOptions
from iris_core.tuning.collectives import OPS, SPOILED, Sample, TuneOptions
from iris_core.tuning.tuner import tune_on_this_rank


def samples(device, nbytes, dtype):
    """For each operation: whether the result was right, and whether a spoiled one and one with a wrong end were not."""
    answers = {}
    with Iris("16MiB", device=device) as ctx:
        for op in OPS:
            with ctx.scope():
                sample = Sample.of_bytes(op, getattr(torch, dtype), ctx.cur_rank, ctx.num_ranks, nbytes)
                out, inp = sample.tensors(ctx)
                getattr(ctx.ccl, op)(*((inp if out is None else out,) if op == "broadcast" else (out, inp)))
                if out is None:
                    answers[op] = (sample.nbytes, None)
                    continue
                right = sample.is_right(out)
                out[-1] += 1
                seen = [right, sample.is_right(out)]
                out.fill_(SPOILED)
                answers[op] = (sample.nbytes, [*seen, sample.is_right(out)])
    return answers


@contextlib.contextmanager
def _broken(name):
    """Let an algorithm for all_reduce launch nothing."""
    from iris_triton import collectives as package

    class Lazy:
        def __init__(self, real):
            self._real = real

        def __getattr__(self, attribute):
            return getattr(self._real, attribute)

        def launch(self, plan, out, inp, stream=None):
            pass

    offered = package.collectives

    def collectives(**options):
        return [Lazy(each) if (each.op, each.name) == ("all_reduce", name) else each for each in offered(**options)]

    package.collectives = collectives
    try:
        yield
    finally:
        package.collectives = offered


@contextlib.contextmanager
def measuring_all():
    """The environment in which `iris tune` runs ranks."""
    with tempfile.TemporaryDirectory() as cache, environment(IRIS_TUNE="exhaustive", IRIS_CACHE_DIR=cache):
        yield


def tune(device, wanted, broken=""):
    """Tune; every rank's findings."""
    options = RunOptions(num_ranks=2, device=device, heap_size="4MiB", limit_s=100)
    with _broken(broken) if broken else contextlib.nullcontext(), measuring_all():
        found = tune_on_this_rank(TuneOptions(**wanted), options)
    return dataclasses.replace(
        found, entries=tuple(dataclasses.replace(e, config=dict(e.config)) for e in found.entries)
    )


def chosen(cache):
    """With tables in a folder: (algorithm, why) of an all_reduce."""
    with environment(IRIS_CACHE_DIR=cache), Iris("1MiB", device="cpu") as ctx:
        x = ctx.ones(4, dtype=torch.float32)
        found = ctx.ccl.explain("all_reduce", x, x)
        return found.algorithm, found.why
