"""Rank jobs of tests/ccl: many calls one after the other, in groups, beside each other, and in graphs."""

import inspect
import random
import time

import torch
import torch.distributed as dist
from ccl_cases import OPS, Case, expected
from jobs_ccl import Tensors, bits, call, verify
from jobs_common import environment, soon

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp
from iris_core.errors import IrisError, UnsupportedError

SHAPES = ((1,), (7,), (129,), (33, 5), (4099,))
DTYPES = ("float32", "bfloat16", "int32", "int8")


def random_case(generator, size, **fixed):
    """A call, the same on every rank that has the same generator."""
    place = generator.choice(("heap", "ordinary", "skewed"))
    op = generator.choice(OPS)
    choice = Case(
        op, generator.choice(DTYPES), shape=generator.choice(SHAPES), place=place, root=generator.randrange(size)
    )
    if op == "all_reduce" and generator.random() < 0.5:
        choice = Case(**{**vars(choice), "config": {"algorithm": generator.choice(("one_shot", "two_shot"))}})
    return choice


def rest(ctx, seconds):
    """Keep this rank's device busy."""
    if ctx.device == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1e9))


def in_groups(device, sets, rounds):
    """Every group makes calls of its own; a rank that is in none of them makes none."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made = [dist.new_group(members, **unsorted) for members in sets]
    sets = [members if unsorted else sorted(members) for members in sets]  # older versions of torch sort them
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        for number, (members, group) in enumerate(zip(sets, made, strict=True)):
            generator = random.Random(number)
            for turn in range(rounds):
                case = random_case(generator, len(members))
                tensors = Tensors(
                    ctx, case, members.index(ctx.cur_rank) if ctx.cur_rank in members else 0, len(members)
                )
                if ctx.cur_rank in members:
                    inputs = tensors.fill(turn)
                    call(ctx, case, tensors, group, members)
                    wrong += verify(case, tensors, inputs, f" in group {members}")
        ctx.barrier()
    return wrong


def back_to_back(device, calls, kinds, slow_ranks):
    """Calls of different sizes and operations, nothing waited for in between; all results are looked at afterwards."""
    generator = random.Random(5)
    wrong = []
    with Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        plays = []
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
    wrong = []
    with environment(IRIS_CCL_WORKSPACE=workspace), Iris("8MiB", device=device) as ctx:
        for case in cases:
            with ctx.scope():
                tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
                for turn in range(2):
                    inputs = tensors.fill(turn)
                    call(ctx, case, tensors)
                    wrong += verify(case, tensors, inputs)
        ctx.barrier()
    return wrong


def against_gloo(device, seed, calls):
    """The same calls by torch.distributed."""
    wrong = []
    generator = random.Random(seed)
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        for turn in range(calls):
            case = case_for_gloo(generator, size)
            tensors = Tensors(ctx, case, rank, size)
            inputs = tensors.fill(turn)
            call(ctx, case, tensors)
            want = by_gloo(case, rank, size, inputs[rank].clone())
            if want is not None and not torch.equal(tensors.out.cpu().flatten(), want.flatten()):
                wrong.append(f"{case}: rank {rank} got {tensors.out.flatten()[:8]}, gloo {want.flatten()[:8]}")
        ctx.barrier()
    return wrong


def case_for_gloo(generator, size):
    """A call of a kind that gloo knows, wherever tensors lie, in place or not, empty or not."""
    case = random_case(generator, size)
    dtype = generator.choice(("float32", "float64", "int32", "int64", "uint8"))
    reduction = generator.choice(("sum", "product", "min", "max"))
    changes = {"dtype": dtype, "config": {}}
    changes["place"] = generator.choice(("heap", "ordinary", "skewed", "strided", "transposed"))
    changes["shape"] = generator.choice((case.shape, (0,), (6, 5)))
    if case.op == "all_reduce":
        changes["in_place"] = generator.random() < 0.5
        if "int" in dtype and generator.random() < 0.5:
            reduction = generator.choice(("band", "bor", "bxor"))
        elif "float" in dtype and generator.random() < 0.3:
            reduction = "avg"
    elif case.op in ("all_gather", "reduce_scatter"):
        changes["in_place"] = changes["place"] in ("heap", "ordinary", "skewed") and generator.random() < 0.5
    return Case(**{**vars(case), **changes, "reduction": reduction})


def by_gloo(case, rank, size, own):
    """What torch.distributed gives this rank; None where it gives nothing."""
    op = {
        "sum": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "band": dist.ReduceOp.BAND,
        "bor": dist.ReduceOp.BOR,
        "bxor": dist.ReduceOp.BXOR,
        "avg": dist.ReduceOp.SUM,  # gloo has no average
    }
    if not own.numel():
        return None
    if case.op in ("all_reduce", "reduce_scatter"):
        dist.all_reduce(own, op[case.reduction])
        if case.reduction == "avg":
            own /= size
        return own if case.op == "all_reduce" else own.chunk(size)[rank]
    if case.op == "reduce":
        dist.reduce(own, case.root, op[case.reduction])
        return own if rank == case.root else None
    if case.op == "broadcast":
        dist.broadcast(own, case.root)
        return own
    if case.op in ("all_gather", "gather"):
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        return torch.cat(parts) if case.op == "all_gather" or rank == case.root else None
    if case.op == "scatter":
        part = own.new_empty(own.shape[0] // size, *own.shape[1:])
        dist.scatter(part, list(own.chunk(size)) if rank == case.root else None, case.root)
        return part
    parts = [torch.empty_like(part) for part in own.chunk(size)]
    _gloo_all_to_all(parts, own)
    return torch.cat(parts)


def _gloo_all_to_all(parts, own):
    """gloo has no list form."""
    out = torch.empty_like(own)
    dist.all_to_all_single(out, own)
    for part, got in zip(parts, out.chunk(len(parts)), strict=True):
        part.copy_(got)


def asynchronous(device):
    """Handles: started together, waited for in another order; and a synchronous call behind asynchronous ones."""
    said = []
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        tensors = [ctx.full((1000 + i,), float(rank + i)) for i in range(4)]
        outputs = [ctx.zeros(1000 + i) for i in range(4)]
        works = [ctx.ccl.all_reduce(out, inp, async_op=True) for out, inp in zip(outputs, tensors, strict=True)]
        last = ctx.zeros(size)
        ctx.ccl.all_gather(last, tensors[0][:1])  # same team: behind the four
        for work in reversed(works):
            work.wait()
        said.append([float(out.float().mean().item()) for out in outputs])
        works[0].wait(timeout_s=10)
        said.append(all(work.is_completed() for work in works))
        said.append(last.tolist())
        gone = torch.full((5000,), float(rank), device=ctx.device)
        out = torch.zeros(5000, device=ctx.device)
        work = ctx.ccl.all_reduce(out, gone, async_op=True)
        del gone
        torch.full((5000,), 77.0, device=ctx.device)  # must not get the memory of what is still read
        work.wait()
        said.append(out.unique().tolist())
        barrier = ctx.ccl.barrier(async_op=True)
        barrier.wait()
        ctx.ccl.barrier()
        ctx.barrier()
        said.append(barrier.is_completed())
    return said


def refused(device):
    """What wrong calls say; nothing is launched, so right ones still work afterwards."""
    said = {}
    alone = dist.new_group([1])
    with Iris("8MiB", device=device) as ctx:
        ccl, rank, size = ctx.ccl, ctx.cur_rank, ctx.num_ranks
        x, y, wide = ctx.zeros(6, 4), ctx.zeros(6, 4), ctx.zeros(size * 6, 4)
        other, recorded = torch.zeros(6, 4, device="meta"), x.clone().requires_grad_()
        calls = {
            "shape": lambda: ccl.all_reduce(y[:5], x), "dtype": lambda: ccl.all_reduce(y.int(), x),
            "device": lambda: ccl.all_reduce(other, x), "no tensor": lambda: ccl.all_reduce(y, [1.0]),
            "reduction": lambda: ccl.all_reduce(y, x, op="median"),
            "bitwise": lambda: ccl.all_reduce(y, x, op=ReduceOp.BAND),
            "average of bool": lambda: ccl.all_reduce(y.bool(), x.bool(), op=ReduceOp.AVG),
            "complex": lambda: ccl.all_reduce(y.cfloat(), x.cfloat()),
            "overlap": lambda: ccl.all_reduce(wide[:6], wide[1:7]),
            "gradient": lambda: [ccl.all_reduce(y, each) for each in (recorded.detach(), recorded)],
            "gradient of the output": lambda: ccl.broadcast(2 * recorded),
            "shared memory": lambda: ccl.all_reduce(y[:1].expand(6, 4), x), "gathered": lambda: ccl.all_gather(y, x),
            "scattered": lambda: ccl.reduce_scatter(y, x), "indivisible": lambda: ccl.all_to_all(y[:5], x[:5]),
            "splits": lambda: ccl.all_to_all(y, x, input_split_sizes=[1] * size),
            "columns": lambda: ccl.all_to_all(y[:, :3], x[:, :3], layout="columns"),
            "layout": lambda: ccl.all_to_all(y, x, layout="rows"), "in place": lambda: ccl.all_to_all(x, x),
            "root": lambda: ccl.broadcast(x, src=size), "kind of root": lambda: ccl.broadcast(x, src="0"),
            "no output": lambda: ccl.gather(None, x, dst=rank),
            "algorithm": lambda: ccl.all_reduce(y, x, config=Config(algorithm="magic")),
            "contradiction": lambda: ccl.all_reduce(
                y, x, config=Config(algorithm="two_shot", all_reduce_variant="one_shot")
            ),
            "config": lambda: ccl.all_reduce(y, x, config={"comm_sms": 3}),
            "unused": lambda: ccl.all_reduce(y, x, config=Config(algorithm="two_shot", swizzle_size=8)),
            "stranger": lambda: ccl.all_reduce(y, x, group=alone if rank != 1 else "no group"),
        }  # fmt: skip
        for name, wrong in calls.items():
            try:
                wrong()
                said[name] = "nothing"
            except (IrisError, TypeError, ValueError, RuntimeError) as e:
                said[name] = f"{type(e).__name__}: {e}"
        x.fill_(rank + 1)
        ccl.all_reduce(y, x)
        ctx.barrier()
        assert y.unique().tolist() == [size * (size + 1) / 2]
    try:
        ccl.all_reduce(y, x)
    except IrisError as e:
        said["closed"] = f"{type(e).__name__}: {e}"
    return said


def different(device, what):
    """Ranks that call differently are told, all of them; afterwards they can go on."""
    with Iris("8MiB", device=device) as ctx:
        odd = ctx.cur_rank == ctx.num_ranks - 1
        x, y = ctx.ones(6, 4), ctx.zeros(6, 4)
        text = ""
        try:
            if what == "shape":
                ctx.ccl.all_reduce(y[: 3 + odd], x[: 3 + odd])
            elif what == "operation":
                ctx.ccl.reduce(y, x) if odd else ctx.ccl.all_reduce(y, x)
            elif what == "place":
                ctx.ccl.all_reduce(y, torch.ones(6, 4, device=ctx.device) if odd else x)
            elif what == "root":
                ctx.ccl.broadcast(x, src=int(odd))
            else:
                ctx.ccl.all_reduce(y, x, config=Config(algorithm="one_shot" if odd else "two_shot"))
        except IrisError as e:
            text = f"{type(e).__name__}: {e}"
        ctx.ccl.all_reduce(y, x)
        ctx.barrier()
        assert y.unique().tolist() == [ctx.num_ranks]
    return text


def stays_away(device):
    """A rank that does not call; the others' kernels end by IRIS_DEVICE_TIMEOUT and say whom they miss.

    Afterwards all put the team back to its beginning, and go on.
    """
    with environment(IRIS_DEVICE_TIMEOUT=soon(device)), Iris("8MiB", device=device) as ctx:
        x, y = ctx.ones(6, 4), ctx.zeros(6, 4)
        ctx.ccl.all_reduce(y, x)
        ctx.barrier()
        if ctx.cur_rank != 1:
            ctx.ccl.all_reduce(y, x)
        said = ""
        try:
            ctx.barrier()
        except IrisError as e:
            said = f"{type(e).__name__}: {e}"
        ctx.ccl.reset()
        x.fill_(ctx.cur_rank)
        ctx.ccl.all_reduce(y, x)
        ctx.barrier()
        return said, y.unique().tolist()


def captured(device, cases, replays):
    """Calls in a graph, replayed with new data; and a first call inside a capture."""
    said, wrong = [], []
    with Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        x = ctx.zeros(77)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ctx.ccl.all_reduce(x, x)
        except UnsupportedError as e:
            said.append(str(e))
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
    return said, wrong


def captured_in_pieces(device, cases, replays, workspace):
    """`captured` with a workspace in which few messages go at once."""
    with environment(IRIS_CCL_WORKSPACE=workspace):
        return captured(device, cases, replays)


def observed(device):
    """What an observer hears."""
    from iris_core.hooks import hookimpl
    from iris_core.registry import default_registry
    from iris_core.types import PluginKind

    heard = []

    class Observer:
        @hookimpl
        def iris_collective(self, op, algorithm, nbytes):
            heard.append((op, algorithm, nbytes))

    with Iris("8MiB", device=device) as ctx:
        x = ctx.zeros(10)
        ctx.ccl.all_reduce(x, x)
        record = default_registry().register(PluginKind.OBSERVER, Observer(), name="listener")
        try:
            ctx.ccl.all_reduce(x, x)
            ctx.ccl.broadcast(x, async_op=True).wait()
        finally:
            default_registry().unregister(record)
        ctx.ccl.all_reduce(x, x)
        ctx.barrier()
    return heard


def messages(device, rounds):
    """Messages round a ring and across, of all kinds, small and larger than an inbox."""
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        right, left = (rank + 1) % size, (rank - 1) % size
        kinds = [(dtype, n) for dtype in ("bfloat16", "int8", "complex128", "bool") for n in (1, 77, 30_001)]
        for turn, (dtype, n) in enumerate(kinds * rounds):

            def content(sender, dtype=dtype, n=n, turn=turn):
                generator = torch.Generator().manual_seed(1000 * turn + sender)
                return torch.randint(0, 2 if dtype == "bool" else 100, (n, 3), generator=generator).to(
                    getattr(torch, dtype)
                )

            make = ctx.empty if turn % 2 else torch.empty
            out = make(n, 6, dtype=getattr(torch, dtype), device=ctx.device)[:, ::2]
            inp = content(rank).to(ctx.device)
            works = [ctx.ccl.send(inp, right, async_op=True), ctx.ccl.recv(out, left, async_op=True)]
            for work in works:
                work.wait()
            if not torch.equal(bits(out.cpu()), bits(content(left))):
                wrong.append(f"{dtype} {n}: rank {rank} got something else than rank {left} sent")
        # in order, and before anybody receives
        small = [ctx.full((5,), float(10 * rank + i)) for i in range(2)]
        got = [ctx.zeros(5) for _ in range(2)]
        for tensor in small:
            ctx.ccl.send(tensor, right)
        for tensor in got:
            ctx.ccl.recv(tensor, left)
        if [t.unique().tolist() for t in got] != [[10.0 * left + i] for i in range(2)]:
            wrong.append(f"rank {rank}: messages came in another order: {got}")
        try:
            ctx.ccl.send(small[0], rank)
            wrong.append("a message to oneself was not refused")
        except ValueError as e:
            if "this rank" not in str(e):
                wrong.append(str(e))
        ctx.barrier()
    return wrong


def in_tiles(device):
    """reduce_scatter in the layout of the reference system."""
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        for place, distribution, swizzle in (("heap", 1, 4), ("heap", 0, 2), ("ordinary", 1, 2), ("ordinary", 0, 1)):
            make = ctx.empty if place == "heap" else torch.empty
            numbers = torch.arange(100 * 130).remainder(251).view(100, 130).to(torch.int32)
            x, y = (make(100, 130, dtype=torch.int32, device=ctx.device) for _ in range(2))
            x.copy_(numbers * (rank + 1))
            y.fill_(-1)
            config = Config(
                all_reduce_distribution=distribution, block_size_m=16, block_size_n=32, swizzle_size=swizzle
            )
            ctx.ccl.reduce_scatter(y, x, layout="tiles", config=config)
            want = torch.full((100, 130), -1, dtype=torch.int32)
            for row, column in own_tiles(rank, size, 7, 5, swizzle, distribution):
                part = slice(16 * row, 16 * row + 16), slice(32 * column, 32 * column + 32)
                want[part] = numbers[part] * (size * (size + 1) // 2)
            if not torch.equal(y.cpu(), want):
                wrong.append(f"rank {rank}, {place}, distribution {distribution}, swizzle {swizzle}")
        ctx.barrier()
    return wrong


def own_tiles(rank, size, rows, columns, swizzle, distribution):
    """(row, column) of the tiles of a rank, numbered as the reference system does."""
    each = -(-rows * columns // size)
    for number in range(rows * columns):
        if rank == (number // each if distribution else number % size):
            first = number // (swizzle * columns) * swizzle
            height = min(rows - first, swizzle)
            within = number % (swizzle * columns)
            yield first + within % height, within // height


def explained(device):
    """What `explain` says, and that it is what happens."""
    with Iris("8MiB", device=device) as ctx:
        x = ctx.zeros(10)
        explanation = ctx.ccl.explain("all_reduce", x, x, op="max")
        refused = ctx.ccl.explain("all_reduce", x, x, config=Config(num_xcds=4))
        ctx.barrier()
        return str(explanation), explanation.algorithm, [c.name for c in explanation.candidates], str(refused)
