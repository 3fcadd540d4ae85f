"""Programs that wait for each other, deadlocks, errors among many programs, threads."""

import _thread
import contextlib
import ctypes
import threading
import time
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import raises, table

import iris_triton as iris
from iris_core import Iris
from iris_core.device.status import Standstill
from iris_core.errors import DeviceTimeoutError, PeerLostError
from iris_triton import interpreter
from iris_triton.interpreter import DeadlockError, scheduler
from iris_triton.language.asm import read_realtime

NEVER = 1e6
"""Seconds; a test in which only the bound of time ends a wait does not end."""


def words(n=8):
    return torch.zeros(n, dtype=torch.int32)


POLLS = {
    name: kernel_of(triton.jit, "p", f"return {value}", tl=tl)
    for name, value in {
        "atomic": 'tl.atomic_add(p, 0, sem="acquire", scope="sys")',
        "cas": 'tl.atomic_cas(p, 0, 0, sem="acquire", scope="sys")',
        "masked": "tl.sum(tl.atomic_add(p + tl.arange(0, 4) * 0, 0, mask=tl.arange(0, 4) == 2))",
        "volatile": "tl.load(p, volatile=True)",
        "uncached": 'tl.load(p, cache_modifier=".cv")',
        "plain": "tl.load(p)",
        "two plain": "tl.load(p) * tl.load(p + 1)",
        "plain block": "tl.max(tl.load(p + tl.arange(0, 4)), 0)",
    }.items()
}


@triton.jit
def reverse(flag, order, n, poll: tl.constexpr):
    """Program k waits for program k + 1; the last one waits for nobody."""
    pid = tl.program_id(0)
    if pid < n - 1:
        while poll(flag + 2 * (pid + 1)) == 0:
            pass
    tl.store(order + pid, tl.atomic_add(flag + 2 * n, 1))
    tl.atomic_xchg(flag + 2 * pid, 1, sem="release")


@triton.jit
def stuck(flag, poll: tl.constexpr):
    if tl.program_id(0) < 3:
        while poll(flag) != 1:
            pass


@table("how", POLLS)
def test_a_program_can_wait_for_a_later_one_and_a_deadlock_says_where(monkeypatch, how):
    monkeypatch.setattr(scheduler, "_IDLE_LOADS", 500)
    order, flag = words(6), words() - 5
    if "plain" not in how:
        reverse[(6,)](words(2 * 6 + 2), order, 6, POLLS[how])
        assert order.tolist() == [5, 4, 3, 2, 1, 0]
    with interpreter.configured(timeout_s=0.2), raises(DeadlockError, "memory.where") as info:
        stuck[(5,)](flag, POLLS[how])
    error = info.value
    assert isinstance(error, TimeoutError)
    assert error.kernel == "stuck"
    assert error.program[0] < 3
    assert error.address in (flag.data_ptr(), flag.data_ptr() + 4 * (how == "two plain"))
    assert error.last_value in (0xFFFFFFFB, 0)  # lanes that are masked off show 0
    reverse[(3,)](words(), words(), 3, POLLS["atomic"])  # everything still works


def test_a_waiting_kernel_notices_that_a_peer_has_ended(make_heap):
    check = mock.Mock(side_effect=[None, PeerLostError("rank 1 has ended", ranks=(1,))])
    heap = make_heap(1, (128, 8, "flag"), rank=3, check=check)
    with pytest.raises(PeerLostError) as caught:
        stuck[(3,)](heap.tensor(0, 128, 2, torch.int32), POLLS["volatile"])
    assert (caught.value.ranks, check.call_count) == ((1,), 2)


@triton.jit
def work(flag, x, out, N: tl.constexpr):
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
    elif tl.program_id(0) == 1:
        v = tl.load(x)
        for _ in range(N):
            v = v * 0.5 + 1.0
        tl.store(x, v)
        tl.store(flag, 1)
    for i in range(N // 10):
        if tl.load(flag, volatile=True) == 1:
            tl.store(out + i, i)


def test_computing_and_storing_are_not_waiting():
    flag, out = words(1), words(1000)
    with interpreter.configured(timeout_s=0.05):
        work[(2,)](flag, torch.ones(1), out, N=10000)
    assert flag.item() == 1
    with interpreter.configured(timeout_s=0.01):
        work[(1,)](flag, torch.ones(1), out.zero_(), N=10000)
    assert torch.equal(out, torch.arange(1000, dtype=torch.int32))


wait_until = kernel_of(triton.jit, "word, count", "while tl.load(word, volatile=True) < count:\n    pass", tl=tl)


def test_a_word_that_keeps_changing_is_no_deadlock(make_heap):
    word = words(1)
    make_heap(1, check=lambda: word.add_(1))  # about five times a second, while all programs wait
    with interpreter.configured(timeout_s=0.6):  # the whole takes more than a second of waiting
        wait_until[(1,)](word, 6)
    assert word.item() == 6


@triton.jit
def fail_among_waiting(flag, n):
    pid = tl.program_id(0)
    if pid == n - 1:
        tl.device_assert(pid < 0, "the last one fails")
    while tl.load(flag, volatile=True) == 0:
        pass


def count_threads():
    return sum(t.name == "iris-cpu-program" for t in threading.enumerate())


def test_an_error_ends_the_waiting_programs_and_leaks_no_threads():
    for _ in range(3):
        with pytest.raises(AssertionError, match="the last one fails") as info:
            fail_among_waiting[(24,)](words(), 24)
        assert "program (23, 0, 0)" in info.value.__notes__[0]
    deadline = time.monotonic() + 60
    while count_threads() > 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (before := count_threads()) <= 16
    wait_until[(50,)](words() + 1, 1)  # programs that do not wait use none
    assert count_threads() == before


@pytest.mark.parametrize("programs", [1, 4])
def test_an_interrupt_ends_the_launch(interruptible, programs, make_heap):
    check = mock.Mock(side_effect=lambda: check.call_count == 1 and _thread.interrupt_main())  # all wait
    make_heap(1, check=check)
    with pytest.raises(KeyboardInterrupt):
        wait_until[(programs,)](words(), 1)
    assert check.called
    reverse[(3,)](words(), words(), 3, POLLS["atomic"])


def test_timeouts_must_be_positive():
    with raises(ValueError, name="timeout_s"):
        interpreter.configure(timeout_s=float("nan"))


@pytest.mark.parametrize("on_heap", [False, True])
def test_alone_a_deadlock_is_an_error_at_once(on_heap):
    with contextlib.ExitStack() as stack:
        flag = stack.enter_context(Iris("1MiB", device="cpu")).zeros(8, dtype=torch.int32) if on_heap else words()
        stack.enter_context(interpreter.configured(timeout_s=NEVER))
        with raises(DeadlockError, "memory.at once", "memory.on heap" if on_heap else "any") as caught:
            stuck[(3,)](flag, POLLS["volatile"])
    assert (caught.value.kernel, caught.value.rank) == ("stuck", 0 if on_heap else None)


@triton.jit
def wait_by_clock(flag, out):
    end = read_realtime() + 800_000_000
    while (tl.load(flag, volatile=True) == 0) & (read_realtime() < end):
        pass
    tl.store(out, 1)


AWAIT = "iris.DeviceContext.initialize(context, 0, 1).wait(flag, 1)"


def test_bounded_waits_end_by_themselves(monkeypatch):
    out = words()
    monkeypatch.setattr(scheduler, "_CHECK_S", 0.05)  # else there is hardly a look at them before they end
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "0.8")
    with Iris("1MiB", device="cpu") as ctx, interpreter.configured(timeout_s=NEVER):
        wait_by_clock[(1,)](words(), out)
        assert out[0] == 1
        kernel_of(triton.jit, "context, flag", AWAIT, iris=iris)[(2,)](
            ctx.get_device_context(), ctx.zeros(1, dtype=torch.int64)
        )
        with pytest.raises(DeviceTimeoutError):
            ctx.barrier()


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
    found = [each.report(True) for _ in range(4) for each in (a, b, c)]
    first = found.index(True)
    assert first >= 3 + 3  # nobody says so before all have polled twice behind somebody's first look
    assert all(found[first:])
    assert not b.report(False)  # what was said of an earlier wait does not count
    assert not b.report(True)


@pytest.mark.parametrize("late", ["never waits", "moves", "stops reporting"])
def test_a_rank_that_may_move_keeps_the_others_waiting(late):
    a, b, c = make_ranks(3)
    for turn in range(50):
        found = [a.report(True), b.report(True)]
        if late == "moves" or (late == "stops reporting" and turn == 0):
            found.append(c.report(turn % 2 == 0))
        assert not any(found)
