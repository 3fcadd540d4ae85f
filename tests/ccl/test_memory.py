"""The system area of the heap, and the memory of teams."""

import concurrent.futures
import gc
import time
from functools import partial

import pytest
import torch
from jobs_ccl import on_heap
from jobs_common import said_by

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.ops import FusedConfig


@on_heap("1MiB", IRIS_SYSTEM_SIZE="64KiB")
def used_before(ctx):
    """A group's first call where its control words come from memory that was in use, full of large numbers."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    ctx.heap.system_area.reserve(ctx._world, ctx.heap.system_area.nbytes // 2, "a test")
    before = ctx.zeros(100_000, dtype=torch.int64)
    torch.manual_seed(rank)
    before.random_(1, 1 << 40)
    ctx.free(before)
    ctx.barrier()
    x, y = ctx.zeros(64), ctx.zeros(64)
    for late in range(size):
        x.fill_(0)
        ctx.barrier()
        time.sleep(0.2 * (rank == late))
        x.fill_(rank + 1.0)
        ctx.ccl.all_reduce(y, x, group=[1, 0, *range(2, size)])
        assert y.unique().tolist() == [size * (size + 1) / 2]


@on_heap("96MiB", IRIS_SYSTEM_SIZE="1MiB", IRIS_CCL_WORKSPACE="8MiB")
def what_a_group_gets(ctx, groups):
    """Algorithms and memory of this rank's group for products and messages that are larger than the system area."""
    members, chosen = next(group for group in groups if ctx.cur_rank in group), {}
    a, b, out = ctx.zeros(512, 16), ctx.zeros(16, 1024), ctx.zeros(512, 1024)
    for name in (None, "copy_engine", "two_shot"):
        config = FusedConfig(algorithm=name)
        chosen[name] = ctx.ops.matmul_all_reduce_preamble(out, a, b, config=config, group=members).variant
    team = ctx.ccl.team(members)
    sizes = [team.workspace("of a test", nbytes).nbytes for nbytes in (3 << 20, 9 << 20)]
    assert "workspace 'huge' of a collective needs" in said_by(team.region, "huge", 1 << 30)
    x, y = ctx.ones(1 << 20), torch.zeros(1 << 20, device=ctx.device)
    message = ctx.ccl.explain("all_reduce", y, x, group=members).algorithm
    ctx.ccl.all_reduce(y, x, group=members)
    assert y.unique().tolist() == [2.0]
    return chosen, sizes, message


@on_heap("32MiB")
def of_unknown_size(ctx):
    """A call with split sizes of ordinary tensors leaves users the heap: members know the sizes of no other."""
    x, out, sizes = torch.ones(10, 3, device=ctx.device), torch.empty(10, 3, device=ctx.device), [5] * ctx.num_ranks
    ctx.ccl.all_to_all(out, x, output_split_sizes=sizes, input_split_sizes=sizes)
    assert ctx.stats().largest_free >= 16 << 20
    assert out.unique().tolist() == [1.0]


@on_heap("8MiB")
def beside_each_other(ctx, how):
    """The sums of calls of several threads, which take turns, and on rank 1 come one after the other."""
    x, outs = torch.full((64,), ctx.cur_rank + 1.0), [torch.empty(64) for _ in range(3)]
    ccl = ctx.ccl._anywhere if how == "anywhere" else ctx.ccl
    calls = [ccl.bind("all_reduce", y, x) if how == "bound" else partial(ccl.all_reduce, y, x) for y in outs]
    time.sleep(0.2 * ctx.cur_rank)
    with concurrent.futures.ThreadPoolExecutor(3 - 2 * ctx.cur_rank) as threads:
        for done in [threads.submit(lambda call=call: [call() for _ in range(10)]) for call in calls]:
            done.result()
    return [y.unique().tolist() for y in outs]


@on_heap("8MiB")
def in_any_mode(ctx):
    """Rank 0 passes copies: for the first time in inference mode, then in a thread of the context, then of nothing."""
    ccl, how = ctx.ccl._anywhere, {"device": ctx.device}

    def new(*size):
        on_heap = ctx.ones(size or 64)
        return on_heap if ctx.cur_rank else torch.ones(size or 64, **how)

    with torch.inference_mode():
        ccl.all_reduce(ctx.ones(64), ctx.ones(64))
        ccl.all_reduce(new(), new())
        ccl.all_reduce(first := new(), new(), async_op=True).wait()
    with torch.no_grad():
        ccl.all_reduce(second := new().requires_grad_(), new().requires_grad_(), async_op=True).wait()
    ccl.all_reduce(third := new(), new())
    for a in (ctx.zeros(8, 8), new(8, 8)):
        out, b = torch.empty(8 * ctx.num_ranks, 0, **how), torch.empty(8, 0, **how)
        ctx.ops._anywhere.all_gather_matmul(out, a, b, gather_dim=0)
    return [each.unique().tolist() for each in (first, second, third)]


@on_heap("8MiB", IRIS_CCL_WORKSPACE="4KiB")
def in_place_on_some(ctx, ranks):
    """Sums that are in place on some ranks, and of an ordinary tensor on these, after one that is in place on all.

    They go in several pieces.
    """
    (x, y, z), config = (ctx.ones(10_000) for _ in range(3)), Config(algorithm="one_shot")
    ordinary, is_one = torch.ones(10_000, device=ctx.device), ctx.cur_rank in ranks
    ctx.ccl._anywhere.all_reduce(x, x, config=config)
    ctx.ccl._anywhere.all_reduce(out := x if is_one else y, x, config=config)
    ctx.ccl._anywhere.all_reduce(other := ordinary if is_one else z, other, config=config)
    found = {each.request.options["in_place"] for each in ctx._binder.bound_anywhere.values()}
    assert found == {True} if is_one else {True, False}  # copies are as the call
    return [*out.unique().tolist(), *other.unique().tolist()]


@pytest.mark.parametrize(("job", "num_ranks", "args", "found"), [
    (used_before, 3, (), None), (of_unknown_size, 2, (), None), (in_any_mode, 2, (), [[2.0]] * 3),
    pytest.param(used_before, 2, (), None, marks=pytest.mark.exhaustive(device="cpu")),
    *((in_place_on_some, 2, (ranks,), [4.0, 2.0]) for ranks in ([0], [1], [])),
])  # fmt: skip
def test_memory_in_use_and_members_whose_tensors_lie_differently(pool, job, num_ranks, args, found, device):
    assert pool.run(job, num_ranks, device, *args) == [found] * num_ranks


@pytest.mark.parametrize("how", ["plain", "bound", "anywhere"])
def test_threads_take_turns(pool, how):
    assert pool.run(beside_each_other, 2, "cpu", how) == [[[3.0]] * 3] * 2


def test_copies_do_not_outlive_the_context():
    ctx = Iris("1MiB", device="cpu")
    ctx.ccl._anywhere.all_reduce(ctx.ones(64), ctx.ones(64))
    heap = f"{ctx.heap.heap_bases[0]:x}-"
    ctx.close()
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(heap) for line in maps)


@pytest.mark.parametrize("num_ranks", [4])
def test_a_group_gets_what_a_world_of_its_size_gets(pool, num_ranks, device):
    worlds = pool.run(what_a_group_gets, 2, device, [(0, 1)])
    groups = pool.run(what_a_group_gets, num_ranks, device, [(0, 2), (3, 1)])
    assert worlds[0] == worlds[1]
    assert groups == [worlds[0]] * num_ranks
    assert worlds[0][1] == [4 << 20, 8 << 20]
