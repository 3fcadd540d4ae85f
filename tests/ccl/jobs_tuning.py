"""What the ranks of test_tuning do: `iris tune` of collectives and of fused operations."""

import contextlib
import dataclasses
import tempfile
from unittest import mock

import torch
from jobs_ccl import on_heap
from jobs_common import environment

from iris_core import Iris
from iris_core.bench import RunOptions
from iris_core.ops import FusedConfig
from iris_core.tuning.collectives import TuneOptions
from iris_core.tuning.matmuls import FusedTuneOptions
from iris_core.tuning.tuner import tune_on_this_rank


@on_heap("16MiB")
def samples(ctx, wanted, algorithm=None):
    """Each operation's result is right; with a wrong end it is not, and spoiled neither."""
    for sample, config, *_ in wanted.points(ctx.cur_rank, ctx.num_ranks):
        with ctx.scope():
            out, *inputs = tensors = sample.tensors(ctx)
            if sample.op == "broadcast":
                tensors = [inputs[0] if out is None else out]
            face = ctx.ops if isinstance(config, FusedConfig) else ctx.ccl
            how = {"config": dataclasses.replace(config, algorithm=algorithm), **sample.options}
            getattr(face, sample.op)(*tensors, **how)
            assert sample.is_right(out), sample
            if out is not None:
                assert out.any(), sample
                out.view(-1)[-1] += 1
                assert not sample.is_right(out), sample
                out.fill_(sample.spoiled)
                assert not sample.is_right(out), sample


def _no_room(*_):
    raise RuntimeError("out of resource: shared memory\nand more")


def _broken(op, name, launch):
    """Give an algorithm another launch."""
    from iris_triton import collectives as package
    from iris_triton import gemm

    where, what = (gemm, "operations") if "matmul" in op else (package, "collectives")
    offered = getattr(where, what)

    def changed(**options):
        found = offered(**options)
        for each in found:
            if (each.op, each.name) == (op, name):
                each.launch = launch
        return found

    return mock.patch.object(where, what, changed)


@contextlib.contextmanager
def measuring_all():
    """The environment in which `iris tune` runs ranks."""
    with tempfile.TemporaryDirectory() as cache, environment(IRIS_TUNE="exhaustive", IRIS_CACHE_DIR=cache):
        yield


def tune(device, wanted, broken="", limit_s=100.0, refuses=False):
    """Tune, with an algorithm that launches nothing, or that cannot be launched; every rank's findings."""
    op, kind = wanted["ops"][0], FusedTuneOptions if "layers" in wanted else TuneOptions
    launch = _no_room if refuses else (lambda *_, **__: None)
    options = RunOptions(num_ranks=2, device=device, heap_size="24MiB", limit_s=limit_s)
    with _broken(op, broken, launch) if broken else contextlib.nullcontext(), measuring_all():
        found = tune_on_this_rank(kind(**wanted), options)
    return dataclasses.replace(found, entries=tuple(dataclasses.asdict(each) for each in found.entries))


def chosen(cache, *shape):
    """With tables in a folder: (algorithm, why) of an all_reduce, or of a matmul_all_reduce of this shape."""
    with environment(IRIS_CACHE_DIR=cache), Iris("1MiB", device="cpu") as ctx:
        if shape:
            m, n, k = shape
            tensors = (ctx.ones(*each, dtype=torch.bfloat16) for each in ((m, n), (m, k), (k, n)))
            found = ctx.ops.explain("matmul_all_reduce", *tensors)
        else:
            x = ctx.ones(4, dtype=torch.float32)
            found = ctx.ccl.explain("all_reduce", x, x)
        return found.algorithm, found.why
