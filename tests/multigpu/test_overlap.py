"""Streams, graphs, threads and groups at the same time: each job in processes of its own, which end if it hangs."""

import concurrent.futures
import contextlib
import random
import re
import time

import pytest
import test_hopper_ops
import torch
import triton
import triton.language as tl
from jobs_common import environment, said_by
from tables import raises, says
from test_device_barrier import Exchange
from triton.language.extra.cuda import gdc_wait

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import UnsupportedError
from iris_core.testing import RankPool

CYCLES_A_MS = 1_000_000


@triton.jit
def fill_device(value):
    """Programs that take all threads of the multiprocessors as soon as they may, and wait for the kernel before."""
    gdc_wait()
    tl.store(value + tl.program_id(0), tl.program_id(0))


def warm():
    """Load what `delay` launches: loading a kernel may wait for those that run, and these for the other ranks."""
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def delay(generator):
    if generator.random() < 0.3:
        torch.cuda._sleep(generator.randrange(CYCLES_A_MS // 10))


def pairs_for(ctx, groups, count):
    return [(ctx.zeros(count), ctx.full((count,), ctx.cur_rank + 1.0)) for _ in groups]


def are_sums(ctx, pairs):
    return all(bool((out == sum(range(1, ctx.num_ranks + 1))).all()) for out, _ in pairs)


def barrier_in_capture():
    with Iris("1MiB", device="cuda") as ctx:
        refused = raises(UnsupportedError, "ccl.captured")
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
            ctx.device_barrier()
        ctx.barrier()


def replays_beside_calls(replays):
    """Two graphs, one with two branches, replayed on two streams in opposite orders on odd ranks, beside calls."""
    generator = random.Random()
    with Iris("1MiB", device="cuda") as ctx:
        eager, first, second, branch = (Exchange(ctx, ctx.device_barrier) for _ in range(4))
        streams = [torch.cuda.Stream() for _ in range(2)]
        warm()
        for each in (eager, first, second, branch):
            each.step(0)
        ctx.barrier()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(graphs[0]):
            first.step(1)
            first.step(2)
        with torch.cuda.graph(graphs[1]):
            forked = torch.cuda.Stream()
            forked.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(forked):
                branch.step(3)
            second.step(4)
            torch.cuda.current_stream().wait_stream(forked)
        ctx.barrier()
        order = (0, 1) if ctx.cur_rank % 2 == 0 else (1, 0)
        for _ in range(replays):
            for number in order:
                with torch.cuda.stream(streams[number]):
                    delay(generator)
                    graphs[number].replay()
            eager.step(5)
        ctx.barrier()
        for each, values in ((first, (1, 2)), (branch, (3,)), (second, (4,)), (eager, (5,))):
            each.check(values, replays)


def overlapping_replays(algorithm, count):
    """The errors of two graphs of one group at the same time on rank 0, and whether all is well afterwards."""
    with environment(IRIS_DEVICE_TIMEOUT="2"), Iris("24MiB", device="cuda") as ctx:
        config, pairs = Config(algorithm=algorithm), pairs_for(ctx, "ab", count)
        warm()
        streams = [torch.cuda.Stream() for _ in pairs]
        graphs = [torch.cuda.CUDAGraph() for _ in pairs]
        for (out, inp), graph in zip(pairs, graphs, strict=True):
            ctx.ccl.all_reduce(out, inp, config=config)
            ctx.barrier()
            with torch.cuda.graph(graph):
                ctx.ccl.all_reduce(out, inp, config=config)
        ctx.barrier()
        for number, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                if ctx.cur_rank > 0:
                    torch.cuda._sleep((50 + 200 * number) * CYCLES_A_MS)
                graph.replay()
        error = said_by(ctx.barrier)
        ctx.broadcast(None)
        ctx.ccl.reset()
        for out, inp in pairs:
            out.zero_()
            ctx.ccl.all_reduce(out, inp, config=config)
        ctx.barrier()
        return error, are_sums(ctx, pairs)


def groups_crossed(rounds, fills):
    """Small calls of two groups on two streams, in opposite orders on odd ranks; `fills`: before large kernels."""
    generator = random.Random()
    with environment(IRIS_DEVICE_TIMEOUT="5"), Iris("24MiB", device="cuda") as ctx:
        members = tuple(range(ctx.num_ranks))
        groups = [members, members[::-1]]
        streams, pairs = [torch.cuda.Stream() for _ in groups], pairs_for(ctx, groups, 256)
        programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
        filled = torch.zeros(programs, dtype=torch.int32, device=ctx.device)
        early = {"num_warps": 32, "launch_pdl": True}
        config = Config(algorithm="ll_one_shot")
        for group, (out, inp) in zip(groups, pairs, strict=True):
            ctx.ccl.all_reduce(out, inp, group=group, config=config)
        fill_device[(programs,)](filled, **early)
        warm()
        ctx.barrier()
        order = (0, 1) if ctx.cur_rank % 2 == 0 else (1, 0)
        for _ in range(rounds):
            for number in order:
                out, inp = pairs[number]
                with torch.cuda.stream(streams[number]):
                    delay(generator)
                    ctx.ccl.all_reduce(out, inp, group=groups[number], config=config)
                    if fills:
                        fill_device[(programs,)](filled, **early)
                if fills:
                    time.sleep(2e-4)  # the first one's follower is there before the second
        ctx.barrier()
        assert are_sums(ctx, pairs)


def threads_and_replays(rounds):
    """A thread for each of two groups, with calls of its own, beside replays of a graph of a third one."""
    with environment(IRIS_DEVICE_TIMEOUT="20"), Iris("24MiB", device="cuda") as ctx:
        members = tuple(range(ctx.num_ranks))
        groups = list(dict.fromkeys((members, members[::-1], (*members[1:], 0))))
        pairs = pairs_for(ctx, groups, 1000)
        for group, (out, inp) in zip(groups, pairs, strict=True):
            ctx.ccl.all_reduce(out, inp, group=group)
        warm()
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ctx.ccl.all_reduce(*pairs[0], group=groups[0])
        ctx.barrier()

        def calls(group, pair):
            generator = random.Random()
            with torch.cuda.stream(torch.cuda.Stream(ctx.device)):
                for _ in range(rounds):
                    delay(generator)
                    ctx.ccl.all_reduce(*pair, group=group)
                    ctx.ccl.all_reduce(*pair, group=group, async_op=True).wait()

        with concurrent.futures.ThreadPoolExecutor() as threads:
            done = threads.map(calls, groups[1:], pairs[1:])  # they begin at once
            for _ in range(rounds):
                graph.replay()
            list(done)  # raises what they raise
        ctx.barrier()
        assert are_sums(ctx, pairs)


pytestmark = [pytest.mark.multigpu, pytest.mark.alone]
LIMIT_S = 100.0


@pytest.mark.parametrize(("job", "args", "num_ranks"), [
    *((replays_beside_calls, (100,), n) for n in (2, 3, 4)),
    *((groups_crossed, (100, fills), n) for fills in (False, True) for n in (2, 3, 4)),
    *((threads_and_replays, (100,), n) for n in (2, 3)), (barrier_in_capture, (), 2),
])  # fmt: skip
def test_at_the_same_time(pool, job, args, num_ranks):
    assert pool.run(job, num_ranks, *args, timeout_s=LIMIT_S) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("algorithm", "count"), [
    ("ll_one_shot", 256), ("sentinel_two_shot", 1 << 16), ("two_shot", 1 << 18),
])  # fmt: skip
def test_replays_at_the_same_time_are_reported(pool, algorithm, count, num_ranks):
    results = pool.run(overlapping_replays, num_ranks, algorithm, count, timeout_s=LIMIT_S)
    assert re.match(rf"Device\w*Error: .*{says('ccl.twice')}", results[0][0], re.DOTALL)
    assert all(well and re.match("Device|$", error) for error, well in results)


def test_launches_that_return_when_their_kernel_is_done():
    """Fused operations, whose copies must be asked for before the products that wait for them."""
    with RankPool(environ={"CUDA_LAUNCH_BLOCKING": "1", "IRIS_DEVICE_TIMEOUT": "5"}, timeout_s=LIMIT_S) as blocking:
        assert blocking.run(test_hopper_ops.run, 2, "cuda", 2) == [[], []]
