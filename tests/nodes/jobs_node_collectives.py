"""Rank jobs of test_collectives: collectives of groups on several nodes."""

import contextlib
import itertools
import os
import random
import time
from functools import partial
from unittest import mock

import jobs_ops
import torch
import torch.distributed as dist
from ccl_cases import OPS, PLACES, Case, moving_cases, place_cases, reducing_cases, shape_cases, way_cases
from jobs_ccl import run_cases
from jobs_common import finish, said_by, unlike
from jobs_nodes import die
from ops_cases import Case as Product
from tables import says

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.dispatch.bind import Bound
from iris_core.errors import UnsupportedError
from iris_core.providers import baseline, hierarchical, overlapped, torch_distributed
from iris_core.providers.hierarchical import Hierarchical
from iris_core.providers.straight import StraightAllToAll
from iris_core.providers.torch_distributed import TorchCollective
from iris_core.types import Availability


def cases(size, which):
    """Calls of every operation; `which` kinds of them."""
    if "elements" in which:
        yield from reducing_cases(2)
        yield from moving_cases()
        for reduction in ("band", "avg", "bxor"):
            yield Case("all_reduce", "int16", reduction, shape=(5, 3))
    if "shapes" in which:
        yield from shape_cases()
        for op, dtype in itertools.product(OPS, ("float32", "float16")):
            yield Case(op, dtype, shape=(4999,))
        yield from (Case(op, shape=(4096,), place="ordinary") for op in OPS if op != "reduce_scatter")
        for op in ("all_reduce", "broadcast", "reduce", "all_gather", "gather"):
            yield Case(op, "int32", shape=(), stacked=op.endswith("gather"))
        yield from (Case(op, shape=(1,), place="strided") for op in ("all_gather", "broadcast", "gather", "scatter"))
    if "ways" in which:
        yield from (
            case for case in (*place_cases(), *way_cases(size)) if not case.config and case.splits != "on device"
        )
        yield Case("all_to_all", "int32", shape=(40, 2000))  # which is not small
    if "lists" in which:
        for splits, place in itertools.product(("", "uneven", "one way"), PLACES):
            yield Case("all_to_all", "int32", splits=splits, shape=(10, 3), place=place)
        yield from (Case("all_to_all", dtype, shape=(3, 0, 2)) for dtype in ("bool", "float8_e4m3fn", "complex64"))
        yield from (Case("all_to_all", dtype, shape=(5,)) for dtype in ("bool", "float8_e4m3fn", "complex64"))


@contextlib.contextmanager
def parts_as_lists():
    """Let parts for other nodes go as NCCL takes them, which gloo cannot."""
    leave_out = TorchCollective._leave_out_node

    def as_nccl(self, plan, *rest):
        plan.on_host = False
        leave_out(self, plan, *rest)

    def all_to_all(outputs, inputs, group, async_op):
        assert async_op
        received = torch.cat(outputs)
        sizes = [[each.numel() for each in parts] for parts in (outputs, inputs)]
        dist.all_to_all_single(received, torch.cat(inputs), *sizes, group)
        for part, each in zip(outputs, received.split(sizes[0]), strict=True):
            part.copy_(each)
        return mock.Mock(wait=lambda: None)

    as_lists = mock.patch.object(TorchCollective, "_leave_out_node", as_nccl)
    with as_lists, mock.patch.object(dist, "all_to_all", all_to_all):
        yield


@contextlib.contextmanager
def small_chunks(nbytes=1024):
    of_products = mock.patch.multiple(overlapped, _LEAST_NBYTES=nbytes, _LEAST_LINES=4)
    with of_products, mock.patch.object(hierarchical, "_LEAST_NBYTES", nbytes):
        yield


@contextlib.contextmanager
def late(rank, share=0.2):
    """Let this rank be late at random, before a chunk and at its end."""
    chance = random.Random(rank)

    def delayed(real):
        def step(*arguments):
            if chance.random() < share:
                time.sleep(chance.random() * 0.02)
            return real(*arguments)

        return step

    with contextlib.ExitStack() as stack:
        levels = (Hierarchical, ("_begin_chunk", "_end_chunk")), (StraightAllToAll, ("_near", "_end"))
        for of, names in (*levels, (TorchCollective, ("_start",))):
            changed = {name: delayed(getattr(of, name)) for name in names}
            stack.enter_context(mock.patch.multiple(of, **changed))
        yield


def served_by(ctx):
    """(operation, algorithm) of what has been called, and in how many chunks at most."""
    served = {(op, text.split("'")[1]) for (_, op, *_), text in ctx._binder.members.served_by.items()}
    plans = [each.plan for each in ctx._binder.bound.values() if each.algorithm == "hierarchical"]
    return served, max([len(plan.chunks) for plan in plans if hasattr(plan, "chunks")], default=0)


def collectives(members, which, every=1, start=0, turns=2, device="cpu"):
    """What is wrong with calls of some ranks, with and without a handle; what has served them."""
    made = list(cases(len(members or range(dist.get_world_size())), which))[start::every]
    with small_chunks(2048), parts_as_lists() if which == "lists" else contextlib.nullcontext():
        return run_cases(device, made, turns, members, heap="48MiB", handles=True, around=late, look=served_by)


def captured():
    """Replay graphs of collectives by levels, with new values each time."""
    with small_chunks(), Iris("64MiB", device="cuda") as ctx:
        size, me = ctx.num_ranks, ctx.cur_rank
        parts = ctx.empty(size, 3000)
        out, gathered, mine = ctx.empty(size, 3000), ctx.empty(size, size, 3000), ctx.empty(3000)
        config = Config(algorithm="hierarchical")
        calls = {
            "all_reduce": (out, lambda everyone: everyone.sum(0)),
            "all_gather": (gathered, lambda everyone: everyone),
            "reduce_scatter": (mine, lambda everyone: everyone.sum(0)[me]),
            "all_to_all": (out, lambda everyone: everyone[:, me]),
        }
        numbers = torch.arange(size * 3000, device=parts.device).view(size, 3000) % 11
        for op, (found, wanted) in calls.items():
            call = partial(getattr(ctx.ccl, op), found, parts, config=config)
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads ask the driver, too
                call()
            for turn in range(3):
                everyone = torch.stack([numbers + (rank + 1) * (turn + 2) for rank in range(size)]).float()
                parts.copy_(everyone[me])
                graph.replay()
                assert torch.equal(found, wanted(everyone)), (op, turn)
                ctx.barrier()
            graph.reset()


def collectives_of_all(every):
    """`collectives` of all ranks, of this rank's node, and along its rail: each takes a share of the calls."""
    with Iris("1MiB", device="cpu") as ctx:
        groups = None, list(ctx.node_group), list(ctx.rail_group)
    return [collectives(each, "elements", every, number, 1) for number, each in enumerate(groups)]


def products(members, names):
    """What is wrong with products of some ranks; what has served them."""
    made = list(product_cases(len(members or range(dist.get_world_size())), names))
    with small_chunks():
        return run_cases("cpu", made, 2, members, look=served_by)


def chunked(ops, numbers):
    """What is wrong with calls in so many chunks as a config says; how many they had; and what is tried by itself."""

    def look(ctx):
        bound = list(ctx._binder.bound.values())
        found = {(each.op, each.request.options["config"]["chunks"]): len(each.plan.chunks) for each in bound}
        with mock.patch.object(hierarchical, "_LEAST_TRIED_NBYTES", 2048):
            tried = Hierarchical("all_reduce").tunings(bound[0].request)
        x, config = torch.ones(24), Config(chunks=2)
        calls = (
            lambda: ctx.ccl.all_to_all(torch.zeros(24), x, config=config),
            lambda: ctx.ccl.all_reduce(x, x, group=ctx.node_group, config=config),
        )
        return found, tried, [said_by(call) for call in calls]

    named = [{"algorithm": "hierarchical", "chunks": number} for number in numbers]
    made = [Case(op, "int32", shape=(4099,), config=config) for op, config in itertools.product(ops, named)]
    return run_cases("cpu", made, 2, around=late, look=look)


def messages():
    """Messages to all ranks and from all, of every kind of tensor, in order.

    The first ones of rank 0 are late.  Then it sends rank 3, on another node, what that does not expect: rank 3
    raises, and gets nothing of it.
    """
    with Iris("4MiB", device="cpu") as ctx:
        me, size = ctx.cur_rank, ctx.num_ranks

        def data(sender, receiver, number):
            shape = [(), (0,), (7, 3), (300_000,)][number % 4]
            dtype = [torch.float32, torch.bool, torch.int16, torch.complex64][number // 4]
            return torch.full(shape, 100 * sender + 10 * receiver + number).to(dtype)

        time.sleep(1.2 * (me == 0))
        for shift in range(1, size):  # all send before any receives
            after, before = (me + shift) % size, (me - shift) % size
            works, received = [], []
            for number in range(16):
                given = data(me, after, number)
                given = given.repeat(2, 1).t()[:, 0] if given.dim() == 1 and number > 8 else given
                works.append(ctx.ccl.send(given, after, async_op=True))
            for number in range(16):
                received.append(torch.zeros_like(data(before, me, number)))
                works.append(ctx.ccl.recv(received[-1], before, async_op=number % 2 == 0))
            for work in works:
                finish(work)
            assert all(torch.equal(each, data(before, me, number)) for number, each in enumerate(received))
        for sent, box in ((5, torch.zeros(4)), (4, torch.zeros(4).int())):
            words = says("ccl.sent", rank=3, number=4, dtype=str(box.dtype)[6:], sent=sent, other="float32")
            if me == 0:
                ctx.ccl.send(torch.ones(sent), 3)
                ctx.ccl.send(torch.full((3,), 7.0), 3)
            if me == 3:
                assert unlike((f"DeviceError: .*{words}", partial(ctx.ccl.recv, box, 0))) == []
                ctx.ccl.recv(later := torch.zeros(3), 0)
                assert (box.unique().tolist(), later.unique().tolist()) == ([0.0], [7.0])
        mine = [3, 2, 2, 2] if me == 1 else [2] * size
        how = {"input_split_sizes": mine, "output_split_sizes": [2] * size}
        call = partial(ctx.ccl.all_to_all, torch.zeros(8), torch.ones(sum(mine)), **how)
        assert unlike(("DeviceError: .*: rank 0 .*rank 1", call)) == []
        ctx.barrier()


def pairs():
    """Messages on GPUs between each two ranks: one sends first, then the other, with and without a handle."""
    with Iris("4MiB", device="cuda") as ctx:
        for both in itertools.combinations(range(ctx.num_ranks), 2):
            for sender, receiver in (both, both[::-1]):
                for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.bool, torch.complex64)):
                    given = torch.full((7, 3 + number), 10 * sender + receiver, device=ctx.device).to(dtype)
                    if ctx.cur_rank == sender:
                        finish(ctx.ccl.send(given, receiver, async_op=number % 2 == 0))
                    if ctx.cur_rank == receiver:
                        finish(ctx.ccl.recv(received := torch.zeros_like(given), sender, async_op=number % 3 == 0))
                        assert torch.equal(received, given)


def too_long():
    """Lengths beyond the cache, on all members."""
    with Iris("4MiB", device="cpu") as ctx:
        decode, kv = ctx.ops.flash_decode(1, 2, 1, 16, dtype=torch.float32), torch.ones(1, 1, 5, 16)
        for length in (6, -1):
            call = partial(decode, torch.ones(1, 2, 16), kv, kv, torch.tensor([length], dtype=torch.int32))
            assert unlike((rf"ArgumentError: .*\[{length}\]", call)) == []


def barriers(members, device="cpu", turns=6):
    """Return when this rank came to each barrier and when it was past it, with and without a handle."""
    spans = []
    with Iris("4MiB", device=device) as ctx:
        chance = random.Random(ctx.cur_rank)
        for turn in range(turns if members is None or ctx.cur_rank in members else 0):
            time.sleep(1.3 if turn == 1 and ctx.cur_rank == 3 else chance.random() * 0.1)
            begin = time.monotonic()
            finish(ctx.ccl.barrier(members, async_op=turn % 2 == 1))
            if device == "cuda":  # there the stream has waited, not this thread
                torch.cuda.synchronize()
            spans.append((begin, time.monotonic()))
        ctx.barrier()
    return spans


def begun_together():
    """Begin two calls that copy through the same memory, and wait for the later one first: each has its own data."""
    with Iris("8MiB", device="cpu") as ctx:
        outs = [torch.zeros(4, 3 * ctx.num_ranks).t() for _ in range(2)]
        inputs = [torch.full((3, 4), 10.0 * number + ctx.cur_rank) for number in range(2)]
        ctx.ccl.all_gather(outs[0], inputs[1], config=Config(algorithm="gloo"))
        (bound,) = (each for each in ctx._binder.bound.values() if each.algorithm == "gloo")
        works = [bound.begin(out, inp) for out, inp in zip(outs, inputs, strict=True)]
        for work in reversed(works):
            work.wait()
        assert [out[::3].tolist() for out in outs] == [[[10.0 * i + rank] * 4 for rank in range(2)] for i in range(2)]


def beside_each_other():
    """Calls of all ranks in a thread, while this one calls with its node and its rail, in both orders."""
    with small_chunks(), Iris("16MiB", device="cpu") as ctx, late(ctx.cur_rank):
        me, chance = float(ctx.cur_rank), random.Random(ctx.cur_rank)
        groups = [None, ctx.node_group, ctx.rail_group, ctx.rail_group[::-1]]
        sums = [i * sum(range(ctx.num_ranks) if group is None else group) for i, group in enumerate(groups, 1)]
        ys = [torch.zeros(3000) for _ in groups]
        for _ in range(8):
            works = []
            for i, (y, group) in enumerate(zip(ys, groups, strict=True), 1):
                works.append(ctx.ccl.all_reduce(y.fill_(i * me), y, group=group, async_op=True))
                time.sleep(chance.choice((0, 0.02)))
            for work in reversed(works):
                work.wait()
            assert [y.unique().tolist() for y in ys] == [[total] for total in sums]
        ctx.ccl.reset()
        ctx.ccl.all_reduce(ys[0].fill_(me), ys[0])
        assert ys[0].unique() == sums[0], "after a reset"
        ctx.barrier()


def node_refuses(how):
    """Rank 3 cannot prepare the collective of its node: all do without, or raise what is wrong if it is a mistake."""
    with Iris("4MiB", device="cpu") as ctx:
        x, y = torch.ones(48), torch.zeros(48)
        chooser = ctx._binder._algorithms(mock.Mock(spec=[]))
        name, does = {
            "supports": ("supports", {"return_value": Availability.no("not today")}),
            "no room": ("prepare", {"side_effect": UnsupportedError("no room here")}),
            "broken": ("prepare", {"side_effect": ValueError("broken here")}),
        }[how]
        broken = "IrisError: ranks 2, 3 .*'hierarchical'.*rank 3 .*'pull'.*: broken here"
        calls = ("all_reduce", "reduce_scatter", [0, 1, 2, 3]), ("all_to_all", "all_to_all", [2, 0, 3])
        for op, part, group in calls:
            call = partial(getattr(ctx.ccl, op), y, x, group=group)
            with contextlib.ExitStack() as unable:
                for each in chooser._by_op[part].values() if ctx.cur_rank == 3 else ():
                    if not getattr(each, "spans_nodes", False):
                        unable.enter_context(mock.patch.object(each, name, mock.Mock(**does), create=True))
                assert ctx.cur_rank not in group or unlike((broken if how == "broken" else "", call)) == []
            if ctx.cur_rank in group:
                served = ctx.ccl.explain(op, y, x, group=group).algorithm
                assert served == ("hierarchical" if how == "broken" else "gloo")
                call()
                assert y.unique().tolist() == [4.0 if op == "all_reduce" else 1.0]
        ctx.barrier()


def bits():
    """Reductions in a context that promises its bits are those of plain torch.

    The algorithm by levels is refused, and so is what no ranks of several nodes have: experts, and split sizes that no
    host knows.
    """
    with Iris("8MiB", device="cpu", deterministic=True) as ctx:
        for dtype, op in itertools.product((torch.bfloat16, torch.float32), ("sum", "avg", "product")):
            inputs = [torch.rand(1001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
            y = torch.zeros(1001, dtype=dtype)
            ctx.ccl.all_reduce(y, inputs[ctx.cur_rank], op=op)
            total = inputs[0].float()
            for each in inputs[1:]:
                total = total * each.float() if op == "product" else total + each.float()
            right = (total / 4 if op == "avg" else total).to(dtype)
            assert ctx.ccl.explain("all_reduce", y, y, op=op).algorithm == "exchanged"
            assert torch.equal(y, right), (dtype, op)
        given, taken = torch.ones(2, 4, dtype=torch.int64)
        sizes = {"input_split_sizes": given, "output_split_sizes": taken}
        assert unlike(
            ("UnsupportedError: ccl.no promise",
             lambda: ctx.ccl.all_reduce(y, y, config=Config(algorithm="hierarchical"))),
            ("UnsupportedError: experts: .*nodes",
             lambda: ctx.ops.experts(max_tokens=4, hidden=16, experts=4, top_k=1)),
            ("UnsupportedError: all_to_all: .*nodes", lambda: (
                ctx.ccl.all_to_all(y, y + 1, **sizes))),
        ) == []  # fmt: skip
        ctx.barrier()


def product_cases(size, names):
    """Sums with one kind of bias each; gathers along the rows with one kind, along the columns with the other."""
    shape = 24 * size, 20, 12 * size
    for number, name in enumerate(names):
        how = {"place": ("heap", "ordinary")[number % 2], "out_place": ("ordinary", "heap")[number % 2]}
        for dim, (bias, dtype) in enumerate((("columns", "float32"), ("rows", "bfloat16"))):
            how |= {"bias": bias}
            op = ("matmul_all_reduce", "matmul_reduce_scatter")[(number + dim) % 2]
            yield Product(op, name, shape, dtype, **how)
            yield Product("all_gather_matmul", name, shape, dtype, dim=dim, **how)
            yield Product("matmul_all_gather", name, shape, dtype, dim=1 - dim, **how)


def order_of_chunks(op):
    """The network carries a chunk of a product while another one is multiplied."""
    log, multiply, begin = [], baseline.multiply, Bound.begin

    def logged_multiply(*given):
        log.append("multiply")
        multiply(*given)

    def logged_begin(self, *tensors):
        work = begin(self, *tensors)
        if self.request.group_size < dist.get_world_size():  # along the rail
            return work
        log.append("begin")
        return mock.Mock(wait=lambda: (log.append("end"), work.wait()))

    case = Product(op, "overlapped", (16 * 4, 20, 12 * 4), "float32", dim=0 if "gather" in op else None)
    with small_chunks(), Iris("24MiB", device="cpu") as ctx:
        tensors = jobs_ops.Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
        with (
            mock.patch.object(baseline, "multiply", logged_multiply),
            mock.patch.object(Bound, "begin", logged_begin),
        ):
            tensors.fill(0)
            jobs_ops.call(ctx, case, tensors, None)
        assert jobs_ops.verify(case, tensors, 0, "") == []
        ctx.barrier()
    order = {
        "matmul_all_reduce": ["multiply begin", *["multiply begin end"] * 3, "end"],
        "all_gather_matmul": ["begin", *["begin end" + 4 * " multiply"] * 3, "end", *["multiply"] * 4],
    }
    assert log == " ".join(order[op]).split()


def reduce_until(is_victim, phase, members):
    """Call a collective of a group; victims die before they connect or call again, in the middle, or after others."""
    bound_s = 4.0 if phase == "silent" else None
    with small_chunks(), Iris("8MiB", device="cpu", barrier_timeout=600.0, device_timeout=bound_s) as ctx:
        x = torch.ones(5000)
        if members is None or ctx.cur_rank in members:
            if is_victim and phase == "connecting":
                torch_distributed.group_of = die
            ctx.ccl.all_reduce(x, x, group=members)
            if is_victim:
                while phase == "silent" and len(os.listdir(os.environ["SURVIVORS"])) < 2:
                    time.sleep(0.1)
                if phase != "in the middle":
                    die()
                Hierarchical._end_chunk = die
            ctx.ccl.all_reduce(x, x, group=members)
        ctx.barrier()


def groups_of_torch():
    """Rank 1 does not come when torch connects the ranks of a group: rank 0 raises within its bound, and all go on.

    A group is made without waiting for the destructor of that of an earlier torch.distributed.
    """
    dropped = []

    class Old:
        def __del__(self):
            dropped.append(self)

    with Iris("4MiB", device="cpu") as ctx:
        world = ctx._world
        if ctx.cur_rank == 0:
            bound, world.timeout_s = world.timeout_s, 1.0
            call = partial(torch_distributed.group_of, (0, 1), None, "gloo", world, "tests")
            assert unlike(("IrisError: .*gloo: torch.distributed has failed between ranks 0, 1: ", call)) == []
            world.timeout_s = bound
        ctx.barrier()
        x = torch.ones(3)
        ctx.ccl.all_reduce(x, x)
        torch_distributed._groups[object(), "gloo", (0, 1), "tests of old groups"] = Old()
        made = torch_distributed.group_of((0, 1), None, "gloo", world, "tests of old groups")
        ctx.barrier()
        assert (x.tolist(), made.size(), dropped) == ([2.0] * 3, 2, [])
