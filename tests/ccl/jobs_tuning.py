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
from iris_core.tuning import collectives, matmuls
from iris_core.tuning.tuner import tune_on_this_rank


@on_heap("16MiB")
def samples(ctx, nbytes, dtype):
    """For each operation: whether the result was right, and whether a spoiled one and one with a wrong end were not."""
    answers = {}
    for op in collectives.OPS:
        with ctx.scope():
            size = ctx.num_ranks
            sample = collectives.Sample.of_bytes(op, getattr(torch, dtype), ctx.cur_rank, size, nbytes)
            out, inp = sample.tensors(ctx)
            getattr(ctx.ccl, op)(*((inp if out is None else out,) if op == "broadcast" else (out, inp)))
            seen = None
            if out is not None:
                right = sample.is_right(out)
                out[-1] += 1
                seen = [right, sample.is_right(out)]
                out.fill_(collectives.SPOILED)
                seen.append(sample.is_right(out))
            answers[op] = (sample.nbytes, seen)
    return answers


@on_heap("16MiB")
def products(ctx, dtype, algorithm=None):
    """The same for each kind of product, and whether there is something to be right, of small numbers."""
    answers, size = {}, ctx.num_ranks
    for op, dim in matmuls.KINDS:
        with ctx.scope():
            layer = (10 * size, 16 * size, 48)
            sample = matmuls.FusedSample.of_layer(op, dim, getattr(torch, dtype), ctx.cur_rank, size, layer)
            out, a, b = sample.tensors(ctx)
            getattr(ctx.ops, op)(out, a, b, config=FusedConfig(algorithm=algorithm), **sample.options)
            want = sample.wanted(ctx.device)
            seen = [torch.equal(out, want), bool(want.any()), bool(want.abs().max() < 100)]
            out[-1, -1] += 1
            seen.append(torch.equal(out, want))
            out.fill_(matmuls.SPOILED)
            answers[op, dim] = (*seen, bool((out == want).any()))
    return answers


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
    op, kind = wanted["ops"][0], matmuls.FusedTuneOptions if "layers" in wanted else collectives.TuneOptions
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
