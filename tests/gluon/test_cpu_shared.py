"""Shared memory of Gluon kernels on the CPU: views, contents, layouts of views, and what is refused."""

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_gluon.interpreter  # noqa: F401
from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter.errors import UninitializedMemoryError
from iris_triton import interpreter
from iris_triton.testing.compile_only import compile_for


@pytest.fixture(autouse=True)
def _executor():
    interpreter.enable()


@gluon.jit
def load_block(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.load(x + r[:, None] * COLUMNS + c[None, :])


@gluon.jit
def store_block(x, value):
    layout: gl.constexpr = value.type.layout
    r = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(x + r[:, None] * value.shape[1] + c[None, :], value)


@gluon.jit
def views(x, out, kind: gl.constexpr, shared: gl.constexpr, one: gl.constexpr):
    memory = gl.allocate_shared_memory(x.dtype.element_ty, [2, 32, 64], shared)
    value = load_block(x, 32, 64, one)
    memory.index(1).store(value)
    memory.index(0).store(-value)
    tile = memory.index(1)
    if kind == "whole":
        store_block(out, tile.load(one))
    elif kind == "other":
        store_block(out, memory.index(0).load(one))
    elif kind == "permute":
        store_block(out, tile.permute([1, 0]).load(one))
    elif kind == "slice rows":
        store_block(out, tile.slice(8, 16).load(one))
    elif kind == "slice columns":
        store_block(out, tile.slice(32, 16, dim=1).load(one))
    elif kind == "store to a slice":
        part = tile.slice(16, 16, dim=1)
        part.store(part.load(one) + 100)
        store_block(out, tile.load(one))
    elif kind == "reshape":
        store_block(out, tile.reshape([64, 32]).load(one))
    elif kind == "initial value":
        again = gl.allocate_shared_memory(x.dtype.element_ty, [32, 64], shared, value)
        store_block(out, again.load(one))
    elif kind == "slice of permuted":
        store_block(out, tile.permute([1, 0]).slice(16, 32).load(one))


def expected_view(kind, x):
    if kind in ("whole", "initial value"):
        return x
    if kind == "store to a slice":
        changed = x.clone()
        changed[:, 16:32] += 100
        return changed
    return {
        "other": -x,
        "permute": x.T,
        "slice rows": x[8:24],
        "slice columns": x[:, 32:48],
        "reshape": x.reshape(64, 32),
        "slice of permuted": x.T[16:48],
    }[kind]


SHARED = {
    "plain": gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]),
    "swizzled": gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0]),
    "nvmma": gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2),
}
BLOCKED = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
KINDS = [
    "whole", "other", "permute", "slice rows", "slice columns", "store to a slice", "reshape", "initial value",
    "slice of permuted",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_views(kind):
    for shared in SHARED:
        x, out = torch.randn(32, 64), torch.zeros(32, 64)
        views[(1,)](x, out, kind, SHARED[shared], BLOCKED)
        expected = expected_view(kind, x)
        assert torch.equal(out.reshape(-1)[: expected.numel()].reshape(expected.shape), expected)


def test_element_types():
    for dtype in [torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float64]:
        x = torch.randint(-100, 100, (32, 64)).to(dtype)
        out = torch.zeros(32, 64, dtype=dtype)
        views[(1,)](x, out, "whole", SHARED["plain"], BLOCKED)
        assert torch.equal(out, x)


@gluon.jit
def view_layouts(x, kind: gl.constexpr, shared: gl.constexpr, notes: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float16, [64, 128], shared)
    if kind == "permute":
        note(notes, memory.permute([1, 0]).type.layout)
    else:
        note(notes, memory.reshape([64, 2, 64]).type.layout)


@triton.constexpr_function
def note(notes, layout):
    notes.seen.append(layout)


class Notes:
    """An argument of a kernel in which constexpr functions leave something behind."""

    def __init__(self):
        self.seen = []


@pytest.mark.parametrize("kind", ["permute", "reshape"])
@pytest.mark.parametrize("shared", [SHARED["swizzled"], gl.NVMMASharedLayout(128, 16, 2)])
def test_layouts_of_views_are_the_compilers(kind, shared):
    here, there = Notes(), Notes()
    try:
        compile_for(view_layouts, (torch.float32, kind, shared, there))
    except (triton.CompilationError, RuntimeError) as error:
        pytest.skip(f"the compiler refuses it: {error}")
    view_layouts[(1,)](torch.zeros(1), kind, shared, here)
    assert len(here.seen) == 1
    assert here.seen == there.seen


@gluon.jit
def misuse(x, what: gl.constexpr, place):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    one: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.float32, [4, 16, 16], plain)
    if what == "uninitialised":
        memory.index(1).load(one)
    elif what == "partly uninitialised":
        tile = memory.index(1)
        tile.slice(0, 8).store(gl.zeros([8, 16], gl.float32, one))
        tile.load(one)
    elif what == "index":
        memory.index(place).store(gl.zeros([16, 16], gl.float32, one))
    elif what == "slice":
        memory.index(0).slice(8, 16)
    elif what == "shape":
        memory.index(0).store(gl.zeros([8, 16], gl.float32, one))
    elif what == "type":
        memory.index(0).store(gl.zeros([16, 16], gl.float16, one))
    elif what == "layout":
        memory.index(0).load(plain)
    elif what == "rank":
        memory.index(0).load(flat)
    elif what == "warps":
        memory.index(0).store(gl.zeros([16, 16], gl.float32, one))
        memory.index(0).load(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))
    elif what == "order":
        memory.index(0).permute([0])
    elif what == "total":
        memory.index(0).reshape([16, 8])


MISUSES = {
    "uninitialised": (UninitializedMemoryError, r"a load reads 'memory\[1\]', of which 256 of 256 elements have never"),
    "partly uninitialised": (UninitializedMemoryError, "of which 128 of 256 elements have never been written"),
    "index": (IndexError, r"memory.index\(4\) is outside \[0, 4\)"),
    "slice": (IndexError, r"slice\(8, 16\) is outside the dimension of size 16"),
    "shape": (ValueError, "source shape .* and destination shape .* must match"),
    "type": (ValueError, "source dtype fp16 and destination dtype fp32 must match"),
    "layout": (ValueError, "expected 'layout' to be a DistributedLayout"),
    "rank": (AssertionError, "tensor shape and layout rank mismatch"),
    "warps": (ValueError, "Layout has 8 warps per CTA, but the context requires 4"),
    "order": (ValueError, "source rank .* and order length .* must match"),
    "total": (ValueError, "total elements mismatch"),
}
ONLY_HERE = ("uninitialised", "partly uninitialised", "index", "slice")


def test_misuse():
    for what in MISUSES:
        error, message = MISUSES[what]
        with pytest.raises(error, match=message):
            misuse[(1,)](torch.zeros(1), what, 4)


def test_index_out_of_range():
    for place in [-1, 4, 1000]:
        with pytest.raises(IndexError, match=rf"index\({place}\) is outside"):
            misuse[(1,)](torch.zeros(1), "index", place)


def test_the_compiler_refuses_the_same():
    for what in [what for what in MISUSES if what not in ONLY_HERE]:
        with pytest.raises((triton.CompilationError, RuntimeError)):
            compile_for(misuse, (torch.float32, what, 4))


def test_messages_name_line_and_variable():
    with pytest.raises(UninitializedMemoryError) as caught:
        misuse[(1,)](torch.zeros(1), "uninitialised", 0)
    assert "line " in str(caught.value)
    assert "of test_cpu_shared.py" in str(caught.value)
    assert "in kernel 'misuse'" in caught.value.__notes__[0]


REINTERPRET = "reinterpret" if hasattr(_compat.core.shared_memory_descriptor, "reinterpret") else "_reinterpret"


@gluon.jit
def reuse(method: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    getattr(memory, method)(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


def test_memory_in_another_form_is_refused():
    with pytest.raises(UnsupportedError, match="'memdesc_reinterpret': physical layouts are not kept"):
        reuse[(1,)](REINTERPRET)


@gluon.jit
def many_programs(x, out):
    """Each program has its own."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=flat)
    memory = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    memory.store(gl.load(x + i) + gl.program_id(0))
    while gl.atomic_add(out + 1024, 0) < gl.program_id(0):
        pass
    gl.store(out + gl.program_id(0) * 128 + i, memory.load(flat))
    gl.atomic_add(out + 1024, 1.0)


def test_programs_do_not_share_it():
    x, out = torch.randn(128), torch.zeros(1025)
    many_programs[(8,)](x, out)
    assert torch.equal(out[:1024].view(8, 128), x + torch.arange(8.0)[:, None])
