"""Rank jobs of tests/ccl: many calls one after the other, in groups, beside each other, and in graphs."""

import contextlib
import functools
import inspect
import random
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ccl_cases import OPS, Case
from emulation import emulation
from jobs_ccl import bits, jobs_of, on_heap
from jobs_common import environment, said_by, unlike
from ops_cases import tiles_of
from rank_processes import wait_until

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import DeviceError
from iris_core.hooks import hookimpl
from iris_core.registry import default_registry
from iris_core.types import PluginKind
from iris_triton.interpreter import configured

SHAPES = ((1,), (7,), (129,), (33, 5), (4099,))
DTYPES = ("float32", "bfloat16", "int32", "int8")
NUMEL = 50_000


def random_case(generator, size):
    """A call, the same on every rank that has the same generator."""
    place, op = generator.choice(("heap", "ordinary", "skewed")), generator.choice(OPS)
    dtype, shape, root = generator.choice(DTYPES), generator.choice(SHAPES), generator.randrange(size)
    config = {"algorithm": generator.choice(("one_shot", "two_shot"))}
    return Case(
        op, dtype, shape=shape, place=place, root=root,
        config=config if op == "all_reduce" and generator.random() < 0.5 else {},
    )  # fmt: skip


def in_groups(device, sets, rounds, cases=(), draw=None, backend="auto"):
    """Every group makes calls of its own, random ones and given ones; a rank that is in none of them makes none."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made, wrong = [dist.new_group(members, **unsorted) for members in sets], []
    sets = [members if unsorted else sorted(members) for members in sets]  # older versions of torch sort them
    with Iris("24MiB", device=device, backend=backend) as ctx:
        for number, (members, group) in enumerate(zip(sets, made, strict=True)):
            generator, size = random.Random(number), len(members)
            rank = members.index(ctx.cur_rank) if ctx.cur_rank in members else None
            drawn = [(draw or random_case)(generator, size) for _ in range(rounds)]
            for turn, case in enumerate([*drawn, *(cases if size > 1 else ())]):
                jobs = jobs_of(case)
                tensors = jobs.Tensors(ctx, case, rank or 0, size)
                if rank is not None:
                    given = tensors.fill(turn)
                    jobs.call(ctx, case, tensors, group if turn % 2 else list(members), members)
                    wrong += jobs.verify(case, tensors, given, f" in group {members}")
        ctx.barrier()
    return wrong


def back_to_back(
    device, calls, kinds, slow=False, draw=None, cases=None, backend="auto", packets=False, begin=None, **variables
):
    """Calls of different kinds with changing data, nothing waited for in between; all is looked at afterwards.

    Between products there are collectives, and some products are waited for behind later calls.

    Args:
        calls, kinds: how many; the kinds are `cases`, or drawn by a function.
        slow: whether some ranks are late.
        packets: whether CPU ranks emulate them.
        begin: called when all kinds are known; from then on one rank is late in every call.
    """
    order, own, wrong, plays = random.Random(11), random.Random(), [], []
    with (emulation if packets else environment)(**variables), Iris("64MiB", device=device, backend=backend) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        for case in cases or [(draw or random_case)(order, size) for _ in range(kinds)]:
            jobs, sides = jobs_of(case), []
            tensors = jobs.Tensors(ctx, case, rank, size)
            held = [each for each in (*tensors.operands, tensors.out) if each is not None]
            for turn in range(2):
                given = tensors.fill(turn)
                before = [each.clone() for each in held]
                jobs.call(ctx, case, tensors)
                wrong += jobs.verify(case, tensors, given, " at first")
                sides.append((before, bits(tensors.out)))
            plays.append((case, tensors, held, sides, torch.zeros((), dtype=torch.int64, device=ctx.device)))
        between, total = ctx.ones(100), ctx.zeros(100)
        ctx.ccl.all_reduce(total, between)
        ctx.barrier()
        if begin:
            begin(ctx)
        for turn in range(calls):
            case, tensors, held, sides, bad = plays[order.randrange(len(plays))]
            (before, want), (others, _) = sides[turn % 2], sides[1 - turn % 2]
            for mine, new in zip(held, before, strict=True):
                mine.copy_(new)
            if (turn + rank) % size == 0 if begin else slow and own.random() < 0.1:
                seconds = 0.05 if begin else 0.003  # for which the device is busy
                time.sleep(seconds) if device == "cpu" else torch.cuda._sleep(int(seconds * 1e9))
            is_product = case.op not in OPS
            is_async = is_product and order.random() < 0.3
            work = jobs_of(case).call(ctx, case, tensors, async_op=is_async)
            if is_product and order.random() < 0.3:
                ctx.ccl.all_reduce(total.zero_(), between)
                bad += (total != size).sum()
            if is_async:
                work.wait()
            for mine, other in zip(held[:-1], others, strict=False):  # operands, with which peers must be done
                mine.copy_(other)
            bad += (bits(tensors.out) != want).sum()  # the same bits every time
        ctx.barrier()
        wrong += [f"{case}: {bad} bytes were wrong on rank {rank}" for case, *_, bad in plays if bad]
    return wrong


def nobody_waits(device, seed, rounds):
    """Calls whose handles are dropped, on late ranks: a barrier brings their results, and no block is used twice."""
    with Iris("24MiB", device=device) as ctx:
        rank, size, reused = ctx.cur_rank, ctx.num_ranks, 0
        shared, own = random.Random(seed), random.Random(100 * seed + rank)
        for turn in range(rounds):
            checks, freed = [], set()
            for _ in range(shared.randint(1, 3)):
                group = shared.sample(range(size), shared.randint(2, size))
                fate = shared.choice(["free", "scope", "drop", "keep"])
                with ctx.scope() if fate == "scope" else contextlib.nullcontext() as scope:
                    x, y = ctx.full((NUMEL,), rank + 1.0), ctx.zeros(NUMEL)
                    time.sleep(own.choice([0, 0, 0, 0.02, 0.1]))
                    if rank in group:
                        ctx.ccl.all_reduce(y, x, group=group, async_op=True)
                        ctx.ccl.barrier(group=group, async_op=True)
                    if scope:
                        scope.keep(y)
                    freed.add(x.data_ptr())
                if fate == "free":
                    ctx.free(x)
                    freed.add(y.data_ptr())
                    ctx.free(y)
                elif rank in group:
                    checks.append((y, float(sum(each + 1 for each in group)), fate))
                del x, y
            time.sleep(own.choice([0, 0, 0.05]))
            ctx.barrier()
            assert [(turn, fate) for y, total, fate in checks if not bool((y == total).all())] == []
            new = [ctx.zeros(NUMEL) for _ in range(4)]
            reused += len(freed & {each.data_ptr() for each in new})
            time.sleep(0.03)
            for each in new:
                assert not each.any(), (turn, "written after it was freed")
                ctx.free(each)
        assert device != "cpu" or reused, "no block was used again"


@on_heap("8MiB")
def freed_and_asked_for(ctx):
    """A block is freed while a call uses it, and asked for again, as there is no other room; also off the heap."""
    numel, one = 1_200_000, torch.ones(5000, device=ctx.device)
    y, gone, out = ctx.zeros(numel), one.clone(), torch.zeros_like(one)
    time.sleep(0.2 * (ctx.cur_rank == 1))
    ctx.ccl.all_reduce(y, torch.ones(numel, device=ctx.device), async_op=True)
    ctx.free(y)
    again = ctx.zeros(numel)
    assert again.data_ptr() == y.data_ptr()
    time.sleep(0.3)
    assert again.unique().tolist() == [0.0]
    work = ctx.ccl.all_reduce(out, gone, async_op=True)
    del gone
    torch.full((5000,), 77.0, device=ctx.device)  # must not get the memory of what is still read
    work.wait()
    assert out.unique().tolist() == [ctx.num_ranks]


def leaves(device):
    """The context is left while calls are under way, on all ranks: by close, and with an error."""
    with Iris("8MiB", device=device) as ctx:
        time.sleep(0.1 * ctx.cur_rank)
        closed = ctx.zeros(NUMEL)
        ctx.ccl.all_reduce(closed, ctx.ones(NUMEL), async_op=True)
        ctx.ccl.barrier(async_op=True)
    assert closed.unique().tolist() == [float(ctx.num_ranks)]
    patient = environment(IRIS_BARRIER_TIMEOUT="20")
    with contextlib.suppress(ZeroDivisionError), patient, Iris("8MiB", device=device) as ctx:
        failed = torch.zeros(NUMEL, device=ctx.device)
        for _ in range(5):
            ctx.ccl.all_reduce(failed, torch.ones(NUMEL, device=ctx.device), async_op=True)
        raise ZeroDivisionError


def fails(how, learn):
    """Rank 0 makes calls to which its partner does not come, and waits for none; `learn` ranks raise it, once."""
    ctx, said = Iris("8MiB", device="cpu"), []
    rank, x, y = ctx.cur_rank, ctx.ones(4), ctx.zeros(4)
    reduce = functools.partial(ctx.ccl.all_reduce, y, x, group=[0, 1])
    reduce() if rank < 2 else None
    with configured(timeout_s=1.0):
        works = [reduce(async_op=True) for _ in range(3)] if rank == 0 else []
        said += [said_by(work.wait) for work in works if how == "wait"]
        if how == "collective" and rank == 0:
            wait_until(works[-1].is_completed)
            said.append(said_by(reduce))
        if how == "group" and rank < 2:
            said.append(said_by(ctx.barrier, group=[1, 0]))
        if how in ("barrier", "close"):
            said.append(said_by(getattr(ctx, how)))
        if how != "close":
            ctx.barrier()  # nothing is raised twice
            if rank < 2:
                ctx.ccl.reset(group=[0, 1])
                reduce(async_op=True)
    if how != "close":
        ctx.close()
        assert y.tolist() == ([2.0] * 4 if rank < 2 else [0.0] * 4)
    assert len(said) == (3 if how == "wait" else 1) * (rank < learn)
    words = f"DeviceError: (?=.*all_reduce)(?=.*{'rank 0' * (rank > 0)}).*Deadlock"
    assert all(re.match("DeadlockError: " if how == "wait" else words, text, re.DOTALL) for text in said), said


def keeps_errors():
    """Rank 0 makes barriers that fail before they are launched, and keeps their errors; then all make one."""
    with Iris("8MiB", device="cpu") as ctx:
        x, y = ctx.ones(4), ctx.zeros(4)
        ctx.ccl.all_reduce(y, x)
        ctx.ccl.barrier()
        kept = []
        with configured(timeout_s=1.0):
            if ctx.cur_rank == 0:
                kept += [ctx.ccl.all_reduce(y, x, async_op=True), ctx.ccl.barrier(async_op=True)]
                wait_until(kept[-1].is_completed)
                with pytest.raises(DeviceError) as error:
                    ctx.ccl.barrier()
                assert error.type is DeviceError
                kept.append(error)
        ctx.broadcast(0)
        last = threading.Thread(target=ctx.ccl.barrier, daemon=True)
        last.start()
        last.join(30)
        assert not last.is_alive()


def captured(device, cases, replays, workspace="", every=1, backend="auto"):
    """What is wrong with replays of new data, looked at in `every` such turn; a first call in a capture is refused."""
    wrong, limits = [], {"IRIS_CCL_WORKSPACE": workspace} if workspace else {}
    with environment(**limits), Iris("64MiB", device=device, backend=backend) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        plays = [(case, jobs_of(case), jobs_of(case).Tensors(ctx, case, rank, size)) for case in cases]

        def make(case, jobs, tensors, is_async=False):
            work = jobs.call(ctx, case, tensors, async_op=is_async)
            if is_async:
                work.wait()

        def first_call():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                make(*plays[0])

        plays[0][-1].fill(0)
        assert unlike(("UnsupportedError: ccl.captured", first_call)) == []
        torch.cuda.synchronize()
        ctx.barrier()
        for play in plays:
            play[-1].fill(0)
            make(*play)
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for play in plays:
                make(*play, is_async=play[0].op in OPS and play[0].place == "ordinary")
        for turn in range(replays):
            if turn % 3 == 0:  # eager calls of the same team between replays
                make(*plays[0])
            given = [tensors.fill(turn) for *_, tensors in plays]
            if turn % 7 == rank:
                torch.cuda._sleep(int(1e6))
            graph.replay()
            if turn < 3 or turn % every == every - 1:
                for (case, jobs, tensors), each in zip(plays, given, strict=True):
                    wrong += jobs.verify(case, tensors, each, f" in replay {turn}")
        ctx.barrier()
    return wrong


@on_heap("8MiB")
def observed(ctx):
    """What an observer hears: which algorithms serve these calls, and their bytes."""
    heard, x = [], ctx.zeros(10)

    class Observer:
        @hookimpl
        def iris_collective(self, op, algorithm, nbytes):
            heard.append((op, algorithm, nbytes))

    ctx.ccl.all_reduce(x, x)
    record = default_registry().register(PluginKind.OBSERVER, Observer(), name="listener")
    try:
        ctx.ccl.all_reduce(x, x)
        ctx.ccl.broadcast(x, async_op=True).wait()
    finally:
        default_registry().unregister(record)
    ctx.ccl.all_reduce(x, x)
    calls = ("all_reduce", x, x), ("broadcast", x)
    assert heard == [(op, ctx.ccl.explain(op, *tensors).algorithm, 40) for op, *tensors in calls]


@on_heap("24MiB")
def messages(ctx):
    """Messages round a ring and across, of all kinds, small and larger than an inbox."""
    rank, size = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % size, (rank - 1) % size
    kinds = [(dtype, n) for dtype in ("bfloat16", "int8", "complex128", "bool") for n in (1, 77, 30_001)]
    for turn, (name, n) in enumerate(kinds):
        dtype = getattr(torch, name)
        drawn = [torch.Generator().manual_seed(1000 * turn + sender) for sender in range(size)]
        sent = [torch.randint(0, 2 if name == "bool" else 100, (n, 3), generator=each).to(dtype) for each in drawn]
        out = (ctx.empty if turn % 2 else torch.empty)(n, 6, dtype=dtype, device=ctx.device)[:, ::2]
        inp = sent[rank].to(ctx.device)
        for work in (ctx.ccl.send(inp, right, async_op=True), ctx.ccl.recv(out, left, async_op=True)):
            work.wait()
        assert torch.equal(bits(out.cpu()), bits(sent[left])), (name, n)
    # in order, and before anybody receives
    small, got = ([ctx.full((5,), float(n * (10 * rank + i))) for i in range(2)] for n in (1, 0))
    for tensor in small:
        ctx.ccl.send(tensor, right)
    for tensor in got:
        ctx.ccl.recv(tensor, left)
    assert [t.unique().tolist() for t in got] == [[10.0 * left + i] for i in range(2)]
    assert "this rank" in said_by(ctx.ccl.send, small[0], rank)  # a message to oneself


@on_heap("24MiB")
def in_tiles(ctx):
    """reduce_scatter in the layout of AMD's Iris."""
    rank, size = ctx.cur_rank, ctx.num_ranks
    for place, distribution, swizzle in (("heap", 1, 4), ("heap", 0, 2), ("ordinary", 1, 2), ("ordinary", 0, 1)):
        make = ctx.empty if place == "heap" else torch.empty
        numbers = torch.arange(100 * 130).remainder(251).view(100, 130).to(torch.int32)
        x, y = (make(100, 130, dtype=torch.int32, device=ctx.device) for _ in range(2))
        x.copy_(numbers * (rank + 1))
        y.fill_(-1)
        config = Config(all_reduce_distribution=distribution, block_size_m=16, block_size_n=32, swizzle_size=swizzle)
        ctx.ccl.reduce_scatter(y, x, layout="tiles", config=config)
        mine = tiles_of((100, 130), 16, 32, swizzle, rank, size, in_turn=distribution == 0)
        assert torch.equal(y.cpu(), torch.where(mine, numbers * (size * (size + 1) // 2), -1)), (place, distribution)
