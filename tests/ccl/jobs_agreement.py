"""Rank jobs of test_agreement: calls that are refused, ranks that do not call alike, plans that only some can make."""

import functools
import logging
import os
import pathlib
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from ccl_cases import OPS
from jobs_ccl import kind_of, on_heap, said_by
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp
from iris_core.dispatch import bind, members
from iris_core.dispatch.products import OPS as PRODUCTS
from iris_core.dispatch.tables import Entry, write_table
from iris_core.errors import UnsupportedError
from iris_core.logs import logger
from iris_core.ops import FusedConfig
from iris_core.types import Availability


def total(ctx, count=6, **how):
    """The sum of 1, 2, ... over all ranks, off the heap."""
    out = torch.zeros(count, device=ctx.device)
    ctx.ccl.all_reduce(out, torch.full((count,), ctx.cur_rank + 1.0, device=ctx.device), **how)
    return out.unique().tolist()


# -- calls that are refused, and calls that differ --------------------------------------------------------------------
DEFECTS = [
    ("ArgumentError: all_reduce: the output has shape", lambda t, bad: (
        t.all_reduce(t.part, t.whole if bad else t.part))),
    ("ArgumentError: .*int32.*float32", lambda t, bad: t.all_gather(t.whole.int() if bad else t.whole, t.part)),
    ("DeviceError: all_reduce: the input is on meta", lambda t, bad: (
        t.all_reduce(t.part, t.part.to("meta") if bad else t.part))),
    ("TypeError: all_reduce: the output must be a torch tensor, not list", lambda t, bad: (
        t.all_reduce([1.0] if bad else t.part, t.part))),
    ("ArgumentError: .*'median'.*known are SUM", lambda t, bad: (
        t.all_reduce(t.part, t.part, op="median" if bad else "sum"))),
    ("ArgumentError: all_reduce: BAND works on integers and bool", lambda t, bad: (
        t.all_reduce(t.part, t.part, op=ReduceOp.BAND if bad else ReduceOp.SUM))),
    ("ArgumentError: all_reduce: AVG does not work on bool", lambda t, bad: (
        t.all_reduce(t.bits, t.bits, op=ReduceOp.AVG if bad else ReduceOp.MAX))),
    ("UnsupportedError: .*torch.complex64 cannot be reduced", lambda t, bad: (
        t.all_reduce(*[t.part.cfloat() if bad else t.part] * 2))),
    ("ArgumentError: all_reduce: input and output overlap", lambda t, bad: (
        t.all_reduce(t.wide[:-1, : t.n], t.wide[1:, : t.n] if bad else t.wide[1:, t.n :]))),
    ("ArgumentError: all_to_all: input and output overlap; it does not work in place", lambda t, bad: (
        t.all_to_all(t.whole, t.whole if bad else t.whole.clone()))),
    ("ArgumentError: all_gather: input and output overlap", lambda t, bad: (
        t.all_gather(t.strided, t.strided[t.rank] if bad else t.part))),
    ("ArgumentError: reduce_scatter: input and output overlap", lambda t, bad: (
        t.reduce_scatter(t.strided[t.rank] if bad else t.part, t.strided))),
    ("ArgumentError: .*cannot record it for gradients", lambda t, bad: (
        t.all_reduce(t.part, t.recorded if bad else t.recorded.detach()))),
    ("ArgumentError: broadcast: writes into its output", lambda t, bad: t.broadcast(2 * t.recorded if bad else t.part)),
    ("ArgumentError: .*share memory", lambda t, bad: t.broadcast(t.few if bad else t.part, 1)),
    (r"ArgumentError: all_gather.*the output must be \(.*\) or \(", lambda t, bad: (
        t.all_gather(t.part if bad else t.whole, t.part))),
    (r"ArgumentError: reduce_scatter.*the input must be \(.*\) or \(", lambda t, bad: (
        t.reduce_scatter(t.part, t.part.clone() if bad else t.whole))),
    ("ArgumentError: all_to_all.*must be divisible by the 3 members", lambda t, bad: (
        t.all_to_all(*[each[int(bad) :] for each in (t.whole, t.whole.clone())]))),
    ("ArgumentError: all_to_all: input_split_sizes=.* must be 3 numbers that add up", lambda t, bad: (
        t.all_to_all(t.rows, t.rows.clone(), input_split_sizes=[t.n + bad, t.n, t.n], output_split_sizes=[t.n] * 3))),
    ("", lambda t, bad: (
        t.reduce_scatter(*([t.broad, t.broad.clone()] if bad else [t.high, t.high.clone()]), layout="tiles"))),
    ("", lambda t, bad: (
        t.all_to_all(*([t.others, t.others + 0] if bad else [t.chunks, t.chunks + 0]), layout="columns"))),
    ('ArgumentError: all_to_all.*with layout="columns"', lambda t, bad: (
        t.all_to_all(*[each[:, bad:] for each in (t.chunks, t.chunks + 0)], layout="columns"))),
    ("ArgumentError: all_to_all: layout must be one of torch, columns, not 'rows'", lambda t, bad: (
        t.all_to_all(t.whole, t.whole + 0, layout="rows" if bad else "torch"))),
    ("ArgumentError: broadcast: rank 3 is not in the group of ranks 0, 1, 2", lambda t, bad: (
        t.broadcast(t.part, 3 if bad else 0))),
    ("TypeError: broadcast: a root is a rank, not '0'", lambda t, bad: t.broadcast(t.part, "0" if bad else 0)),
    ("ArgumentError: .*is the root and must pass the output", lambda t, bad: (
        t.reduce(None if bad else t.part, t.part, 0)), 0),
    ("ArgumentError: scatter", lambda t, bad: t.scatter(t.part, t.whole[:-1] if bad else t.whole, 1), 1),
    ("ArgumentError: gather: input and output overlap", lambda t, bad: (
        t.gather(t.strided if bad else t.whole, t.strided[t.rank] if bad else t.part, 2)), 2),
    ("ArgumentError: all_reduce: there is no algorithm 'magic'.*two_shot, one_shot", lambda t, bad: (
        t.all_reduce(t.part, t.part, config=Config(algorithm="magic" if bad else "two_shot")))),
    ("ArgumentError: .*there is no algorithm 'magic'", lambda t, bad: (
        t.all_reduce(t.part[:0], t.part[:0], config=Config(algorithm="magic" if bad else "two_shot")))),
    ("ArgumentError: .*'two_shot' contradicts all_reduce_variant='one_shot'", lambda t, bad: (
        t.all_reduce(t.part, t.part, config=Config(algorithm="two_shot",
            all_reduce_variant="one_shot" if bad else "auto")))),
    ("TypeError: all_reduce: config must be an iris_core.ccl.Config, not dict", lambda t, bad: (
        t.all_reduce(t.part, t.part, config={"comm_sms": 3} if bad else None))),
    ("UnsupportedError: all_reduce: algorithm 'two_shot' cannot serve.*swizzle_size", lambda t, bad: (
        t.all_reduce(t.part, t.part, config=Config(algorithm="two_shot", **({"swizzle_size": 8} if bad else {}))))),
    ("ArgumentError: .*as many columns as B has rows", lambda t, bad: (
        t.matmul_all_reduce(t.product, t.a[:, :2] if bad else t.a, t.b))),
    ("ArgumentError: .*share memory", lambda t, bad: (
        t.matmul_all_reduce(t.product, t.product[:, 1:4] if bad else t.a, t.b))),
    ("", lambda t, bad: t.matmul_all_reduce(*[each[:0] if bad else each for each in (t.product, t.a)], t.b)),
    ("TypeError: .*FusedWorkspace", lambda t, bad: (
        t.matmul_all_reduce(t.product, t.a, t.b, workspace={} if bad else None))),
]  # fmt: skip
"""What calls say, and on 3 ranks the calls, with whether this rank makes it badly, and the root if it alone must not.

All may make those that say nothing.
"""


def calls_of(ctx):
    """The collectives and products of a context, by name."""
    engines = {**dict.fromkeys((*OPS, "team"), ctx.ccl), **dict.fromkeys(PRODUCTS, ctx.ops)}
    return {name: getattr(engine, name) for name, engine in engines.items()}


def tensors_of(ctx, n):
    """What the calls are made with; n tells kinds apart."""
    zeros, size, rank = functools.partial(torch.zeros, device=ctx.device), ctx.num_ranks, ctx.cur_rank
    wide, rows = zeros(size + 1, 2 * n), zeros(size * n, 4)
    return SimpleNamespace(
        **calls_of(ctx), n=n, rank=rank, wide=wide, rows=rows, part=zeros(n), whole=zeros(size * n),
        strided=wide[:size, :n], few=zeros(1).expand(n), bits=zeros(n).bool(), recorded=zeros(n).requires_grad_(),
        a=rows[:n, :3], b=torch.ones(3, 5, device=ctx.device), product=zeros(n, 5), high=zeros(n, 4), broad=zeros(4, n),
        chunks=zeros(n, 4 * size), others=zeros(4, n * size),
    )  # fmt: skip


@on_heap("16MiB", IRIS_BARRIER_TIMEOUT="30")
def refused_by_some(ctx):
    """Calls that one rank, each in turn, or all cannot make, of every operation; afterwards right ones.

    Returns what each call raised.
    """
    outcomes = []
    for who in (0, 2, "all", "none"):
        for row, (_, call, *_) in enumerate(DEFECTS):
            tensors = tensors_of(ctx, 8 + len(outcomes))
            outcomes.append((who, row, said_by(call, tensors, who in (tensors.rank, "all"))))
        assert total(ctx) == [6.0]
    return outcomes


def strangers():
    """What is said to who is not in a group, of what is no group, and after the end."""
    alone = dist.new_group([1])
    with Iris("1MiB", device="cpu") as ctx:
        said = [said_by(total, ctx, group=group) for group in (alone, "no group")]
        ctx.barrier()
    return [*said, said_by(total, ctx)]


F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DIFFERING = [
    ("elements: 12 on rank 0; 12 on rank 1; 16 on rank 2", lambda t, odd: t.all_reduce(t.y[: 3 + odd], t.x[: 3 + odd])),
    ("elements: 24 on rank 0; 24 on rank 1; 0 on rank 2", lambda t, odd: (
        t.all_reduce(*[each[6 * odd :] for each in (t.y, t.x)]))),
    ("operation: all_reduce on rank 0; all_reduce on rank 1; reduce on rank 2", lambda t, odd: (
        t.reduce(t.y, t.x) if odd else t.all_reduce(t.y, t.x))),
    ("input on the heap and contiguous: True on rank 0; True on rank 1; False on rank 2", lambda t, odd: (
        t.all_reduce(t.y, t.off_heap[:, :4] if odd else t.x))),
    ("root: 0 on rank 0; 0 on rank 1; 1 on rank 2", lambda t, odd: t.broadcast(t.x, src=int(odd))),
    ("algorithm: two_shot on rank 0; two_shot on rank 1; one_shot on rank 2", lambda t, odd: (
        t.all_reduce(t.y, t.x, config=Config(algorithm="one_shot" if odd else "two_shot")))),
    ("group: ranks 0, 1, 2 on rank 0; ranks 0, 1, 2 on rank 1; ranks 0, 2, 1 on rank 2", lambda t, odd: (
        t.all_reduce(t.y, t.x, group=[0, 2, 1] if odd else None))),
    ("group: ranks 2, 0, 1 on rank 0; ranks 2, 0, 1 on rank 1; ranks 2, 1, 0 on rank 2", lambda t, odd: (
        t.team((2, 1, 0) if odd else (2, 0, 1)))),
    ("product: 6 x 4 times 4 x 8 .* on rank 1; 6 x 4 times 4 x 4 .*on rank 2", lambda t, odd: (
        t.matmul_all_reduce(t.out[:, : 8 - 4 * odd], t.x, t.b[:, : 8 - 4 * odd]))),
    ("times float8_e4m3fn to float32 on rank 1; float8_e4m3fn times float8_e5m2 to float32 on rank 2", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x.to(F8[0]), t.b.to(F8[odd])))),
    ("the output on the heap, with dense rows at multiples of 16 bytes: True .* False on rank 2", lambda t, odd: (
        t.matmul_all_gather(t.off_heap if odd else t.gathered, t.x, t.b, gather_dim=1))),
    ("algorithm: two_shot on rank 0; two_shot on rank 1; unfused on rank 2", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x, t.b, config=FusedConfig(algorithm="unfused" if odd else "two_shot")))),
    ("scales: rows on rank 0; rows on rank 1; blocks on rank 2", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x.to(F8[0]), t.b.to(F8[0]), a_scales=t.x[:, :1].contiguous(),
                            b_scales=t.b[:1, :1] if odd else t.b[:1]))),
    ("bias along: none on rank 0; none on rank 1; columns on rank 2", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x, t.b, t.bias if odd else None))),
]  # fmt: skip
"""What 3 ranks are told whose last one calls otherwise."""


@on_heap("8MiB")
def different(ctx):
    """Ranks that call differently are told, all of them, and go on: what each call raised, and sums behind it."""
    off_heap, found = torch.ones(6, 24, device=ctx.device), []
    product, square = ctx.zeros(6, 5), ctx.ones(4, 5)
    t = SimpleNamespace(**calls_of(ctx), off_heap=off_heap, gathered=ctx.zeros(6, 24))
    t.x, t.y, t.b, t.bias, t.out = ctx.ones(6, 4), ctx.zeros(6, 4), ctx.ones(4, 8), ctx.zeros(8), ctx.zeros(6, 8)
    for _, call in DIFFERING:
        said = said_by(call, t, ctx.cur_rank == 2)
        ctx.ops.matmul_all_reduce(product, t.x, square)  # of a kind of its own
        orders = (None, [1, 0, 2], (0, 1, 2), dist.group.WORLD)
        found.append((said, product.unique().tolist(), [total(ctx, group=group) for group in orders]))
    return found


def opens_differently(device, what):
    """What an opening raises whose ranks ask for other bits, or other bounds of workspaces and so other pieces."""
    rank = int(os.environ["RANK"])
    with environment(**({"IRIS_CCL_WORKSPACE": f"{1 + rank}MiB"} if what == "workspace" else {})):
        return said_by(Iris, "8MiB", device=device, deterministic=what == "bits" and rank == 0)


def tables_that_differ(device, folder, engine):
    """Measured tables that differ only in the number of programs; then a call that names its own config."""
    is_ccl, cache = engine == "ccl", pathlib.Path(folder) / os.environ["RANK"]
    config = {"comm_sms" if is_ccl else "num_sms": 1 + int(os.environ["RANK"])}
    op, size = ("all_reduce", (64 * 64 * 4,)) if is_ccl else ("matmul_all_reduce", (64, 64, 64))
    write_table(
        cache / engine / "mine.json", "cpu", 2, {}, [Entry(op, "float32", size, "two_shot", 1e-9, config=config)]
    )
    with environment(IRIS_CACHE_DIR=str(cache)), Iris("8MiB", device=device) as ctx:
        x, y = ctx.ones(64, 64), ctx.zeros(64, 64)
        call = functools.partial(*(ctx.ccl.all_reduce, y, x) if is_ccl else (ctx.ops.matmul_all_reduce, y, x, x))
        said = said_by(call)
        call(config=(Config if is_ccl else FusedConfig)(algorithm="two_shot"))
        ctx.barrier()
        return said, y.unique().tolist()


@on_heap("8MiB")
def refused_later(ctx):
    """Lazy views, and strided tensors that overlap at a distance, after calls of the same kinds that are right."""
    numbers = torch.full((4,), complex(1, 2), device=ctx.device)
    gathered, one, other = numbers.new_zeros(4 * ctx.num_ranks), torch.zeros_like(numbers), torch.zeros_like(numbers)
    wide = torch.ones(9, 64, device=ctx.device)
    reduce = ctx.ccl.all_reduce
    said = [
        said_by(call)
        for call in (
            lambda: ctx.ccl.all_gather(gathered, numbers), lambda: reduce(one.imag, numbers.imag),
            lambda: ctx.ccl.broadcast(numbers), lambda: reduce(wide[:4, :4], wide[5:, :4]),
            lambda: ctx.ccl.all_gather(gathered, numbers.conj()), lambda: reduce(one.imag, numbers.conj().imag),
            lambda: reduce(other.conj().imag, numbers.imag), lambda: ctx.ccl.broadcast(numbers.conj()),
            lambda: reduce(wide[:4, :4], wide[1:5, :4]), lambda: reduce(wide[1:5, :4], wide[:4, :4]),
        )
    ]  # fmt: skip
    reduce(wide[:4, :4], wide[1:5, 4:8])  # in the gaps
    return said, one.imag.tolist(), other.tolist(), wide[:5].unique().tolist()


# -- plans that only some can make ------------------------------------------------------------------------------------
@on_heap("24MiB")
def one_cannot_prepare(ctx, where):
    """Rank 1 fails while plans are made, before or after the others ask for memory; afterwards all go on."""
    total(ctx, 3)
    algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"]["two_shot"]
    own = algorithm.prepare

    def prepare(request, context):
        plan = None if where == "before" else own(request, context)
        if ctx.cur_rank == 1:
            raise UnsupportedError("no room here") if where == "no room" else MemoryError("out of memory here")
        return plan or own(request, context)

    algorithm.prepare = prepare
    config = Config(algorithm="two_shot")
    said = said_by(total, ctx, 40_001, config=config)
    algorithm.prepare = own
    return said, total(ctx, 40_001, config=config), total(ctx, 3)


@on_heap("24MiB")
def next_candidate(ctx):
    """What is chosen has no room on rank 1; another one serves the call on all, now and when it is prepared again."""
    warnings, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    inp, out = torch.ones(40_003, device=ctx.device), torch.zeros(40_003, device=ctx.device)
    first = ctx.ccl.explain("all_reduce", out, inp).algorithm
    algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"][first]
    own = algorithm.prepare

    def prepare(request, context):
        if ctx.cur_rank == 1:
            raise UnsupportedError("no room here")
        return own(request, context)

    algorithm.prepare = prepare
    logger.addHandler(handler)
    ctx.ccl.all_reduce(out, inp)
    ctx.ccl.all_reduce(out[:40_001], inp[:40_001])
    logger.removeHandler(handler)
    algorithm.prepare = own
    found, after = [out.unique().tolist()], ctx.ccl.explain("all_reduce", out, inp)
    if ctx.cur_rank == 0:  # alone: the others know a plan
        ctx.ccl._bound.clear()
    ctx.ccl.all_reduce(out, inp)
    return first, after.algorithm, str(after), [*found, out.unique().tolist()], warnings


# -- what only the device can tell ------------------------------------------------------------------------------------
@on_heap("24MiB")
def messages_that_differ(ctx):
    """Messages that are not what the receiver expects, of one piece and of several, and of nothing; then right ones."""
    said, wrong, rank = [], [], ctx.cur_rank
    piece = ctx.ccl.team((0, 1)).mail.nbytes // 4
    f32, i32 = torch.float32, torch.int32
    pairs = [((10, f32), (5, f32)), ((10, f32), (10, i32)), ((piece, f32), (7, f32)), ((3, f32), (piece, f32))]
    for number, pair in enumerate([*pairs, ((5, f32), (0, f32)), ((0, f32), (5, f32))]):
        count, dtype = pair[rank]
        tensor = torch.full((count,), 1 + number, dtype=dtype, device=ctx.device)
        ctx.ccl.send(tensor, 1) if rank == 0 else ctx.ccl.recv(tensor, 0)
        if not (tensor == 1 + number).all():
            wrong.append(f"message {number}: the tensor was changed")
        said.append(said_by(ctx.barrier))
        right = torch.full((9,), (rank == 0) * (50.0 + number), device=ctx.device)
        ctx.ccl.send(right, 1, config=Config(comm_sms=3)) if rank == 0 else ctx.ccl.recv(right, 0)
        if right.unique().tolist() != [50.0 + number]:
            wrong.append(f"after message {number} came {right.tolist()}")
    return said, wrong


@on_heap("8MiB")
def splits_that_differ(ctx):
    """Split sizes that do not fit together: what a rank knows by itself, and what only the device can tell."""
    rank = ctx.cur_rank

    def exchange(given, taken):
        inp, out = (
            torch.full((sum(rows), 3), rank + n, device=ctx.device) for n, rows in ((1.0, given), (-9.0, taken))
        )
        ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)
        return out[:, 0].tolist()

    own = said_by(exchange, [3, 3], [5, 5])
    exchange(*[([2, 4], [3, 2])[rank]] * 2)  # rank 0 takes 4 of the 3 rows that there are
    differing = said_by(ctx.barrier)
    right = exchange([2, 4], [2, 3]) if rank == 0 else exchange([3, 2], [4, 2])
    return own, differing, right, said_by(ctx.barrier)


@on_heap("8MiB")
def accepted(ctx):
    """Arguments as torch and numpy have them; results."""
    rank, device, found = ctx.cur_rank, ctx.device, {}
    found["object"] = total(ctx, op=dist.ReduceOp(dist.ReduceOp.MAX))
    root = torch.full((3,), float(rank), device=device)
    ctx.ccl.broadcast(root, np.int64(1))
    inp, out = torch.arange(4.0, device=device) + 10 * rank, torch.zeros(4, device=device)
    ctx.ccl.all_to_all(out, inp, input_split_sizes=[], output_split_sizes=[])
    one_side = torch.zeros_like(out)
    ctx.ccl.all_to_all(one_side, inp, input_split_sizes=[2, 2])
    expanded = torch.ones(1, device=device).expand(4) if rank == 0 else torch.zeros(4, device=device)
    ctx.ccl.broadcast(expanded)
    average = torch.full((2,), 200, dtype=torch.uint8, device=device)
    ctx.ccl.all_reduce(average, average, "avg")
    tensors = {"root": root, "no splits": out, "one side": one_side, "expanded": expanded, "average": average}
    found |= {name: tensor.tolist() for name, tensor in tensors.items()}
    return found | {"no tensor": kind_of(ctx.ccl.send, None, 1 - rank)}


def kinds_without_end(device):
    """Lengths and split sizes that vary; what is known of them stays bounded, and what was dropped works again."""
    wrong, sizes = [], []
    with mock.patch.object(bind, "GENERATION", 8), Iris("24MiB", device=device) as ctx:
        rank = ctx.cur_rank
        for turn in range(60):
            length = 1 + turn % 40
            if total(ctx, length) != [3.0]:
                wrong.append(f"length {length}, call {turn}")
            given = [1 + (turn + rank) % 7, 2 + turn % 3 + rank]
            taken = [1 + turn % 7, 1 + (turn + 1) % 7] if rank == 0 else [2 + turn % 3, 3 + turn % 3]
            inp = torch.full((sum(given), 2), turn + 100.0 * rank, device=device)
            out = torch.zeros(sum(taken), 2, device=device)
            ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)
            if out[:, 1].tolist() != [float(turn)] * taken[0] + [turn + 100.0] * taken[1]:
                wrong.append(f"splits of call {turn}: {out[:, 1].tolist()}")
            sizes.append(len(ctx.ccl._bound) + len(ctx.ccl._bound.old))
        ctx.barrier()
    return wrong, max(sizes)


# -- members that are ahead -------------------------------------------------------------------------------------------
def wait_for(file):
    """Wait until a rank has made a file; returns whether it did."""
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.exists()


@on_heap("8MiB")
def refused_by_one_that_is_ahead(ctx, folder):
    """Rank 0 refuses a call of an operation that all have called before, and the others come to none until it has."""
    raised, said = pathlib.Path(folder) / "raised", []
    sums, out = [total(ctx)], torch.zeros(6, device=ctx.device)
    if ctx.cur_rank == 0:
        said.append(kind_of(ctx.ccl.all_reduce, out, out[:5]))
        raised.touch()
    came = wait_for(raised)
    if ctx.cur_rank != 0:
        said.append(kind_of(ctx.barrier))
    ctx.barrier()
    # a call of another kind
    said.append(kind_of(ctx.ccl.all_reduce, out, out[:5]) if ctx.cur_rank == 0 else kind_of(total, ctx, 7))
    return came, said, [*sums, total(ctx), total(ctx, 7)]


@on_heap("8MiB")
def laid_out_otherwise(ctx, folder):
    """A call whose tensors lie so on rank 1 alone that another algorithm serves it; then it is so on all."""
    raised, said, sums = pathlib.Path(folder) / "raised", "", []
    dense, strided, out = (torch.ones(8, n, device=ctx.device)[:, :8] for n in (8, 9, 8))
    first = ctx.ccl.explain("all_reduce", out, dense).algorithm
    algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"][first]
    own, no = algorithm.supports, Availability.no("rows are not dense")
    algorithm.supports = lambda request: own(request) if request.options["in_stride"] == (8, 1) else no
    ctx.ccl.all_reduce(out, dense)
    if ctx.cur_rank == 1:
        with mock.patch.object(members, "ABSENT_S", 1.0):
            said = said_by(ctx.ccl.all_reduce, out, strided)
        raised.touch()
    came = wait_for(raised)
    if ctx.cur_rank == 0:
        said = kind_of(ctx.barrier)
    ctx.barrier()
    for inp in (strided, dense, strided):
        ctx.ccl.all_reduce(out, inp)
        sums.append(out.unique().tolist())
    return first, came, said, sums, said_by(ctx.ccl.all_reduce, out[:4], (dense, strided)[ctx.cur_rank][:4])
