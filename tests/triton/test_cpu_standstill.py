"""Launches whose programs wait for what no rank will change: an error at once, and only then."""

import contextlib
import ctypes
import threading

import pytest
import torch
import triton
import triton.language as tl

from iris_core import Iris
from iris_core.device.status import Standstill
from iris_core.errors import DeviceTimeoutError
from iris_triton import interpreter
from iris_triton.interpreter import DeadlockError, scheduler
from iris_triton.language.asm import read_realtime

NEVER = 1e6
"""Seconds; a test in which only the bound of time ends a wait does not end."""


@triton.jit
def wait_kernel(flag, out, HOW: tl.constexpr):
    if HOW == "plain":
        while tl.load(flag) == 0:
            pass
    elif HOW == "two plain":
        while (tl.load(flag) == 0) | (tl.load(flag + 1) == 0):
            pass
    elif HOW == "block":
        while tl.max(tl.load(flag + tl.arange(0, 8)), 0) == 0:
            pass
    elif HOW == "clock":
        end = read_realtime() + 1_500_000_000
        while (tl.load(flag, volatile=True) == 0) & (read_realtime() < end):
            pass
    else:
        while tl.load(flag, volatile=True) == 0:
            pass
    tl.store(out, 1)


def words(n=8):
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize("heap", [False, True])
def test_alone_a_deadlock_is_an_error_at_once(heap):
    interpreter.enable()
    with contextlib.ExitStack() as stack:
        flag = stack.enter_context(Iris("1MiB", device="cpu")).zeros(8, dtype=torch.int32) if heap else words()
        stack.enter_context(interpreter.configured(timeout_s=NEVER))
        with pytest.raises(DeadlockError) as caught:
            wait_kernel[(3,)](flag, words(), "volatile")
    assert caught.value.kernel == "wait_kernel"
    assert ("on rank 0 of 1" in str(caught.value)) == heap
    assert "no program of any rank changes" in str(caught.value)


@pytest.mark.parametrize("how", ["plain", "two plain", "block"])
def test_loops_of_plain_loads_end(how, monkeypatch):
    monkeypatch.setattr(scheduler, "_IDLE_LOADS", 500)
    interpreter.enable()
    with interpreter.configured(timeout_s=0.5), pytest.raises(DeadlockError) as caught:
        wait_kernel[(2,)](words(), words(), how)
    assert caught.value.last_value == 0


@pytest.mark.parametrize("how", ["plain", "volatile"])
def test_another_thread_may_end_the_wait(how, monkeypatch):
    monkeypatch.setattr(scheduler, "_IDLE_LOADS", 500)
    interpreter.enable()
    flag, out, go = words(), words(), threading.Event()

    def write():
        go.wait(1.0)
        flag.fill_(1)

    writer = threading.Thread(target=write)
    writer.start()
    with interpreter.configured(timeout_s=NEVER):
        wait_kernel[(2,)](flag, out, how)
    writer.join()
    assert out[0] == 1


def test_a_wait_that_looks_at_the_clock_ends_by_itself():
    interpreter.enable()
    out = words()
    with interpreter.configured(timeout_s=NEVER):
        wait_kernel[(1,)](words(), out, "clock")
    assert out[0] == 1


def test_bounded_waits_end_by_their_bound(monkeypatch):
    import iris_triton as iris

    @triton.jit
    def bounded(context, flag):
        iris.DeviceContext.initialize(context, 0, 1).wait(flag, 1)

    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1.5")
    with Iris("1MiB", device="cpu") as ctx, interpreter.configured(timeout_s=NEVER):
        bounded[(2,)](ctx.get_device_context(), ctx.zeros(1, dtype=torch.int64))
        with pytest.raises(DeviceTimeoutError):
            ctx.barrier()


# -- the rows ---------------------------------------------------------------------------------------------------------
def make_ranks(size):
    memory = (ctypes.c_uint64 * (2 * size))()
    rows = [ctypes.addressof(memory) + 16 * rank for rank in range(size)]
    ranks = [Standstill(rows, rank) for rank in range(size)]
    for rank in ranks:
        rank.memory = memory
        assert not rank.report(False)
    return ranks


def test_all_ranks_learn_that_they_stand_still():
    a, b, c = make_ranks(3)
    told = [each.report(True) for _ in range(4) for each in (a, b, c)]
    first = told.index(True)
    assert first >= 3 + 3  # nobody says so before all have polled twice behind somebody's first look
    assert all(told[first:])


@pytest.mark.parametrize("late", ["never waits", "moves", "stops reporting"])
def test_a_rank_that_may_move_keeps_the_others_waiting(late):
    a, b, c = make_ranks(3)
    for turn in range(50):
        assert not a.report(True)
        assert not b.report(True)
        if late == "moves":
            assert not c.report(turn % 2 == 0)
        elif late == "stops reporting" and turn == 0:
            assert not c.report(True)


def test_what_was_said_of_an_earlier_wait_does_not_count():
    a, b = make_ranks(2)
    while not a.report(True):
        b.report(True)
    assert not b.report(False)  # it had moved on before it looked
    assert not b.report(True)
