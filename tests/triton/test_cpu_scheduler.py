"""Programs that wait for each other, deadlocks, errors among many programs, threads."""

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from iris_core.errors import PeerLostError
from iris_core.types import Block
from iris_triton import interpreter
from iris_triton.interpreter import DeadlockError


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


def flags(n):
    return torch.zeros(n, dtype=torch.int32)


@triton.jit
def poll_atomic(p):
    return tl.atomic_add(p, 0, sem="acquire", scope="sys")


@triton.jit
def poll_cas(p):
    return tl.atomic_cas(p, 0, 0, sem="acquire", scope="sys")


@triton.jit
def poll_masked(p):
    i = tl.arange(0, 4)
    return tl.sum(tl.atomic_add(p + i * 0, 0, mask=i == 2))


@triton.jit
def poll_volatile(p):
    return tl.load(p, volatile=True)


@triton.jit
def poll_uncached(p):
    return tl.load(p, cache_modifier=".cv")


@triton.jit
def poll_block(p):
    return tl.max(tl.load(p + tl.arange(0, 2), volatile=True), axis=0)


POLLS = [poll_atomic, poll_cas, poll_masked, poll_volatile, poll_uncached, poll_block]


@triton.jit
def reverse_kernel(flag, order, n, POLL: tl.constexpr):
    """Program k waits for program k + 1; the last one waits for nobody."""
    pid = tl.program_id(0)
    if pid < n - 1:
        while POLL(flag + 2 * (pid + 1)) == 0:
            pass
    tl.store(order + pid, tl.atomic_add(flag + 2 * n, 1))
    tl.atomic_xchg(flag + 2 * pid, 1, sem="release")


@pytest.mark.parametrize("poll", POLLS, ids=lambda f: f.__name__)
def test_a_program_can_wait_for_a_later_one(poll):
    flag, order = flags(2 * 6 + 2), flags(6)
    reverse_kernel[(6,)](flag, order, 6, POLL=poll)
    assert order.tolist() == [5, 4, 3, 2, 1, 0]


@triton.jit
def grid_barrier_kernel(counter, out, n, ROUNDS: tl.constexpr):
    pid = tl.program_id(0)
    for r in range(ROUNDS):
        tl.store(out + r * n + pid, tl.atomic_add(counter + 1, 1) // n)
        tl.atomic_add(counter, 1, sem="release")
        while tl.atomic_add(counter, 0, sem="acquire") < n * (r + 1):
            pass


def test_barriers_over_a_grid():
    counter, out = flags(2), flags(3 * 40)
    grid_barrier_kernel[(40,)](counter, out, 40, ROUNDS=3)
    assert torch.equal(out.view(3, 40), torch.arange(3).int()[:, None].expand(3, 40))


@triton.jit
def stuck_kernel(flag, POLL: tl.constexpr):
    if tl.program_id(0) < 3:
        while POLL(flag) != 1:
            pass


@pytest.mark.parametrize("poll", POLLS, ids=lambda f: f.__name__)
def test_a_deadlock_is_an_error_that_says_where(poll):
    flag = flags(2)
    flag.fill_(-5)
    with interpreter.configured(timeout_s=0.2), pytest.raises(DeadlockError) as info:
        stuck_kernel[(5,)](flag, POLL=poll)
    error = info.value
    assert isinstance(error, TimeoutError)
    assert error.kernel == "stuck_kernel"
    assert error.program[0] < 3
    assert error.address == flag.data_ptr()
    assert error.last_value in (0xFFFFFFFB, 0)  # lanes that are masked off show 0
    assert "'stuck_kernel'" in str(error)
    assert "(byte 0 of block 'flag' of 8 bytes" in str(error)
    assert "2 other programs wait, 0 have not started" in str(error)
    reverse_kernel[(3,)](flags(8), flags(3), 3, POLL=poll)  # everything still works


class Peers:
    """A heap whose peer dies."""

    rank, nbytes, version, nodes = 3, 4096, 0, ((3,),)

    def __init__(self, lost_after):
        self.memory = torch.zeros(4096, dtype=torch.uint8)
        self.heap_bases = (self.memory.data_ptr(),)
        self.calls, self.lost_after = 0, lost_after

    def live_blocks(self):
        return [Block(128, 8, "flag")]

    def stands_still(self, quiet):
        return False

    def elsewhere(self):
        return ()

    def check_peers(self):
        self.calls += 1
        if self.calls > self.lost_after:
            raise PeerLostError("rank 1 has ended", ranks=(1,))


def test_a_waiting_kernel_notices_that_a_peer_has_ended():
    heap = Peers(lost_after=1)
    token = interpreter.register_memory(heap)
    try:
        with pytest.raises(PeerLostError, match="rank 1"):
            stuck_kernel[(3,)](heap.memory[128:136].view(torch.int32), POLL=poll_volatile)
    finally:
        interpreter.unregister_memory(token)
    assert heap.calls == 2


def test_a_deadlock_on_a_heap_names_block_and_rank():
    heap = Peers(lost_after=10**9)
    token = interpreter.register_memory(heap)
    try:
        with interpreter.configured(timeout_s=0.3), pytest.raises(DeadlockError, match="on rank 3") as info:
            stuck_kernel[(1,)](heap.memory[128:136].view(torch.int32), POLL=poll_volatile)
    finally:
        interpreter.unregister_memory(token)
    assert "(byte 0 of block 'flag' of 8 bytes at offset 128 of the heap of rank 0)" in str(info.value)
    assert heap.calls >= 1


@triton.jit
def slow_neighbour_kernel(flag, x, N: tl.constexpr):
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
    else:
        v = tl.load(x)
        for _ in range(N):
            v = v * 0.5 + 1.0
        tl.store(x, v)
        tl.store(flag, 1)


def test_computation_of_other_programs_is_not_waiting():
    flag, x = flags(1), torch.ones(1)
    with interpreter.configured(timeout_s=0.05):
        slow_neighbour_kernel[(2,)](flag, x, N=30000)
    assert flag.item() == 1


@triton.jit
def countdown_kernel(word, count):
    while tl.load(word, volatile=True) < count:
        pass


def test_a_word_that_keeps_changing_is_no_deadlock():
    word = flags(1)

    class Writes(Peers):
        def check_peers(self):  # about five times a second, while all programs wait
            word.add_(1)

    token = interpreter.register_memory(Writes(lost_after=0))
    try:
        with interpreter.configured(timeout_s=0.6):  # the whole takes more than a second of waiting
            countdown_kernel[(1,)](word, 6)
    finally:
        interpreter.unregister_memory(token)
    assert word.item() == 6


@triton.jit
def polling_worker_kernel(stop, out, N: tl.constexpr):
    for i in range(N):
        if tl.load(stop, volatile=True) == 0:
            tl.store(out + i, i)


def test_a_worker_that_polls_and_stores_is_not_deadlocked():
    out = flags(4000)
    with interpreter.configured(timeout_s=0.01):
        polling_worker_kernel[(1,)](flags(1), out, N=4000)
    assert torch.equal(out, torch.arange(4000, dtype=torch.int32))


@triton.jit
def failing_among_waiting_kernel(flag, n):
    pid = tl.program_id(0)
    if pid == n - 1:
        tl.device_assert(pid < 0, "the last one fails")
    while tl.load(flag, volatile=True) == 0:
        pass


def test_an_error_ends_the_waiting_programs_and_leaks_no_threads():
    flag = flags(1)
    for _ in range(3):
        with pytest.raises(AssertionError, match="the last one fails") as info:
            failing_among_waiting_kernel[(24,)](flag, 24)
        assert "program (23, 0, 0)" in info.value.__notes__[0]
    deadline = time.monotonic() + 60
    while count_threads() > 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_threads() <= 16


def count_threads():
    return sum(t.name == "iris-cpu-program" for t in threading.enumerate())


def test_programs_that_do_not_wait_use_no_threads():
    before = count_threads()
    polling_worker_kernel[(50,)](flags(1) + 1, flags(4), N=1)
    assert count_threads() == before


@triton.jit
def thread_kernel(flags, out, me, rounds, N: tl.constexpr):
    i = tl.arange(0, N)
    for r in range(1, rounds + 1):
        tl.atomic_xchg(flags + me, r, sem="release")
        while tl.atomic_add(flags + 1 - me, 0, sem="acquire") < r:
            pass
        tl.store(out + i, tl.load(out + i) + me + 1)


def test_launches_from_several_python_threads_run_side_by_side():
    shared, outs = flags(2), torch.zeros(2, 64, dtype=torch.int32)
    errors = []

    def run(me):
        try:
            thread_kernel[(1,)](shared, outs[me], me, 20, N=64)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert (outs[0] == 20).all()
    assert (outs[1] == 40).all()


@triton.jit
def forever_kernel(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


@pytest.mark.parametrize("programs", [1, 4])
def test_an_interrupt_ends_the_launch(interruptible, programs):
    import _thread

    class Interrupts(Peers):
        def check_peers(self):  # when all programs wait
            self.calls += 1
            if self.calls == 1:
                _thread.interrupt_main()

    heap = Interrupts(lost_after=0)
    token = interpreter.register_memory(heap)
    try:
        with pytest.raises(KeyboardInterrupt):
            forever_kernel[(programs,)](flags(1))
    finally:
        interpreter.unregister_memory(token)
    assert heap.calls >= 1
    reverse_kernel[(3,)](flags(8), flags(3), 3, POLL=poll_atomic)


def test_timeouts_must_be_positive():
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            interpreter.configure(timeout_s=value)
    assert interpreter.configuration().timeout_s == 60
