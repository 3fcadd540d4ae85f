"""Algorithms are measured on all members alike, by `iris tune` on verified data and by first calls on their tensors."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from dataclasses import replace
from unittest import mock

import jobs_ccl
import pytest
import torch
from ccl_cases import OPS, Case
from emulation import emulation
from jobs_ccl import total
from jobs_common import environment, in_vain, said_by, unlike
from tables import raises, table

from iris_core import Iris
from iris_core.bench import RunOptions
from iris_core.ccl import Config
from iris_core.cli import main
from iris_core.device import timers
from iris_core.dispatch import PRODUCTS
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.providers import Providers
from iris_core.tuning.samples import KINDS, LAYERS, FusedSample, FusedTuneOptions, TuneOptions
from iris_core.tuning.tuner import tune_on_this_rank
from iris_core.types import Availability
from iris_triton.collectives.pull_reduce import PullReduce
from iris_triton.collectives.two_shot import TwoShot
from iris_triton.gemm.matmul_reduce import Reduce

LAYER = ((16, 32, 48),)
REDUCED = ("matmul_all_reduce", "matmul_reduce_scatter")
CLASSES = {"one_shot": PullReduce, "two_shot": Reduce}  # of all_reduce, and of matmul_all_reduce


def tune(device, wanted, broken="", how="", limit_s=100.0):
    """Tune, with an algorithm that writes "nothing" or a wrong "end", or cannot be launched; a rank's findings."""
    kind = FusedTuneOptions if "layers" in wanted else TuneOptions
    launches = CLASSES[broken].launch if broken else None

    def launch(algorithm, plan, out, *inputs):
        if how == "not launched":
            raise RuntimeError("out of resource: shared memory\nand more")
        if how == "end":
            launches(algorithm, plan, out, *inputs)
            out.view(-1)[-1] += 1

    options = RunOptions(num_ranks=2, device=device, heap_size="24MiB", limit_s=limit_s)
    with (
        mock.patch.object(CLASSES[broken], "launch", launch) if broken else contextlib.nullcontext(),
        tempfile.TemporaryDirectory() as cache,
        emulation(IRIS_TUNE="exhaustive", IRIS_CACHE_DIR=cache),  # as `iris tune` runs ranks
    ):
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


@pytest.mark.parametrize(("wanted", "points"), [
    ({"min_nbytes": 5000, "max_nbytes": 5000}, {("*", op) for op in OPS}),
    ({"ops": ("all_reduce",), "dtypes": ("float32", "int32"), "min_nbytes": 1, "max_nbytes": 2}, {
        ("*", "all_reduce"), ("int32", "all_reduce")}),
    ({"layers": ((20, 32, 48), (64, 32, 48))}, {("bfloat16", op) for op in PRODUCTS}),
    ({"ops": REDUCED, "dtypes": ("float8_e4m3fn",), "layers": ((20, 32, 48),)}, {
        ("float8_e4m3fn", op) for op in REDUCED}),
])  # fmt: skip
def test_all_ranks_find_the_same_and_what_is_right_is_right(pool, device, wanted, points):
    first, second = pool.run(tune, 2, device, wanted)
    assert first == second
    assert first.wrong == ()
    found = {(row["dtype"], row["op"]) for row in first.entries}
    assert found <= points if device == "cuda" else (found, first.passed_over) == (points, ())
    assert all(row["seconds"] > 0 for row in first.entries)
    if len(wanted.get("layers", ())) > 1:
        kinds = {(row["gather_dim"], row["size"]) for row in first.entries if row["op"] == "matmul_all_gather"}
        assert kinds == {(0, (10, 32, 48)), (0, (32, 32, 48)), (1, (20, 16, 48)), (1, (64, 16, 48))}


@pytest.mark.parametrize(("wanted", "broken", "how", "dtype", "text"), [
    *(({"ops": ("all_reduce",), "dtypes": ("float32",), "max_nbytes": 1024}, "one_shot", how, "*",
       "all_reduce one_shot at 1024 bytes: ranks 0, 1") for how in ("nothing", "end")),
    *(({"ops": ("matmul_all_reduce",), "dtypes": ("tf32",), "layers": LAYER}, "two_shot", how, "float32",  # no TF32
       "matmul_all_reduce two_shot at 16 x 16 times 16 x 48 tf32: ranks 0, 1") for how in ("nothing", "end")),
    ({"ops": ("matmul_all_reduce",), "layers": LAYER}, "two_shot", "not launched", "bfloat16", ""),
])  # fmt: skip
def test_wrong_data_is_left_out_and_named(pool, wanted, broken, how, dtype, text):
    for found in pool.run(tune, 2, "cpu", wanted, broken, how):
        assert {row["dtype"] for row in found.entries} == {dtype}
        assert broken not in {row["algorithm"] for row in found.entries}
        assert text in found.wrong if text else found.wrong == found.passed_over == ()


def test_after_the_limit_nothing_is_begun(pool):
    wanted = {"ops": ("matmul_all_reduce",), "layers": (*LAYER, (32, 32, 48))}
    for found in pool.run(tune, 2, "cpu", wanted, "", "", 1e-6):
        assert (found.entries, len(found.passed_over)) == ((), 2)
        assert all(" 0 s " in each for each in found.passed_over)


def test_layers():
    found = [point.sample for point in FusedTuneOptions().points(0, 8)]
    assert len(found) == len(KINDS) * len(LAYERS) == len(set(found))
    sizes = [sample.heap_nbytes for sample in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 12 << 30
    assert {(sample.op, sample.gather_dim) for sample in found if 8192 in sample.shape} == set(KINDS)
    with raises(ArgumentError, "config.divide", ranks=3, what="8192 rows"):
        FusedTuneOptions().points(0, 3)
    with raises(ArgumentError, "config.divide", ranks=2, what=5):
        FusedSample("matmul_reduce_scatter", None, torch.half, 0, 2, (5, 4, 4))


@pytest.mark.slow
def test_the_command_writes_what_calls_use(pool, forked_ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    on_two = ["--device", "cpu", "--ranks", "2"]
    arguments = ["tune", *on_two, "--op", "all_reduce", "--max", "1KiB"]
    assert main(arguments) == 0
    assert main(["tune", "--ops", *on_two, "--op", "matmul_all_reduce", "--shape", "40x32x48"]) == 0
    shown = capsys.readouterr().out
    for engine, shape in (("ccl", ()), ("ops", (40, 48, 16))):
        path = tmp_path / engine / "cpu-2.json"
        assert f"written to {path}" in shown
        fastest = min(read_table(path).entries, key=lambda row: row.seconds).algorithm
        found = pool.run(chosen, 2, str(tmp_path), *shape)
        assert found[0] == (fastest, f"measured as the fastest in {path}")
    assert {each.name for each in tmp_path.iterdir()} == {"ccl", "ops"}
    fastest, own = read_table(tmp_path / "ccl" / "cpu-2.json").entries[0], tmp_path / "own.json"
    write_table(own, "cpu", 2, [], [Entry("reduce", "*", (1024,), "pull", 1.0), *(replace(fastest, seconds=9.0),) * 2])
    assert main([*arguments, "--op", "scatter", "--out", str(own)]) == 0
    entries = read_table(own).entries
    assert {each.op for each in entries} == {"all_reduce", "reduce", "scatter"}  # what was not measured again stays
    assert entries[0].op == "all_reduce"
    assert entries[0].seconds < 9.0


NOT_IN_PLACE = ("all_to_all", "broadcast")
SECONDS, SLOW_SECONDS = 1e-4, 1e-3
"""What algorithms take by the clock of these tests."""

WATCHED = {"one_shot", "two_shot", "third", "gloo"}
HERE = "measured here as the fastest"


NO_TABLES = mock.patch.object(Providers, "tables", return_value=[])


@contextlib.contextmanager
def measuring(cache, mode="first", fastest="two_shot", names=WATCHED, added=()):
    """A context without shipped tables whose calls measure, by a clock for which `fastest` is that.

    With it comes a list of the algorithms that an all_reduce launches, of `names` and those `added`.
    """
    own = timers._cpu_seconds

    def seconds(launch, calls):
        own(launch, calls)
        return SECONDS if launch.func.__self__.algorithm == fastest else SLOW_SECONDS, 0.0

    clock = mock.patch.object(timers, "_cpu_seconds", seconds)
    of_test = environment(IRIS_TUNE=mode, IRIS_CACHE_DIR=str(cache))
    with clock, NO_TABLES, of_test, Iris("24MiB", device="cpu") as ctx:
        binder = ctx.ccl._binder
        binder.providers.found()
        binder.providers._plugins[0].extend([PullReduce("all_reduce", "third"), *added])  # as if plugins had them
        binder._choosers.clear()
        yield ctx, watched(ctx, {*names, *(each.name for each in added)})
        ctx.barrier()


def known_of(ctx, op="all_reduce"):
    """The algorithms of a collective, by name."""
    return ctx.ccl._binder._algorithms(None)._by_op[op]


def watched(ctx, names):
    """Leave an all_reduce these algorithms, all of them good ones; returns a list, of those that are launched."""
    launched = []

    def noted(name, launch, plan, *tensors):
        launched.append(name)
        return launch(plan, *tensors)

    for name, each in known_of(ctx).items():
        each.launch = functools.partial(noted, name, each.launch)
        each.cost = lambda request: 1.0
        if name not in names:
            each.supports = lambda request: Availability.no("left out by the test")
    return launched


def said_of(ctx, count=6, **how):
    """Algorithm and reason for `total`."""
    x = torch.zeros(count, device=ctx.device)
    found = ctx.ccl.explain("all_reduce", x.clone(), x, **how)
    return found.algorithm, found.why


def results(device, cache, members, mode):
    """Every operation, with new data in each of two calls; what is wrong, and why which algorithms serve all_reduce.

    Two members make the calls on the heap that three make off it, and the other way around.  On GPUs, what is
    the fastest is captured.
    """
    own, graphs = timers._captured, []
    kinds = [("float32", "heap"), ("int32", "ordinary")]
    calls = [(op, in_place) for op in OPS for in_place in (False, True) if not in_place or op not in NOT_IN_PLACE]
    cases = [
        Case(op, dtype, shape=(7, 33 << 5 * in_place), root=len(members) - 1, place=place, in_place=in_place)
        for number, (op, in_place) in enumerate(calls)
        for dtype, place in (kinds if op == "all_reduce" else kinds[(number + len(members)) % 2 :][:1])
    ]

    def reasons(ctx):
        made = [jobs_ccl.Tensors(ctx, case, 0, len(members)) for case in cases if case.op == "all_reduce"]
        return [
            ctx.ccl.explain("all_reduce", tensors.out, tensors.inp, group=members).why
            for tensors in made * (ctx.cur_rank in members)
        ]

    captured = mock.patch.object(timers, "_captured", lambda *args: graphs.append(own(*args)) or graphs[-1])
    with NO_TABLES, environment(IRIS_TUNE=mode, IRIS_CACHE_DIR=cache), captured:
        found = jobs_ccl.run_cases(device, cases, 2, members, handles=True, look=reasons)
    assert any(graphs) == (device == "cuda" and bool(found[1]))
    return found


def twice(cache, mode):
    """Two contexts, one after the other: the second one measures only if all is measured always."""
    for is_later in (False, True):
        with measuring(cache, mode) as (ctx, launched):
            known = is_later and mode == "first"
            known_of(ctx)["two_shot"].tunings = lambda request: ({}, {"comm_sms": 2})
            why = f"measured as the fastest in {cache}/ccl/cpu-2.json" if known else HERE
            assert (said_of(ctx) == ("two_shot", why)) == known
            assert total(ctx) == total(ctx) == [3.0]
            assert (set(launched), said_of(ctx)) == ({"two_shot"} if known else WATCHED, ("two_shot", why))


def with_a_config(cache):
    """Calls whose config says something are measured, near a point of the table, and leave no point themselves."""
    with measuring(cache) as (ctx, _):
        assert total(ctx) == [3.0]
    with measuring(cache) as (ctx, launched):
        assert total(ctx, config=Config(num_warps=2)) == total(ctx, config=Config(num_warps=2)) == [3.0]
        assert set(launched) == WATCHED - {"gloo"}  # which has no use for it
        assert said_of(ctx, config=Config(num_warps=2)) == ("two_shot", HERE)
        assert said_of(ctx)[1].startswith("measured as the fastest in")
    assert len(read_table(pathlib.Path(cache) / "ccl" / "cpu-2.json").entries) == len(WATCHED)


class OfAPlugin(PullReduce):
    """An algorithm that does not come with Iris."""


def newer_than_the_table(cache):
    """An algorithm of a plugin is measured once, near a point that was measured without it; one of Iris's is not."""
    kinds, found = {"ours": PullReduce, "theirs": OfAPlugin}, []
    for added in ((), ("ours",), ("theirs",), ("theirs",)):
        algorithms = [kinds[name]("all_reduce", name) for name in added]
        with measuring(cache, fastest="theirs", added=algorithms) as (ctx, launched):
            assert total(ctx) == total(ctx) == [3.0]
            found.append((len(set(launched)) > 1, said_of(ctx)[0] == "theirs"))
    assert found == [(True, False), (False, False), (True, True), (False, True)]


def nearly_as_fast(cache):
    """Where the two fastest took nearly as long at a near point, or none is there, all are measured, and kept, once."""
    times = {"one_shot": 1e-6, "third": 1.04e-6, "two_shot": 1.06e-6}
    entries = [Entry("all_reduce", "float32", (4096,), *each, "ordinary") for each in times.items()]
    entries.append(Entry("all_reduce", "float32", (16000,), "gone", 1e-6, "ordinary"))
    write_table(pathlib.Path(cache) / "ccl" / "mine.json", "cpu", 2, [], entries)
    damaged = pathlib.Path(cache) / "ccl" / "cpu-2.json"
    damaged.write_text('{"format": 1}')
    with measuring(cache) as (ctx, launched):
        for count, expected in ((1100, {"one_shot"}), (1200, WATCHED), (1210, {"two_shot"}), (4000, WATCHED)):
            assert total(ctx, count) == total(ctx, count) == [3.0]
            assert set(launched) == expected
            launched.clear()
    assert len(read_table(damaged).entries) == 2 * len(WATCHED)


def in_order(cache):
    """A first call in place, and on a tensor that only inference mode may write, follows one that is under way."""
    with measuring(cache) as (ctx, _):
        with torch.inference_mode():
            x, y = torch.ones(1 << 18), torch.full((1 << 18,), 100.0)
        ctx.ccl.all_to_all(torch.empty(1 << 18), torch.ones(1 << 18))
        ctx.barrier()
        work = ctx.ccl.all_to_all(y, x, async_op=True)
        ctx.ccl.all_reduce(y, y)
        work.wait()
        assert y.unique().tolist() == [2.0]


def of_other_groups(cache):
    """What ranks have measured with others, and took of the heap there, changes nothing for a call, or part of one."""
    with measuring(cache) as (ctx, _):
        if ctx.cur_rank < 2:
            assert total(ctx, group=[0, 1]) == total(ctx, 1 << 20, group=[0, 1]) == [3.0]
        if ctx.cur_rank > 0:
            out, config = torch.zeros(2, 3), FusedConfig(algorithm="unfused")
            ctx.ops.matmul_all_reduce(out, torch.ones(2, 4), torch.ones(4, 3), config=config, group=[1, 2])
            assert out.unique().tolist() == [8.0]
        assert total(ctx, 1 << 20) == total(ctx, 40, config=Config(algorithm="third")) == total(ctx, 40) == [6.0]
        assert said_of(ctx, 40) == ("two_shot", HERE)


def fewer_can_serve(cache):
    """Calls that not every algorithm takes are measured, and leave no point for those that others could serve."""
    gaps, odd = torch.ones(2000)[::2], torch.ones(1201)[1:]
    with measuring(cache) as (ctx, launched):
        for x, op in ((gaps, "sum"), (odd, "sum"), (torch.ones(4000), "max")):
            ctx.ccl.all_reduce(torch.empty_strided(x.shape, x.stride()), x, op)
            assert len(set(launched)) > 1
            launched.clear()
    assert not (pathlib.Path(cache) / "ccl").exists()


def caches_that_differ(folder, names, group, chosen):
    """Each rank has a cache of its own, with a near point of an algorithm, or without."""
    rank, folder = int(os.environ["RANK"]), pathlib.Path(folder)
    cache, own = folder / str(rank), ["mine.json"] if names[rank] else []
    if names[rank]:
        entry = Entry("all_reduce", "float32", (1024,), names[rank], 1e-9, "ordinary", config={"comm_sms": 1 + rank})
        write_table(cache / "ccl" / "mine.json", "cpu", 2, [], [entry])
    with measuring(cache) as (ctx, launched):
        assert total(ctx, group=group) == total(ctx, group=group) == [3.0]
        said = said_of(ctx, group=group)
    if chosen:
        path = folder / str(names.index(chosen)) / "ccl" / "mine.json"
        assert (set(launched), said) == ({chosen}, (chosen, f"measured as the fastest in {path}"))
    else:  # it has no near point, so all measure, and it writes
        assert (set(launched), said) == (WATCHED, ("two_shot", HERE))  # the third as both would launch it
        own += ["cpu-2.json"] if rank == 0 else []
    assert sorted(path.name for path in cache.glob("ccl/*")) == sorted(own)


def offered_by_some(cache):
    """Each rank would measure an algorithm that the other one would not."""
    own = ("one_shot", "third")[int(os.environ["RANK"])]
    with measuring(cache, names=("two_shot", "gloo", own)) as (ctx, launched):
        assert total(ctx) == total(ctx) == [3.0]
        assert (set(launched), said_of(ctx)) == ({"two_shot", "gloo"}, ("two_shot", HERE))


def not_measured(cache, what, wanted):
    """A call that measures nothing and writes no table; it launches `wanted`: these algorithms, or as many."""
    with measuring(cache, "off" if what == "off" else "first") as (ctx, launched):
        rank = ctx.cur_rank
        x, y, splits = torch.full((5, 2), float(rank)), torch.full((5, 2), -1.0), [3 - rank, 2 + rank]
        if what == "a message":
            ctx.ccl.send(x, 1) if rank == 0 else ctx.ccl.recv(y, 0)
            assert rank == 0 or y.eq(0).all()
        elif what == "splits":
            ctx.ccl.all_to_all(y, x, input_split_sizes=splits, output_split_sizes=splits)
            assert y[:, 0].tolist() == [0.0] * (3 - rank) + [1.0] * (2 + rank)
        elif what == "one member":
            assert total(ctx, group=[rank]) == [rank + 1.0]
        else:
            named = {"named": {"algorithm": "third"}, "named by variant": {"all_reduce_variant": "one_shot"}}
            config = Config(**named[what]) if what in named else None
            assert total(ctx, 0 if what == "nothing" else 6, config=config) == [3.0] * (what != "nothing")
    assert wanted in (set(launched), len(set(launched)))
    assert not any(pathlib.Path(cache).rglob("*.json"))


def little_room(cache, taken, wanted):
    """A call that needs a workspace of the heap, while users have much of it: what is launched leaves them half."""
    with measuring(cache) as (ctx, launched):
        x = ctx.empty(taken, dtype=torch.uint8)
        before = ctx.heap.stats().largest_free
        assert total(ctx, 1 << 20) == [3.0]
        del x
        assert set(launched) == wanted
        assert ctx.heap.stats().largest_free >= before // 2


def odd_one(cache, where, who):
    """An algorithm that cannot be prepared or launched is left out; a launch that fails on one rank raises on all."""
    bad, alone = who in ("all", int(os.environ["RANK"])), where == "launch" and who != "all"
    odd = TwoShot("all_reduce", "odd")
    prepare = odd.prepare

    def fails(*arguments, **options):
        if where != "launch":
            prepare(*arguments)
        raise {"no room": UnsupportedError, "prepare": MemoryError, "launch": RuntimeError}[where]("not here")

    if bad:
        setattr(odd, "launch" if where == "launch" else "prepare", fails)
    of_test = measuring(cache, names=("two_shot", "third"), added=[odd])
    with environment(IRIS_DEVICE_TIMEOUT="5"), of_test as (ctx, launched):
        out, inp = torch.zeros(6), torch.full((6,), ctx.cur_rank + 1.0)
        with in_vain(4) if alone else contextlib.nullcontext():
            said = said_by(lambda: ctx.ccl.all_reduce(out, inp))
        if said:
            ctx.ccl.reset()
        known_of(ctx)["odd"].supports = lambda request: Availability.no("it had its turn")
        assert total(ctx) == total(ctx) == [3.0]
        if alone:
            assert said.startswith("RuntimeError: not here" if bad else "Device")
            return
        assert (said, out.unique().tolist(), inp.unique().numel()) == ("", [3.0], 1)
        assert said_of(ctx) == ("two_shot", HERE)
        assert set(launched) - {"odd"} == {"two_shot", "third"}
        assert ("odd" in launched) == (where == "launch")


def calls_that_differ(cache, what, words):
    """One rank calls otherwise, or cannot call; then all call alike."""
    with measuring(cache) as (ctx, launched):
        bad = ctx.cur_rank == 1
        x, y = torch.ones(8), torch.zeros(8)
        config = Config(algorithm="third") if bad and what == "named" else None
        dtype = torch.int32 if bad and what == "dtype" else torch.float32
        out, inp = y.to(dtype), x.to(dtype)[: 7 if bad and what == "refused" else 8]
        assert unlike((words, lambda: ctx.ccl.all_reduce(out, inp, config=config))) == launched == []
        assert total(ctx) == total(ctx) == [3.0]
        assert said_of(ctx) == ("two_shot", HERE)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize(("members", "mode"), [((0, 1, 2), "first"), ((2, 0), "exhaustive")])
def test_results_are_right_after_measuring_also_in_place(pool, num_ranks, device, members, mode, tmp_path):
    for rank, (wrong, reasons) in enumerate(pool.run(results, num_ranks, device, str(tmp_path), members, mode)):
        assert (wrong, len(reasons)) == ([], 4 * (rank in members))
        # NCCL knows no other order
        alone = {"the cheapest by its model"} if device == "cuda" and members == (2, 0) else set()
        assert set(reasons) - alone == ({HERE} if rank in members else set())


@pytest.mark.parametrize(("mode", "configs"), [("first", [{}]), ("exhaustive", [{"comm_sms": 2}, {}])])
def test_a_later_context_measures_nothing_or_all_again(pool, tmp_path, mode, configs):
    """What was measured is in the cache, the fastest first, with the launches that the best one was tried with."""
    assert pool.run(twice, 2, str(tmp_path), mode) == [None] * 2
    entries = read_table(tmp_path / "ccl" / "cpu-2.json").entries
    points = {(each.op, each.dtype, each.size, each.place) for each in entries}
    assert points == {("all_reduce", "float32", (1024,), "ordinary")}
    slow = [(name, SLOW_SECONDS, {}) for name in WATCHED - {"two_shot"}]
    found = [(each.algorithm, each.seconds, each.config) for each in entries]
    assert sorted(found[: len(configs)], key=str) == [("two_shot", SECONDS, config) for config in configs]
    assert sorted(found[len(configs) :], key=str) == sorted(slow, key=str)


@table("rounds, seconds", [
    # a single call of some microseconds is not timed well enough to leave an algorithm out
    (([4e-6] * 3, [90e-6, 2e-6, 2e-6]), [4e-6, 2e-6]),
    # those that are close are measured longer
    (([4.2e-6] * 4 + [3.7e-6] * 2, [4e-6] * 6, [4.8e-6] * 3), [3.7e-6, 4e-6, 4.8e-6]),
    (([float("inf")] * 3 + [2e-6], [4e-6] * 4), [2e-6, 4e-6]),  # the device waited for the host, which says nothing
    (([0.08], []), [0.08, float("inf")]),  # with a single call of one, the time is over: others are not begun
    ((), []),  # none could be launched: the choice stays
])  # fmt: skip
def test_how_long_algorithms_are_measured(monkeypatch, rounds, seconds):
    """Of launches that take what is given, round by round, and not a round more; the CPU takes twice as long."""
    times = {(lambda each=each: each): iter(each) for each in map(tuple, rounds)}
    monkeypatch.setattr(timers, "_cpu_seconds", lambda launch, _calls: ((each := next(times[launch])), 2 * each))
    alone = mock.Mock(all_gather_ints=lambda numbers: [list(numbers)])
    assert timers.measure(list(times), alone, captures=None, hurries=True) == [(each, 2 * each) for each in seconds]


@pytest.mark.parametrize(("job", "args"), [
    *((caches_that_differ, each) for each in (
        (("one_shot", ""), None, "one_shot"), (("one_shot", "third"), None, "one_shot"),
        (("one_shot", "third"), (1, 0), "third"), (("", "third"), None, ""))),
    (offered_by_some, ()), (newer_than_the_table, ()), (with_a_config, ()), (nearly_as_fast, ()),
    (fewer_can_serve, ()), (in_order, ()), (of_other_groups, ()),
    (little_room, (7 << 20, WATCHED)), (little_room, (13 << 20, WATCHED - {"two_shot"})),
    *((odd_one, each) for each in (
        ("launch", "all"), ("prepare", 1), ("no room", "all"), ("no room", 1), ("launch", 0))),
    *(pytest.param(odd_one, each, marks=pytest.mark.exhaustive) for each in (("prepare", 0), ("launch", 1))),
    (calls_that_differ, ("dtype", "RankMismatchError: all_reduce: .*dtype: float32 ")),
    (calls_that_differ, ("named", "RankMismatchError: all_reduce: .*algorithm: that ")),
    (calls_that_differ, ("refused", "ArgumentError: ")),
    *((not_measured, each) for each in (
        ("off", 1), ("named", {"third"}), ("named by variant", {"one_shot"}), ("a message", set()), ("splits", set()),
        ("one member", 1), ("nothing", set()))),
])  # fmt: skip
def test_some_ranks(pool, tmp_path, job, args):
    num_ranks = 3 if job is of_other_groups else 2
    assert pool.run(job, num_ranks, str(tmp_path), *args) == [None] * num_ranks
