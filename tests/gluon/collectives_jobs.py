"""Rank jobs of test_collectives: those of tests/ccl with the Gluon backend, and a few of their own."""

import importlib
from dataclasses import replace
from unittest import mock

import jobs_sequences
import torch
from ccl_cases import Case
from jobs_ccl import bits
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


def noise(ctx, numel, dtype, seed):
    """Random numbers: not such that every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype).to(ctx.device)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype).to(ctx.device)


def same_bits(device, dtypes, reductions, numel):
    """all_reduce in Gluon and in Triton on data that rounds; returns where they differ, and a digest of all results."""
    wrong, results = [], []
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        for name in dtypes:
            dtype = getattr(torch, name)
            mine = noise(ctx, numel, dtype, ctx.cur_rank)
            for reduction in reductions:
                outputs = {}
                for algorithm in ("two_shot", ALGORITHMS["all_reduce"]):
                    for place in ("heap", "off the heap"):
                        make = ctx.empty if place == "heap" else torch.empty
                        x, y = (make(numel, dtype=dtype, device=ctx.device) for _ in range(2))
                        x.copy_(mine)
                        ctx.ccl.all_reduce(y, x, reduction, config=Config(algorithm=algorithm))
                        outputs[algorithm, place] = bits(y.cpu())
                first = next(iter(outputs.values()))
                wrong += [f"{name} {reduction}: {who}" for who, got in outputs.items() if not torch.equal(got, first)]
                results.append(bytes(first.numpy()))
        ctx.barrier()
    return wrong, results


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


def asynchronous(device):
    """Handles of calls in Gluon, waited for in another order than they were made."""
    config = Config(use_gluon=True)
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        inputs = [ctx.full((1000 + i,), float(rank + i)) for i in range(4)]
        outputs = [ctx.zeros(1000 + i) for i in range(4)]
        works = [
            ctx.ccl.all_reduce(out, inp, async_op=True, config=config) for out, inp in zip(outputs, inputs, strict=True)
        ]
        gathered = ctx.zeros(size)
        ctx.ccl.all_gather(gathered, inputs[0][:1], config=config)
        for work in reversed(works):
            work.wait(timeout_s=10)
        ctx.barrier()
        return [out.unique().tolist() for out in outputs], gathered.tolist()


def said_of(device):
    """What is chosen for some configs, or why nothing is; and what is said of all algorithms."""
    said = {}
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        x, y = ctx.zeros(64), ctx.zeros(64)
        configs = {
            "gluon": Config(use_gluon=True),
            "named": Config(use_gluon=True, algorithm="gluon_two_shot"),
            "warps": Config(use_gluon=True, num_warps=8, comm_sms=3, block_size_m=8),
            "lanes": Config(use_gluon=True, threads_per_warp=32),
            "triton": Config(use_gluon=True, algorithm="two_shot"),
            "stages": Config(use_gluon=True, num_stages=3),
            "waves": Config(use_gluon=True, waves_per_eu=2),
            "swizzle": Config(use_gluon=True, swizzle_size=8),
        }
        for name, config in configs.items():
            said[name] = str(ctx.ccl.explain("all_reduce", y, x, config=config))
        said["gather"] = ctx.ccl.explain(
            "all_gather", ctx.zeros(64 * ctx.num_ranks), x, config=configs["gluon"]
        ).algorithm
        said["no gluon"] = str(ctx.ccl.explain("broadcast", x, src=0, config=configs["gluon"]))
        said["free"] = str(ctx.ccl.explain("all_reduce", y, x))
        ctx.barrier()
    return said


def one_of_each(device):
    """Every operation and nothing said of how: what the Gluon backend offers serves all of them."""
    with environment(IRIS_BACKEND="gluon"):
        cases = [Case(op, "bfloat16", shape=(9, 101)) for op in jobs_sequences.OPS]
        return importlib.import_module("jobs_ccl").run_cases(device, cases, 2), jobs_sequences.messages(device, 1)
