"""Jobs of the tests of the backend "iris": each rank compares what torch.distributed gives with gloo (NCCL on GPUs)."""

import contextlib
import copy
import datetime
import importlib
import itertools
import os
import random
import time
import weakref
from functools import partial, reduce
from unittest import mock

import torch
import torch.distributed as dist
from jobs_common import environment, finish, said_by, unlike
from torch.distributed.fsdp import fully_shard

import iris_core.torch_backend as torch_backend
from iris_core import Iris
from iris_core.errors import UnsupportedError
from iris_core.testing.conformance.collective_jobs import Case, promised, source
from iris_core.torch_backend import fsdp, library
from iris_core.torch_backend.adapters import operations_of
from iris_core.torch_backend.communicator import Communicator

SHAPES = [(), (0,), (5,), (3, 4)]
IS_211 = torch.__version__ < "2.12"
LACKING = {"all_to_all"} if IS_211 else set()  # what gloo has only later
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def start(store, options=None, device="cpu", **how):
    """Initialise torch.distributed on backend "iris" in a rank of `iris_core.run`; return (rank, world size)."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        how = {"device_id": torch.device("cuda", torch.cuda.current_device()), **how}
    dist.init_process_group(
        "iris", store=dist.FileStore(store, size), rank=rank, world_size=size, pg_options=options,
        **{"timeout": datetime.timedelta(minutes=2), **how},
    )  # fmt: skip
    return rank, size


def whole(shape, dtype, seed):
    """Whole numbers whose sums and products over 4 ranks every dtype holds."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def collectives(ranks, device):
    """By name: what is called with (group, arguments), tensors of a shape and dtype for it, and whether it reduces."""
    me, size, root = ranks.index(dist.get_rank()), len(ranks), ranks[-1]
    is_root = dist.get_rank() == root

    def mine(shape, dtype, more=0):
        return whole(shape, dtype, 10 * me + more).to(device)

    def listed(shape, dtype, seed=None):
        seeds = range(size) if seed is None else [None] * size
        return [zeros(shape, dtype) if i is None else mine(shape, dtype, i) for i in seeds]

    def zeros(shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    def rows(shape):
        return (size * shape[0], *shape[1:]) if shape else (size,)

    def reduced(x, **how):
        finish(dist.reduce(x, root, **how))
        if not is_root:
            x.zero_()  # what is left there is nobody's promise

    return {
        "all_reduce": (lambda x, **how: dist.all_reduce(x, **how), lambda *k: [mine(*k)], True),
        "reduce": (reduced, lambda *k: [mine(*k)], True),
        "broadcast": (lambda x, **how: dist.broadcast(x, root, **how), lambda *k: [mine(*k)], False),
        "all_gather": (dist.all_gather, lambda *k: [listed(*k, seed=0), mine(*k)], False),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, lambda s, d: [zeros(rows(s), d), mine(s, d)], False),
        "gather": (lambda o, x, **how: dist.gather(x, o if is_root else None, root, **how),
                   lambda *k: [listed(*k, seed=0), mine(*k)], False),
        "scatter": (lambda o, x, **how: dist.scatter(o, x if is_root else None, root, **how),
                    lambda *k: [zeros(*k), listed(*k)], False),
        "reduce_scatter": (dist.reduce_scatter, lambda *k: [zeros(*k), listed(*k)], True),
        "reduce_scatter_tensor": (dist.reduce_scatter_tensor, lambda s, d: [zeros(s, d), mine(rows(s), d)], True),
        "all_to_all": (dist.all_to_all, lambda *k: [listed(*k, seed=0), listed(*k)], False),
        "all_to_all_single": (dist.all_to_all_single, lambda s, d: [zeros(rows(s), d), mine(rows(s), d)], False),
    }  # fmt: skip


def flat(tensors):
    return [each for some in tensors for each in (some if isinstance(some, list) else [some])]


def in_group(store, job, *args):
    """Run a job that initialises torch.distributed, and end that."""
    answer = job(store, *args)
    dist.destroy_process_group()
    return answer


def beside_a_compiler(store):
    """Calls in the group's thread and this one's go on while something is compiled; return what they gave."""
    start(store)
    x, y = given = torch.ones(2, 4)

    def compiler(graph, _):
        finish(dist.all_reduce(x, async_op=True))
        torch_backend.context_of().ccl.all_reduce(y, y)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiler)(x)
    return given.tolist()


def on_nodes(store, nodes, job, *args):
    with environment(IRIS_NODES=nodes):
        return job(store, *args)


def equal_to_peer(store, groups, device, every):
    """Compare every collective, called both ways, in the groups that have this rank, with gloo's or NCCL's.

    In the first group with one of `every` dtypes, and shapes, in turn, and with every reduction, the others being as
    usual, both ways in turn: which ones `ctx.ccl` takes, tests/ccl tries.
    """
    rank, _ = start(store, device=device)
    on_gpu = device == "cuda"
    for number, ranks in enumerate(groups):
        ours, others = dist.new_group(ranks), dist.new_group(ranks, backend="nccl" if on_gpu else "gloo")
        if rank not in ranks:
            continue
        for place, (name, (call, make, reduces)) in enumerate(collectives(ranks, device).items()):
            dtypes, shapes = (each[place % every :: every] for each in (DTYPES[1:], SHAPES))
            usual = torch.float32, SHAPES[-1], "SUM"  # the peers' sum of bool is any
            cases = [usual]
            if number == 0:
                cases += [(dtype, *usual[1:]) for dtype in dtypes] + [(*usual[:2], "MAX")] * reduces
                cases += [(usual[0], shape, "PRODUCT") for shape in shapes]
                bitwise = [] if on_gpu else ["BAND", "BOR", "BXOR"]  # NCCL has none
                cases += [(torch.int64, (5,), each) for each in ("MIN", *bitwise)] * reduces
            for turn, (dtype, shape, op) in enumerate(cases):
                if (not shape and name.endswith(("_tensor", "_single"))) or (name in LACKING and not on_gpu):
                    continue  # the peers refuse scalars there
                results = []
                ways = (False, True) if turn == 0 else (turn % 2 == 1,)
                for group, is_async in (*((ours, each) for each in ways), (others, False)):
                    tensors = make(shape, dtype)
                    how = {"op": getattr(dist.ReduceOp, op)} if reduces else {}
                    finish(call(*tensors, group=group, async_op=is_async, **how))
                    results.append(flat(tensors))
                for found in results[:-1]:
                    assert all(map(torch.equal, found, results[-1])), (ranks, name, dtype, shape, op)


def placed(ctx, x, how):
    """A tensor like x on the heap ("shifted", at another alignment), off it, or with gaps.  Collective."""
    on_heap = ctx.zeros(x.numel() + 1, dtype=x.dtype)
    found = {
        "heap": on_heap[: x.numel()].view(x.shape), "shifted": on_heap[1:].view(x.shape),
        "ordinary": torch.empty_like(x), "strided": x.new_empty(*x.shape, 2)[..., 0],
    }[how]  # fmt: skip
    return found.copy_(x)


def lying_differently(store):
    """Tensors of members lie differently, whatever the first call of their kind was like.

    Where all were on the heap, later calls with such tensors work on these: return which.
    """
    rank, size = start(store, timeout=datetime.timedelta(seconds=30))
    ctx, peers = torch_backend.context_of(), dist.new_group(backend="gloo")
    draw = random.Random(rank).choice
    every = collectives(list(range(size)), "cpu")
    for name in sorted(every, key=lambda name: not name.endswith("_tensor")):  # for others, some tensors are ours
        call, make, _ = every[name]
        parts = {"all_gather_into_tensor": (0, 1), "reduce_scatter_tensor": (1, 0)}.get(name)
        for shape, turn in itertools.product([] if name in LACKING else [(3, 4), (5,), (2, 3)], range(5)):
            is_first_on_heap = turn == 0 and shape != (2, 3)

            def lie(x, is_first_on_heap=is_first_on_heap):
                how = "heap" if is_first_on_heap else draw(("heap", "shifted", "ordinary", "strided"))
                return [*map(lie, x)] if isinstance(x, list) else placed(ctx, x, how)

            tensors = make(shape, torch.float32)
            ours, theirs = lie(tensors), copy.deepcopy(tensors)
            if parts and (draw((False, True)) if turn else shape == (3, 4)):  # in place
                whole, part = (ours[each] for each in parts)
                if whole.is_contiguous():
                    ours[parts[1]] = whole.chunk(size)[rank]
                    if name == "all_gather_into_tensor":
                        ours[1].copy_(part)
            finish(call(*ours, async_op=turn % 2 == 1))
            call(*theirs, group=peers)
            outputs = slice(1 if name.endswith(("_tensor", "_single")) else None)
            assert all(map(torch.equal, flat(ours[outputs]), flat(theirs[outputs]))), (name, shape, turn)
    crowded = ctx.ones(1000)
    with mock.patch.object(type(ctx.heap), "take_region", side_effect=UnsupportedError("no room")):
        dist.all_reduce(crowded)
    with ctx.scope():
        dist.all_reduce(ctx.ones(2000))
    kept, other, x = ctx.ones(4000), torch.ones(2000), ctx.ones(2000)
    x = other if rank else x
    dist.all_reduce(x)
    assert (kept == 1).all()  # the memory for copies is not the scope's
    assert (x == size).all()
    assert (crowded == size).all()
    bound = ctx._binder.bound_anywhere.values()
    return {each.op for each in bound if each.request.direct_in and each.request.direct_out}


def operators_lying_differently(store):
    """Members' tensors lie differently in operators and the communicator, then alike, and again; eager and compiled."""
    rank, size = start(store, timeout=datetime.timedelta(seconds=60))
    comm, ops = Communicator(dist.group.WORLD, heap_size="8MiB"), torch.ops.iris
    ctx, other = (Iris("8MiB", device="cpu", group=dist.group.WORLD) for _ in range(2))

    def step(ctx, members, x, y, w, residual, gathered):
        group = library.name_of(ctx, members)
        ops.all_reduce_(y, "max", group)
        found = [ops.all_reduce(x, "sum", group), ops.all_gather(x, group), ops.all_to_all(x, group), y + 1]
        found += [ops.reduce_scatter(x, "sum", group), ops.broadcast(x, 0, group)]
        found += [each(x, w, None, group) for each in (ops.all_gather_matmul, ops.matmul_all_reduce)]
        found += ops.all_reduce_rms_norm(x, residual, w[0], 1e-5, group)
        ccl, fused = ctx.ccl._anywhere, ctx.ops._anywhere
        ccl.all_reduce(y, x, group=members)
        fused.matmul_all_gather(gathered, x, w, group=members)
        fused.matmul_all_reduce(x, y, w, group=members)
        return [*found, gathered + 1, x + 1, y + 1]

    compiled = torch.compile(step, backend="aot_eager", dynamic=False)
    for seed, members in itertools.product(range(6), ([*range(size)], [size - 1, 0])):
        rows = (2 + seed % 2) * size * (size - 1)  # of one kind, tensors are alike at first; of the other one, not
        how = "ordinary" if rank and seed in (1, 4, 5) else "heap"
        shapes = (rows, 8), (rows, 8), (8, 8), (rows, 8), (len(members) * rows, 8)
        given = [whole(shape, torch.float32, rank if n < 2 else n) for n, shape in enumerate(shapes)]
        wanted = step(other, members, *[each.clone() for each in given]) if rank in members else None
        for run in (step, compiled):
            placed_here = [placed(ctx, each, how) for each in given]
            summed = comm.all_reduce(placed(comm.context, given[0], how))
            if rank in members:
                found = run(ctx, members, *placed_here)
                assert [*map(torch.equal, found, wanted)] == [True] * len(wanted), (seed, members)
    dist.all_reduce(total := given[0].clone())
    assert torch.equal(total, summed)
    bound = [*ctx._binder.bound_anywhere.values(), *ctx._binder.fused_anywhere.values()]
    lie = "direct_in", "reach_a", "reach_out"
    for each in (ctx, other):
        each.close()
    comm.destroy()
    return {each.op for each in bound if any(getattr(each.request, name, False) for name in lie)}


def calls(store):
    """Messages before any collective, and together; sums with a factor, averages, futures, columns, uneven parts."""
    rank, size = start(store)
    if rank == 0:
        dist.send(torch.full((3,), 7.0), 1)
    elif rank == 1:
        assert dist.recv(box := torch.empty(3)) == 0
        assert box.tolist() == [7.0] * 3
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    assert work.get_future().wait()[0].tolist() == x.tolist() == [size] * 4
    assert work.is_completed()
    work.wait()
    assert [each.data_ptr() for each in (*work.result(), *work.get_future().value())] == [x.data_ptr()] * 2
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as several:
        dist.irecv(again := torch.empty(2), (rank - 1) % size)
        dist.isend(torch.full((2,), rank + 5.0), (rank + 1) % size)
    several.wait()
    assert again.tolist() == [(rank - 1) % size + 5] * 2
    with torch.inference_mode():
        dist.all_gather(parts := [*torch.zeros(size, 2)], torch.full((2,), 1.0 * rank), async_op=True).wait()
    assert [each.tolist() for each in parts] == [[peer] * 2 for peer in range(size)]
    *_, work = [dist.all_reduce(y := torch.ones(1 << size), async_op=True) for size in (18, 18, 18, 2)]
    y.requires_grad_()  # as torch does with what functional collectives return
    work.wait()
    assert y.tolist() == [size] * 4
    for op, factor in ((torch.distributed._make_nccl_premul_sum(0.5), 0.5), (dist.ReduceOp.AVG, 1 / size)):
        dist.all_reduce(x := torch.full((4,), rank + 1.0), op)
        assert x.tolist() == [size * (size + 1) / 2 * factor] * 4
    # of a matrix, whose columns are no contiguous tensors; gloo refuses them
    strided, gathered = whole((4, 3), torch.float32, rank), torch.zeros(3, 4 * size)
    dist.all_gather_into_tensor(gathered.t(), strided.t().contiguous().t())
    everyone = [whole((4, 3), torch.float32, each) for each in range(size)]
    assert torch.equal(gathered.t(), torch.cat(everyone))
    dist.all_reduce(strided.t())
    assert torch.equal(strided, sum(everyone))
    dist.broadcast(strided[:, 1].fill_(rank), 1)
    assert strided[:, 1].tolist() == [1.0] * 4
    parts, sizes = [torch.zeros(each, 2) for each in range(size)], [(rank + each) % 3 for each in range(size)]
    dist.all_gather(parts, torch.full((rank, 2), rank + 1.0))
    assert [each.unique().tolist() for each in parts] == [[peer + 1.0] * (peer > 0) for peer in range(size)]
    lists = [torch.zeros(each) for each in sizes]
    dist.all_to_all(lists, [torch.full((each,), 1.0 * rank) for each in sizes])
    assert [each.tolist() for each in lists] == [[peer] * sizes[peer] for peer in range(size)]
    sent, found = torch.arange(2.0 * sum(sizes)).view(-1, 2) + 100 * rank, []
    for group in (None, dist.new_group(backend="gloo")):
        found.append(torch.zeros(sum(sizes), 2))
        dist.all_to_all_single(found[-1], sent, sizes, sizes, group=group)
    assert torch.equal(*found)
    dist.barrier()
    assert "fp8" in torch_backend.explain()
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    operations = weakref.ref(operations_of(group))
    dist.destroy_process_group(group)
    del group
    assert operations() is None  # and what gloo had open


def promising_bits(store):
    """Groups that promise bits, by options and by torch's setting, refuse what goes to others, and give those bits."""
    rank, size = start(store, torch_backend.Options(deterministic=True))
    torch.use_deterministic_algorithms(True)
    groups = [None, dist.new_group(), dist.new_group(pg_options=torch_backend.Options(deterministic=False))]
    torch.use_deterministic_algorithms(False)
    groups.append(dist.new_group())
    refusals = [said_by(lambda each=each: dist.reduce(torch.ones(3).cfloat(), 0, group=each)) for each in groups]
    promises = [torch_backend.context_of(group).settings.deterministic for group in groups]
    assert promises == [bool(each) for each in refusals] == [True, True, False, False]
    assert all("torch.complex64" in each for each in refusals[:2])
    flags = torch.ones(3, dtype=torch.bool)
    dist.all_reduce(flags)  # gloo's, in whatever order
    assert flags.all()
    case = Case("all_reduce", "bfloat16")
    inputs = [source(case, each, 0, size) for each in range(size)]
    x = inputs[rank].clone()
    dist.all_reduce(x)
    assert torch.equal(x, promised(case, inputs)[rank])


def die(store, folder, device, by):
    """Rank 1 ends within a step; the others write down the error that they get.  On GPUs, NCCL carries the step."""
    rank, size = start(store, device=device)
    x = torch.ones(1000, device=device)
    # DDP's code in C++ reads the future of an asynchronous call
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(device)) if by == "DDP" else None
    dist.barrier()

    def step():
        if by == "barrier":
            return dist.group.WORLD.monitored_barrier()
        if by == "messages":
            return [(dist.send if rank == 1 else dist.recv)(x, each) for each in ({0, size - 1} if rank == 1 else [1])]
        if net is not None:
            return net(torch.ones(1, 4, device=device)).sum().backward()
        finish(dist.all_reduce(x, async_op=device == "cuda"))
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    if rank == 1:
        os._exit(7)
    try:
        for _ in range(3):
            step()
    except Exception as error:
        (folder / f"rank {rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def late(store, is_async):
    """Rank 1 comes later than the group's bound, after a call of other sizes: what calls raise themselves."""
    rank, size = start(store, timeout=datetime.timedelta(seconds=3))

    def call(number):
        x, sizes = torch.ones(size * number), [number] * size
        return dist.all_to_all_single(x.clone(), x, sizes, sizes, async_op=True) if is_async else dist.all_reduce(x)

    for number in (10, 20):
        finish(call(number))
    if rank == 1:
        time.sleep(5)
    return said_by(lambda: finish(call(10))) + said_by(dist.recv, torch.ones(1), 1) * (rank == 0)


def program(text, port):
    """Run a program as torchrun would; return the values of its x and of x's gradient."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    names, quick = {"__name__": "__main__"}, contextlib.nullcontext()
    if "torch.compile" in text:
        quick = importlib.import_module("torch._inductor.config").patch(importlib.import_module("jobs_fuse").QUICK)
    with quick:
        exec(compile(text, "docs/pytorch.md", "exec"), names)
    x = names["x"]
    return x.tolist(), None if x.grad is None else x.grad.tolist(), dist.is_initialized()


def where_a_graph_breaks(store):
    """The first call of a group, where the graph of compiled code breaks; the compiler leaves alone what it does."""
    _, size = start(store)
    compiled = []

    def step(x):
        torch._dynamo.graph_break()
        dist.all_reduce(x, async_op=True).wait()
        return x + 1

    with torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename)):
        assert torch.compile(step, backend="aot_eager")(torch.ones(2)).tolist() == [size + 1] * 2
    assert {"iris_core/" in each for each in compiled} == {False}


def gradients(store):
    """Gradients of `torch.ops.iris.*` beside finite differences of the sum of all ranks' losses, by name."""
    rank, size = start(store)
    group, process_group = library.name_of(torch_backend.context_of()), dist.group.WORLD.group_name
    ops = torch.ops.iris
    torch.manual_seed(1)
    b, c = torch.randn(4, 2 * size), torch.randn(4 * size, 3)
    cases = {
        "all_reduce": (ops.all_reduce, "sum", group), "average": (ops.all_reduce, "AVG", process_group),
        "all_gather": (ops.all_gather, group), "reduce_scatter": (ops.reduce_scatter, "sum", group),
        "all_to_all": (ops.all_to_all, group), "broadcast": (ops.broadcast, 1, process_group),
        "reduce": (ops.reduce, 1, process_group), "all_gather_matmul": (ops.all_gather_matmul, b, None, group),
        "of columns": (ops.all_gather_matmul, c, c[0], group, 1),
        "matmul_all_reduce": (ops.matmul_all_reduce, b, None, group),
        "matmul_reduce_scatter": (ops.matmul_reduce_scatter, b, None, group),
        "matmul_all_gather": (ops.matmul_all_gather, b, lambda x: x[:, :1], group),
        "beside each other": (ops.matmul_all_gather, b, lambda x: (x @ b)[:1], group, 1),
        "norm": (lambda x, *how: torch.cat(ops.all_reduce_rms_norm(x, 2 * x, *how)), b[:, 0], 1e-3, group),
    }  # fmt: skip
    for name, (op, *how) in cases.items():

        def case(x, op=op, how=how, **out):
            x = x.float() if isinstance(how[0], torch.Tensor) else x
            return op(x, *(each(x) if callable(each) else each for each in how), **out)

        x = torch.ones(2 * size, 4)
        for forward in (partial(torch.func.jvp, case, (x,), (x,)), partial(torch.func.jacfwd(case), x)):
            assert unlike(("UnsupportedError: torch.ops.iris .*forward-mode", forward)) == [], name
        shape = (2 * size, 4)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        y = case(x)
        weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(10 + rank))
        (y * weights).sum().backward()
        direction = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(20 + rank))
        step = 1e-3 if y.dtype == torch.float32 else 1e-6
        ends = [(case(x.detach() + sign * step * direction) * weights).double().sum() for sign in (1, -1)]
        sums = torch.stack([(ends[0] - ends[1]) / (2 * step), (x.grad * direction).sum()]).double()
        dist.all_reduce(sums)
        assert torch.allclose(sums[0], sums[1], rtol=1e-2 if y.dtype == torch.float32 else 1e-6), (name, sums)
        torch.compiler.reset()  # all cases have the same code
        compiled = torch.compile(case, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.detach()), case(x.detach())), name
        if name != "norm":
            write = partial(case, op=getattr(ops, f"{op.__name__}_out"))
            for call in (write, torch.compile(write, fullgraph=True, backend="aot_eager")):
                call(x.detach(), out=(out := torch.empty_like(y)))
                assert torch.equal(out, y), name
        eager, x.grad = x.grad, None
        (compiled(x) * weights).sum().backward()  # and no rank leaves a call out that others make
        assert torch.allclose(x.grad, eager), name
    for dim, factor in enumerate((b, c)):
        found = []
        for needs in ((True, True), (rank == 0, rank == 1)):
            pair = [each.detach().float().requires_grad_(need) for each, need in zip((x, factor), needs, strict=True)]
            ops.all_gather_matmul(*pair, None, group, gather_dim=dim).sum().backward()
            found.append([each.grad for each in pair])
        assert found[1][1 - rank] is None, "the gradient of one factor"
        assert torch.equal(*(grads[rank] for grads in found)), dim
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ops.matmul_all_reduce(c[: 2 * size, :1], b[:1].bfloat16(), None, group)
    assert torch.equal(cast, ops.matmul_all_reduce(c[: 2 * size, :1].bfloat16(), b[:1].bfloat16(), None, group))
    recorded = b.t().contiguous().requires_grad_() * 1
    sums, out = (recorded, "sum", group), torch.zeros(2 * size, 2 * size)
    for op, given, how in (
        ("all_reduce_", sums, {}), ("all_reduce_out", sums, {"out": c}),
        ("matmul_all_reduce_out", (recorded.detach(), recorded.t(), None, group), {"out": out}),
    ):  # fmt: skip
        for call in (getattr(ops, op), torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")):
            assert unlike((f".*iris::{op} .*gradient", partial(call, *given, **how))) == []
    for x, call in ((whole((6,), torch.int32, 1), ops.reduce_scatter), (whole((8,), torch.int32, 1), ops.all_reduce)):
        words = "ArgumentError.*op='nonsense'"
        assert unlike((words, partial(call, x, ("sum", "nonsense")[rank], group))) == []
    for call, given in (
        (ops.reduce_scatter, (c[: 2 * size - rank, 0], "sum")), (ops.reduce, (c[:1, 0], 7)),
        (ops.matmul_reduce_scatter, (c[: 2 * size - rank, :1], c[:1, :2], None)),
    ):  # fmt: skip
        assert unlike(("ArgumentError: .*(rows|rank 7)", partial(call, *given, group))) == []


def trained(net, device="cpu", part=lambda x: x, after=lambda: None):
    """Losses and gradients of a few steps, and parameters then; `after` is called behind each step."""
    found, full = [], lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x = whole((4, 6, 8), torch.float32, 10 * dist.get_rank() + step).to(device)
        loss = net(part(x)).square().mean()
        loss.backward()
        optimizer.step()
        found += map(full, (loss, *(each.grad for each in net.parameters())))
        optimizer.zero_grad()
        after()
    return [*found, *map(full, net.parameters())]


def small_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))


def fsdp_on_the_heap(store):
    """FSDP2 trains alike with buffers on the heap; what the first step has made is used again."""
    start(store)
    ctx = torch_backend.context_of()
    parameters, blocks = [], []
    for on_heap in (False, True):
        net = small_net()
        for each in (*net, net):
            fully_shard(each)
        if on_heap:
            fsdp.use_heap(net, ctx)
        parameters.append(trained(net, after=lambda: blocks.append(ctx.stats().num_blocks)))
    assert all(map(torch.equal, *parameters))
    assert blocks[:4] == [blocks[0]] * 4
    assert blocks[5:] == [blocks[5]] * 3 > [blocks[0]] * 3


def large_beside_small(store, is_deterministic):
    """Gather, scatter and sum large tensors beside small sums on another stream; NCCL carries what promises no bits."""
    rank, size = start(store, torch_backend.Options("256MiB", deterministic=is_deterministic), device="cuda")
    side, n = torch.cuda.Stream(), (64 << 20) // 2 // size
    part, parted = (torch.full((n,), float(rank), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    wholes, small = part.new_empty(size, n), torch.ones(1000, device="cuda")
    bucket, in_bucket = torch.ones(8 << 20, dtype=torch.bfloat16, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    for turn in range(6):
        dist.all_gather_into_tensor(wholes, part)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000 * ((rank + turn) % size))
            dist.all_reduce(small)
        finish(dist.reduce_scatter_tensor(parted, wholes, async_op=turn % 2 == 0))
        summed = dist.all_reduce(bucket.fill_(turn), async_op=True)
        dist.all_reduce(in_bucket)  # by Iris, on the stream that has not waited for the bucket
        summed.wait()
        in_bucket += bucket[-1000:]
    torch.cuda.synchronize()
    assert (small == size**6).all()
    assert (in_bucket == reduce(lambda total, turn: size * (total + turn), range(6))).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(bucket, async_op=True).wait()  # by Iris again, which served the first call
    bucket.fill_(1)
    graph.replay()
    assert (bucket == size).all()
    assert (parted == size * rank).all()
    assert wholes[:, 0].tolist() == list(range(size))
    assert ("cuda: nccl" in torch_backend.explain()) != is_deterministic
