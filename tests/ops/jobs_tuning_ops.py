"""What the ranks of test_tuning_ops do."""

import contextlib
import dataclasses

import torch
from jobs_common import environment
from jobs_tuning import measuring_all

from iris_core import Iris
from iris_core.bench import RunOptions
from iris_core.ops import FusedConfig
from iris_core.tuning.matmuls import KINDS, SPOILED, FusedSample, FusedTuneOptions
from iris_core.tuning.tuner import tune_on_this_rank


def samples(device, dtype, algorithm=None):
    """For each kind of call: whether the result was right, and whether a spoiled one and one wrong element were not."""
    answers = {}
    with Iris("16MiB", device=device) as ctx:
        for op, dim in KINDS:
            with ctx.scope():
                layer = (10 * ctx.num_ranks, 16 * ctx.num_ranks, 48)
                sample = FusedSample.of_layer(op, dim, getattr(torch, dtype), ctx.cur_rank, ctx.num_ranks, layer)
                out, a, b = sample.tensors(ctx)
                config = FusedConfig(algorithm=algorithm)
                getattr(ctx.ops, op)(out, a, b, config=config, **sample.options)
                want = sample.wanted(ctx.device)
                seen = [torch.equal(out, want), bool(want.any()), bool(want.abs().max() < 100)]
                out[-1, -1] += 1
                seen.append(torch.equal(out, want))
                out.fill_(SPOILED)
                answers[op, dim] = (*seen, bool((out == want).any()))
        ctx.barrier()
    return answers


def _no_room(*_):
    raise RuntimeError("out of resource: shared memory\nand more")


@contextlib.contextmanager
def _broken(op, name, launch):
    """Give an algorithm another launch."""
    from iris_triton import gemm as package

    offered = package.operations

    def operations():
        found = offered()
        for each in found:
            if (each.op, each.name) == (op, name):
                each.launch = launch
        return found

    package.operations = operations
    try:
        yield
    finally:
        package.operations = offered


def tune(device, wanted, broken="", limit_s=100.0, refuses=False):
    """Tune, with an algorithm that launches nothing, or that cannot be launched; every rank's findings."""
    launch = _no_room if refuses else (lambda *_: None)
    options = RunOptions(num_ranks=2, device=device, heap_size="24MiB", limit_s=limit_s)
    with _broken("matmul_all_reduce", broken, launch) if broken else contextlib.nullcontext(), measuring_all():
        found = tune_on_this_rank(FusedTuneOptions(**wanted), options)
    return dataclasses.replace(found, entries=tuple(dataclasses.asdict(each) for each in found.entries))


def chosen(cache, m, n, k):
    """With tables in a folder: (algorithm, why) of a matmul_all_reduce."""
    with environment(IRIS_CACHE_DIR=cache), Iris("1MiB", device="cpu") as ctx:
        out, a, b = (ctx.ones(*shape, dtype=torch.bfloat16) for shape in ((m, n), (m, k), (k, n)))
        found = ctx.ops.explain("matmul_all_reduce", out, a, b)
        return found.algorithm, found.why
