"""What several tests share; kernels of tests/multirank in Gluon, where this module stands for DeviceContext."""

import functools
import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_gluon import IrisDeviceCtx, _compat
from iris_triton._compat import JITFunction
from iris_triton.testing.compile_only import compile_for
from iris_triton.testing.languages import in_gluon

ELEMENTS = {
    torch.int8: gl.int8, torch.int32: gl.int32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
}  # fmt: skip


@gluon.jit
def initialize(context, rank, world, tracing: gl.constexpr = False):
    return IrisDeviceCtx.initialize(context, tracing)


@gluon.jit
def from_tensor(context, world):
    return IrisDeviceCtx.initialize(context)


@functools.cache
def kernels_of(jobs):
    found = {name: each for name, each in vars(jobs).items() if isinstance(each, JITFunction)}
    here = sys.modules[__name__]
    return {name: in_gluon(each, DeviceContext=here, threads_meet=_compat.barrier) for name, each in found.items()}


@gluon.jit
def load_block(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.load(x + r[:, None] * COLUMNS + c[None, :])


@gluon.jit
def store_block(x, value):
    r = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    c = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    gl.store(x + r[:, None] * value.shape[1] + c[None, :], value)


def describe(tensor, block, padding="zero"):
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout, padding)


class Notes:
    """An argument of a kernel in which constexpr functions leave something behind; no two are the same constant."""

    def __init__(self):
        self.seen = []


@triton.constexpr_function
def note(notes, what):
    notes.seen.append(what)


def said_by_the_compiler(kernel, *args, **named):
    """All causes for which the compiler refuses a kernel, or what a function compiles; "" if it does not."""
    try:
        compile_for(kernel, args, named) if isinstance(kernel, JITFunction) else kernel(*args, **named)
    except (triton.CompilationError, RuntimeError) as refusal:
        error, texts = refusal, []
        while error is not None:
            texts.append(f"{type(error).__name__}: {error}")
            error = error.__cause__
        return "\n".join(texts)
    return ""
