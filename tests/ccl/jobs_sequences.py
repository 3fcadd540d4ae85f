"""Rank jobs of tests/ccl: many calls one after the other, in groups, beside each other, and in graphs."""

import contextlib
import functools
import inspect
import random
import re
import threading
import time

import torch
import torch.distributed as dist
from ccl_cases import OPS, Case, expected
from jobs_ccl import Tensors, bits, call, on_heap, run_cases, said_by, verify
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import IrisError
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


def rest(ctx, seconds):
    """Keep this rank's device busy."""
    if ctx.device == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1e9))


def in_groups(device, sets, rounds):
    """Every group makes calls of its own; a rank that is in none of them makes none."""

    def play(ctx, generator, turn, rank, members, group):
        case = random_case(generator, len(members))
        tensors = Tensors(ctx, case, rank or 0, len(members))
        if rank is None:
            return []
        inputs = tensors.fill(turn)
        call(ctx, case, tensors, group, members)
        return verify(case, tensors, inputs, f" in group {members}")

    return of_groups(device, sets, lambda members: rounds, play)


def of_groups(device, sets, rounds, play, backend="auto"):
    """What `play` finds wrong with calls of each group, in turns; its rank is None where this one is no member."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made, wrong = [dist.new_group(members, **unsorted) for members in sets], []
    sets = [members if unsorted else sorted(members) for members in sets]  # older versions of torch sort them
    with Iris("24MiB", device=device, backend=backend) as ctx:
        for number, (members, group) in enumerate(zip(sets, made, strict=True)):
            generator = random.Random(number)
            rank = members.index(ctx.cur_rank) if ctx.cur_rank in members else None
            for turn in range(rounds(members)):
                wrong += play(ctx, generator, turn, rank, members, group)
        ctx.barrier()
    return wrong


def back_to_back(device, calls, kinds, slow_ranks):
    """Calls of different sizes and operations, nothing waited for in between; all results are looked at afterwards."""
    generator, wrong, plays = random.Random(5), [], []
    with Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        for turn in range(kinds):
            case = random_case(generator, size)
            tensors = Tensors(ctx, case, rank, size)
            inputs = tensors.fill(turn)
            source = tensors.inp.clone()
            bad = torch.zeros((), dtype=torch.int64, device=ctx.device)
            has_output = case.op not in ("reduce", "gather") or rank == case.root
            want = expected(case, rank, inputs).to(ctx.device) if has_output else None
            plays.append((case, tensors, source, want, bad))
        ctx.barrier()
        for _ in range(calls):
            case, tensors, source, want, bad = plays[generator.randrange(kinds)]
            if slow_ranks and generator.random() < 0.1 and generator.randrange(size) == rank:
                rest(ctx, 0.003)
            if case.op == "broadcast" and rank == case.root:
                tensors.out.copy_(source)
            elif want is not None:
                tensors.out.copy_(want.flip(0))
            call(ctx, case, tensors)
            tensors.inp.neg_() if case.dtype != "int8" else tensors.inp.add_(1)  # peers must be done with it
            if want is not None:
                bad += (bits(tensors.out) != bits(want)).sum()
            tensors.inp.copy_(source)
        ctx.barrier()
        for case, _, _, _, bad in plays:
            if int(bad.item()):
                wrong.append(f"{case}: {int(bad.item())} bytes were wrong on rank {rank}")
    return wrong


def in_pieces(device, cases, workspace):
    """Tensors off the heap that are larger than the workspace."""
    return run_cases(device, cases, 2, None, workspace)


def nobody_waits(device, seed, rounds):
    """Calls of several teams whose handles are dropped: results are there behind a barrier, and no block is used twice.

    Ranks are late by themselves; all else is the same on all of them.
    """
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        shared, own = random.Random(seed), random.Random(100 * seed + rank)
        reused = 0
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
            wrong += [(turn, fate) for y, total, fate in checks if not bool((y == total).all())]
            new = [ctx.zeros(NUMEL) for _ in range(4)]
            reused += len(freed & {each.data_ptr() for each in new})
            time.sleep(0.03)
            wrong += [(turn, "written after it was freed") for each in new if bool(each.any())]
            for each in new:
                ctx.free(each)
        if device == "cpu" and not reused:
            wrong.append("no block was used again")
    return wrong


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
    with (
        contextlib.suppress(ZeroDivisionError),
        environment(IRIS_BARRIER_TIMEOUT="20"),
        Iris("8MiB", device=device) as ctx,
    ):
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
        if how == "wait":
            said += [said_by(work.wait) for work in works]
        if how == "collective" and rank == 0:
            while not works[-1].is_completed():
                time.sleep(0.01)
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
    kind = (
        "DeadlockError: " if how == "wait" else f"DeviceError: (?=.*all_reduce)(?=.*{'rank 0' * (rank > 0)}).*Deadlock"
    )
    assert all(re.match(kind, text, re.DOTALL) for text in said), said


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
                while not kept[-1].is_completed():
                    time.sleep(0.01)
                try:
                    ctx.ccl.barrier()
                except IrisError as error:
                    kept.append(error)
                assert type(kept[-1]).__name__ == "DeviceError"
        ctx.broadcast(0)
        last = threading.Thread(target=ctx.ccl.barrier, daemon=True)
        last.start()
        last.join(30)
        assert not last.is_alive()


def captured(device, cases, replays, workspace=""):
    """Calls in a graph, replayed with new data; and a first call inside a capture; with a workspace of this bound."""
    wrong = []
    with environment(**({"IRIS_CCL_WORKSPACE": workspace} if workspace else {})), Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        x = ctx.zeros(77)

        def first_call():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ctx.ccl.all_reduce(x, x)

        said = said_by(first_call)
        ctx.barrier()
        everything = [Tensors(ctx, case, rank, size) for case in cases]
        for case, tensors in zip(cases, everything, strict=True):
            tensors.fill(0)
            call(ctx, case, tensors)
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for case, tensors in zip(cases, everything, strict=True):
                work = call(ctx, case, tensors, async_op=case.place == "ordinary")
                if work is not None:
                    work.wait()
        for turn in range(replays):
            inputs = [tensors.fill(turn) for tensors in everything]
            if turn % 7 == rank:
                torch.cuda._sleep(int(1e6))
            graph.replay()
            if turn % 3 == 0:  # eager calls of the same team between replays
                call(ctx, cases[0], everything[0])
            for case, tensors, given in zip(cases, everything, inputs, strict=True):
                wrong += verify(case, tensors, given, f" in replay {turn}")
        ctx.barrier()
    return [said] if said.startswith("UnsupportedError") else [], wrong


class Observer:
    """Writes down what it hears."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def iris_collective(self, op, algorithm, nbytes):
        self.heard.append((op, algorithm, nbytes))


@on_heap("8MiB")
def observed(ctx):
    """What an observer hears: which algorithms serve these calls, and their bytes."""
    observer, x = Observer(), ctx.zeros(10)
    ctx.ccl.all_reduce(x, x)
    record = default_registry().register(PluginKind.OBSERVER, observer, name="listener")
    try:
        ctx.ccl.all_reduce(x, x)
        ctx.ccl.broadcast(x, async_op=True).wait()
    finally:
        default_registry().unregister(record)
    ctx.ccl.all_reduce(x, x)
    calls = ("all_reduce", x, x), ("broadcast", x)
    assert observer.heard == [(op, ctx.ccl.explain(op, *tensors).algorithm, 40) for op, *tensors in calls]


@on_heap("24MiB")
def messages(ctx, rounds):
    """Messages round a ring and across, of all kinds, small and larger than an inbox."""
    wrong, rank, size = [], ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % size, (rank - 1) % size
    kinds = [(dtype, n) for dtype in ("bfloat16", "int8", "complex128", "bool") for n in (1, 77, 30_001)]
    for turn, (name, n) in enumerate(kinds * rounds):
        dtype = getattr(torch, name)
        drawn = [torch.Generator().manual_seed(1000 * turn + sender) for sender in range(size)]
        sent = [torch.randint(0, 2 if name == "bool" else 100, (n, 3), generator=each).to(dtype) for each in drawn]
        out = (ctx.empty if turn % 2 else torch.empty)(n, 6, dtype=dtype, device=ctx.device)[:, ::2]
        inp = sent[rank].to(ctx.device)
        for work in (ctx.ccl.send(inp, right, async_op=True), ctx.ccl.recv(out, left, async_op=True)):
            work.wait()
        if not torch.equal(bits(out.cpu()), bits(sent[left])):
            wrong.append(f"{name} {n}: rank {rank} got something else than rank {left} sent")
    # in order, and before anybody receives
    small, got = ([ctx.full((5,), float(n * (10 * rank + i))) for i in range(2)] for n in (1, 0))
    for tensor in small:
        ctx.ccl.send(tensor, right)
    for tensor in got:
        ctx.ccl.recv(tensor, left)
    if [t.unique().tolist() for t in got] != [[10.0 * left + i] for i in range(2)]:
        wrong.append(f"rank {rank}: messages came in another order: {got}")
    if "this rank" not in said_by(ctx.ccl.send, small[0], rank):
        wrong.append("a message to oneself was not refused")
    return wrong


@on_heap("24MiB")
def in_tiles(ctx):
    """reduce_scatter in the layout of the reference system."""
    rank, size = ctx.cur_rank, ctx.num_ranks
    for place, distribution, swizzle in (("heap", 1, 4), ("heap", 0, 2), ("ordinary", 1, 2), ("ordinary", 0, 1)):
        make = ctx.empty if place == "heap" else torch.empty
        numbers = torch.arange(100 * 130).remainder(251).view(100, 130).to(torch.int32)
        x, y = (make(100, 130, dtype=torch.int32, device=ctx.device) for _ in range(2))
        x.copy_(numbers * (rank + 1))
        y.fill_(-1)
        config = Config(all_reduce_distribution=distribution, block_size_m=16, block_size_n=32, swizzle_size=swizzle)
        ctx.ccl.reduce_scatter(y, x, layout="tiles", config=config)
        want = torch.full((100, 130), -1, dtype=torch.int32)
        for row, column in own_tiles(rank, size, 7, 5, swizzle, distribution):
            part = slice(16 * row, 16 * row + 16), slice(32 * column, 32 * column + 32)
            want[part] = numbers[part] * (size * (size + 1) // 2)
        assert torch.equal(y.cpu(), want), (place, distribution, swizzle)


def own_tiles(rank, size, rows, columns, swizzle, distribution):
    """(row, column) of the tiles of a rank, numbered as the reference system does."""
    each = -(-rows * columns // size)
    for number in range(rows * columns):
        if rank == (number // each if distribution else number % size):
            first = number // (swizzle * columns) * swizzle
            height = min(rows - first, swizzle)
            within = number % (swizzle * columns)
            yield first + within % height, within // height
