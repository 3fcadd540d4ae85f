"""gl.warp_specialize on the CPU: partitions that wait for each other, for other programs, and in vain."""

import threading
import time

import pytest
import torch
from gluon_kernels import Notes, describe, said_by_the_compiler
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from iris_core.errors import UnsupportedError
from iris_gluon._compat import tma_load, tma_store
from iris_gluon.interpreter.errors import MBarrierError, RaceError, UninitializedMemoryError
from iris_triton import _compat as _triton
from iris_triton import interpreter
from iris_triton.testing.compile_only import compile_for


# -- three partitions: load, add, store -------------------------------------------------------------------------------
@gluon.jit
def load_part(x_desc, y_desc, out_desc, barriers, buffers, row, steps, BUG: gl.constexpr):
    in_empty, in_ready, _, _ = barriers
    x_bufs, y_bufs, _ = buffers
    COUNT: gl.constexpr = x_bufs.type.shape[0]
    for i in range(steps):
        ready = in_ready.index(i % COUNT)
        mbarrier.wait(in_empty.index(i % COUNT), (i // COUNT & 1) ^ 1)
        mbarrier.expect(ready, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
        tma_load(x_desc, [row, i * 32], ready, x_bufs.index(i % COUNT))
        tma_load(y_desc, [row, i * 32], ready, y_bufs.index(i % COUNT))


@gluon.jit
def store_part(x_desc, y_desc, out_desc, barriers, buffers, row, steps, BUG: gl.constexpr):
    _, _, out_empty, out_ready = barriers
    _, _, out_bufs = buffers
    COUNT: gl.constexpr = out_bufs.type.shape[0]
    for i in range(steps):
        mbarrier.wait(out_ready.index(i % COUNT), i // COUNT & 1)
        tma_store(out_desc, [row, i * 32], out_bufs.index(i % COUNT))
        if BUG != "frees too early":
            tma.store_wait(COUNT - 1)
            mbarrier.arrive(out_empty.index((i - (COUNT - 1)) % COUNT), count=1, pred=i >= COUNT - 1)
        else:
            mbarrier.arrive(out_empty.index(i % COUNT), count=1)
    tma.store_wait(0)


@gluon.jit
def add_part(x_desc, y_desc, out_desc, barriers, buffers, row, steps, BUG: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    in_empty, in_ready, out_empty, out_ready = barriers
    x_bufs, y_bufs, out_bufs = buffers
    COUNT: gl.constexpr = x_bufs.type.shape[0]
    OUT: gl.constexpr = out_bufs.type.shape[0]
    for i in range(steps):
        place = i % COUNT
        if BUG != "no wait for data":
            mbarrier.wait(in_ready.index(place), i // COUNT & 1)
        x = x_bufs.index(place).load(layout)
        if BUG == "gives back too early":
            fence_async_shared()
            mbarrier.arrive(in_empty.index(place), count=1)
        y = y_bufs.index(place).load(layout)
        if BUG != "gives back too early":
            if BUG != "no fence before giving back":
                fence_async_shared()
            mbarrier.arrive(in_empty.index(place), count=1)
        if BUG != "no wait for room":
            mbarrier.wait(out_empty.index(i % OUT), (i // OUT & 1) ^ 1)
        out_bufs.index(i % OUT).store(x + y)
        if BUG != "no fence before storing":
            fence_async_shared()
        mbarrier.arrive(out_ready.index(i % OUT), count=1)


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def add_specialized(x_desc, y_desc, out_desc, steps, COUNT: gl.constexpr, OUT: gl.constexpr, BUG: gl.constexpr):
    x_bufs = gl.allocate_shared_memory(gl.float32, [COUNT, 8, 32], x_desc.layout)
    y_bufs = gl.allocate_shared_memory(gl.float32, [COUNT, 8, 32], y_desc.layout)
    out_bufs = gl.allocate_shared_memory(gl.float32, [OUT, 8, 32], out_desc.layout)
    barriers = (make_barriers(COUNT), make_barriers(COUNT), make_barriers(OUT), make_barriers(OUT))
    buffers, row = (x_bufs, y_bufs, out_bufs), gl.program_id(0) * 8
    arguments = (x_desc, y_desc, out_desc, barriers, buffers, row, steps, BUG)
    gl.warp_specialize([(add_part, arguments), (load_part, arguments), (store_part, arguments)], [1, 1], [24, 24])


def add(rows, columns, count, out_count, bug=""):
    x, y, out = torch.randn(rows, columns), torch.randn(rows, columns), torch.zeros(rows, columns)
    described = [describe(t, [8, 32]) for t in (x, y, out)]
    add_specialized[(-(-rows // 8),)](*described, -(-columns // 32), count, out_count, bug)
    return torch.equal(out, x + y)


@table("rows, columns", [(16, 256), (20, 100)])
def test_three_partitions(rows, columns):
    for count, out_count in ((1, 1), (2, 1), (1, 2), (3, 2)):
        assert add(rows, columns, count, out_count)


@table("bug, text", [
    ("frees too early", "store overwrites 'out_bufs.*TMA store.*may still be reading"),
    ("no wait for data", "load reads 'x_bufs.*in the default partition, while the TMA load|never been written"),
    ("gives back too early", "TMA load overwrites 'y_bufs.*which the default partition has read.*nothing orders the two"
                             "|goes through the async proxy"),
    ("no fence before giving back", "TMA load of 'x_bufs.*async proxy.*not ordered with the load"),
    ("no wait for room", "store overwrites 'out_bufs|too many|for the phase before arriving again"),
    ("no fence before storing", "TMA store of 'out_bufs.*async proxy.*not ordered with the store"),
])  # fmt: skip
def test_mistakes_are_found(bug, text):
    for count in [1, 2]:
        with pytest.raises((RaceError, MBarrierError, UninitializedMemoryError), match=text):
            add(8, 32 * 12, count, count, bug)


# -- results, arguments, warps ----------------------------------------------------------------------------------------
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


@_triton.core.builtin
def note_warps(notes, _semantic=None, _generator=None):
    warps = _semantic.builder.options.num_warps, _triton.gluon_warps(_semantic, _generator)
    _triton.core._unwrap_if_constexpr(notes).seen.append(warps)


@gluon.jit
def notes_warps(notes: gl.constexpr):
    note_warps(notes)


@gluon.jit
def notes_all_warps(notes: gl.constexpr):
    notes_warps(notes)
    gl.warp_specialize([(notes_warps, (notes,)), (notes_warps, (notes,))], [1], [24])


def test_options_are_those_of_the_kernel_also_in_partitions():
    here, there = Notes(), Notes()
    notes_all_warps[(1,)](here)
    compile_for(notes_all_warps, (there,))
    assert set(here.seen) == set(there.seen) == {(4, 4), (4, 1)}


@gluon.jit
def asks_for_warps(x, num_warps: gl.constexpr):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    gl.store(x + i, gl.num_warps())


@table("warps", [1, 2, 8])
def test_warps_that_are_an_argument_and_an_option(warps):
    x = torch.zeros(128, dtype=torch.int32)
    asks_for_warps[(1,)](x, num_warps=warps)
    assert (x == warps).all()


@gluon.jit
def nothing():
    pass


@gluon.jit
def layout_of_the_kernel():
    gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def nested():
    gl.warp_specialize([(nothing, ()), (nothing, ())], [1], [24])


@gluon.jit
def specialize(what: gl.constexpr):
    if what == "nested":
        gl.warp_specialize([(nothing, ()), (nested, ())], [1], [24])
    elif what == "nested in default":
        gl.warp_specialize([(nested, ()), (nothing, ())], [1], [24])
    elif what == "layout":
        gl.warp_specialize([(nothing, ()), (layout_of_the_kernel, ())], [1], [24])
    else:
        gl.warp_specialize([(nothing, ()), (nothing, ())], [1], [24])


@table("what, error, text", [
    ("nested", UnsupportedError, "cannot be called inside a partition"),
    ("nested in default", UnsupportedError, "cannot be called inside a partition"),
    ("layout", ValueError, "Layout has 4 warps per CTA, but the context requires 1 warps per CTA"),
])  # fmt: skip
def test_misuse(what, error, text):
    with pytest.raises(error, match=text):
        specialize[(1,)](what)
    assert what != "layout" or said_by_the_compiler(specialize, what)
    assert not said_by_the_compiler(specialize, "")


# -- waiting for other programs ---------------------------------------------------------------------------------------
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


# -- failures ---------------------------------------------------------------------------------------------------------
@gluon.jit
def wait_for(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def fail():
    gl.device_assert(False, "on purpose")


@gluon.jit
def mutual(what: gl.constexpr):
    first = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    if what == "deadlock":
        gl.warp_specialize([(wait_for, (first,)), (wait_for, (second,)), (nothing, ())], [1, 1], [24, 24])
    elif what == "worker":
        gl.warp_specialize([(wait_for, (first,)), (wait_for, (second,)), (fail, ())], [1, 1], [24, 24])
    elif what == "default":
        gl.warp_specialize([(fail, ()), (wait_for, (second,)), (wait_for, (first,))], [1, 1], [24, 24])
    elif what == "workers alone":
        gl.warp_specialize([(nothing, ()), (wait_for, (second,))], [1], [24])


@table("what, texts", [
    ("deadlock", ["the default partition waits for mbarrier 'first' with phase=0",
                  "partition 1 (wait_for) waits for mbarrier 'second' with phase=0"]),
    ("workers alone", ["partition 1 (wait_for) waits for mbarrier 'second'"]),
])  # fmt: skip
def test_a_deadlock_names_partitions_and_barriers(what, texts):
    with pytest.raises(interpreter.DeadlockError) as caught:
        mutual[(3,)](what)
    assert all(text in str(caught.value) for text in texts)
    assert caught.value.kernel == "mutual"


@pytest.mark.parametrize(("what", "note"), [("worker", "in partition 2 (fail)"), ("default", "in kernel 'mutual'")])
def test_an_error_in_one_partition_ends_all(what, note):
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(AssertionError, match="on purpose") as caught:
            mutual[(2,)](what)
        assert any(note in line for line in caught.value.__notes__)
    until = time.perf_counter() + 60
    while threading.active_count() > max(before, 20) and time.perf_counter() < until:
        time.sleep(0.01)
    assert threading.active_count() <= max(before, 20)  # the pool keeps some, none is left waiting
    assert add(16, 64, 2, 2)
