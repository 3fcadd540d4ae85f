"""Gluon kernels on the CPU: layouts, elementwise operations, reductions, shapes, and what is refused."""

import pytest
import torch
import triton.language as tl
from gluon_kernels import Notes, load_block, note, said_by_the_compiler
from kernel_text import kernel_of
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.errors import UnsupportedError
from iris_gluon import _compat, blocked_layout, default_layout, warp_size
from iris_triton.testing.compile_only import compile_for

LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
OTHER = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])


@gluon.jit
def double(x, out, n, layout: gl.constexpr, BLOCK: gl.constexpr):
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out + i, 2 * gl.load(x + i, mask=i < n, other=1.0), mask=i < n)


ONE, TWO = (gl.constexpr(gl.BlockedLayout([n], [32], [4], [0])) for n in (1, 2))


@table("text, error, said", [
    ("gl.store(x + gl.arange(0, 256, layout=TWO), gl.load(x + i))", ValueError,
     "Layout mismatch in broadcast: BlockedLayout.*2.*vs BlockedLayout.*1"),
    ("gl.convert_layout(i, TWO, assert_trivial=True)", TypeError, "is not trivial.*The linear layouts are"),
    ("tl.arange(0, 256)", TypeError, "missing 1 required positional argument: 'layout'"),
])  # fmt: skip
def test_misuse_has_the_compilers_message(text, error, said):
    kernel = kernel_of(gluon.jit, "x", f"i = gl.arange(0, 256, layout=ONE)\n{text}", gl=gl, tl=tl, ONE=ONE, TWO=TWO)
    with pytest.raises(error, match=f"(?s){said}"):
        kernel[(1,)](torch.zeros(256))
    assert said_by_the_compiler(kernel, torch.float32)


@gluon.jit
def mixed_lanes(first: gl.constexpr, second: gl.constexpr):
    gl.arange(0, 256, layout=gl.BlockedLayout([1], [first], [4], [0]))
    gl.arange(0, 256, layout=gl.BlockedLayout([1], [second], [4], [0]))


def test_a_layout_must_fit_the_launch_and_the_others():
    x = torch.zeros(128)
    with pytest.raises(ValueError, match="Layout has 4 warps per CTA, but the context requires 8 warps per CTA"):
        double[(1,)](x, x, 128, gl.BlockedLayout([1], [32], [4], [0]), BLOCK=128, num_warps=8)
    with pytest.raises(ValueError, match="16 threads per warp, but the module specifies 32 threads per warp"):
        double[(1,)](x, x, 128, gl.BlockedLayout([1], [16], [4], [0]), BLOCK=128)
    for each in (32, 64):
        mixed_lanes[(1,)](each, each)
    with pytest.raises(ValueError, match="32 threads per warp, but the module specifies 64"):
        mixed_lanes[(1,)](64, 32)
    with pytest.raises(UnsupportedError, match="num_ctas must be 1, not 2"):
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
    with pytest.raises(ValueError, match="powers of 2"):
        blocked_layout([48], 4, 32)
    with pytest.raises(ValueError, match="outside of JIT functions"):
        default_layout([16])
