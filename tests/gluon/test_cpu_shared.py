"""Shared memory of Gluon kernels on the CPU: views, contents, layouts of views, and what is refused."""

import pytest
import torch
from gluon_kernels import load_block, said_by_the_compiler, store_block
from kernel_text import kernel_of
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter.errors import UninitializedMemoryError

SHARED = [gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]), gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0]),
          gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)]  # fmt: skip
PLAIN, BLOCKED = gl.constexpr(SHARED[0]), gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
FILLED = """
memory = gl.allocate_shared_memory(x.dtype.element_ty, [2, 32, 64], shared)
value = load_block(x, 32, 64, BLOCKED)
memory.index(1).store(value)
memory.index(0).store(-value)
tile = memory.index(1)
"""


def check_view(before, view, expected, x, shared):
    names = {"gl": gl, "load_block": load_block, "store_block": store_block, "BLOCKED": BLOCKED}
    text = f"{FILLED}{before}\nstore_block(out, {view}.load(BLOCKED))"
    kernel, out = kernel_of(gluon.jit, "x, out, shared: gl.constexpr", text, **names), torch.zeros_like(x)
    kernel[(1,)](x, out, shared)
    assert torch.equal(out.view(-1)[: expected.numel()].view(expected.shape), expected)


@table("view, expected", [
    ("tile", lambda x: x),
    ("gl.allocate_shared_memory(gl.float32, [32, 64], shared, value)", lambda x: x),
    ("memory.index(0)", lambda x: -x),
    ("tile.permute([1, 0])", lambda x: x.T),
    ("tile.slice(8, 16)", lambda x: x[8:24]),
    ("tile.slice(32, 16, dim=1)", lambda x: x[:, 32:48]),
    ("tile.reshape([64, 32])", lambda x: x.reshape(64, 32)),
    ("tile.permute([1, 0]).slice(16, 32)", lambda x: x.T[16:48]),
])  # fmt: skip
def test_views(view, expected):
    x = torch.randn(32, 64)
    for shared in SHARED:
        check_view("", view, expected(x), x, shared)


def test_a_store_to_a_slice_changes_the_whole():
    x = torch.randn(32, 64)
    before = "part = tile.slice(16, 16, dim=1)\npart.store(part.load(BLOCKED) + 100)"
    check_view(before, "tile", torch.cat([x[:, :16], x[:, 16:32] + 100, x[:, 32:]], 1), x, SHARED[1])


SPACE = """
memory = gl.allocate_shared_memory(gl.float32, [4, 16, 16], PLAIN)
zero = gl.zeros([16, 16], gl.float32, BLOCKED)
"""
PART = "memory.index(1).slice(0, 8).store(gl.zeros([8, 16], gl.float32, BLOCKED))\nmemory.index(1).load(BLOCKED)"
REINTERPRET = "reinterpret" if hasattr(_compat.core.shared_memory_descriptor, "reinterpret") else "_reinterpret"
FIRST = r"line 5 of kernel_\d+.py: a load reads 'memory\[1\]', of which 256 of 256 (?s:.*)in kernel 'kernel'"


@table("text, place, error, said, compiles", [
    ("memory.index(1).load(BLOCKED)", 0, UninitializedMemoryError, FIRST, True),
    (PART, 0, UninitializedMemoryError, "of which 128 of 256 elements have never been written", True),
    ("memory.index(place).store(zero)", 4, IndexError, r"memory.index\(4\) is outside \[0, 4\)", True),
    ("memory.index(place).store(zero)", -1, IndexError, r"index\(-1\) is outside", True),
    ("memory.index(0).slice(8, 16)", 0, IndexError, r"slice\(8, 16\) is outside the dimension of size 16", True),
    ("memory.index(0).store(gl.zeros([8, 16], gl.float32, BLOCKED))", 0, ValueError,
     "source shape .* and destination shape .* must match", False),
    ("memory.index(0).load(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))", 0, ValueError,
     "Layout has 8 warps per CTA, but the context requires 4", False),
    (f"memory.{REINTERPRET}(gl.int32, [4, 16, 16], PLAIN)", 0, UnsupportedError,
     "'memdesc_reinterpret': physical layouts are not kept", True),
])  # fmt: skip
def test_misuse(text, place, error, said, compiles):
    kernel = kernel_of(gluon.jit, "x, place", SPACE + text, gl=gl, PLAIN=PLAIN, BLOCKED=BLOCKED)
    with pytest.raises(error, match=said):
        kernel[(1,)](torch.zeros(1), place)
    assert compiles or said_by_the_compiler(kernel, torch.float32, 4)
