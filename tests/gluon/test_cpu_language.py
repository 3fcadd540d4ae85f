"""Gluon kernels on the CPU: layouts, elementwise operations, reductions, shapes, and what is refused."""

import pytest
import torch
import triton
import triton.language as tl
from gluon_kernels import Notes, load_block, note, said_by_the_compiler, store_block
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.errors import UnsupportedError
from iris_gluon import _compat, blocked_layout, default_layout, warp_size
from iris_triton.language.blocks import lanes
from iris_triton.testing.compile_only import compile_for
from iris_triton.testing.languages import in_gluon

LAYOUT = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
OTHER = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])


# -- layouts ----------------------------------------------------------------------------------------------------------
@gluon.jit
def double(x, out, n, layout: gl.constexpr, BLOCK: gl.constexpr):
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out + i, 2 * gl.load(x + i, mask=i < n, other=1.0), mask=i < n)


@table("lanes, warps", [(32, 1), (32, 8), (64, 1), (64, 4)])
def test_one_dimension(lanes, warps):
    x, out = torch.randn(1000), torch.zeros(1000)
    double[(8,)](x, out, 1000, gl.BlockedLayout([2], [lanes], [warps], [0]), BLOCK=128, num_warps=warps)
    assert torch.equal(out, 2 * x)


@gluon.jit
def two_dimensions(x, rows, columns, out, turned, layout: gl.constexpr, other: gl.constexpr):
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, layout))
    value = load_block(x, 16, 32, layout)
    gl.store(rows + r, gl.sum(value, axis=1))
    highest = gl.max(value, axis=0)
    gl.store(columns + c, highest)
    below = gl.convert_layout(value - gl.expand_dims(highest, 0), other)
    store_block(out, gl.where(below > -1, below, -below))
    flat = gl.load(x + gl.arange(0, 512, layout=gl.BlockedLayout([2], [32], [4], [0])))
    store_block(turned, gl.permute(gl.convert_layout(gl.reshape(flat, [128, 4]), layout), [1, 0]))


def test_two_dimensions_reductions_and_conversions():
    x, turned = torch.randn(16, 32), torch.zeros(4, 128)
    rows, columns, out = torch.zeros(16), torch.zeros(32), torch.zeros(16, 32)
    two_dimensions[(1,)](x, rows, columns, out, turned, LAYOUT, OTHER)
    torch.testing.assert_close(rows, x.sum(1))
    assert torch.equal(columns, x.max(0).values)
    below = x - x.max(0).values
    assert torch.equal(out, torch.where(below > -1, below, -below))
    assert torch.equal(turned, x.view(128, 4).T)


@gluon.jit
def misuse(what: gl.constexpr, x, lanes: gl.constexpr, warps: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [lanes], [warps], [0])
    two: gl.constexpr = gl.BlockedLayout([2], [lanes], [warps], [0])
    i = gl.arange(0, 256, layout=one)
    if what == "pointers":
        gl.store(x + gl.arange(0, 256, layout=two), gl.load(x + i))
    elif what == "addition":
        i + gl.arange(0, 256, layout=two)
    elif what == "mask":
        gl.load(x + i, mask=gl.arange(0, 256, layout=two) < 3)
    elif what == "expand":
        i[:, None]
    elif what == "trivial":
        gl.convert_layout(i, two, assert_trivial=True)
    elif what == "no layout":
        tl.arange(0, 256)
    elif what == "rank":
        gl.full([16, 16], 0, gl.int32, one)
    elif what == "clusters":
        gl.num_ctas()


@table("what, error, text", [
    ("pointers", ValueError, "Layout mismatch in broadcast: BlockedLayout.*2.*vs BlockedLayout.*1"),
    ("addition", ValueError, "Layout mismatch in broadcast"),
    ("mask", ValueError, "Layout mismatch in broadcast"),
    ("expand", ValueError, "expected expand_dims input to have a SliceLayout"),
    ("trivial", TypeError, "is not trivial.*The linear layouts are"),
    ("no layout", TypeError, "missing 1 required positional argument: 'layout'"),
    ("rank", AssertionError, "tensor shape and layout rank mismatch"),
])  # fmt: skip
def test_misuse_has_the_compilers_message(what, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        misuse[(1,)](what, torch.zeros(256), 32, 4)
    assert said_by_the_compiler(misuse, what, torch.float32, 32, 4)


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
        misuse[(1,)]("clusters", torch.zeros(256), 32, 4, num_ctas=2)


@gluon.jit
def inferred(x, kind: gl.constexpr, layout: gl.constexpr, layouts: gl.constexpr):
    """Tell the host which layout the result of an operation has."""
    value = load_block(x, 32, 64, layout)
    if kind == "permute":
        result = gl.permute(value, [1, 0])
    elif kind == "reshape":
        result = gl.reshape(value, [64, 32])
    elif kind == "join":
        result = gl.join(value, value)
    elif kind == "split":
        result, _ = gl.split(gl.join(value, value))
    elif kind == "sum":
        result = gl.sum(value, axis=0)
    elif kind == "ravel":
        result = gl.ravel(value)
    note(layouts, result.type.layout)


@table("kind", ["permute", "reshape", "join", "split", "sum", "ravel"])
def test_layouts_of_results_are_the_compilers(kind):
    """The compiler is asked by compiling the kernel; here and there the layout is noted while it runs."""
    here, there = Notes(), Notes()
    inferred[(1,)](torch.zeros(32, 64), kind, LAYOUT, here)
    compile_for(inferred, (torch.float32, kind, LAYOUT, there))
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


@gluon.jit
def without_layout(x, what: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128)
    if what == "set":
        j = gl.set_auto_layout(i, layout) + gl.full([128], 3, gl.int32) - 3
        gl.store(x + j, gl.load(x + j) + 1)
    elif what == "loaded, then set":
        gl.store(x + gl.arange(0, 128, layout=layout), gl.set_auto_layout(gl.load(x + i), layout) + 1)
    elif what == "stored value":
        gl.store(x + gl.arange(0, 128, layout=layout), (i + 1).to(gl.float32))
    elif what == "pointers beside a value":
        gl.store(x + i, gl.arange(1, 129, layout=layout).to(gl.float32))
    elif what == "coalesced":
        j = gl.arange(0, 128, layout=gl.CoalescedLayout())
        gl.store(x + j, gl.load(x + j) + 1)


@table("what", ["set", "loaded, then set", "stored value", "pointers beside a value", "coalesced"])
def test_blocks_that_get_a_layout(what):
    x = torch.arange(128.0)
    without_layout[(1,)](x, what)
    assert torch.equal(x, torch.arange(128.0) + 1)
    assert compile_for(without_layout, (torch.float32, what))


# -- beside Triton ----------------------------------------------------------------------------------------------------
@triton.jit
def add_one(x, offsets):
    return tl.load(x + offsets) + 1


@gluon.jit
def calls_triton(x, out):
    i = gl.arange(0, 32, layout=default_layout([32]))
    gl.store(out + i, add_one(x, i))


@triton.jit
def triton_caller(x, out):
    i = tl.arange(0, 32)
    tl.store(out + i, add_one(x, i))


def test_device_functions_of_triton_may_be_called():
    x, out = torch.arange(32.0), torch.zeros(32)
    calls_triton[(1,)](x, out)
    assert torch.equal(out, x + 1)
    triton_caller[(1,)](x, out)
    calls_triton[(1,)](out, out)
    assert torch.equal(out, x + 2)


@triton.jit
def numbers(x, out, dtype: tl.constexpr):
    i = lanes(64)
    value = tl.load(x + i).to(dtype)
    result = value * value - value / 3 + tl.maximum(value, 1) + tl.exp(tl.cast(value, tl.float32)).to(dtype)
    tl.store(out + i, result)


@table("dtype, element", [(torch.float32, tl.float32), (torch.float16, tl.float16), (torch.bfloat16, tl.bfloat16)])
def test_arithmetic_is_that_of_the_triton_dialect(dtype, element):
    x, out, expected = torch.randn(64), torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    in_gluon(numbers)[(1,)](x, out, element)
    numbers[(1,)](x, expected, element)
    assert torch.equal(out, expected)


# -- layouts that fit -------------------------------------------------------------------------------------------------
@table("warp, vector", [(32, 1), (32, 8), (64, 1), (64, 8)])
def test_layouts_have_as_many_lanes_and_warps_as_asked(warp, vector):
    for shape in [[1], [8], [4096], [1, 64], [64, 1], [2, 2], [128, 256], [4, 8, 16]]:
        layout = blocked_layout(shape, num_warps=8, warp_size=warp, vector=vector)
        assert torch.tensor(layout.threads_per_warp).prod() == warp
        assert torch.tensor(layout.warps_per_cta).prod() == 8
        assert layout.order == list(range(len(shape)))[::-1]
        assert layout.size_per_thread == [1] * (len(shape) - 1) + [min(vector, shape[-1])]


def test_layouts_cover_a_row_before_they_go_to_the_next():
    assert blocked_layout([64, 64], 4, 32, 4).threads_per_warp == [2, 16]
    assert blocked_layout([64, 64], 4, 64, 4).threads_per_warp == [4, 16]
    assert blocked_layout([64, 512], 4, 32, 4).warps_per_cta == [1, 4]
    with pytest.raises(ValueError, match="powers of 2"):
        blocked_layout([48], 4, 32)


@gluon.jit
def fill_default(x, R: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = default_layout([R, C], vector=4)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    gl.store(x + r[:, None] * C + c[None, :], r[:, None] + c[None, :])


def test_default_layouts_in_kernels():
    x = torch.zeros(16, 32, dtype=torch.int32)
    fill_default[(1,)](x, R=16, C=32, num_warps=2)
    assert torch.equal(x, torch.arange(16)[:, None].int() + torch.arange(32).int())
    with pytest.raises(RuntimeError, match="default_layout can be called in kernels only"):
        default_layout([16])
