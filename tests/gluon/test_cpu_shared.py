"""Shared memory of Gluon kernels on the CPU: views, contents, layouts of views, and what is refused."""

import pytest
import torch
from gluon_kernels import Notes, load_block, note, said_by_the_compiler, store_block
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter.errors import UninitializedMemoryError


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


SHARED = [gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]), gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0]),
          gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)]  # fmt: skip
BLOCKED = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])


def check_view(kind, expected, x, shared):
    out = torch.zeros_like(x)
    views[(1,)](x, out, kind, shared, BLOCKED)
    assert torch.equal(out.view(-1)[: expected.numel()].view(expected.shape), expected)


@table("kind, expected", [
    ("whole", lambda x: x),
    ("initial value", lambda x: x),
    ("other", lambda x: -x),
    ("permute", lambda x: x.T),
    ("slice rows", lambda x: x[8:24]),
    ("slice columns", lambda x: x[:, 32:48]),
    ("store to a slice", lambda x: torch.cat([x[:, :16], x[:, 16:32] + 100, x[:, 32:]], 1)),
    ("reshape", lambda x: x.reshape(64, 32)),
    ("slice of permuted", lambda x: x.T[16:48]),
])  # fmt: skip
def test_views(kind, expected):
    x = torch.randn(32, 64)
    for shared in SHARED:
        check_view(kind, expected(x), x, shared)


@table("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float64])
def test_element_types(dtype):
    x = torch.randint(-100, 100, (32, 64)).to(dtype)
    check_view("whole", x, x, SHARED[0])


@gluon.jit
def view_layouts(x, kind: gl.constexpr, shared: gl.constexpr, notes: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float16, [64, 128], shared)
    if kind == "permute":
        note(notes, memory.permute([1, 0]).type.layout)
    else:
        note(notes, memory.reshape([64, 2, 64]).type.layout)


@pytest.mark.parametrize("kind", ["permute", "reshape"])
@pytest.mark.parametrize("shared", [SHARED[1], gl.NVMMASharedLayout(128, 16, 2)])
def test_layouts_of_views_are_the_compilers(kind, shared):
    here, there = Notes(), Notes()
    if said := said_by_the_compiler(view_layouts, torch.float32, kind, shared, there):
        pytest.skip(f"the compiler refuses it: {said}")
    view_layouts[(1,)](torch.zeros(1), kind, shared, here)
    assert len(here.seen) == 1
    assert here.seen == there.seen


@gluon.jit
def misuse(x, what: gl.constexpr, place):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    one: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, [4, 16, 16], plain)
    zero = gl.zeros([16, 16], gl.float32, one)
    if what == "uninitialised":
        memory.index(1).load(one)
    elif what == "partly uninitialised":
        tile = memory.index(1)
        tile.slice(0, 8).store(gl.zeros([8, 16], gl.float32, one))
        tile.load(one)
    elif what == "index":
        memory.index(place).store(zero)
    elif what == "slice":
        memory.index(0).slice(8, 16)
    elif what == "shape":
        memory.index(0).store(gl.zeros([8, 16], gl.float32, one))
    elif what == "type":
        memory.index(0).store(gl.zeros([16, 16], gl.float16, one))
    elif what == "layout":
        memory.index(0).load(plain)
    elif what == "rank":
        memory.index(0).load(gl.BlockedLayout([1], [32], [4], [0]))
    elif what == "warps":
        memory.index(0).store(zero)
        memory.index(0).load(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))
    elif what == "order":
        memory.index(0).permute([0])
    elif what == "total":
        memory.index(0).reshape([16, 8])


FIRST = r"line \d+ of test_cpu_shared.py: a load reads 'memory\[1\]', of which 256 of 256 (?s:.*)in kernel 'misuse'"


@table("what, place, error, text, compiles", [
    ("uninitialised", 0, UninitializedMemoryError, FIRST, True),
    ("partly uninitialised", 0, UninitializedMemoryError, "of which 128 of 256 elements have never been written", True),
    ("index", 4, IndexError, r"memory.index\(4\) is outside \[0, 4\)", True),
    ("index", -1, IndexError, r"index\(-1\) is outside", True),
    ("index", 1000, IndexError, r"index\(1000\) is outside", True),
    ("slice", 0, IndexError, r"slice\(8, 16\) is outside the dimension of size 16", True),
    ("shape", 0, ValueError, "source shape .* and destination shape .* must match", False),
    ("type", 0, ValueError, "source dtype fp16 and destination dtype fp32 must match", False),
    ("layout", 0, ValueError, "expected 'layout' to be a DistributedLayout", False),
    ("rank", 0, AssertionError, "tensor shape and layout rank mismatch", False),
    ("warps", 0, ValueError, "Layout has 8 warps per CTA, but the context requires 4", False),
    ("order", 0, ValueError, "source rank .* and order length .* must match", False),
    ("total", 0, ValueError, "total elements mismatch", False),
])  # fmt: skip
def test_misuse(what, place, error, text, compiles):
    with pytest.raises(error, match=text):
        misuse[(1,)](torch.zeros(1), what, place)
    assert compiles or said_by_the_compiler(misuse, torch.float32, what, 4)


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
