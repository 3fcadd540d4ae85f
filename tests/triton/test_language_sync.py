"""signal, wait, put_signal and barrier; every program of a launch plays a rank."""

import pytest
import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core.device.context_words import STATUS_WORDS, Status, code_of
from iris_core.device.reports import Meaning, Report, timeout_text
from iris_triton import interpreter

FLAGS = [torch.int32, torch.int64, torch.uint32, torch.uint64]


def launch(kernel, world, tensors, *args, timeout_ns=0, **kwargs):
    """Launch one program per rank; tensors are passed as tables of each rank's addresses."""
    tables = [torch.tensor([t.data_ptr() for t in by_rank], dtype=torch.int64) for by_rank in tensors]
    contexts = world.contexts(timeout_ns)
    kernel[(world.world_size,)](*tables, contexts, contexts.shape[1], *args, world_size=world.world_size, **kwargs)


@triton.jit
def wait_alone(flag, value, out, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr):
    tl.store(out, iris.wait(flag, value, cmp, sem, scope))


@pytest.mark.parametrize("flag", FLAGS)
def test_comparisons(flag):
    interpreter.enable()
    word, out = torch.tensor([5], dtype=flag), torch.zeros(1, dtype=flag)
    for cmp, holds, fails in (
        ("eq", [5], [4, 6]), ("ne", [4, 6], [5]), ("gt", [4], [5, 6]), ("ge", [4, 5], [6]), ("lt", [6], [4, 5]),
        ("le", [5, 6], [4]),
    ):  # fmt: skip
        for value in holds:
            out.zero_()
            wait_alone[(1,)](word, value, out, cmp, "acquire", "sys")
            assert out.item() == 5
        with interpreter.configured(timeout_s=0.02):
            for value in fails:
                with pytest.raises(TimeoutError, match="wait_alone"):
                    wait_alone[(1,)](word, value, out, cmp, "acquire", "sys")


def test_unsigned_flags_compare_unsigned():
    interpreter.enable()
    word, out = torch.tensor([2**32 - 1], dtype=torch.uint32), torch.zeros(1, dtype=torch.uint32)
    wait_alone[(1,)](word, 7, out, "gt", "relaxed", "gpu")
    assert out.item() == 2**32 - 1


@triton.jit
def wait_for_all(flags, values, out, n, N: tl.constexpr):
    if tl.program_id(0) == 0:
        i = tl.arange(0, N)
        tl.store(out + i, iris.wait(flags + i, tl.load(values + i), "eq"))
    else:  # raise the flags one by one, in descending order
        for i in range(n):
            tl.atomic_xchg(flags + n - 1 - i, n - i, sem="release", scope="sys")


def test_a_block_of_flags_waits_for_the_last_one():
    interpreter.enable()
    n = 8
    flags, out = torch.zeros(n, dtype=torch.int64), torch.full((n,), -1, dtype=torch.int64)
    wait_for_all[(2,)](flags, torch.arange(1, n + 1), out, n, N=n)
    assert out.tolist() == list(range(1, n + 1))


@triton.jit
def serve_any(flags, data, out, order, n, N: tl.constexpr):
    """Program 0 takes from whoever has signalled; the others signal in an order of their own."""
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        for turn in range(n):
            sender = iris.wait_any(flags + i, 0, "gt")
            tl.store(out + turn, tl.load(data + sender) * 100 + iris.load_acquire(flags + sender))
            tl.store(flags + sender, -1)
    else:
        sender = tl.load(order + tl.program_id(0) - 1)
        tl.store(data + sender, sender)
        tl.atomic_xchg(flags + sender, sender + 1, sem="release", scope="sys")


def test_wait_any_returns_the_first_flag_that_holds():
    interpreter.enable()
    n = 8
    flags, data, out = (torch.zeros(n, dtype=torch.int64) for _ in range(3))
    serve_any[(n + 1,)](flags, data, out, torch.tensor([3, 1, 7, 0, 2, 6, 5, 4]), n, N=n)
    assert sorted(out.tolist()) == [101 * sender + 1 for sender in range(n)]
    assert (flags == -1).all()


@triton.jit
def look_once(flags, values, out, cmp: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out, iris.test(flags, tl.load(values), cmp))
    tl.store(out + 1, iris.test(flags + i, tl.load(values + i), cmp))
    tl.store(out + 2, iris.wait_any(flags + i, tl.load(values + i), cmp, timeout_ns=1000))
    tl.store(out + 3, iris.load_acquire(flags))
    tl.store(out + 4 + i, iris.load_acquire(flags + i))


def test_looking_does_not_wait():
    for flag in FLAGS:
        interpreter.enable()
        flags, values = torch.tensor([5, 6, 7, 8], dtype=flag), torch.tensor([5, 6, 7, 8])
        for values, cmp, wanted in (
            ([5, 6, 7, 8], "eq", [1, 1, 0]),
            ([5, 6, 7, 9], "eq", [1, 0, 0]),
            ([4, 5, 7, 8], "lt", [0, 0, -1]),
            ([5, 6, 7, 9], "lt", [0, 0, 3]),
            ([6, 6, 0, 0], "ge", [0, 0, 1]),
        ):
            out = torch.full((8,), -7)
            look_once[(1,)](flags, torch.tensor(values), out, cmp, N=4)
            assert out.tolist() == [*wanted, 5, 5, 6, 7, 8], (values, cmp)


# -- bounded waits ----------------------------------------------------------------------------------------------------
@triton.jit
def wait_bounded(flags, out, context, lanes: tl.constexpr, world_size: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    pid = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    if lanes == 1:
        seen = ctx.wait(flags, 42)
        tl.store(out + pid, seen)
    elif lanes < 0:
        tl.store(out, ctx.wait_any(flags + tl.arange(0, -lanes), 42, "eq"))
    else:
        i = tl.arange(0, lanes)
        seen = ctx.wait(flags + i, i, "eq")
        tl.store(out + i, seen)


def test_a_bounded_wait_reports_and_goes_on(make_world):
    world = make_world(2)
    (_, flag), out = world.tensors(*(torch.tensor([7]) for _ in range(2))), torch.zeros(1, dtype=torch.int64)
    wait_bounded[(1,)](flag, out, world.context(1, timeout_ns=100_000_000), lanes=1, world_size=2)
    assert out.item() == 7
    words = world.status.tolist()
    assert code_of(words[Status.CODE]) == 1
    assert words[Status.RANK] == 1
    assert words[Status.PROGRAM] == 0
    assert words[Status.ADDRESS] == flag.data_ptr()
    assert (words[Status.EXPECTED], words[Status.LAST]) == (42, 7)
    assert ">= 42" in timeout_text(Report(0, Status.CODE, words, 0), Meaning((0,)))


def test_the_first_missing_flag_of_a_block_is_reported(make_world):
    world = make_world(1)
    (flags,), out = world.tensors(torch.tensor([0, 1, 9, 3, 8, 5, 6, 7])), torch.zeros(8, dtype=torch.int64)
    wait_bounded[(1,)](flags, out, world.context(0, timeout_ns=20_000_000), lanes=8, world_size=1)
    words = world.status.tolist()
    assert words[Status.ADDRESS] == flags.data_ptr() + 2 * 8
    assert (words[Status.EXPECTED], words[Status.LAST]) == (2, 9)
    assert "== 2" in timeout_text(Report(0, Status.CODE, words, 0), Meaning((0,)))
    assert out.tolist() == flags.tolist()


def test_a_wait_for_any_flag_reports_the_first_one(make_world):
    world = make_world(1)
    (flags,), out = world.tensors(torch.tensor([3, 1, 9, 2])), torch.zeros(1, dtype=torch.int64)
    wait_bounded[(1,)](flags, out, world.context(0, timeout_ns=20_000_000), lanes=-4, world_size=1)
    words = world.status.tolist()
    assert out.item() == -1
    assert (words[Status.ADDRESS], words[Status.EXPECTED], words[Status.LAST]) == (flags.data_ptr(), 42, 3)
    assert "== 42" in timeout_text(Report(0, Status.CODE, words, 0), Meaning((0,)))


class Clock:
    """Goes on by 10 ms at every look."""

    looks = 0

    def monotonic_ns(self):
        self.looks += 1
        return self.looks * 10_000_000


def test_one_report_and_no_second_full_wait(make_world, monkeypatch):
    """After the first timeout the other waits give up early: what they compute is lost anyway."""
    clock = Clock()
    monkeypatch.setattr("iris_triton.interpreter.entries.clock", clock.monotonic_ns)
    world = make_world(1)
    (flag,), out = world.zeros(1, dtype=torch.int64), torch.full((24,), -1, dtype=torch.int64)
    context = world.context(0, timeout_ns=200_000_000)  # 20 looks
    wait_bounded[(2, 3, 4)](flag, out, context, lanes=1, world_size=1)
    assert out.tolist() == [0] * 24
    assert 0 <= world.status[Status.PROGRAM] < 24
    clock.looks = 0
    wait_bounded[(1,)](flag, out, context, lanes=1, world_size=1)
    assert clock.looks == 1
    world.status.zero_()
    clock.looks = 0
    wait_bounded[(1,)](flag, out, context, lanes=1, world_size=1)
    assert clock.looks > 20


@triton.jit
def wait_where(flag, status, pids, timeout_ns, x, y, z):
    here = (tl.program_id(0) == x) & (tl.program_id(1) == y) & (tl.program_id(2) == z)
    if here:
        iris.wait(flag, 1, timeout_ns=timeout_ns, status=status, rank=6)


def test_program_and_rank_of_the_report(make_world):
    interpreter.enable()
    flag, status = torch.zeros(1, dtype=torch.int64), torch.zeros(STATUS_WORDS, dtype=torch.int64)
    wait_where[(2, 3, 4)](flag, status, flag, 10_000_000, 1, 2, 3)
    assert status[Status.PROGRAM] == 1 + 2 * (2 + 3 * 3)
    assert status[Status.RANK] == 6


def test_a_bounded_wait_without_status_words_just_returns(make_world):
    world = make_world(1)
    (flag,), out = world.tensors(torch.tensor([3])), torch.zeros(1, dtype=torch.int64)
    context = world.context(0, timeout_ns=10_000_000, reports=False)
    wait_bounded[(1,)](flag, out, context, lanes=1, world_size=1)
    assert out.item() == 3
    assert not world.status.any()


# -- barrier ----------------------------------------------------------------------------------------------------------
@triton.jit
def meet(
    data, flags, bad, contexts, words, rounds, start, stride, size, flag_type: tl.constexpr, whole: tl.constexpr,
    world_size: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Members write a round number to each other between two barriers, and must all see all of them."""
    rank = tl.program_id(0)
    ctx = iris.DeviceContext.from_tensor(contexts + rank * words, world_size)
    mine = tl.load(data + rank).to(tl.pointer_type(tl.int32))
    own_flags = tl.load(flags + rank).to(tl.pointer_type(flag_type))
    report = tl.load(bad + rank).to(tl.pointer_type(tl.int32))
    member = (rank >= start) & ((rank - start) % stride == 0) & ((rank - start) // stride < size)
    lanes = tl.arange(0, LANES)
    if member:
        for r in range(rounds):
            ctx.store(mine + rank, r + 1, start + lanes % size * stride)
            if whole:
                ctx.barrier(own_flags)
            else:
                ctx.barrier(own_flags, start, stride, size)
            seen = tl.load(mine + start + lanes % size * stride, volatile=True)
            tl.store(report, tl.load(report) + tl.sum((seen != r + 1).to(tl.int32), axis=0))
            if whole:
                iris.barrier(own_flags, rank, world_size, ctx.heap_bases)
            else:
                iris.barrier(own_flags, rank, world_size, ctx.heap_bases, start, stride, size)


def check_meeting(world, flags, flag_type, rounds, start, stride, size):
    data, bad = world.zeros(world.world_size, dtype=torch.int32), world.zeros(1, dtype=torch.int32)
    whole = (start, stride, size) == (0, 1, world.world_size)
    launch(meet, world, (data, flags, bad), rounds, start, stride, size, flag_type, whole, LANES=8)
    members = range(start, start + stride * size, stride)
    assert [b.item() for b in bad] == [0] * world.world_size
    for rank in members:
        assert [data[rank][m].item() for m in members] == [rounds] * size


@pytest.mark.parametrize(("world_size", "group"), [
    (1, (0, 1, 1)), (8, (1, 3, 3)), (4, (3, 1, 1)),
])  # fmt: skip
def test_barrier_of_a_group(make_world, world_size, group):
    world = make_world(world_size)
    flags = world.zeros(world_size + 1, dtype=torch.int64)
    for _ in range(2):  # nothing is reset between launches
        check_meeting(world, flags, tl.int64, 3, *group)
    members = range(group[0], group[0] + group[1] * group[2], group[1])
    for rank in range(world_size):
        # two barriers per round; ranks outside the group are not touched
        expected = [12 if rank in members and m in members else 0 for m in range(world_size)]
        assert flags[rank].tolist() == [*expected, 12 if rank in members else 0]


def test_barrier_counters_may_wrap_around(make_world):
    world = make_world(3)
    start = torch.full((4,), 2**31 - 3, dtype=torch.int32)
    flags = world.tensors(start, start, start)
    check_meeting(world, flags, tl.int32, 3, 0, 1, 3)
    assert flags[1].tolist() == [-(2**31) + 3] * 4


@triton.jit
def meet_in_columns(flags, contexts, words, rounds, world_size: tl.constexpr):
    """Grid (world_size, programs): program j of a rank meets program j of the others."""
    rank = tl.program_id(0)
    ctx = iris.DeviceContext.from_tensor(contexts + rank * words, world_size)
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int64))
    for _ in range(rounds):
        ctx.barrier(own, program=tl.program_id(1))


def test_programs_have_barriers_of_their_own(make_world):
    world = make_world(2)
    programs = 5
    flags = world.zeros(programs * 3, dtype=torch.int64)
    table, contexts = torch.tensor([f.data_ptr() for f in flags]), world.contexts()
    meet_in_columns[(2, programs)](table, contexts, contexts.shape[1], 4, world_size=2)
    assert all(f.tolist() == [4] * programs * 3 for f in flags)


@triton.jit
def arrive_alone(flags, context, world_size: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    ctx.barrier(flags)


def test_barrier_does_not_pass_while_a_rank_is_missing(make_world):
    world = make_world(2)
    flags = world.zeros(3, dtype=torch.int64)
    with interpreter.configured(timeout_s=0.05), pytest.raises(TimeoutError, match="arrive_alone"):
        arrive_alone[(1,)](flags[0], world.context(0), world_size=2)
    assert flags[1].tolist() == [1, 0, 0]  # rank 0 has announced itself there


def test_a_bounded_barrier_names_the_word_of_the_missing_rank(make_world):
    world = make_world(2)
    flags = world.zeros(3, dtype=torch.int64)
    arrive_alone[(1,)](flags[0], world.context(0, timeout_ns=20_000_000), world_size=2)
    words = world.status.tolist()
    assert words[Status.ADDRESS] == flags[0].data_ptr() + 8
    assert (words[Status.EXPECTED], words[Status.LAST]) == (1, 0)
    assert ">= 1" in timeout_text(Report(0, Status.CODE, words, 0), Meaning((0,)))


# -- bad input --------------------------------------------------------------------------------------------------------
@triton.jit
def misuse(flag, bases, what: tl.constexpr):
    if what == "op":
        iris.signal(flag, 1, 0, 0, bases, op="sub")
    elif what == "cmp":
        iris.wait(flag, 1, cmp="=>")
    elif what == "barrier":
        iris.barrier(flag, 0, 1, bases)
    elif what == "signal type":
        iris.signal(flag, 1, 0, 0, bases)
    elif what == "signal scope":
        iris.signal(flag, 1, 0, 0, bases, scope="cta")
    elif what == "signal sem":
        iris.put_signal(flag, flag, flag, 1, 0, 0, bases, sem="acquire")
    elif what == "wait scope":
        iris.wait(flag, 1, scope="cta")
    elif what == "wait sem":
        iris.wait(flag, 1, sem="release")
    elif what == "signal block":
        iris.signal(flag + tl.arange(0, 2), 1, 0, 0, bases)
    elif what == "barrier block":
        iris.barrier(flag + tl.arange(0, 2), 0, 1, bases)
    elif what == "wait block":
        iris.wait(flag + tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :], 1)
    elif what == "any of one":
        iris.wait_any(flag, 1)
    elif what == "test type":
        iris.test(flag, 1)
    elif what == "load scope":
        iris.load_acquire(flag, scope="cta")
    else:
        iris.wait(flag, 1)


MISUSE = (
    ("op", torch.int64, 'op of signal must be "set" or "add"'),
    ("cmp", torch.int64, "cmp of wait must be"),
    ("barrier", torch.uint32, "flags of a barrier must be int32 or int64"),
    ("barrier", torch.float64, "flags of a barrier must be int32 or int64"),
    ("dtype", torch.float32, "flags must be integers of 32 or 64 bits"),
    ("dtype", torch.int16, "flags must be integers of 32 or 64 bits"),
    ("signal type", torch.float32, "flags must be integers of 32 or 64 bits"),
    ("signal scope", torch.int64, 'sem of signal must be "release" or "relaxed", scope "sys" or "gpu"'),
    ("signal sem", torch.int64, 'sem of signal must be "release" or "relaxed", scope "sys" or "gpu"'),
    ("wait scope", torch.int64, 'sem of wait must be "acquire" or "relaxed", scope "sys" or "gpu"'),
    ("wait sem", torch.int64, 'sem of wait must be "acquire" or "relaxed", scope "sys" or "gpu"'),
    ("signal block", torch.int64, "signal changes one flag"),
    ("barrier block", torch.int64, "flags of a barrier must be a pointer to the first word"),
    ("any of one", torch.int64, "wait_any takes a block of flags"),
    ("test type", torch.float32, "flags must be integers of 32 or 64 bits"),
    ("load scope", torch.int64, 'scope "sys" or "gpu"'),
    ("wait block", torch.int64, "wait takes one flag, or a block of them with one dimension"),
)


def test_misuse_is_refused(make_world):
    world = make_world(1)
    for what, dtype, text in MISUSE:
        with pytest.raises(Exception, match=text):
            misuse[(1,)](*world.tensors(torch.ones(1, dtype=dtype)), world.bases, what)


@triton.jit
def meet_as(flags, contexts, words, caller, start, stride, size, world_size: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(contexts + caller * words, world_size)
    ctx.barrier(flags, start, stride, size)


def test_a_barrier_of_an_impossible_group_is_refused(make_world):
    """Unchecked, an address of the tensor's other words is taken for a heap's."""
    outside, twice, stranger = "empty or reaches outside of the world", "names a rank twice", "no member of its group"
    world = make_world(2)
    flags, contexts = world.zeros(3, dtype=torch.int64), world.contexts()
    for caller, group, text in (
        (0, (0, 1, 3), outside),
        (0, (0, 1, 0), outside),
        (0, (-1, 1, 2), outside),
        (1, (1, -2, 2), outside),
        (0, (0, 0, 2), twice),
        (0, (1, 1, 1), stranger),
        (1, (0, 2, 1), stranger),
    ):
        with pytest.raises(AssertionError, match=text):
            meet_as[(1,)](flags[caller], contexts, contexts.shape[1], caller, *group, world_size=2)
    assert not any(each.any() for each in flags)
    for turn, stride in enumerate((0, -1)):  # a group of one needs none
        meet_as[(1,)](flags[1], contexts, contexts.shape[1], 1, 1, stride, 1, world_size=2)
        assert flags[1].tolist() == [0, turn + 1, turn + 1]
