"""Rank jobs of test_first_calls: measuring at the first call of a kind, and what the members make of it."""

import contextlib
import os
import pathlib
from types import SimpleNamespace
from unittest import mock

import jobs_ccl
import jobs_ops
import torch
from ccl_cases import OPS, Case
from jobs_agreement import total
from jobs_ccl import said_by
from jobs_common import environment, in_vain
from ops_cases import Case as Product

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.dispatch import first_calls
from iris_core.dispatch.tables import Entry, write_table
from iris_core.errors import UnsupportedError
from iris_core.providers import Providers
from iris_core.types import Availability
from iris_triton.collectives.pull_reduce import PullReduce

NOT_IN_PLACE = ("all_to_all", "broadcast")
SECONDS, SLOW_SECONDS = 1e-4, 1e-3
"""What algorithms take by the clock of these tests."""


@contextlib.contextmanager
def measuring(cache, mode="first", device="cpu", fastest="two_shot"):
    """A context whose first calls measure, with a clock by which one algorithm is the fastest; None for a real one.

    Tables that the library brings for this GPU are left out: a point of theirs would not be measured.
    """
    own = first_calls._cpu_seconds

    def seconds(launch, calls):
        own(launch, calls)
        return SECONDS if launch.func.__self__.algorithm == fastest else SLOW_SECONDS

    clock = mock.patch.object(first_calls, "_cpu_seconds", seconds if fastest else own)
    no_tables = mock.patch.object(Providers, "tables", return_value=[])
    of_test = environment(IRIS_TUNE=mode, IRIS_CACHE_DIR=str(cache))
    with clock, no_tables, of_test, Iris("24MiB", device=device) as ctx:
        ctx.ccl._binder.add([PullReduce("all_reduce", "third")])
        yield ctx
        ctx.barrier()


def known_of(ctx, op="all_reduce"):
    """The algorithms of a collective, by name."""
    return ctx.ccl._binder._algorithms(None)._by_op[op]


def watched(ctx, names=("one_shot", "two_shot", "third", "gloo")):
    """Leave an all_reduce these algorithms, all of them good ones; returns a list, of those that are launched."""
    launched = []

    def noted(name, launch):
        def run(plan, *tensors):
            launched.append(name)
            return launch(plan, *tensors)

        return run

    for name, each in known_of(ctx).items():
        each.launch = noted(name, each.launch)
        each.cost = lambda request: 1.0
        if name not in names:
            each.supports = lambda request: Availability.no("left out by the test")
    return launched


def said_of(ctx, count=6, **how):
    """Algorithm and reason for `total`."""
    x = torch.zeros(count, device=ctx.device)
    found = ctx.ccl.explain("all_reduce", x.clone(), x, **how)
    return found.algorithm, found.why


# -- results ----------------------------------------------------------------------------------------------------------
def results(device, cache, members, mode):
    """Every operation, with new data in each of two calls: what was wrong, and what was measured.

    Two members make the calls on the heap that three make off it, and the other way around.
    """
    kinds = [("float32", "heap"), ("int32", "ordinary")]
    calls = [(op, in_place) for op in OPS for in_place in (False, True) if not in_place or op not in NOT_IN_PLACE]
    cases = [
        Case(op, dtype, shape=(7, 33 << 5 * in_place), root=len(members) - 1, place=place, in_place=in_place)
        for number, (op, in_place) in enumerate(calls)
        for dtype, place in (kinds if op == "all_reduce" else kinds[(number + len(members)) % 2 :][:1])
    ]
    with measuring(cache, mode, device, fastest=None) as ctx:
        return of_cases(ctx, jobs_ccl, cases, members)


def products(cache, members):
    """The same of fused operations."""
    cases = [
        Product("all_gather_matmul", None, (12, 5, 8), dim=0), Product("matmul_all_gather", None, (6, 5, 8), dim=1),
        Product("matmul_reduce_scatter", None, (12, 5, 8)),
        Product("matmul_all_reduce", None, (6, 5, 8), bias="columns"),
    ]  # fmt: skip
    with measuring(cache, fastest=None) as ctx:
        return of_cases(ctx, jobs_ops, cases, members)


def of_cases(ctx, jobs, cases, members):
    """What is wrong with calls of some ranks, and why which algorithm serves those that reduce to all, or products."""
    wrong, measured, is_ccl = [], [], jobs is jobs_ccl
    is_member, size = ctx.cur_rank in members, len(members)
    group = None if size == ctx.num_ranks else members
    for case in cases:
        tensors = jobs.Tensors(ctx, case, members.index(ctx.cur_rank) if is_member else 0, size)
        for turn in range(2 * is_member):
            inputs = tensors.fill(turn)
            how = (group, members, case.place == "ordinary") if is_ccl else (group,)
            work = jobs.call(ctx, case, tensors, *how)
            if is_ccl and work is not None:
                work.wait()
            wrong += jobs.verify(case, tensors, inputs if is_ccl else turn, f" (turn {turn})")
        if is_member and (not is_ccl or case.op == "all_reduce"):
            dim = {} if is_ccl or case.dim is None else {"gather_dim": case.dim}
            operands = (tensors.inp,) if is_ccl else (tensors.a, tensors.b, tensors.bias)
            engine = ctx.ccl if is_ccl else ctx.ops
            why = engine.explain(case.op, tensors.out, *operands, group=group, **dim).why
            measured.append((case.in_place, why) if is_ccl else why)
    return wrong, measured


# -- what is kept -----------------------------------------------------------------------------------------------------
def twice(cache, mode, tunings):
    """Two contexts, one after the other: what each launched, what it said, and the sums."""
    found = []
    for _ in range(2):
        with measuring(cache, mode) as ctx:
            launched = watched(ctx)
            known_of(ctx)["two_shot"].tunings = lambda request: tunings
            before = said_of(ctx)
            sums = [total(ctx) for _ in range(2)]
            found.append((set(launched), sums, before, said_of(ctx)))
    return found


def caches_that_differ(folder, names, group):
    """Each rank has a cache of its own, with a near point of an algorithm, or without."""
    rank = int(os.environ["RANK"])
    cache = pathlib.Path(folder) / str(rank)
    if names[rank]:
        entry = Entry("all_reduce", "float32", (1024,), names[rank], 1e-9, "ordinary", config={"comm_sms": 1 + rank})
        write_table(cache / "ccl" / "mine.json", "cpu", 2, {}, [entry])
    with measuring(cache) as ctx:
        launched = watched(ctx)
        sums = [total(ctx, group=group) for _ in range(2)]
        said = said_of(ctx, group=group)
    return set(launched), sums, said, sorted(path.name for path in cache.glob("ccl/*"))


def offered_by_some(cache):
    """Each rank would measure an algorithm that the other one would not."""
    with measuring(cache) as ctx:
        launched = watched(ctx, names=("two_shot", "gloo", ("one_shot", "third")[ctx.cur_rank]))
        return [total(ctx) for _ in range(2)], set(launched), said_of(ctx)


def not_measured(cache, what):
    """A call for which nothing is to be measured: what was launched, and whether there is a table."""
    with measuring(cache, "off" if what == "off" else "first") as ctx:
        launched, rank = watched(ctx), ctx.cur_rank
        x, y, splits = torch.full((5, 2), float(rank)), torch.full((5, 2), -1.0), [3 - rank, 2 + rank]
        if what == "a message":
            ctx.ccl.send(x, 1) if rank == 0 else ctx.ccl.recv(y, 0)
            right = rank == 0 or y.eq(0).all().item()
        elif what == "splits":
            ctx.ccl.all_to_all(y, x, input_split_sizes=splits, output_split_sizes=splits)
            right = y[:, 0].tolist() == [0.0] * (3 - rank) + [1.0] * (2 + rank)
        elif what == "a group of one":
            right = total(ctx, group=[rank]) == [rank + 1.0]
        else:
            named = {"named": {"algorithm": "third"}, "named by variant": {"all_reduce_variant": "one_shot"}}
            config = Config(**named[what]) if what in named else None
            right = total(ctx, 0 if what == "nothing" else 6, config=config) == [3.0] * (what != "nothing")
    return right, set(launched), any(pathlib.Path(cache).rglob("*.json"))


def little_room(cache, taken):
    """A call that needs a workspace of the heap, while users have much of it: sums, what was launched, what is left."""
    with measuring(cache) as ctx:
        launched, x = watched(ctx), ctx.empty(taken, dtype=torch.uint8)
        before = ctx.heap.stats().largest_free
        right = total(ctx, 1 << 20) == [3.0]
        del x
        return right, set(launched), ctx.heap.stats().largest_free >= before // 2


# -- what goes wrong --------------------------------------------------------------------------------------------------
class Odd:
    """two_shot by another name, and what some ranks raise when they prepare or launch it; None for nothing."""

    op, name, info = "all_reduce", "odd", SimpleNamespace(name="third")

    def __init__(self, own, prepares=None, launches=None):
        self._own, self._prepares, self._launches = own, prepares, launches
        self.supports = own.supports

    def cost(self, request):
        return 1.0

    def prepare(self, request, context):
        plan = self._own.prepare(request, context)
        if self._prepares is not None:
            raise self._prepares
        return plan

    def launch(self, plan, out, inp, stream=None):
        if self._launches is not None:
            raise self._launches
        return self._own.launch(plan, out, inp, stream)


def odd_one(cache, where, who):
    """An algorithm that cannot be prepared, or launched, on all ranks or on one."""
    with environment(IRIS_DEVICE_TIMEOUT="5"), measuring(cache) as ctx:
        bad = who in ("all", ctx.cur_rank)
        error = {"no room": UnsupportedError, "prepare": MemoryError, "launch": RuntimeError}[where]("not here")
        raised = {"launches" if where == "launch" else "prepares": error} if bad else {}
        odd = Odd(known_of(ctx)["two_shot"], **raised)
        ctx.ccl._binder.add([odd])
        launched = watched(ctx, names=("two_shot", "third", "odd"))
        out, inp = torch.zeros(6), torch.full((6,), ctx.cur_rank + 1.0)
        with in_vain(4) if where == "launch" and who != "all" else contextlib.nullcontext():
            said = said_by(lambda: ctx.ccl.all_reduce(out, inp))
        if said:
            ctx.ccl.reset()
        known_of(ctx)["odd"].supports = lambda request: Availability.no("it had its turn")
        again = [total(ctx), total(ctx)]
        return said, out.unique().tolist(), inp.unique().tolist(), again, set(launched), said_of(ctx)


def calls_that_differ(cache, what):
    """One rank calls otherwise, or cannot call; then all call alike."""
    with measuring(cache) as ctx:
        launched = watched(ctx)
        bad = ctx.cur_rank == 1
        x, y = torch.ones(8), torch.zeros(8)
        config = Config(algorithm="third") if bad and what == "named" else None
        dtype = torch.int32 if bad and what == "dtype" else torch.float32
        out, inp = y.to(dtype), x.to(dtype)[: 7 if bad and what == "refused" else 8]
        said = said_by(ctx.ccl.all_reduce, out, inp, config=config)
        nothing = not launched
        return said, nothing, [total(ctx), total(ctx)], said_of(ctx)
