"""gl.warp_specialize on the CPU: partitions that wait for each other, for other programs, and in vain."""

import threading
import time

import pytest
import torch
from gluon_kernels import said_by_the_compiler
from kernel_text import kernel_of
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from iris_core.errors import UnsupportedError
from iris_triton import interpreter


@gluon.jit
def sums(x, i, bar):
    mbarrier.wait(bar, 0)
    return gl.sum(x, axis=0), x + i


@gluon.jit
def signal(bar, out, value: gl.constexpr):
    gl.store(out + value, gl.num_warps())
    mbarrier.arrive(bar, count=1)


@gluon.jit
def with_results(x, out, warps):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=2)
    total, moved = gl.warp_specialize(
        [(sums, (gl.load(x + i), i, bar)), (signal, (bar, warps, 0)), (signal, (bar, warps, 1))], [1, 4], [24, 24]
    )
    gl.store(out + i, moved)
    gl.store(out + 128, total)
    gl.store(warps + 2, gl.num_warps())


def test_results_of_the_default_partition_and_warps_of_each():
    x, out, warps = torch.randn(128), torch.zeros(129), torch.zeros(3, dtype=torch.int32)
    with_results[(1,)](x, out, warps)
    torch.testing.assert_close(out, torch.cat([x + torch.arange(128), x.sum()[None]]))
    assert warps.tolist() == [1, 4, 4]


nothing = kernel_of(gluon.jit, "bar", "pass")


@gluon.jit
def layout_of_the_kernel(bar):
    gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def nested(bar):
    gl.warp_specialize([(nothing, (bar,)), (nothing, (bar,))], [1], [24])


SPECIALIZE = """
first = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
mbarrier.init(first, count=1)
mbarrier.init(second, count=1)
gl.warp_specialize([(default, (first,)), (one, (second,)), (two, (first,))], [1, 1], [24, 24])
"""


def specializing(default, one, two):
    """A kernel with these partitions."""
    return kernel_of(gluon.jit, "x", SPECIALIZE, gl=gl, mbarrier=mbarrier, default=default, one=one, two=two)


@table("functions, error, text", [
    ((nothing, nothing, nested), UnsupportedError, "cannot be called inside a partition"),
    ((nested, nothing, nothing), UnsupportedError, "cannot be called inside a partition"),
    ((nothing, layout_of_the_kernel, nothing), ValueError,
     "Layout has 4 warps per CTA, but the context requires 1 warps per CTA"),
])  # fmt: skip
def test_misuse(functions, error, text):
    with pytest.raises(error, match=text):
        specializing(*functions)[(1,)](torch.zeros(1))
    assert error is UnsupportedError or said_by_the_compiler(specializing(*functions), torch.float32)
    assert not said_by_the_compiler(specializing(nothing, nothing, nothing), torch.float32)


@gluon.jit
def await_word(word, least):
    while gl.atomic_add(word, 0, sem="acquire", scope="gpu") < least:
        pass


@gluon.jit
def poll(flags, bar, rounds):
    """Wait for the other program, and let the default partition go on."""
    for i in range(rounds):
        await_word(flags + gl.program_id(0), i + 1)
        mbarrier.arrive(bar, count=1)


@gluon.jit
def answer(flags, bar, out, rounds):
    me = gl.program_id(0)
    for i in range(rounds):
        if me == 0:
            gl.atomic_add(flags + 1, 1, sem="release", scope="gpu")
        mbarrier.wait(bar, i & 1)
        gl.store(out + me, i + 1)
        if me == 1:
            gl.atomic_add(flags, 1, sem="release", scope="gpu")


@gluon.jit
def talk(flags, out, rounds):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(answer, (flags, bar, out, rounds)), (poll, (flags, bar, rounds))], [1], [24])


@gluon.jit
def poll_and_tell(flags, here: gl.constexpr):
    await_word(flags + here, 1)
    gl.atomic_add(flags + here + 1, 1)


@gluon.jit
def two_polls(flags):
    """Both partitions poll; the last program makes the first one go on, and that one the second."""
    if gl.program_id(0) == 0:
        gl.warp_specialize([(poll_and_tell, (flags, 1)), (poll_and_tell, (flags, 0))], [1], [24])
    else:
        gl.atomic_add(flags, 1)


def test_partitions_wait_for_other_programs():
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    talk[(2,)](flags, out, 12)
    assert out.tolist() == [12, 12]
    flags = torch.zeros(3, dtype=torch.int32)
    two_polls[(2,)](flags)
    assert flags.tolist() == [1, 1, 1]
    with interpreter.configured(timeout_s=0.3), pytest.raises(interpreter.DeadlockError, match="all programs of the"):
        talk[(1,)](flags.zero_(), out, 3)


@gluon.jit
def wait_for(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def fail(bar):
    gl.device_assert(False, "on purpose")


@table("functions, texts", [
    ((wait_for, wait_for, nothing), ["the default partition waits for mbarrier 'first' with phase=0",
                                     "partition 1 (wait_for) waits for mbarrier 'second' with phase=0"]),
    ((nothing, wait_for, nothing), ["partition 1 (wait_for) waits for mbarrier 'second'"]),
])  # fmt: skip
def test_a_deadlock_names_partitions_and_barriers(functions, texts):
    with pytest.raises(interpreter.DeadlockError) as caught:
        specializing(*functions)[(3,)](torch.zeros(1))
    assert all(text in str(caught.value) for text in texts)
    assert caught.value.kernel == "kernel"


@table("functions, note", [
    ((wait_for, wait_for, fail), "in partition 2 (fail)"), ((fail, wait_for, wait_for), "in kernel 'kernel'"),
])  # fmt: skip
def test_an_error_in_one_partition_ends_all(functions, note):
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(AssertionError, match="on purpose") as caught:
            specializing(*functions)[(2,)](torch.zeros(1))
        assert any(note in line for line in caught.value.__notes__)
    until = time.perf_counter() + 60
    while threading.active_count() > max(before, 20) and time.perf_counter() < until:
        time.sleep(0.01)
    assert threading.active_count() <= max(before, 20)  # the pool keeps some, none is left waiting
