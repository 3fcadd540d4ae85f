"""Rank jobs of test_memory."""

import time

import torch
from jobs_ccl import on_heap, said_by
from jobs_common import environment

from iris_core import Iris
from iris_core.errors import HeapExhaustedError, UnsupportedError
from iris_core.ops import FusedConfig


def areas(device):
    """Ranges of groups that share members, and of one that does not fit."""
    places = {}
    with environment(IRIS_SYSTEM_SIZE="64KiB"), Iris("1MiB", device=device) as ctx:
        area = ctx.heap.system_area
        for members in ((0, 1), (1, 2), (2, 0), (0, 1, 2), (1, 0)):
            if ctx.cur_rank in members:
                places[members] = area.reserve(ctx._world.subworld(members), 1000 * len(members), "a test")
        before = list(area._used)
        said = said_by(area.reserve, ctx._world, 64 << 10, "a test")
        ctx.barrier()
        return places, said, before == area._used, area.nbytes


def regions(device, system_size, workspace):
    """Regions of the whole world and of a part of it: stable, symmetric, filled, growing."""
    found = []
    with environment(IRIS_SYSTEM_SIZE=system_size, IRIS_CCL_WORKSPACE=workspace), Iris("2MiB", device=device) as ctx:
        for members in ((0, 1, 2), (2, 0)):
            if ctx.cur_rank not in members:
                continue
            team = ctx.ccl.team(members)
            first, same = team.region("test", 1000, fill=7), team.region("test", 500)
            other, larger = team.region("other", 1000), team.region("test", 5000)
            space, again = (team.workspace("space", 1 << 40) for _ in range(2))
            each = (first, other, larger, space)
            found.append({
                "offsets": [r.offset_bytes for r in each], "sizes": [r.nbytes for r in each],
                "same": same is first and again is space and team.region("test", 5000) is larger,
                "filled": first.tensor.unique().tolist() == [7] and other.tensor.unique().tolist() == [0],
                "place": first.tensor.data_ptr() - team.base_ptrs[team.rank] == first.offset_bytes,
                "rank": (team.rank, team.size, team.members), "huge": said_by(team.region, "huge", 1 << 30),
            })  # fmt: skip
        ctx.barrier()
    return found


@on_heap("1MiB", IRIS_SYSTEM_SIZE="64KiB")
def used_before(ctx):
    """A group's first call where its control words come from memory that was in use, full of large numbers."""
    ctx.heap.system_area.reserve(ctx._world, ctx.heap.system_area.nbytes // 2, "a test")
    before, found = ctx.zeros(100_000, dtype=torch.int64), []
    torch.manual_seed(ctx.cur_rank)
    before.random_(1, 1 << 40)
    ctx.free(before)
    ctx.barrier()
    x, y = ctx.full((64,), ctx.cur_rank + 1.0), ctx.zeros(64)
    for late in range(ctx.num_ranks):
        x.fill_(0)
        ctx.barrier()
        time.sleep(0.2 * (ctx.cur_rank == late))
        x.fill_(ctx.cur_rank + 1.0)
        ctx.ccl.all_reduce(y, x, group=[1, 0, *range(2, ctx.num_ranks)])
        found.append(y.unique().tolist())
    return found


@on_heap("96MiB", IRIS_SYSTEM_SIZE="1MiB")
def what_a_group_gets(ctx, groups):
    """Algorithms and memory of this rank's group for products and messages that are larger than the system area."""
    members, chosen = next(group for group in groups if ctx.cur_rank in group), {}
    a, b, out = ctx.zeros(512, 16), ctx.zeros(16, 1024), ctx.zeros(512, 1024)
    for name in (None, "copy_engine", "two_shot"):
        config = FusedConfig(algorithm=name)
        chosen[name] = ctx.ops.matmul_all_reduce_preamble(out, a, b, config=config, group=members).variant
    team = ctx.ccl.team(members)
    sizes = [team.workspace("of a test", nbytes).nbytes for nbytes in (3 << 20, 9 << 20)]
    x, y = ctx.ones(1 << 20), torch.zeros(1 << 20, device=ctx.device)
    message = ctx.ccl.explain("all_reduce", y, x, group=members).algorithm
    ctx.ccl.all_reduce(y, x, group=members)
    return chosen, sizes, message, y.unique().tolist()


@on_heap("8MiB", IRIS_SYSTEM_SIZE="64KiB")
def off_the_heap(ctx):
    """What a group makes of tensors that lie on no heap, where its workspaces come from the end of the heap."""
    found, before, members, rank = [], ctx.heap.live_blocks(), [0, 1], ctx.cur_rank
    if rank in members:
        x, y = torch.full((100_000,), rank + 1.0, device=ctx.device), torch.zeros(100_000, device=ctx.device)
        ctx.ccl.all_reduce(y, x, group=members)
        found.append(y.unique().tolist() == [3.0])
        torch.manual_seed(7)
        factors = [(torch.randn(64, 16), torch.randn(16, 256)) for _ in members]
        a, b = (factor.to(ctx.device) for factor in factors[rank])
        products = [(left @ right).to(ctx.device) for left, right in factors]
        total = products[0] + products[1]
        for name, wanted in (
            ("matmul_all_reduce", total), ("matmul_all_gather", torch.cat(products)),
            ("matmul_reduce_scatter", total.chunk(2)[rank]),
        ):  # fmt: skip
            out = torch.zeros(wanted.shape, device=ctx.device)
            getattr(ctx.ops, name)(out, a, b, group=members)
            found.append(bool(torch.allclose(out, wanted, atol=1e-4)))
    ctx.barrier()
    return found, [block.label for block in ctx.heap.live_blocks() if block not in before]


def groups_beside_allocations(device):
    """Regions of groups with and without common members, and allocations until nothing is left: nothing overlaps."""
    groups, wrong, counts = ((0, 1), (1, 2, 3), (2, 3), (3, 0)), [], []
    with environment(IRIS_SYSTEM_SIZE="64KiB"), Iris("8MiB", device=device) as ctx:
        regions, blocks = {}, []
        for turn in range(12):
            members = groups[turn % 4]
            if ctx.cur_rank in members:
                try:
                    region = ctx.ccl.team(members).region(f"test {turn}", 200_000 + 777 * turn, fill=turn)
                except UnsupportedError:
                    region = None
                regions[turn, members] = region
            if turn % 3 == 2:
                blocks += [ctx.full((100_000,), 100 + ctx.cur_rank, dtype=torch.uint8) for _ in range(10)]
        try:
            while True:
                blocks.append(ctx.full((100_000,), 100 + ctx.cur_rank, dtype=torch.uint8))
        except HeapExhaustedError:
            counts.append(len(blocks))
        ctx.barrier()
        wrong += [name for name, region in regions.items() if region and region.tensor.unique().tolist() != [name[0]]]
        wrong += [at for at, block in enumerate(blocks) if block.unique().tolist() != [100 + ctx.cur_rank]]
        for block in blocks:
            ctx.free(block)
        ctx.barrier()
        free = ctx.stats().free
        places = {name: None if region is None else region.offset_bytes for name, region in regions.items()}
        ctx.barrier()
        return wrong, counts, places, free
