"""Rank jobs of test_agreement: ranks that do not call alike, plans that only some can make, kinds without end."""

import logging
import os
import pathlib
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.dispatch import bind, members
from iris_core.dispatch.tables import Entry, write_table
from iris_core.errors import IrisError, UnsupportedError
from iris_core.logs import logger
from iris_core.ops import FusedConfig
from iris_core.types import Availability


def said_by(call):
    """What a call raises, as text; empty if nothing."""
    try:
        call()
    except (IrisError, TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def kind_of(call):
    """The type of the error that a call raises; empty if none."""
    return said_by(call).partition(":")[0]


def total(ctx, count=6, **how):
    """The sum of 1 and 2 over two ranks, off the heap."""
    out = torch.zeros(count, device=ctx.device)
    ctx.ccl.all_reduce(out, torch.full((count,), ctx.cur_rank + 1.0, device=ctx.device), **how)
    return out.unique().tolist()


def lazy_views(device):
    """Conjugated and negated tensors after calls with ordinary ones of the same kind."""
    said = {}
    with Iris("8MiB", device=device) as ctx:
        numbers = torch.full((4,), complex(1, 2), device=device)
        gathered = torch.zeros(4 * ctx.num_ranks, dtype=torch.complex64, device=device)
        ctx.ccl.all_gather(gathered, numbers)
        said["conjugate"] = said_by(lambda: ctx.ccl.all_gather(gathered, numbers.conj()))
        one, other = torch.zeros_like(numbers), torch.zeros_like(numbers)
        ctx.ccl.all_reduce(one.imag, numbers.imag)
        said["negative input"] = said_by(lambda: ctx.ccl.all_reduce(one.imag, numbers.conj().imag))
        said["negative output"] = said_by(lambda: ctx.ccl.all_reduce(other.conj().imag, numbers.imag))
        ctx.ccl.broadcast(numbers)
        said["broadcast"] = said_by(lambda: ctx.ccl.broadcast(numbers.conj()))
        ctx.barrier()
        return said, one.imag.tolist(), other.tolist()


def one_cannot_prepare(device, where):
    """Rank 1 fails while plans are made, before or after the others ask for memory; afterwards all go on."""
    with Iris("24MiB", device=device) as ctx:
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
        said = said_by(lambda: total(ctx, 40_001, config=config))
        algorithm.prepare = own
        return said, total(ctx, 40_001, config=config), total(ctx, 3)


def next_candidate(device):
    """What is chosen has no room on rank 1; another one serves the call on all, now and when it is prepared again."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    with Iris("24MiB", device=device) as ctx:
        inp, out = torch.ones(40_003, device=device), torch.zeros(40_003, device=device)
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
        found = [out.unique().tolist()]
        after = ctx.ccl.explain("all_reduce", out, inp)
        if ctx.cur_rank == 0:  # alone: the others know a plan
            ctx.ccl._bound.clear()
        ctx.ccl.all_reduce(out, inp)
        found.append(out.unique().tolist())
        ctx.barrier()
        return first, after.algorithm, str(after), found, warnings


def orders_of_a_group(device):
    """Rank 1 names the group's members in another order; then all go on, with either order, named in either way."""
    with Iris("8MiB", device=device) as ctx:
        said = [said_by(lambda: total(ctx, group=[0, 1] if ctx.cur_rank == 0 else [1, 0]))]
        said.append(said_by(lambda: ctx.ccl.team((0, 1) if ctx.cur_rank == 0 else (1, 0)) and total(ctx)))
        sums = [total(ctx), total(ctx, group=[1, 0]), total(ctx, group=(0, 1)), total(ctx, group=dist.group.WORLD)]
        ctx.barrier()
        return said, sums


def nothing_on_one(device):
    """A tensor that is empty on one rank only; and a config that asks of nothing what there is not."""
    with Iris("8MiB", device=device) as ctx:
        said = said_by(lambda: total(ctx, 4 * (1 - ctx.cur_rank)))
        magic = said_by(lambda: total(ctx, 0, config=Config(algorithm="magic")))
        return said, magic, total(ctx, 0), total(ctx, 4)


def known_kinds(device):
    """Calls that both ranks know, but that differ; after a reset all go on."""
    with Iris("8MiB", device=device) as ctx:
        config = Config(algorithm="one_shot")
        total(ctx, 4, config=config)
        total(ctx, 8, config=config)
        ctx.barrier()
        total(ctx, 4 + 4 * ctx.cur_rank, config=config)
        said = said_by(ctx.barrier)
        ctx.ccl.reset()
        return said, total(ctx, 4, config=config), said_by(ctx.barrier)


def messages_that_differ(device):
    """Messages that are not what the receiver expects, of one piece and of several, and of nothing; then right ones."""
    said, wrong = [], []
    with Iris("24MiB", device=device) as ctx:
        piece = ctx.ccl.team((0, 1)).mail.nbytes // 4
        f32, i32 = torch.float32, torch.int32
        pairs = [((10, f32), (5, f32)), ((10, f32), (10, i32)), ((piece, f32), (7, f32)), ((3, f32), (piece, f32))]
        pairs += [((5, f32), (0, f32)), ((0, f32), (5, f32))]
        for number, (sent, expected) in enumerate(pairs):
            count, dtype = sent if ctx.cur_rank == 0 else expected
            tensor = torch.full((count,), 1 + number, dtype=dtype, device=device)
            ctx.ccl.send(tensor, 1) if ctx.cur_rank == 0 else ctx.ccl.recv(tensor, 0)
            if not (tensor == 1 + number).all():
                wrong.append(f"message {number}: the tensor was changed")
            said.append(said_by(ctx.barrier))
            right = torch.full((9,), (ctx.cur_rank == 0) * (50.0 + number), device=device)
            ctx.ccl.send(right, 1, config=Config(comm_sms=3)) if ctx.cur_rank == 0 else ctx.ccl.recv(right, 0)
            if right.unique().tolist() != [50.0 + number]:
                wrong.append(f"after message {number} came {right.tolist()}")
    return said, wrong


def splits_that_differ(device):
    """Split sizes that do not fit together: what a rank knows by itself, and what only the device can tell."""
    with Iris("8MiB", device=device) as ctx:
        rank = ctx.cur_rank

        def exchange(given, taken):
            inp, out = (
                torch.full((sum(rows), 3), rank + n, device=device) for n, rows in ((1.0, given), (-9.0, taken))
            )
            ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)
            return out[:, 0].tolist()

        own = said_by(lambda: exchange([3, 3], [5, 5]))
        exchange([2, 4], [2, 4]) if rank == 0 else exchange(
            [3, 2], [3, 2]
        )  # rank 0 takes 4 of the 3 rows that there are
        differing = said_by(ctx.barrier)
        right = exchange([2, 4], [2, 3]) if rank == 0 else exchange([3, 2], [4, 2])
        return own, differing, right, said_by(ctx.barrier)


def accepted(device):
    """Arguments as torch and numpy have them; results."""
    with Iris("8MiB", device=device) as ctx:
        rank, found = ctx.cur_rank, {}
        found["object"] = total(ctx, op=dist.ReduceOp(dist.ReduceOp.MAX))
        tensor = torch.full((3,), float(rank), device=device)
        ctx.ccl.broadcast(tensor, np.int64(1))
        found["root"] = tensor.tolist()
        inp, out = torch.arange(4.0, device=device) + 10 * rank, torch.zeros(4, device=device)
        ctx.ccl.all_to_all(out, inp, input_split_sizes=[], output_split_sizes=[])
        found["no splits"] = out.tolist()
        tensor = torch.ones(1, device=device).expand(4) if rank == 0 else torch.zeros(4, device=device)
        ctx.ccl.broadcast(tensor)
        found["expanded"] = tensor.tolist()
        small = torch.full((2,), 200, dtype=torch.uint8, device=device)
        ctx.ccl.all_reduce(small, small, "avg")
        found["average"] = small.tolist()
        found["no tensor"] = said_by(lambda: ctx.ccl.send(None, 1 - rank))
        ctx.barrier()
        return found


def kinds_without_end(device):
    """Lengths and split sizes that vary; what is known of them stays bounded, and what was dropped works again."""
    wrong, sizes = [], []
    whole, bind.GENERATION = bind.GENERATION, 8
    try:
        with Iris("24MiB", device=device) as ctx:
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
                want = torch.tensor([float(turn)] * taken[0] + [turn + 100.0] * taken[1])
                if not torch.equal(out[:, 1].cpu(), want):
                    wrong.append(f"splits of call {turn}: {out[:, 1].tolist()}")
                sizes.append(len(ctx.ccl._bound) + len(ctx.ccl._bound.old))
            ctx.barrier()
    finally:
        bind.GENERATION = whole
    return wrong, max(sizes)


def tables_that_differ(device, folder, engine):
    """Measured tables that differ only in the number of programs; then a call that names its own config."""
    config = {"comm_sms" if engine == "ccl" else "num_sms": 1 + int(os.environ["RANK"])}
    cache = pathlib.Path(folder) / os.environ["RANK"]
    if engine == "ccl":
        entry = Entry("all_reduce", "float32", (64 * 64 * 4,), "two_shot", 1e-9, config=config)
    else:
        entry = Entry("matmul_all_reduce", "float32", (64, 64, 64), "two_shot", 1e-9, config=config)
    write_table(cache / engine / "mine.json", "cpu", 2, {}, [entry])
    with environment(IRIS_CACHE_DIR=str(cache)), Iris("8MiB", device=device) as ctx:
        x, y = ctx.ones(64, 64), ctx.zeros(64, 64)

        def call(config=None):
            if engine == "ccl":
                ctx.ccl.all_reduce(y, x, config=config)
            else:
                ctx.ops.matmul_all_reduce(y, x, x, config=config)

        said = said_by(call)
        call(Config(algorithm="two_shot") if engine == "ccl" else FusedConfig(algorithm="two_shot"))
        ctx.barrier()
        return said, y.unique().tolist()


def workspaces_that_differ(device):
    """A bound of workspaces, and with it the size of pieces, that is another one on each rank."""
    with environment(IRIS_CCL_WORKSPACE=f"{1 + int(os.environ['RANK'])}MiB"):
        return said_by(lambda: Iris("8MiB", device=device))


def refused_by_some(device):
    """Calls that one rank, each in turn, or all cannot make, of every operation; afterwards right ones.

    Returns what each call raised, the type alone.
    """
    outcomes = []
    with environment(IRIS_BARRIER_TIMEOUT="30"), Iris("16MiB", device=device) as ctx:
        rank, size, place = ctx.cur_rank, ctx.num_ranks, ctx.device
        ccl, ops = ctx.ccl, ctx.ops

        def defects(n):
            """Calls by name, each with whether this rank makes it badly as an argument; n tells kinds apart."""
            wide, rows = torch.zeros(size + 1, 2 * n, device=place), torch.zeros(size * n, 4, device=place)
            part, whole = torch.zeros(n, device=place), torch.zeros(size * n, device=place)
            strided = wide[:size, :n]
            few = torch.zeros(1, device=place).expand(n)
            a, b, product = rows[:n, :3], torch.ones(3, 5, device=place), torch.zeros(n, 5, device=place)
            splits = [n] * size
            high, broad = torch.zeros(n, 4, device=place), torch.zeros(4, n, device=place)
            chunks, others = torch.zeros(n, 4 * size, device=place), torch.zeros(4, n * size, device=place)
            return {
                "tiles": lambda bad: ccl.reduce_scatter(
                    *([broad, broad.clone()] if bad else [high, high.clone()]), layout="tiles"
                ),
                "columns": lambda bad: ccl.all_to_all(
                    *([others, others.clone()] if bad else [chunks, chunks.clone()]), layout="columns"
                ),
                "overlap": lambda bad: ccl.all_reduce(wide[:-1, :n], wide[1:, :n] if bad else wide[1:, n:]),
                "in place": lambda bad: ccl.all_gather(strided, strided[rank] if bad else part),
                "scattered": lambda bad: ccl.reduce_scatter(strided[rank] if bad else part, strided),
                "expanded": lambda bad: ccl.broadcast(few if bad else part, 1),
                "shape": lambda bad: ccl.all_reduce(part, whole if bad else part),
                "dtype": lambda bad: ccl.all_gather(whole.int() if bad else whole, part),
                "device": lambda bad: ccl.all_reduce(part, part.to("meta") if bad else part),
                "no tensor": lambda bad: ccl.all_reduce([1.0] if bad else part, part),
                "gather": lambda bad: ccl.gather(strided if bad else whole, strided[rank] if bad else part, 2),
                "no output": lambda bad: ccl.reduce(None if bad else part, part, 0),
                "scatter": lambda bad: ccl.scatter(part, whole[:-1] if bad else whole, 1),
                "splits": lambda bad: ccl.all_to_all(
                    rows, rows.clone(), input_split_sizes=[n + bad, *splits[1:]], output_split_sizes=splits
                ),
                "root": lambda bad: ccl.broadcast(part, size if bad else 0),
                "config": lambda bad: ccl.all_reduce(
                    part, part, config=Config(algorithm="magic" if bad else "two_shot")
                ),
                "product": lambda bad: ops.matmul_all_reduce(product, a[:, :2] if bad else a, b),
                "in itself": lambda bad: ops.matmul_all_reduce(product, product[:, 1:4] if bad else a, b),
                "empty": lambda bad: ops.matmul_all_reduce(product[:0] if bad else product, a[:0] if bad else a, b),
                "workspace": lambda bad: ops.matmul_all_reduce(product, a, b, workspace={} if bad else None),
            }

        names = list(defects(1))
        for turn, (who, name) in enumerate((who, name) for who in (0, 2, "all", "none") for name in names):
            try:
                defects(8 + turn)[name](who in (rank, "all"))
                outcome = ""
            except (IrisError, TypeError, ValueError) as error:
                outcome = type(error).__name__
            outcomes.append((who, name, outcome))
            if name == names[-1] and total(ctx) != [sum(range(1, size + 1))]:
                outcomes.append((who, "a right call", "has a wrong result"))
        ctx.barrier()
    return outcomes


def wait_for(file):
    """Wait until a rank has made a file; returns whether it did."""
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.exists()


def refused_later(device, folder):
    """Rank 0 refuses a call of an operation that all have called before, and the others come to none until it has."""
    raised = pathlib.Path(folder) / "raised"
    with Iris("8MiB", device=device) as ctx:
        sums, out = [total(ctx)], torch.zeros(6, device=device)
        said = []
        if ctx.cur_rank == 0:
            said.append(kind_of(lambda: ctx.ccl.all_reduce(out, out[:5])))
            raised.touch()
        came = wait_for(raised)
        if ctx.cur_rank != 0:
            said.append(kind_of(ctx.barrier))
        ctx.barrier()
        if ctx.cur_rank == 0:
            said.append(kind_of(lambda: ctx.ccl.all_reduce(out, out[:5])))
        else:  # a call of another kind
            said.append(kind_of(lambda: total(ctx, 7)))
        return came, said, [*sums, total(ctx), total(ctx, 7)]


def laid_out_otherwise(device, folder):
    """A call whose tensors lie so on rank 1 alone that another algorithm serves it; then it is so on all."""
    raised = pathlib.Path(folder) / "raised"
    with Iris("8MiB", device=device) as ctx:
        dense, strided = torch.ones(8, 8, device=device), torch.ones(8, 9, device=device)[:, :8]
        out = torch.zeros(8, 8, device=device)
        first = ctx.ccl.explain("all_reduce", out, dense).algorithm
        algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"][first]
        own = algorithm.supports
        no = Availability.no("rows are not dense")
        algorithm.supports = lambda request: own(request) if request.options["in_stride"] == (8, 1) else no
        ctx.ccl.all_reduce(out, dense)
        said = ""
        if ctx.cur_rank == 1:
            with mock.patch.object(members, "ABSENT_S", 1.0):
                said = said_by(lambda: ctx.ccl.all_reduce(out, strided))
            raised.touch()
        came = wait_for(raised)
        if ctx.cur_rank == 0:
            said = kind_of(ctx.barrier)
        ctx.barrier()
        sums = []
        for inp in (strided, dense, strided):
            ctx.ccl.all_reduce(out, inp)
            sums.append(out.unique().tolist())
        both = said_by(lambda: ctx.ccl.all_reduce(out[:4], (dense, strided)[ctx.cur_rank][:4]))
        ctx.barrier()
        return first, came, said, sums, both


def strided_and_known(device):
    """Strided tensors that lie apart, and then, of the same kind, others that overlap at a distance."""
    with Iris("8MiB", device=device) as ctx:
        wide = torch.ones(9, 64, device=device)
        said = [said_by(lambda: ctx.ccl.all_reduce(wide[:4, :4], wide[5:, :4]))]
        said.append(said_by(lambda: ctx.ccl.all_reduce(wide[:4, :4], wide[1:5, :4])))
        said.append(said_by(lambda: ctx.ccl.all_reduce(wide[1:5, :4], wide[:4, :4])))
        said.append(said_by(lambda: ctx.ccl.all_reduce(wide[:4, :4], wide[1:5, 4:8])))  # in the gaps
        ctx.barrier()
        return said, wide[:5].unique().tolist()
