"""Gluon kernels on the CPU: layouts, operations, what is refused; partitions that wait, also in vain."""

import threading
import time

import pytest
import torch
import triton.language as tl
from gluon_kernels import Notes, load_block, note, said_by_the_compiler
from kernel_text import kernel_of
from tables import raises, table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from iris_core.errors import UnsupportedError
from iris_gluon import _compat, blocked_layout, default_layout, warp_size
from iris_triton import interpreter
from iris_triton.testing.compile_only import compile_for

LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def double(x, out, n, layout: gl.constexpr, BLOCK: gl.constexpr):
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out + i, 2 * gl.load(x + i, mask=i < n, other=1.0), mask=i < n)


ONE, TWO = (gl.constexpr(gl.BlockedLayout([n], [32], [4], [0])) for n in (1, 2))


@table("text, error, key", [
    ("gl.store(x + gl.arange(0, 256, layout=TWO), gl.load(x + i))", ValueError, "unlike"),
    ("gl.convert_layout(i, TWO, assert_trivial=True)", TypeError, "not trivial"),
    ("tl.arange(0, 256)", TypeError, "missing"),
])  # fmt: skip
def test_misuse_has_the_compilers_message(text, error, key):
    kernel = kernel_of(gluon.jit, "x", f"i = gl.arange(0, 256, layout=ONE)\n{text}", gl=gl, tl=tl, ONE=ONE, TWO=TWO)
    with raises(error, f"layout.{key}"):
        kernel[(1,)](torch.zeros(256))
    assert said_by_the_compiler(kernel, torch.float32)


LANES = "gl.arange(0, 256, layout=gl.BlockedLayout([1], [{}], [4], [0]))\n"


def test_a_layout_must_fit_the_launch_and_the_others():
    x = torch.zeros(128)
    with raises(ValueError, "layout.warps", has=4, warps=8):
        double[(1,)](x, x, 128, gl.BlockedLayout([1], [32], [4], [0]), BLOCK=128, num_warps=8)
    with raises(ValueError, "layout.threads", has=16, threads=32):
        double[(1,)](x, x, 128, gl.BlockedLayout([1], [16], [4], [0]), BLOCK=128)
    for lanes in ((32, 32), (64, 64)):
        kernel_of(gluon.jit, "", "".join(map(LANES.format, lanes)), gl=gl)[(1,)]()
    with raises(ValueError, "layout.threads", has=32, threads=64):
        kernel_of(gluon.jit, "", "".join(map(LANES.format, (64, 32))), gl=gl)[(1,)]()
    with raises(UnsupportedError, name="num_ctas"):
        questions[(1,)](x, num_ctas=2)


@table("result", [
    "gl.permute(value, [1, 0])", "gl.reshape(value, [64, 32])", "gl.join(value, value)",
    "gl.split(gl.join(value, value))[0]", "gl.sum(value, axis=0)", "gl.ravel(value)",
])  # fmt: skip
def test_layouts_of_results_are_the_compilers(result):
    """The compiler is asked by compiling the kernel; here and there the layout is noted while it runs."""
    text = f"value = load_block(x, 32, 64, LAYOUT)\nnote(layouts, ({result}).type.layout)"
    names = {"gl": gl, "load_block": load_block, "note": note, "LAYOUT": LAYOUT}
    kernel = kernel_of(gluon.jit, "x, layouts: gl.constexpr", text, **names)
    here, there = Notes(), Notes()
    kernel[(1,)](torch.zeros(32, 64), here)
    compile_for(kernel, (torch.float32, there))
    assert len(here.seen) == 1
    assert here.seen == there.seen


@gluon.jit
def questions(out):
    gl.store(out, gl.num_warps())
    gl.store(out + 1, gl.num_ctas())
    gl.store(out + 2, warp_size())
    barrier()


barrier = _compat.barrier


@table("options, warps", [({"num_warps": 8}, 8), ({}, 4)])
def test_the_launch_answers_questions(options, warps):
    out = torch.zeros(3, dtype=torch.int32)
    questions[(1,)](out, **options)
    assert out.tolist() == [warps, 1, 32]


@table("text", [
    "j = gl.set_auto_layout(i, ONE) + gl.full([128], 3, gl.int32) - 3\ngl.store(x + j, gl.load(x + j) + 1)",
    "gl.store(x + gl.arange(0, 128, layout=ONE), gl.set_auto_layout(gl.load(x + i), ONE) + 1)",
    "gl.store(x + gl.arange(0, 128, layout=ONE), (i + 1).to(gl.float32))",
    "gl.store(x + i, gl.arange(1, 129, layout=ONE).to(gl.float32))",
    "j = gl.arange(0, 128, layout=gl.CoalescedLayout())\ngl.store(x + j, gl.load(x + j) + 1)",
])  # fmt: skip
def test_blocks_that_get_a_layout(text):
    kernel = kernel_of(gluon.jit, "x", f"i = gl.arange(0, 128)\n{text}", gl=gl, ONE=ONE)
    x = torch.arange(128.0)
    kernel[(1,)](x)
    assert torch.equal(x, torch.arange(128.0) + 1)
    assert compile_for(kernel, (torch.float32,))


def test_layouts_cover_a_row_before_they_go_to_the_next():
    assert blocked_layout([64, 64], 4, 32, 4).threads_per_warp == [2, 16]
    assert blocked_layout([64, 64], 4, 64, 4).threads_per_warp == [4, 16]
    assert blocked_layout([64, 512], 4, 32, 4).warps_per_cta == [1, 4]
    with raises(ValueError, "layout.powers"):
        blocked_layout([48], 4, 32)
    with raises(ValueError, "layout.outside"):
        default_layout([16])


nothing = kernel_of(gluon.jit, "bar", "pass")


layout_of_the_kernel = kernel_of(gluon.jit, "bar", "gl.arange(0, 128, layout=ONE)", gl=gl, ONE=ONE)
sums = kernel_of(gluon.jit, "x, i", "return gl.sum(x, axis=0), x + i", gl=gl)
RESULTS = """
i = gl.arange(0, 128, layout=ONE)
total, moved = gl.warp_specialize([(sums, (gl.load(x + i), i)), (nothing, (x,))], [1], [24])
gl.store(out + i, moved)
gl.store(out + 128, total)
"""


def test_results_of_the_default_partition():
    x, out = torch.randn(128), torch.zeros(129)
    kernel_of(gluon.jit, "x, out", RESULTS, gl=gl, ONE=ONE, sums=sums, nothing=nothing)[(1,)](x, out)
    torch.testing.assert_close(out, torch.cat([x + torch.arange(128), x.sum()[None]]))


INNER = "gl.warp_specialize([(nothing, (bar,)), (nothing, (bar,))], [1], [24])"
nested = kernel_of(gluon.jit, "bar", INNER, gl=gl, nothing=nothing)
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
    with interpreter.configured(timeout_s=0.3), raises(interpreter.DeadlockError, "memory.all"):
        talk[(1,)](flags.zero_(), out, 3)


@gluon.jit
def wait_for(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def fail(bar):
    gl.device_assert(False, "on purpose")


@table("functions, error, keys", [
    ((wait_for, wait_for, nothing), interpreter.DeadlockError, ["mbarrier.default waits", "mbarrier.partition waits"]),
    ((nothing, wait_for, nothing), interpreter.DeadlockError, ["mbarrier.partition waits"]),
    *((functions, UnsupportedError, ["names"])
      for functions in ((nothing, nothing, nested), (nested, nothing, nothing))),
    ((nothing, layout_of_the_kernel, nothing), ValueError, ["layout.warps"]),
])  # fmt: skip
def test_deadlocks_and_misuse_of_partitions(functions, error, keys):
    kernel = specializing(*functions)
    with raises(error, *keys, has=4, warps=1, name="gl.warp_specialize") as caught:
        kernel[(3,)](torch.zeros(1))
    assert getattr(caught.value, "kernel", "kernel") == "kernel"
    assert error is not ValueError or said_by_the_compiler(kernel, torch.float32)
    assert not said_by_the_compiler(specializing(nothing, nothing, nothing), torch.float32)


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
