"""Jobs about groups: splits, meshes, several calls at a time, events and memory; compared with gloo, bit for bit."""

import contextlib
import datetime
import functools
import gc
import inspect
import itertools
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs_common import finish, said_by
from jobs_torch_backend import IS_211, collectives, flat, small_net, start, trained, whole
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import iris_core.torch_backend as torch_backend
from iris_core import Iris
from iris_core.errors import ArgumentError, GroupError, UnsupportedError
from iris_core.torch_backend.adapters import IS_BACKEND, operations_of

CPU = torch.device("cpu")
PARTS = (3, 4), (5,), (1,)


@contextlib.contextmanager
def an_accelerator():
    """Let torch believe in one GPU, as it has to for a device_id; nothing that is made within may look at it."""
    with contextlib.ExitStack() as stack:
        for name, value in (("current_accelerator", torch.device("cuda")), ("is_available", True), ("device_count", 1)):
            stack.enter_context(mock.patch.object(torch.accelerator, name, return_value=value))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))  # which torch 2.11 asks
        yield


def is_right(group, ranks):
    """Whether collectives of a group, some at the same time, give what its ranks' values make."""
    me, size = ranks.index(dist.get_rank()), len(ranks)
    x = whole((3, 4), torch.float32, ranks[me])
    gathered, scattered, last = torch.zeros(3 * size, 4), torch.zeros(2, 4), torch.full((2,), float(ranks[me]))
    work = dist.all_gather_into_tensor(gathered, x, group=group, async_op=True)
    dist.reduce_scatter_tensor(scattered, whole((2 * size, 4), torch.float32, 10 + ranks[me]), group=group)
    dist.broadcast(last, ranks[-1], group=group)
    work.wait()
    dist.all_reduce(x, group=group)
    many = sum(whole((2 * size, 4), torch.float32, 10 + each) for each in ranks)
    parts = [whole((3, 4), torch.float32, each) for each in ranks]
    wanted = [torch.cat(parts), many[2 * me : 2 * me + 2], torch.full((2,), float(ranks[-1])), sum(parts)]
    known = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    return known == (me, size, ranks) and all(map(torch.equal, [gathered, scattered, last, x], wanted))


def groups_of_all_kinds(store, is_bound):
    """Splits, splits of splits, new groups, one that torch examines (TORCH_DISTRIBUTED_DEBUG=DETAIL), a 2 x 2 mesh."""
    with an_accelerator() if is_bound else contextlib.nullcontext():
        bound, how = torch.device("cuda", 0), {}
        if is_bound:
            how = {"options": torch_backend.Options(heap_size="16MiB", devices=("cpu",)), "device_id": bound}
        rank, _ = start(store, **how)
        row, column = divmod(rank, 2)
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("rows", "columns"),
            backend_override={"rows": ("iris", torch_backend.Options(heap_size="8MiB", devices=("cpu",)))},
        )  # fmt: skip
        groups = {
            "all": (dist.group.WORLD, [0, 1, 2, 3]), "rows": (mesh.get_group("rows"), [column, column + 2]),
            "columns": (mesh.get_group("columns"), [2 * row, 2 * row + 1]),
            "descending": (dist.new_group([2, 0]), [0, 2]), "alone": (dist.new_group([3]), [3]),
            "three": (dist.new_group([1, 3, 0]), [0, 1, 3]), "gloo": (dist.new_group([1, 2], backend="gloo"), [1, 2]),
        }  # fmt: skip
        groups["split"] = dist.group.WORLD.split_group([column, column + 2]), [column, column + 2]
        level = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        groups["that torch examines"] = dist.new_group(backend="iris"), [0, 1, 2, 3]
        dist.set_debug_level(level)
        gc.collect()
        if is_bound:
            mine = [column, column + 2]
            half = dist.split_group(split_ranks=[[0, 2], [1, 3]], group_desc="half")
            last = dist.split_group(half, [[1]])  # without one of its ranks
            groups |= {"half": (half, mine), "of the half": (last, mine[1:])}
            options = torch_backend.Options(heap_size="6MiB", devices=("cpu",))
            pair = dist.split_group(split_ranks=[[2, 1]], pg_options=options)
            groups["pair"] = pair, [2, 1] if IS_BACKEND else [1, 2]
            assert rank not in (1, 2) or operations_of(pair)._options == options
            made = [dist.group.WORLD, half, mesh.get_group("rows"), *[last] * (rank in mine[1:])]
            assert {each.bound_device_id for each in made} == {bound}
            assert half.group_desc == "half"
            source = dist.distributed_c10d._get_split_source
            asked = ["nccl"] * (len(inspect.signature(source).parameters) - 1)  # from torch 2.15 on
            assert source(dist.group.WORLD, *asked) is None  # else groups of NCCL are refused
    members = [name for name, (group, _) in groups.items() if group not in (None, dist.GroupMember.NON_GROUP_MEMBER)]
    assert members == [name for name, (_, ranks) in groups.items() if rank in ranks]
    assert [name for name in members if not is_right(*groups[name])] == []
    assert is_bound or torch_backend.context_of(groups["that torch examines"][0]).num_ranks == 4
    dist.group.WORLD.monitored_barrier(datetime.timedelta(minutes=1))
    assert operations_of(mesh["rows"])._options.heap_size == "8MiB"
    assert is_bound or torch_backend.context_of(mesh["rows"]).num_ranks == 2
    # of other sizes than before in this process: torch keeps what it has worked out, with groups that are gone
    a = torch.arange(64.0 if is_bound else 32.0).reshape(-1, 4)
    b = torch.ones(4, 2)
    product = distribute_tensor(a, mesh, [Shard(0), Shard(1)]) @ distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    assert torch.equal(product.full_tensor(), a @ b)
    for call in (
        lambda: torch.ops.iris.all_reduce(product, "sum", dist.group.WORLD.group_name),
        lambda: dist.send(product, 3 - rank), lambda: dist.all_gather([product.to_local()] * 4, product),
    ):  # fmt: skip
        assert "to_local()" in said_by(call)
    assert "dist.new_group" in said_by(lambda: Iris(group=[0, 1]))


def objects(store):
    """Objects of different sizes come as they were sent, in the world and among some ranks."""
    rank, size = start(store)
    for ranks in (list(range(size)), [0, 2]):
        group, first, last = dist.new_group(ranks), ranks[0], ranks[-1]
        if rank not in ranks:
            continue
        sent = [{"of": each, "text": "é" * 10**each} for each in ranks]
        mine, nothing, is_last = sent[ranks.index(rank)], [None] * len(ranks), rank == last
        everyone, gathered, scattered, message = nothing[:], nothing[:], [None], [mine, rank]
        dist.all_gather_object(everyone, mine, group)
        dist.gather_object(mine, gathered if is_last else None, last, group)
        dist.scatter_object_list(scattered, sent if is_last else None, last, group)
        told = sent[:] if is_last else nothing
        dist.broadcast_object_list(told, last, group)
        if rank == first:
            dist.send_object_list(message, last, group)
        elif is_last:
            assert dist.recv_object_list(message, first, group) == first
            assert message == [sent[0], first]
        assert (everyone, gathered if is_last else sent, scattered, told) == (sent, sent, [mine], sent)


def beside_another_backend(store):
    """A group of two backends, and one that torch's hooks look at; from torch 2.14 on."""
    _, size = start(store)
    mixed, hooked = (dist.new_group(backend=each) for each in ("meta:gloo,cpu:iris", "iris"))
    seen = []
    hooked.register_pre_hook(7, lambda *_: seen.append("before"))
    hooked.register_post_hook(7, lambda *_: seen.append("after"))
    assert is_right(hooked, list(range(size)))
    assert seen == ["before", "after"] * 4
    with mock.patch.dict(os.environ, TORCH_DIST_NAN_CHECK="1"):
        checked = dist.new_group(backend="iris")
    assert is_right(mixed, list(range(size)))  # who leaves while others still connect would make them fail
    assert isinstance(mixed._get_backend(torch.device("meta")), dist.ProcessGroupGloo)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.full((3,), torch.nan), group=checked)


def different_calls(store):
    """Who is in which call, where members differ: the group's own functions, one that its thread runs, an operator."""
    rank, _ = start(store)
    group, x = dist.group.WORLD.group_name, torch.ones(3)
    dist.all_reduce(x)
    first = (dist.barrier, lambda: dist.all_gather_into_tensor(torch.empty(9), x, async_op=True).wait())[rank > 0]
    second = (dist.barrier, lambda: torch.ops.iris.all_to_all(x, group))[rank > 0]
    return [re.findall(r"\n  (ranks? .*)\(\)", said_by(each)) for each in (first, second)]


def what_a_group_refuses(store):
    """Splits, memory and pools on CPU ranks, before any context is opened."""
    rank, _ = start(store)
    group, gpu = dist.group.WORLD, torch.device("cuda", 0)
    backend = group._get_backend(CPU)
    made = [dist.new_group([each]) for each in range(2)]  # of which rank 2 is in neither
    others = made[rank == 0]
    split = group.split_group
    cases = [
        (ArgumentError, lambda: split([0, 1], device_types=[torch.device("cuda")])),
        (TypeError, lambda: split([rank], opts=7)), (ArgumentError, lambda: split([0, 0])),
        (ArgumentError, lambda: split([0, 7])), (ArgumentError, lambda: split([])),
        (UnsupportedError, lambda: backend.mem_allocator),
        (ArgumentError, lambda: backend.allocate_tensor(4, torch.float32, gpu)),
        *((GroupError, functools.partial(each, others)) for each in (torch_backend.explain, torch_backend.context_of)),
    ]  # fmt: skip
    if IS_BACKEND:  # as torch splits groups of several backends
        others, options = [each for each in range(3) if each != rank], c10d.Backend.Options("gloo")
        parts = functools.partial(backend.split, dist.PrefixStore("split", group.get_group_store()))
        cases += [
            (UnsupportedError, lambda: parts(others, backend.options)), (TypeError, lambda: parts([rank], options)),
        ]  # fmt: skip
    for kind, call in cases:
        with pytest.raises(kind):
            call()
    gloo, x = dist.new_group(backend="gloo"), torch.ones(1)
    dist.barrier(gloo)  # who leaves while others still connect makes them fail
    for call in (torch_backend.context_of, lambda _: torch.ops.iris.all_reduce(x, "sum", gloo.group_name)):
        assert "backend 'gloo'" in said_by(call, gloo)
    assert not any(map(backend.supports_tensor_alloc, (gpu, 0)))
    assert not backend.operations._contexts


def refused_by_all(store, is_async):
    """Return which calls with tensors or lists that do not fit, on rank 1 alone, are no ArgumentError on all ranks."""
    rank, size = start(store, timeout=datetime.timedelta(seconds=30))
    wrong, how = rank == 1, {"async_op": is_async}

    def zeros(number=size, *sizes):
        return [torch.zeros(each) for each in sizes or [4] * number]

    x, whole, uneven = torch.zeros(4), torch.zeros(4 * size), [4 + each for each in range(size)]
    long, fewer, more = torch.zeros(4 * size + wrong), zeros(size - wrong), zeros(size + wrong)
    own = zeros(0, *[4 + wrong] * size)
    at_root = lambda *parts: zeros(*parts) if wrong else None
    calls = {
        "larger output": lambda: dist.all_gather_into_tensor(long, x, **how),
        "larger input": lambda: dist.reduce_scatter_tensor(x, long, **how),
        "output to divide": lambda: dist.all_to_all_single(long, whole, **how),
        "splits": lambda: dist.all_to_all_single(whole, whole.clone(), [4 + wrong] * size, [4] * size, **how),
        "scattered sizes": lambda: dist.scatter(x, at_root(0, *uneven), 1, **how),
        "scattered list": lambda: dist.scatter(x, at_root(size - 1), 1, **how),
        "gathered sizes": lambda: dist.gather(torch.zeros(1), at_root(size), 1, **how),
        "gathered list": lambda: dist.gather(x, at_root(size + 1), 1, **how),
        "shorter": lambda: dist.all_gather(fewer, x, **how), "longer": lambda: dist.all_gather(more, x, **how),
        "own part": lambda: dist.all_gather(own, x, **how), "part to sum": lambda: dist.reduce_scatter(x, own, **how),
        "list of sizes": lambda: dist.all_gather(zeros(0, *uneven[wrong:]), zeros(0, *uneven)[rank], **how),
        "list to sum": lambda: dist.reduce_scatter(x, fewer, **how),
        "list to swap": lambda: dist.all_to_all(fewer, zeros(), **how),
        "lists": lambda: dist.all_gather_coalesced([[x, x][wrong:] for _ in range(size)], [x, x], **how),
    }  # fmt: skip
    dist.barrier()
    said = {name: said_by(lambda call=call: finish(call())) for name, call in calls.items()}
    dist.all_reduce(x.fill_(1))
    assert x.tolist() == [size] * 4
    return {name: text for name, text in said.items() if "ArgumentError: rank 1 " not in text}


def at_once(group, ranks, is_async, device):
    """Yield the tensors that forms of several calls at a time give; one form is of calls within a device."""
    me, n = ranks.index(dist.get_rank()), len(ranks)
    rows = [(n * shape[0], *shape[1:]) for shape in PARTS]
    mine = lambda shapes: [whole(shape, torch.float32, 10 * me + i) for i, shape in enumerate(shapes)]
    zeros = lambda shapes: [torch.zeros(shape) for shape in shapes]
    for call, outputs, inputs, within in (
        (dist.all_reduce, None, mine(PARTS), None), (dist.all_gather_into_tensor, zeros(rows), mine(PARTS), None),
        (dist.reduce_scatter_tensor, zeros(PARTS), mine(rows), None), (dist.all_reduce, None, mine(PARTS), device),
    ):  # fmt: skip
        with dist._coalescing_manager(group, within, async_ops=is_async) as several:
            for each in zip(*filter(None, (outputs, inputs)), strict=True):
                call(*each, group=group)
        if is_async:
            several.wait()
        yield outputs or inputs
    x, parts = mine(PARTS), [zeros(PARTS) for _ in range(n)]
    works = [dist.all_reduce_coalesced(x, dist.ReduceOp.MAX, group, is_async)]
    works.append(dist.all_gather_coalesced(parts, mine(PARTS), group, is_async))
    boxes = zeros(PARTS)
    for work in works if is_async else ():
        work.wait()
    yield [x, *parts]
    operations = []
    for i, (box, given) in enumerate(zip(boxes, mine(PARTS), strict=True)):
        step = 1 + i % (n - 1)
        operations.append(dist.P2POp(dist.isend, given, ranks[(me + step) % n], group, tag=i))
        operations.append(dist.P2POp(dist.irecv, box, ranks[(me - step) % n], group, tag=i))
    for each in dist.batch_isend_irecv(operations):
        each.wait()
    yield boxes


def several_at_a_time(store, devices):
    """Compare several calls at a time with gloo's, on all ranks and on two of them."""
    rank, _ = start(store)
    options = torch_backend.Options(devices=devices)
    for ranks in ([0, 1, 2], [0, 2]):
        ours, gloo = dist.new_group(ranks, pg_options=options), dist.new_group(ranks, backend="gloo")
        for is_async in (False, True) if rank in ranks else ():
            # gloo has no calls between begin and end of a device; their works are those of all calls within
            pairs = zip(at_once(ours, ranks, is_async, CPU), at_once(gloo, ranks, is_async, None), strict=True)
            assert all(all(map(torch.equal, flat(found), flat(wanted))) for found, wanted in pairs)


def events(store, profiler):
    """Compare events of Iris with gloo's: names, shapes of inputs, and whether asynchronous; return what is wrong."""
    rank, size = start(store)
    gloo = dist.new_group(backend="gloo")
    dist.barrier()  # opens the context
    at_root = rank == size - 1

    def calls(group, is_async):
        for name, (call, make, _) in collectives(list(range(size)), "cpu").items():
            if name not in ("reduce_scatter", "reduce_scatter_tensor", "all_to_all"):  # gloo makes them of others
                yield call(*make((2, 3), torch.float32), group=group, async_op=is_async)
        yield dist.barrier(group=group, async_op=is_async)

    found = {}
    for is_async in (False, True):
        for kind, group in (("iris", dist.group.WORLD), ("gloo", gloo)):
            with profiler(record_shapes=True) as profile:
                for work in calls(group, is_async):
                    finish(work)
            listed = profile.events() if isinstance(profile, torch.profiler.profile) else profile.function_events
            found[kind, is_async] = [
                (each.name.removeprefix(kind), each.input_shapes, each.is_async)
                for each in sorted(listed, key=lambda each: each.time_range.start)
                if each.name.startswith(kind + ":") and (at_root or "scatter" not in each.name)
            ]
        with profiler():
            late = dist.all_reduce(torch.ones(100_000), async_op=True)
        late.wait()
    # gloo has no shape where a scatter receives; its threads run all calls, and Iris's only those that do not wait
    found["gloo", False] = [(name, shapes, False) for name, shapes, _ in found["gloo", False]]
    kinds = [False] if IS_211 else [False, True]  # torch 2.11 drops events that another thread ends
    return [each for each in kinds if not found["iris", each] or found["iris", each] != found["gloo", each]]


def memory_of_the_group(store):
    """FSDP2 by torch's own switch trains as on gloo, on two dimensions, with buffers on the heap, which stay."""
    rank, _ = start(store)
    taken = []

    def parameters(backend):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={0: backend, 1: backend})

        net = small_net()
        for each in (*net, net):
            fully_shard(each, mesh=mesh)
            if backend == "iris":
                each.set_allocate_memory_from_process_group_for_comm(True)

        def look():
            if backend == "iris":
                operations = operations_of(mesh.get_group("b"))
                made = itertools.chain(*(each.values() for each in operations._buffers["cpu"]._made.values()))
                buffers = [each.memory for same in made for each in same]
                taken.append((len(buffers), all(map(operations.context().is_symmetric, buffers))))

        return trained(net, after=look)

    assert all(map(torch.equal, parameters("iris"), parameters("gloo")))
    assert taken == [taken[0], *[(taken[1][0], True)] * 3]  # what the first steps have made is used again
    assert taken[0][0] > 0
    assert taken[0][1]
    backend = dist.group.WORLD._get_backend(CPU)
    x = backend.allocate_tensor(6, dtype=torch.bfloat16, device=CPU)
    dist.all_reduce(x.fill_(rank))
    assert x.tolist() == [6.0] * 6
    assert torch_backend.context_of().is_symmetric(x)


def pool_of_torch(store):
    """What torch allocates in a pool of the group's allocator lies on its heap, and is added up there."""
    rank, size = start(store, device="cuda")
    pool = torch.cuda.MemPool(dist.group.WORLD._get_backend(torch.device("cuda")).mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        x, y = (torch.full((each,), rank + 1.0, device="cuda") for each in (1000, 30))
    ctx, total = torch_backend.context_of(), size * (size + 1) / 2
    for each in (x, y):
        assert ctx.is_symmetric(each)
        dist.all_reduce(each)
        dist.all_reduce(each, async_op=True).wait()
        assert each.tolist() == [size * total] * len(each)
    assert {each.request.direct_in for each in ctx._binder.bound_anywhere.values()} == {True}
    del each, x, y  # before the pool
