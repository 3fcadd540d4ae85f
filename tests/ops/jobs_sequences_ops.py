"""Rank jobs of tests/ops: many calls one after the other, in groups, beside each other, in graphs; wrong calls."""

import inspect
import random
import time

import torch
import torch.distributed as dist
from jobs_ops import Tensors, call, verify
from ops_cases import OPS, SEVERAL, Case, algorithms, dims

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import IrisError, UnsupportedError
from iris_core.ops import FusedConfig, FusedWorkspace

ENGINES = {
    "all_gather_matmul": ["copy_engine_push"],
    "matmul_all_reduce": ["copy_engine"],
    "matmul_reduce_scatter": ["copy_engine"],
}
"""Algorithms that use the copy engine."""

SHAPES = ((1, 3, 5), (17, 20, 33), (33, 40, 16))


IN_GROUPS = (
    Case("all_gather_matmul", "copy_engine_push", (6, 20, 17), dim=0, bias="columns"),
    Case("matmul_reduce_scatter", "copy_engine", (6, 20, 17), bias="rows"),
)
"""What any group is to serve, beside random calls."""


def random_case(generator, size):
    """A call, the same on every rank that has the same generator."""
    op = generator.choice(OPS)
    dim = generator.choice(dims(op))
    engines = ENGINES.get(op, []) if dim in (0, None) else []
    algorithm = generator.choice((*algorithms(op, size), *(engines if size > 1 else [])))
    config = SEVERAL if algorithm not in ("unfused", *engines, None) and generator.random() < 0.6 else {}
    return Case(
        op, algorithm, generator.choice(SHAPES), generator.choice(("float32", "bfloat16")),
        place=generator.choice(("heap", "ordinary", "gaps")), out_place=generator.choice(("heap", "ordinary")),
        bias=generator.choice(("", "columns")), dim=dim, config=config,
    )  # fmt: skip


def in_groups(device, sets, rounds, cases=IN_GROUPS, backend="triton"):
    """Every group makes calls of its own, random ones and given ones; a rank that is in none of them makes none."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made = [dist.new_group(members, **unsorted) for members in sets]
    sets = [members if unsorted else sorted(members) for members in sets]  # older versions of torch sort them
    wrong = []
    with Iris("24MiB", device=device, backend=backend) as ctx:
        for number, (members, group) in enumerate(zip(sets, made, strict=True)):
            generator = random.Random(number)
            mine = ctx.cur_rank in members
            for turn in range(rounds + (len(cases) if len(members) > 1 else 0)):
                case = random_case(generator, len(members)) if turn < rounds else cases[turn - rounds]
                tensors = Tensors(ctx, case, members.index(ctx.cur_rank) if mine else 0, len(members))
                if mine:
                    tensors.fill(turn)
                    call(ctx, case, tensors, group if turn % 2 else list(members))
                    wrong += verify(case, tensors, turn, f" in group {members}")
        ctx.barrier()
    return wrong


def back_to_back(device, kinds, calls, slow_ranks, cases=None, backend="triton"):
    """Calls of different kinds with changing data, between them collectives; nothing is waited for in between.

    The kinds are `cases`, or so many random ones.
    """
    generator = random.Random(11)
    wrong = []
    with Iris("32MiB", device=device, backend=backend) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        plays = []
        for case in cases or [random_case(generator, size) for _ in range(kinds)]:
            tensors = Tensors(ctx, case, rank, size)
            sides = []
            for turn in range(2):
                tensors.fill(turn)
                call(ctx, case, tensors)
                wrong += verify(case, tensors, turn, " at first")
                sides.append(
                    [None if x is None else x.clone() for x in (tensors.a, tensors.b, tensors.bias, tensors.out)]
                )
            plays.append((case, tensors, sides, torch.zeros((), dtype=torch.int64, device=ctx.device)))
        between = ctx.ones(100)
        total = ctx.zeros(100)
        ctx.barrier()
        for _ in range(calls):
            case, tensors, sides, bad = plays[generator.randrange(len(plays))]
            *operands, want = sides[generator.randrange(2)]
            for mine, new in zip((tensors.a, tensors.b, tensors.bias), operands, strict=True):
                if new is not None:
                    mine.copy_(new)
            tensors.out.fill_(5.0)
            if slow_ranks and generator.random() < 0.1 and generator.randrange(size) == rank:
                time.sleep(0.003) if ctx.device == "cpu" else torch.cuda._sleep(3_000_000)
            call(ctx, case, tensors)
            if generator.random() < 0.3:
                ctx.ccl.all_reduce(total, between)
                bad += (total != size).sum()
            for mine in (tensors.a, tensors.b):  # peers must be done with them
                mine.fill_(float("nan"))
            bad += (tensors.out != want).sum()  # the same bits every time
        ctx.barrier()
        for case, _, _, bad in plays:
            if int(bad.item()):
                wrong.append(f"{case}: {int(bad.item())} elements were wrong on rank {rank}")
    return wrong


BITS = tuple(
    Case("matmul_all_reduce", algorithm, (50, 70, 33), "bfloat16", bias="columns")
    for algorithm in ("unfused", "two_shot", "copy_engine")
)


def equal_bits(device, cases=BITS, backend="triton"):
    """What all ranks get is the same on all of them: the results of each rank."""
    results = []
    with Iris("16MiB", device=device, backend=backend) as ctx:
        for case in cases:
            tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
            for turn in range(2):
                tensors.fill(turn)
                call(ctx, case, tensors)
                results.append(tensors.out.cpu().view(torch.int16).flatten().tolist())
        ctx.barrier()
    return results


def asynchronous(device, cases=None, backend="triton"):
    """Handles: started together, waited for in another order; a synchronous call behind asynchronous ones."""
    wrong = []
    with Iris("16MiB", device=device, backend=backend) as ctx:
        cases = cases or [Case(op, name, dim=dims(op)[0]) for op in OPS for name in algorithms(op, ctx.num_ranks)]
        plays = [(case, Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)) for case in cases]
        works = []
        for case, tensors in plays:
            tensors.fill(0)
            works.append(call(ctx, case, tensors, async_op=True))
        behind = Tensors(ctx, cases[0], ctx.cur_rank, ctx.num_ranks)
        behind.fill(1)
        call(ctx, cases[0], behind)
        for work in reversed(works):
            work.wait()
        for case, tensors in plays:
            wrong += verify(case, tensors, 0, " asynchronous")
        wrong += verify(cases[0], behind, 1, " behind")
        works[0].wait(timeout_s=10)
        if not all(work.is_completed() for work in works):
            wrong.append("a handle is not completed after it was waited for")
        ctx.barrier()
    return wrong


def workspaces(device):
    """A workspace knows its last call, is used again, and lets go of what it has."""
    said = {}
    with Iris("8MiB", device=device) as ctx:
        case = Case("all_gather_matmul", "fetch" if ctx.num_ranks > 1 else "unfused", (20, 24, 32), dim=0)
        tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
        mine = FusedWorkspace()
        config = FusedConfig(algorithm=case.algorithm)
        prepared = ctx.ops.all_gather_matmul_preamble(
            tensors.out, tensors.a, tensors.b, None, config, mine, gather_dim=0
        )
        shape = (20 * ctx.num_ranks, 24, 32)
        said["preamble"] = prepared is mine and mine.matches("all_gather_matmul", shape, torch.float32, ctx.num_ranks)
        plan = next(iter(mine.calls.values())).plan
        wrong = []
        for turn in range(3):
            tensors.fill(turn)
            said[f"returned {turn}"] = call(ctx, case, tensors, workspace=mine) is mine
            wrong += verify(case, tensors, turn)
        said["right"] = wrong == []
        said["planned once"] = len(mine.calls) == 1 and next(iter(mine.calls.values())).plan is plan
        said["memory"] = mine.aux_buffer is not None and (mine.locks is not None) == (case.algorithm == "fetch")
        other = Case("matmul_all_reduce", "unfused", (4, 4, 4))
        others = Tensors(ctx, other, ctx.cur_rank, ctx.num_ranks)
        others.fill(0)
        call(ctx, other, others, workspace=mine)
        said["another"] = mine.operation == "matmul_all_reduce" and len(mine.calls) == 2
        said["mismatch"] = not mine.matches("all_gather_matmul", shape, torch.float32, ctx.num_ranks)
        own = call(ctx, other, others)
        said["own"] = own is not mine and own is call(ctx, other, others) and own.variant == "unfused"
        said["passed back"] = call(ctx, other, others, workspace=own) is own and len(own.calls) == 1
        with Iris("1MiB", device=device) as second:
            try:
                call(second, other, others, workspace=mine)
            except IrisError as error:
                said["of another context"] = "plans of another context" in str(error)
            mine.reset()
            call(second, other, others, workspace=mine)
            said["of another context, reset"] = verify(other, others) == [] and len(mine.calls) == 1
            second.barrier()
        said["closed with it"] = not mine.calls and mine.owner is None
        mine.clear()
        said["cleared"] = mine == mine and not mine.calls and not mine.prepared and mine.aux_buffer is None
        tensors.fill(5)
        call(ctx, case, tensors, workspace=mine)
        said["again"] = verify(case, tensors, 5) == []
        ctx.barrier()
    said["closed"] = not mine.prepared and not mine.calls
    try:
        call(ctx, case, tensors, workspace=mine)
    except IrisError as error:
        said["after close"] = "closed" in str(error)
    return said


def without_room(device, deterministic):
    """A large product on a small heap: the library takes what needs less, a named algorithm says so.

    In a `deterministic` context, what needs less has other bits.
    """
    said = []
    with Iris("1MiB", device=device, deterministic=deterministic) as ctx:
        size = ctx.num_ranks
        a, b = torch.ones(1024, 8, device=ctx.device), torch.ones(8, 4096, device=ctx.device)
        out = torch.zeros(1024, 4096, device=ctx.device)
        for _ in range(2):
            try:
                ctx.ops.matmul_all_reduce(
                    out, a, b, config=None if deterministic else FusedConfig(algorithm="two_shot")
                )
            except UnsupportedError as error:
                said.append(str(error))
        if not deterministic:
            ctx.ops.matmul_all_reduce(out, a, b)
        said.append(out.unique().tolist() == [8.0 * size])
        ctx.barrier()
    return said


def different(device, what):
    """Ranks that call differently are told, all of them; afterwards they can go on."""
    with Iris("8MiB", device=device) as ctx:
        odd = ctx.cur_rank == 1
        a, b, out, bias = ctx.ones(8, 8), ctx.ones(8, 8), ctx.zeros(8, 8), ctx.zeros(8)
        wide = ctx.zeros(8, 8 * ctx.num_ranks)
        off_heap = torch.zeros(8, 8 * ctx.num_ranks, device=ctx.device)
        try:
            if what == "shape":
                n = 8 - 4 * odd
                ctx.ops.matmul_all_reduce(out[:, :n], a, b[:, :n])
            elif what == "dtypes":
                kinds = torch.float8_e4m3fn, (torch.float8_e4m3fn, torch.float8_e5m2)[odd]
                ctx.ops.matmul_all_reduce(out, a.to(kinds[0]), b.to(kinds[1]))
            elif what == "place":
                ctx.ops.matmul_all_gather(off_heap if odd else wide, a, b, gather_dim=1)
            elif what == "config":
                ctx.ops.matmul_all_reduce(out, a, b, config=FusedConfig(algorithm="unfused" if odd else "two_shot"))
            else:
                ctx.ops.matmul_all_reduce(out, a, b, bias if odd else None)
            said = "nothing"
        except IrisError as error:
            said = f"{type(error).__name__}: {error}"
        ctx.ops.matmul_all_reduce(out, a, b)
        said = (said, out.unique().tolist())
        ctx.barrier()
    return said


def refused(device):
    """What wrong calls say; nothing is launched, so right ones still work afterwards."""
    said = {}
    with Iris("8MiB", device=device) as ctx:
        ops, size = ctx.ops, ctx.num_ranks
        a, b, out = ctx.ones(6 * size, 4), ctx.ones(4, 6), ctx.zeros(6 * size, 6)
        part = ctx.zeros(6, 6)
        grad = torch.ones(4, 6, device=ctx.device, requires_grad=True)
        double = [x.double() for x in (out, a, b)]
        calls = {
            "shape": lambda: ops.matmul_all_reduce(out[:5], a, b),
            "inner": lambda: ops.matmul_all_reduce(out, a[:, :3], b),
            "vector": lambda: ops.matmul_all_reduce(out, a[0], b),
            "nothing": lambda: ops.matmul_all_reduce(out, a[:, :0], b[:0]),
            "dtype": lambda: ops.matmul_all_reduce(out, a, b.half()),
            "out dtype": lambda: ops.matmul_all_reduce(out.half(), a, b),
            "double": lambda: ops.matmul_all_reduce(*double),
            "integers": lambda: ops.matmul_all_reduce(out.int(), a.int(), b.int()),
            "device": lambda: ops.matmul_all_reduce(out, a, torch.zeros(4, 6, device="meta")),
            "no tensor": lambda: ops.matmul_all_reduce(out, a, [[1.0]]),
            "bias": lambda: ops.matmul_all_reduce(out, a, b, ctx.zeros(5)),
            "bias along rows": lambda: ops.matmul_all_reduce(out, a, b, ctx.zeros(6 * size)),
            "bias dtype": lambda: ops.matmul_all_reduce(out, a, b, torch.zeros(6, dtype=torch.half, device=ctx.device)),
            "overlap": lambda: ops.matmul_all_reduce(out, out[:, :4], b),
            "shared memory": lambda: ops.matmul_all_reduce(out[:1].expand(6 * size, 6), a, b),
            "gradients": lambda: ops.matmul_all_reduce(out, a, grad),
            "config": lambda: ops.matmul_all_reduce(out, a, b, config=Config()),
            "workspace": lambda: ops.matmul_all_reduce(out, a, b, workspace={}),
            "algorithm": lambda: ops.matmul_all_reduce(out, a, b, config=FusedConfig(algorithm="magic")),
            "ring": lambda: ops.matmul_all_reduce(out, a, b, config=FusedConfig(all_reduce_variant="ring")),
            "unused": lambda: ops.matmul_all_reduce(
                out, a, b, config=FusedConfig(algorithm="two_shot", num_fetch_sms=8)
            ),
            "block": lambda: ops.matmul_all_reduce(
                out, a, b, config=FusedConfig(algorithm="two_shot", block_size_m=48)
            ),
            "indivisible": lambda: ops.matmul_reduce_scatter(part, a[:-1], b),
            "scattered": lambda: ops.matmul_reduce_scatter(out, a, b),
            "tiles": lambda: ops.matmul_reduce_scatter(part, a, b, layout="tiles"),
            "layout": lambda: ops.matmul_reduce_scatter(part, a, b, layout="columns"),
            "gathered": lambda: ops.all_gather_matmul(out, a[:6], b),
            "dim": lambda: ops.all_gather_matmul(out, a[:6], b, gather_dim=2),
            "gathered after": lambda: ops.matmul_all_gather(out, a[:6], b, gather_dim=1),
            "fetchers": lambda: ops.all_gather_matmul(
                out, a[:6], b, gather_dim=0, config=FusedConfig(algorithm="fetch", num_sms=2, num_fetch_sms=2)
            ),
            "gluon": lambda: ops.all_gather_matmul(out, a[:6], b, gather_dim=0, config=FusedConfig(use_gluon=True)),
            "operation": lambda: ops.explain("matmul", out, a, b),
        }
        buffer = torch.zeros(64 * (6 * size + 1), device=ctx.device)
        spread, column = buffer.as_strided((6 * size, 4), (64, 1)), buffer.as_strided((6 * size, 4), (64, 1), 8)
        negated = torch.view_as_complex(torch.zeros(6 * size, 4, 2, device=ctx.device)).conj().imag
        assert negated.is_neg()
        plain = torch.zeros(6 * size, 4, 2, device=ctx.device)[..., 1]
        assert plain.stride() == negated.stride()
        ops.matmul_all_reduce(spread, column, b[:, :4])  # between each other's rows they share nothing
        ops.matmul_all_reduce(column, plain, b[:, :4])
        calls |= {  # the same kinds of calls, which are known now
            "gaps": lambda: ops.matmul_all_reduce(spread, buffer.as_strided((6 * size, 4), (64, 1), 64), b[:, :4]),
            "negated": lambda: ops.matmul_all_reduce(column, negated, b[:, :4]),
            "families": lambda: ops.matmul_all_reduce(out, a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fnuz)),
            "variant": lambda: ops.all_gather_matmul(
                out, a[:6], b, gather_dim=0, config=FusedConfig(all_reduce_variant="ring")
            ),
            "fetchers of another": lambda: ops.matmul_reduce_scatter(
                part, a, b, config=FusedConfig(algorithm="push", num_fetch_sms=1)
            ),
        }
        for name, wrong in calls.items():
            try:
                wrong()
                said[name] = "nothing"
            except (IrisError, TypeError, ValueError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        ops.matmul_reduce_scatter(part, a, b)
        ctx.barrier()
        assert part.unique().tolist() == [4.0 * size]
        with torch.no_grad():
            ops.matmul_all_reduce(out, a, grad)
        empty = ops.matmul_all_reduce(out[:0], a[:0], b)
        assert empty.operation == ""
        said["explain"] = str(ops.explain("all_gather_matmul", out, a[:6], b, gather_dim=0))
        ctx.barrier()
    try:
        ops.matmul_all_reduce(out, a, b)
    except IrisError as error:
        said["closed"] = f"{type(error).__name__}: {error}"
    return said


def captured(device, cases, replays, backend="triton"):
    """Graphs: the first call of a kind is refused inside a capture; replays see the data of their time."""
    wrong, said = [], []
    with Iris("64MiB", device=device, backend=backend) as ctx:
        first = Tensors(ctx, cases[0], ctx.cur_rank, ctx.num_ranks)
        first.fill(0)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call(ctx, cases[0], first)
        except (UnsupportedError, RuntimeError) as error:
            said.append(str(error))
        torch.cuda.synchronize()
        for case in cases:
            tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
            tensors.fill(0)
            call(ctx, case, tensors)
            ctx.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(ctx, case, tensors)
            for turn in range(replays):
                tensors.fill(turn)
                graph.replay()
                if turn % 10 == 9 or turn < 3:
                    wrong += verify(case, tensors, turn, f" in replay {turn}")
            ctx.barrier()
    return said, wrong
