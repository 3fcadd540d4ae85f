"""Device functions among several ranks in one process: which rank is meant, conversions, hints, waits, misuse."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import raises, table

import iris_gluon
import iris_triton as iris
from iris_core import Iris
from iris_core.device.context_words import STATUS_WORDS, Status, code_of
from iris_core.device.reports import Meaning, Report, timeout_text
from iris_core.errors import CapabilityError
from iris_core.types import ContextSpec, CreateRequest, DeviceTarget, DeviceType
from iris_gluon import layouts
from iris_triton import _compat, interpreter
from iris_triton.backend import TritonBackend
from iris_triton.language import address, blocks, gin
from iris_triton.settings import TritonSettings

I32, I64 = torch.int32, torch.int64
NS = 20_000_000


TILE = "x + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]"


@table("hint", [(1, 1, 4), 0, -4, 3, 16.0, "x", (1, 0), (1, 12)])
def test_impossible_hints_are_refused(make_world, hint):
    world, store = make_world(2), f"iris.store({TILE}, 1.0, 0, 1, bases, hint={hint!r})"
    with raises(Exception, "hint.dimensions" if hint == (1, 1, 4) else "hint.power"):
        kernel_of(triton.jit, "x, bases", store, iris=iris, tl=tl)[(1,)](world.zeros(128)[0], world.bases)


@triton.jit
def load_from(x, out, context, peer, world_size: tl.constexpr, RANKS: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, 0, world_size)
    i = tl.arange(0, RANKS)
    tl.store(out, ctx.load(x, peer))
    tl.store(out + i, ctx.load(x + i, peer + i))


def test_a_rank_outside_the_world_is_named():
    with Iris("1MiB", device="cpu") as ctx:
        x, out = ctx.ones(1), torch.zeros(1)
        load_from[(1,)](x, out, ctx.get_device_context(), 0, 1, 1)
        assert out.item() == 1
        for peer, ranks, named in ((-1, 1, -1), (1, 1, 1), (7, 1, 7), (0, 2, 1)):
            with raises(AssertionError, "kernel.no rank", rank=named):
                load_from[(1,)](x, out, ctx.get_device_context(), peer, 1, ranks)


@table("module", [iris, interpreter, iris_gluon])
def test_every_exported_name_can_be_had(module):
    assert module is interpreter or set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_backend_refuses_heaps_that_are_not_aligned():
    backend = TritonBackend(CreateRequest(DeviceTarget(DeviceType.CPU), 0, 1, 1 << 20, TritonSettings()))
    with raises(CapabilityError, name="rank 1 at 0x1001"):
        backend.make_context(ContextSpec(0, 2, (0x1000, 0x1001)))


ALL_OF_A_BLOCK = """
i = tl.arange(0, 4)
tl.store(out, iris.test(flags + i, tl.load(values + i), "le"))
tl.store(out + 1 + i, iris.wait(flags + i, 5 + i, "eq"))
"""
UNSIGNED = 'tl.store(out, iris.wait(flags, 7, "gt", "relaxed", "gpu"))'


@table("text, flags, values, found", [
    *((ALL_OF_A_BLOCK, torch.tensor([5, 6, 7, 8]), [5, 6, 7, last], [holds, 5, 6, 7, 8])
      for last, holds in ((8, 1), (7, 0))),
    (UNSIGNED, torch.tensor([2**32 - 1], dtype=torch.uint32), [], [2**32 - 1]),
])  # fmt: skip
def test_how_flags_are_compared(text, flags, values, found):
    out = torch.full((len(found),), -7)
    kernel_of(triton.jit, "flags, values, out", text, iris=iris, tl=tl)[(1,)](flags, torch.tensor(values), out)
    assert out.tolist() == found


@triton.jit
def wait_bounded(flags, out, context, lanes: tl.constexpr, world_size: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    pid = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    if lanes == 0:
        ctx.barrier(flags)
    elif lanes == 1:
        tl.store(out + pid, ctx.wait(flags, 42))
    elif lanes < 0:
        tl.store(out, ctx.wait_any(flags + tl.arange(0, -lanes), 42, "eq"))
    else:
        i = tl.arange(0, lanes)
        tl.store(out + i, ctx.wait(flags + i, i, "eq"))


@table("flags, lanes, seen, word, expected, last, text", [
    ([7], 1, [7], 0, 42, 7, ">= 42"),
    ([0, 1, 9, 3, 8, 5, 6, 7], 8, [0, 1, 9, 3, 8, 5, 6, 7], 2, 2, 9, "== 2"),  # the first that is missing
    ([3, 1, 9, 2], -4, [-1], 0, 42, 3, "== 42"),
    ([0, 0, 0], 0, [], 2, 1, 0, ">= 1"),  # of rank 0, which is not at the barrier
])  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bounded_wait_reports_and_goes_on(make_world, rank, flags, lanes, seen, word, expected, last, text):
    world, out = make_world(2), torch.full((8,), -7)
    mine = world.tensors(*(torch.tensor(flags) for _ in range(2)))[rank]
    wait_bounded[(1,)](mine, out, world.context(rank, timeout_ns=NS), lanes=lanes, world_size=2)
    assert out[: len(seen)].tolist() == seen
    words, address = world.status.tolist(), mine.data_ptr() + 8 * (word if lanes else 1 - rank)
    assert code_of(words[Status.CODE]) == 1
    assert (words[Status.RANK], words[Status.PROGRAM], words[Status.ADDRESS]) == (rank, 0, address)
    assert (words[Status.EXPECTED], words[Status.LAST]) == (expected, last)
    assert text in timeout_text(Report(0, Status.CODE, words, 0), Meaning((0,)))


def test_one_report_and_no_second_full_wait(make_world, monkeypatch):
    """After the first timeout the other waits give up early: what they compute is lost anyway."""
    clock = mock.Mock(side_effect=lambda: clock.call_count * 10_000_000)
    monkeypatch.setattr("iris_triton.interpreter.entries.clock", clock)
    world = make_world(1)
    (flag,), out = world.zeros(1, dtype=I64), torch.full((2,), -1)
    context = world.context(0, timeout_ns=40_000_000)  # 4 looks
    wait_bounded[(1, 1, 2)](flag, out, context, lanes=1, world_size=1)
    assert out.tolist() == [0] * 2
    assert 0 <= world.status[Status.PROGRAM] < 2
    for forget, looks in ((False, range(1, 2)), (True, range(5, 1000))):
        clock.reset_mock()
        world.status *= not forget
        wait_bounded[(1,)](flag, out, context, lanes=1, world_size=1)
        assert clock.call_count in looks


AT_ONE_PROGRAM = """
if (tl.program_id(0) == 1) & (tl.program_id(1) == 2) & (tl.program_id(2) == 3):
    iris.wait(flag, 1, timeout_ns=timeout_ns, status=status, rank=6)
"""


def test_program_and_rank_of_the_report_and_waits_without_status_words(make_world):
    flag, status = torch.zeros(1, dtype=I64), torch.zeros(STATUS_WORDS, dtype=I64)
    kernel = kernel_of(triton.jit, "flag, status, timeout_ns", AT_ONE_PROGRAM, iris=iris, tl=tl)
    kernel[(2, 3, 4)](flag, status, NS)
    assert (status[Status.PROGRAM], status[Status.RANK]) == (1 + 2 * (2 + 3 * 3), 6)
    world, out = make_world(1), torch.zeros(1, dtype=I64)
    (flag,) = world.tensors(torch.tensor([3]))
    wait_bounded[(1,)](flag, out, world.context(0, timeout_ns=NS, reports=False), lanes=1, world_size=1)
    assert out.item() == 3
    assert not world.status.any()


@triton.jit
def meet(flags, contexts, words, rounds, world_size: tl.constexpr):
    """In a grid of two dimensions program j of a rank meets program j of the others."""
    rank, program = tl.program_id(0), tl.program_id(1)
    ctx = iris.DeviceContext.from_tensor(contexts + rank * words, world_size)
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for _ in range(rounds):
        ctx.barrier(own, program=program)
        iris.barrier(own, rank, world_size, ctx.heap_bases, program=program)


def test_programs_have_barriers_of_their_own_whose_counters_wrap_around(make_world):
    """The kit looks at what is stored before barriers, and at groups."""
    world, first = make_world(2), 2**31 - 3
    flags, contexts = world.tensors(*(torch.full((5, 3), first, dtype=I32) for _ in range(2))), world.contexts()
    for launch in (1, 2):  # nothing is reset between launches
        addresses = torch.tensor([each.data_ptr() for each in flags])
        meet[(2, 5)](addresses, contexts, contexts.shape[1], 3, world_size=2)
        passed = torch.tensor([first + launch * 6]).to(I32)
        assert all((each == passed).all() for each in flags)


@table("text, dtype, key", [
    ('iris.signal(flag, 1, 0, 0, bases, op="sub")', I64, "op"), ('iris.wait(flag, 1, cmp="=>")', I64, "cmp"),
    ("iris.barrier(flag, 0, 1, bases)", torch.uint32, "of a barrier"), ("iris.wait(flag, 1)", torch.float32, "dtype"),
    ("iris.signal(flag, 1, 0, 0, bases)", torch.float32, "dtype"), ("iris.test(flag, 1)", torch.float32, "dtype"),
    ('iris.signal(flag, 1, 0, 0, bases, scope="cta")', I64, "order"),
    ('iris.wait(flag, 1, scope="cta")', I64, "order"), ('iris.load_acquire(flag, scope="cta")', I64, "scope"),
    ("iris.signal(flag + tl.arange(0, 2), 1, 0, 0, bases)", I64, "one"), ("iris.wait_any(flag, 1)", I64, "block"),
    ("iris.barrier(flag + tl.arange(0, 2), 0, 1, bases)", I64, "first"),
    ("iris.wait(flag + tl.arange(0, 4).reshape([2, 2]), 1)", I64, "one or a block"),
])  # fmt: skip
def test_misuse_is_refused(make_world, text, dtype, key):
    world = make_world(1)
    kernel = kernel_of(triton.jit, "flag, bases", text, iris=iris, tl=tl)
    what, sem = ("signal", "release") if "signal" in text else ("wait", "acquire")
    with raises(Exception, f"flags.{key}", what=what, sem=sem):
        kernel[(1,)](*world.tensors(torch.ones(1, dtype=dtype)), world.bases)


@table("caller, group, key", [
    *((*each, "flags.outside") for each in ((0, (0, 1, 3)), (0, (0, 1, 0)), (0, (-1, 1, 2)), (1, (1, -2, 2)))),
    (0, (0, 0, 2), "flags.twice"), (0, (1, 1, 1), "flags.alien"), (1, (0, 2, 1), "flags.alien"), (1, (1, 0, 1), ""),
    (1, (1, -1, 1), ""),
])  # fmt: skip
def test_a_barrier_of_an_impossible_group_is_refused(make_world, caller, group, key):
    """Unchecked, an address of the tensor's other words is taken for a heap's; a group of one needs no stride."""
    world, meet = make_world(2), "iris.DeviceContext.from_tensor(context, 2).barrier(flags, start, stride, size)"
    kernel = kernel_of(triton.jit, "flags, context, start, stride, size", meet, iris=iris)
    flags = world.zeros(3, dtype=I64)
    with raises(AssertionError, key):
        kernel[(1,)](flags[caller], world.context(caller), *group)
    assert [each.tolist() for each in flags] == [[0, 0, 0], [0, 0, 0] if key else [0, 1, 1]]


def one(_semantic=None):
    return tl.constexpr(1)


@triton.jit
def with_a_builtin(out):
    tl.store(out, one())


def test_sources_of_builtins_are_in_the_keys_of_compiled_kernels(monkeypatch):
    """Of the module's file: an upgrade of Iris compiles kernels anew, which Triton alone would not."""
    keys = []
    for source in ("first", "second", "second"):
        monkeypatch.setattr(_compat.inspect, "getsource", lambda module, source=source: source)
        monkeypatch.setitem(globals(), "one", _compat.builtin(one))
        with_a_builtin.hash = None
        keys.append(with_a_builtin.cache_key)
        monkeypatch.undo()
    assert keys[0] != keys[1] == keys[2]
    modules = address, blocks, gin, layouts
    ours = [each for module in modules for each in vars(module).values() if _compat.is_builtin(each)]
    assert len(ours) > 12
    assert [each for each in ours if each.__module__.startswith("iris_") and not hasattr(each, "hash_attrs")] == []
