"""Calls that are refused, ranks that do not call alike, plans that only some can make, kinds of calls without end."""

import contextlib
import functools
import os
import pathlib
import re
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ccl_cases import OPS
from jobs_ccl import on_heap, total
from jobs_common import environment, kind_of, pattern, said_by, unlike
from rank_processes import wait_until
from tables import says
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp
from iris_core.dispatch import PRODUCTS, bind, members
from iris_core.dispatch.tables import Entry, write_table
from iris_core.dispatch.team import ELEMENT_TYPES, control_words
from iris_core.errors import UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.types import Availability
from iris_triton.collectives.parts.barrier import row_words
from iris_triton.collectives.parts.sizes import MOVABLE


def of(algorithm, **more):
    return Config(algorithm=algorithm, **more)


DEFECTS = [
    ("ArgumentError: shape", lambda t, bad: t.all_reduce(t.part, t.whole if bad else t.part)),
    ("ArgumentError: int32.*float32", lambda t, bad: t.all_gather(t.whole.int() if bad else t.whole, t.part)),
    ("DeviceError: meta", lambda t, bad: t.all_reduce(t.part, t.part.to("meta") if bad else t.part)),
    ("TypeError: list", lambda t, bad: t.all_reduce([1.0] if bad else t.part, t.part)),
    ("ArgumentError: BAND", lambda t, bad: t.all_reduce(t.part, t.part, op=ReduceOp.BAND if bad else ReduceOp.SUM)),
    ("ArgumentError: AVG", lambda t, bad: t.all_reduce(t.bits, t.bits, op=ReduceOp.AVG if bad else ReduceOp.MAX)),
    ("UnsupportedError: complex64", lambda t, bad: t.all_reduce(*[t.part.cfloat() if bad else t.part] * 2)),
    ("ArgumentError: overlap", lambda t, bad: (
        t.all_reduce(t.wide[:-1, : t.n], t.wide[1:, : t.n] if bad else t.wide[1:, t.n :]))),
    ("ArgumentError: in place", lambda t, bad: t.all_to_all(t.whole, t.whole if bad else t.whole.clone())),
    ("ArgumentError: overlap", lambda t, bad: t.all_gather(t.strided, t.strided[t.rank] if bad else t.part)),
    ("ArgumentError: gradient", lambda t, bad: t.all_reduce(t.part, t.recorded if bad else t.recorded.detach())),
    ("ArgumentError: ccl.no gradient", lambda t, bad: t.broadcast(2 * t.recorded if bad else t.part)),
    ("ArgumentError: share", lambda t, bad: t.broadcast(t.few if bad else t.part, 1)),
    ("ArgumentError: must be: the output", lambda t, bad: t.all_gather(t.part if bad else t.whole, t.part)),
    ("ArgumentError: must be: the input", lambda t, bad: t.reduce_scatter(t.part, t.part.clone() if bad else t.whole)),
    ("ArgumentError: divisible", lambda t, bad: t.all_to_all(*[each[int(bad) :] for each in (t.whole, t.whole + 0)])),
    ("ArgumentError: input_split_sizes", lambda t, bad: (
        t.all_to_all(t.rows, t.rows.clone(), input_split_sizes=[t.n + bad, t.n, t.n], output_split_sizes=[t.n] * 3))),
    ("ArgumentError: columns", lambda t, bad: (
        t.all_to_all(*[each[:, bad:] for each in (t.chunks, t.chunks + 0)], layout="columns"))),
    ("ArgumentError: 'rows'", lambda t, bad: t.all_to_all(t.whole, t.whole + 0, layout="rows" if bad else "torch")),
    ("ArgumentError: rank 3", lambda t, bad: t.broadcast(t.part, 3 if bad else 0)),
    ("TypeError: root", lambda t, bad: t.broadcast(t.part, "0" if bad else 0)),
    ("ArgumentError: root", lambda t, bad: t.reduce(None if bad else t.part, t.part, 0), 0),
    ("ArgumentError: scatter", lambda t, bad: t.scatter(t.part, t.whole[:-1] if bad else t.whole, 1), 1),
    ("ArgumentError: magic", lambda t, bad: t.all_reduce(t.part, t.part, config=of("magic" if bad else "two_shot"))),
    ("TypeError: FusedConfig", lambda t, bad: t.all_reduce(t.whole, t.whole, config=FusedConfig() if bad else None)),
    ("TypeError: dict", lambda t, bad: t.all_reduce(t.part, t.part, config={"comm_sms": 3} if bad else None)),
    ("ArgumentError: columns", lambda t, bad: t.matmul_all_reduce(t.product, t.a[:, :2] if bad else t.a, t.b)),
    ("", lambda t, bad: t.matmul_all_reduce(*[each[:0] if bad else each for each in (t.product, t.a)], t.b)),
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
        a=rows[:n, :3], b=torch.ones(3, 5, device=ctx.device), product=zeros(n, 5), chunks=zeros(n, 4 * size),
    )  # fmt: skip


@on_heap("16MiB", IRIS_BARRIER_TIMEOUT="30")
def refused_by_some(ctx):
    """What calls raise that one rank, each in turn, or all cannot make, of every operation; afterwards right ones."""
    outcomes = []
    for who in (0, 2, "all", "none"):
        for row, (_, call, *_) in enumerate(DEFECTS):
            tensors = tensors_of(ctx, 8 + len(outcomes))
            outcomes.append((who, row, said_by(call, tensors, who in (tensors.rank, "all"))))
        assert total(ctx) == [6.0]
    return outcomes


F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DIFFERING = [
    ("12", "16", lambda t, odd: t.all_reduce(t.y[: 3 + odd], t.x[: 3 + odd])),
    ("all_reduce", "reduce", lambda t, odd: (t.reduce if odd else t.all_reduce)(t.y, t.x)),
    ("contiguous: True", "False", lambda t, odd: t.all_reduce(t.y, t.off_heap[:, :4] if odd else t.x)),
    ("root: 0", "1", lambda t, odd: t.broadcast(t.x, src=int(odd))),
    ("two_shot", "one_shot", lambda t, odd: t.all_reduce(t.y, t.x, config=of("one_shot" if odd else "two_shot"))),
    ("ranks 0, 1, 2", "ranks 0, 2, 1", lambda t, odd: t.all_reduce(t.y, t.x, group=[0, 2, 1] if odd else None)),
    ("ranks 2, 0, 1", "ranks 2, 1, 0", lambda t, odd: t.team((2, 1, 0) if odd else (2, 0, 1))),
    ("4 x 8", "6 x 4 times 4 x 4", lambda t, odd: (
        t.matmul_all_reduce(t.out[:, : 8 - 4 * odd], t.x, t.b[:, : 8 - 4 * odd]))),
    ("times float8_e4m3fn to float32", "float8_e4m3fn times float8_e5m2 to float32", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x.to(F8[0]), t.b.to(F8[odd])))),
    ("True", "False", lambda t, odd: (
        t.matmul_all_gather(t.off_heap if odd else t.gathered, t.x, t.b, gather_dim=1))),
    ("scales: rows", "blocks", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x.to(F8[0]), t.b.to(F8[0]), a_scales=t.x[:, :1].contiguous(),
                            b_scales=t.b[:1, :1] if odd else t.b[:1]))),
    ("none", "columns", lambda t, odd: (
        t.matmul_all_reduce(t.out, t.x, t.b, t.bias if odd else None))),
]  # fmt: skip
"""What 3 ranks say of the first two, and of the last one, which calls otherwise; and the call."""


@on_heap("8MiB")
def different(ctx):
    """Calls that differ raise an error on all ranks, which go on, with calls of a kind of their own."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("one", "row"))
    row, off_heap = mesh["row"], torch.ones(6, 24, device=ctx.device)
    part = distribute_tensor(torch.ones(3, 4), row, [Shard(0)])
    product, square = ctx.zeros(6, 5), ctx.ones(4, 5)
    t = SimpleNamespace(**calls_of(ctx), off_heap=off_heap, gathered=ctx.zeros(6, 24))
    t.x, t.y, t.b, t.bias, t.out = ctx.ones(6, 4), ctx.zeros(6, 4), ctx.ones(4, 8), ctx.zeros(8), ctx.zeros(6, 8)
    for *words, call in DIFFERING:
        differ = says("ccl.differ", two=words[0], one=words[1])
        assert unlike((f"RankMismatchError.*{differ}", functools.partial(call, t, ctx.cur_rank == 2))) == []
        ctx.ops.matmul_all_reduce(product, t.x, square)
        assert product.unique().tolist() == [12.0], words
        for group in (None, [1, 0, 2], (0, 1, 2), dist.group.WORLD, row):
            assert total(ctx, group=group) == [6.0], (words, group)
    ctx.device_barrier(row)
    ctx.barrier(group=row)
    assert unlike(
        (r"GroupError.*mesh\[name\]", lambda: t.all_reduce(t.y, t.y, group=mesh)),
        ("TypeError: all_reduce: the output .*DTensor", lambda: t.all_reduce(part, part)),
        (r".*tensor.to_local\(\)", lambda: t.matmul_all_reduce(t.out, part, t.b)),
    ) == []  # fmt: skip


def tables_that_differ(_, folder):
    """Measured tables that differ only in the number of programs; then a call that names its own config."""
    cache, config = pathlib.Path(folder) / os.environ["RANK"], {"comm_sms": 1 + int(os.environ["RANK"])}
    entry = Entry("all_reduce", "float32", (64 * 64 * 4,), "two_shot", 1e-9, config=config)
    write_table(cache / "ccl" / "mine.json", "cpu", 2, [], [entry])
    with environment(IRIS_CACHE_DIR=str(cache)), Iris("8MiB", device="cpu") as ctx:
        call = functools.partial(ctx.ccl.all_reduce, y := ctx.zeros(64, 64), ctx.ones(64, 64))
        wrong = unlike(("RankMismatchError.*config: comm_sms=1 on rank 0.*comm_sms=2 on rank 1", call))
        call(config=Config(algorithm="two_shot"))
        ctx.barrier()
        assert (wrong, y.unique().tolist()) == ([], [2.0])


@on_heap("8MiB")
def refused_later(ctx):
    """Lazy views, and strided tensors that overlap at a distance, after calls of the same kinds that are right."""
    numbers = torch.full((4,), complex(1, 2), device=ctx.device)
    gathered, one, other = numbers.new_zeros(4 * ctx.num_ranks), torch.zeros_like(numbers), torch.zeros_like(numbers)
    wide = torch.ones(9, 64, device=ctx.device)
    reduce = ctx.ccl.all_reduce
    wrong = unlike(
        ("", lambda: ctx.ccl.all_gather(gathered, numbers)), ("", lambda: reduce(one.imag, numbers.imag)),
        ("", lambda: ctx.ccl.broadcast(numbers)), ("", lambda: reduce(wide[:4, :4], wide[5:, :4])),
        (".*the input .*conjugate", lambda: ctx.ccl.all_gather(gathered, numbers.conj())),
        (".*the input .*negated", lambda: reduce(one.imag, numbers.conj().imag)),
        (".*the output .*negated", lambda: reduce(other.conj().imag, numbers.imag)),
        (".*conjugate", lambda: ctx.ccl.broadcast(numbers.conj())),
        (".*overlap", lambda: reduce(wide[1:5, :4], wide[:4, :4])),
    )  # fmt: skip
    assert wrong == []
    reduce(wide[:4, :4], wide[1:5, 4:8])  # in the gaps
    assert (one.imag.tolist(), other.tolist(), wide[:5].unique().tolist()) == ([4.0] * 4, [0j] * 4, [1.0, 2.0])


@on_heap("24MiB")
def next_candidate(ctx):
    """What is chosen has no room on rank 1; another one serves the call on all, now and when it is prepared again."""
    inp, out = torch.ones(40_003, device=ctx.device), torch.zeros(40_003, device=ctx.device)
    first = ctx.ccl.explain("all_reduce", out, inp).algorithm
    algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"][first]
    no_room = mock.patch.object(algorithm, "prepare", side_effect=UnsupportedError("no room here"))
    with no_room if ctx.cur_rank == 1 else contextlib.nullcontext():
        ctx.ccl.all_reduce(out, inp)
        ctx.ccl.all_reduce(out[:40_001], inp[:40_001])
    assert out.unique().tolist() == [2.0]
    after = ctx.ccl.explain("all_reduce", out, inp)
    if ctx.cur_rank == 0:  # alone: the others know a plan
        ctx.ccl._bound.clear()
    ctx.ccl.all_reduce(out.zero_(), inp)
    assert out.unique().tolist() == [2.0]
    assert after.algorithm not in ("", first)
    (refused,) = (each for each in after.candidates if each.name == first)
    assert re.search("rank 1 .*no room here", refused.reason)


@on_heap("24MiB")
def messages_that_differ(ctx):
    """Messages that are not what the receiver expects, of one piece and of several, and of nothing; then right ones."""
    rank, piece = ctx.cur_rank, ctx.ccl.team((0, 1)).mail.nbytes // 4
    f32, i32 = torch.float32, torch.int32
    pairs = [((10, f32), (5, f32)), ((10, f32), (10, i32)), ((piece, f32), (7, f32)), ((3, f32), (piece, f32))]
    for number, pair in enumerate([*pairs, ((5, f32), (0, f32)), ((0, f32), (5, f32))]):
        (sent, dtype), (expected, other) = pair
        tensor = torch.full((pair[rank][0],), 1 + number, dtype=pair[rank][1], device=ctx.device)
        ctx.ccl.send(tensor, 1) if rank == 0 else ctx.ccl.recv(tensor, 0)
        assert (tensor == 1 + number).all(), number
        kinds = {"dtype": str(other)[6:], "other": str(dtype)[6:]}
        words = says("ccl.sent", rank=1, number=expected, sent=sent, **kinds)
        assert unlike((f"DeviceError: .*{words}", ctx.barrier)) == []
        right = torch.full((9,), (rank == 0) * (50.0 + number), device=ctx.device)
        ctx.ccl.send(right, 1, config=Config(comm_sms=3)) if rank == 0 else ctx.ccl.recv(right, 0)
        assert right.unique().tolist() == [50.0 + number]


@on_heap("8MiB")
def places_that_differ(ctx):
    """Outputs of which the config promises that they lie at the same place of all heaps; then one that does."""
    memory, inp = ctx.zeros(64), torch.full((8,), ctx.cur_rank + 1.0, device=ctx.device)
    for places, words in (((0, 8), "differently.*, its output at byte"), ((8, 8), "^$")):
        out = memory[places[ctx.cur_rank] :][:16]
        ctx.ccl.all_gather(out, inp, config=Config(algorithm="copy_engine", same_place=True))
        assert re.search(words, said_by(ctx.barrier))
        ctx.ccl.reset()
    assert out.tolist() == [1.0] * 8 + [2.0] * 8


@on_heap("8MiB")
def splits_that_differ(ctx):
    """Split sizes that do not fit together: what a rank knows by itself, and what only the device can tell."""
    rank = ctx.cur_rank

    def exchange(given, taken):
        inp = torch.full((sum(given), 3), rank + 1.0, device=ctx.device)
        out = torch.zeros(sum(taken), 3, device=ctx.device)
        ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)
        return out[:, 0].tolist()

    assert unlike((f".*number {rank} .*3 rows", lambda: exchange([3, 3], [5, 5]))) == []
    exchange(*[([2, 4], [3, 2])[rank]] * 2)  # rank 0 takes 4 of the 3 rows that there are
    said = said_by(ctx.barrier)
    assert re.search(says("ccl.taken", taken=12, given=9), said) or rank == 1
    assert "rank 1 takes 9" not in said or rank == 1
    right = exchange([2, 4], [2, 3]) if rank == 0 else exchange([3, 2], [4, 2])
    assert right == ([1.0] * 2 + [2.0] * 3, [1.0] * 4 + [2.0] * 2)[rank]


@on_heap("8MiB")
def splits_on_devices(ctx):
    """Split sizes that no host knows: what does not fit is not moved, and reported; what they cannot be is refused."""
    rank, device = ctx.cur_rank, ctx.device
    inp = torch.arange(6.0, device=device)[:, None].repeat(1, 3) + 10 * rank

    def call(out, given, taken):
        ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)

    def exchange(sizes, room=7, call=call):
        out, given = torch.full((room, 3), -1.0, device=device), torch.tensor(sizes[rank], device=device)
        taken = torch.full_like(given, -1)
        call(out, given, taken)
        return out[:, 0].tolist(), taken.tolist()

    two, out = torch.tensor([1, 1], device=device), torch.empty_like(inp)
    assert unlike(*((words, functools.partial(call, out, given, taken)) for words, given, taken in (
        ("ArgumentError: .*overlap", two, two), (r"TypeError: .*input_split_sizes \(int64 of 2 .*list", [1, 1], two),
        ("TypeError: .*output_split_sizes .*int64.*NoneType", two, None),
        (r"ArgumentError: .*\(2,\), int64", two.int() if rank else two + 0, two),  # one of the ranks
        (r"ArgumentError: .*\(2,\), int64", two[:1], two + 0),
    ))) == []  # fmt: skip
    right = ([0.0, 1.0, 10.0, *[-1.0] * 4], [2, 1]), ([2.0, 3.0, 4.0, 11.0, 12.0, -1.0, -1.0], [3, 2])
    for _ in range(2):
        assert exchange(([2, 3], [1, 2])) == right[rank]
    cut = [0.0, 1.0], [2, 0]
    assert exchange(([2, 3], [1, 2]), 2 if rank == 0 else 7) == (cut, right[1])[rank]
    assert re.search(says("ccl.room", given=3, there=2), said_by(ctx.barrier))
    rest = ([10.0, 11.0, 12.0, 13.0, *[-1.0] * 3], [0, 4]), ([14.0, 15.0, *[-1.0] * 5], [0, 2])
    assert exchange(([0, 0], [4, 3])) == rest[rank]
    assert re.search(says("ccl.given", rank=1, given=3, there=2), said_by(ctx.barrier))
    assert exchange(([-5, 1], [1 << 62, 0]))[1] == ([0, 6], [1, 0])[rank]
    said = said_by(ctx.barrier)
    assert re.search(says("ccl.given", rank=0, given=-5, there=0), said) or rank == 1
    assert re.search(says("ccl.given", rank=0, given=1 << 62, there=6), said) or rank == 0
    assert exchange(([2, 3], [1, 2]), call=torch.compile(call, fullgraph=True, backend="eager")) == right[rank]


@on_heap("8MiB")
def accepted(ctx):
    """Arguments as torch and numpy have them."""
    rank, device = ctx.cur_rank, ctx.device
    assert total(ctx, op=dist.ReduceOp(dist.ReduceOp.MAX)) == [2.0]
    root = torch.full((3,), float(rank), device=device)
    ctx.ccl.broadcast(root, np.int64(1))
    assert root.tolist() == [1.0] * 3
    inp, out = torch.arange(4.0, device=device) + 10 * rank, torch.zeros(4, device=device)
    for splits in ({"input_split_sizes": [], "output_split_sizes": []}, {"input_split_sizes": [2, 2]}):
        ctx.ccl.all_to_all(out.zero_(), inp, **splits)
        assert out.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
    expanded = torch.ones(1, device=device).expand(4) if rank == 0 else torch.zeros(4, device=device)
    ctx.ccl.broadcast(expanded)
    assert expanded.tolist() == [1.0] * 4
    average = torch.full((2,), 200, dtype=torch.uint8, device=device)
    ctx.ccl.all_reduce(average, average, "avg")
    assert average.tolist() == [72, 72]  # as NCCL: integers wrap around before they are divided
    assert kind_of(ctx.ccl.send, None, 1 - rank) == "TypeError"


def kinds_without_end(device):
    """Lengths and splits that vary: what is known stays bounded and works again, and what is in use is made once."""
    usual = set()
    with mock.patch.object(bind, "GENERATION", 8), Iris("24MiB", device=device) as ctx:
        rank = ctx.cur_rank
        for turn in range(40):
            assert total(ctx, 1 + turn % 25) == total(ctx, 77) == [3.0], turn
            known = {**ctx.ccl._bound.old, **ctx.ccl._bound}.values()
            usual |= {each for each in known if each.request and each.request.shape == (77,)}
            given = [1 + (turn + rank) % 7, 2 + turn % 3 + rank]
            taken = [1 + turn % 7, 1 + (turn + 1) % 7] if rank == 0 else [2 + turn % 3, 3 + turn % 3]
            inp = torch.full((sum(given), 2), turn + 100.0 * rank, device=device)
            out = torch.zeros(sum(taken), 2, device=device)
            ctx.ccl.all_to_all(out, inp, input_split_sizes=given, output_split_sizes=taken)
            assert out[:, 1].tolist() == [float(turn)] * taken[0] + [turn + 100.0] * taken[1], turn
            assert len(ctx.ccl._bound) + len(ctx.ccl._bound.old) <= 2 * 8
        ctx.barrier()
        assert len(usual) == 1


@on_heap("8MiB")
def refused_by_one_that_is_ahead(ctx, folder):
    """Rank 0 refuses a call of an operation that all have called before, and the others come to none until it has."""
    raised, out = pathlib.Path(folder) / "raised", torch.zeros(6, device=ctx.device)
    total(ctx)
    if ctx.cur_rank == 0:
        assert kind_of(ctx.ccl.all_reduce, out, out[:5]) == "ArgumentError"
        raised.touch()
    wait_until(raised.exists)
    ctx.barrier()  # what the others do not compare, they pass over
    if ctx.cur_rank == 0:
        assert [kind_of(ctx.ccl.all_reduce, out, out[:n]) for n in (4, 5)] == ["ArgumentError"] * 2
    ctx.ccl.all_gather(torch.zeros(2, device=ctx.device), out[:1])  # which they have not called before
    assert total(ctx) == total(ctx, 8) == [3.0]
    said = kind_of(ctx.ccl.all_reduce, out, out[:5]) if ctx.cur_rank == 0 else kind_of(total, ctx, 7)
    assert said == "ArgumentError"
    assert total(ctx) == total(ctx, 7) == [3.0]


@on_heap("8MiB")
def laid_out_otherwise(ctx, folder):
    """A call whose tensors lie so on rank 1 alone that another algorithm serves it; then it is so on all."""
    raised = pathlib.Path(folder) / "raised"
    dense, strided, out = (torch.ones(8, n, device=ctx.device)[:, :8] for n in (8, 9, 8))
    reduce, first = ctx.ccl.all_reduce, ctx.ccl.explain("all_reduce", out, dense).algorithm
    algorithm = ctx.ccl._binder._algorithms(None)._by_op["all_reduce"][first]
    own, no = algorithm.supports, Availability.no("rows are not dense")
    algorithm.supports = lambda request: own(request) if request.options["in_stride"] == (8, 1) else no
    reduce(out, dense)
    if ctx.cur_rank == 1:
        served = rf"served by {first!r} with in_stride=\(8, 1\)"
        words = rf"RankMismatchError: all_reduce: (?=.*{served}).*in_stride=\(9, 1\)"
        with mock.patch.object(members, "ABSENT_S", 1.0):
            assert unlike((words, lambda: reduce(out, strided))) == []
        raised.touch()
    wait_until(raised.exists)
    ctx.barrier()
    for inp in (strided, dense, strided):
        reduce(out, inp)
        assert out.unique().tolist() == [2.0]
    layout = r"in_stride=\(9, 1\), out_stride=\(8, 1\), aligned=True on rank 1"
    words = f"RankMismatchError.*algorithm: {first} on rank 0; .*{layout}"
    assert unlike((words, lambda: reduce(out[:4], (dense, strided)[ctx.cur_rank][:4]))) == []


@pytest.mark.parametrize("num_ranks", [3])
def test_what_one_rank_refuses_all_refuse(pool, num_ranks, device):
    for rows in zip(*pool.run(refused_by_some, num_ranks, device), strict=True):
        who, row, text = rows[0]
        expected, _, *root = DEFECTS[row]
        kinds, at_root = {said.partition(":")[0] for *_, said in rows}, who in (*root, "all") or not root
        assert len(kinds) == 1, rows
        assert (text != "") == (who != "none" and at_root and (expected != "" or who != "all")), rows
        if text:
            kind, _, words = pattern(expected or "RankMismatchError: ").partition(": ")
            assert kinds == {kind}, rows
            own = [said for rank, (*_, said) in enumerate(rows) if who in (rank, "all")]
            assert any(re.search(words, said, re.DOTALL) for said in own), rows


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    (different, 3, ()),
    *((job, 2, ()) for job in (
        refused_later, next_candidate, messages_that_differ, places_that_differ, splits_that_differ, splits_on_devices,
        accepted, kinds_without_end)),
    *((job, 2, ("a folder",)) for job in (tables_that_differ, refused_by_one_that_is_ahead, laid_out_otherwise)),
])  # fmt: skip
def test_calls_that_differ_or_are_refused(pool, num_ranks, device, job, args, tmp_path):
    args = [str(tmp_path) if each == "a folder" else each for each in args]
    assert pool.run(job, num_ranks, device, *args) == [None] * num_ranks


def test_another_algorithm_serves_in_graphs(monkeypatch):
    """A launch that a graph captures is not kept less long than the graph may need it."""
    capturing, launched = [False], []
    monkeypatch.setattr(bind, "MAY_BE_WATCHED", set())

    def bound(plan, drops_plans):
        algorithm = mock.Mock(drops_plans=drops_plans, launch=lambda *arguments: launched.append(arguments))
        team = mock.Mock(reports=mock.Mock(alarm=[0], heard=0))
        order = mock.Mock(run=lambda launch, *arguments: launch(*arguments), mark=None)
        return bind.Bound(algorithm, plan, order, team, None, mock.Mock(op="all_reduce"))

    eager, other = bound("eager plan", True), bound("captured plan", False)
    assert eager.droppable
    eager.let_capture(other)
    assert not eager.droppable
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for capturing[0] in (False, True):
        eager.run("out", "inp")
    assert launched == [("eager plan", "out", "inp"), ("captured plan", "out", "inp")]


def test_another_thread_may_add_launches_meanwhile(monkeypatch):
    """It goes on in the middle of a change of generations."""
    monkeypatch.setattr(bind, "GENERATION", 3)
    known, threads = bind.Launches(), []
    new = functools.partial(SimpleNamespace, droppable=True, mark=lambda: None)

    class Slow:
        mark = staticmethod(lambda: None)

        @property
        def droppable(self):
            threads.append(threading.Thread(target=known.keep, args=(f"other {len(threads)}", new())))
            threads[-1].start()
            threads[-1].join(0.05)
            return True

    for number in range(4):
        known.keep(number, Slow())
    for thread in threads:
        thread.join()
    assert all(known.get(name) or known.old.pop(name, None) for name in (3, "other 0", "other 2"))


def test_kernels_and_hosts_agree_on_words_and_types():
    assert [row_words(size) for size in (1, 2, 8)] == [control_words(size) for size in (1, 2, 8)]
    assert set(MOVABLE) <= set(ELEMENT_TYPES)
