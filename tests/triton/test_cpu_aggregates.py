"""Aggregates: methods, static methods, nesting, constants, in the form in which they also compile for GPUs."""

import pytest
import torch
import triton
import triton.language as tl

from iris_triton import interpreter
from iris_triton._compat import aggregate


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


@aggregate
class Inner:
    scale: tl.tensor
    size: tl.constexpr

    @triton.constexpr_function
    def __init__(self, scale, size):
        self.scale = scale
        self.size = tl.constexpr(size)

    @triton.jit
    def scaled(self, x, extra=1):
        return x * self.scale * extra

    @triton.jit
    def indices(self):
        return tl.arange(0, self.size)


@aggregate
class Outer:
    inner: Inner
    base: tl.tensor
    flag: tl.constexpr

    @triton.constexpr_function
    def __init__(self, inner, base, flag):
        self.inner = inner
        self.base = base
        self.flag = tl.constexpr(flag)

    @staticmethod
    @triton.jit
    def make(base, scale, size: tl.constexpr, flag: tl.constexpr = True):
        return Outer(Inner(scale, size), base, flag)

    @triton.jit
    def load(self, offset=0):
        return self.inner.scaled(tl.load(self.base + offset + self.inner.indices()), extra=2)

    @triton.jit
    def with_base(self, base):
        return Outer(self.inner, base, self.flag)


@triton.jit
def kernel(x, y, out, scale, B: tl.constexpr):
    outer = Outer.make(x, scale, B)
    other = outer.with_base(y)
    i = outer.inner.indices()
    if outer.flag:
        tl.store(out + i, outer.load() + other.load(offset=1))
    if outer.inner.size == B and outer.inner.size * 2 > 4:
        tl.store(out + B, outer.inner.size)
    for k in range(outer.inner.size):
        tl.store(out + B + 1 + k, k)
    for k in tl.static_range(other.inner.size):
        tl.store(out + 2 * B + 1 + k, k + other.inner.size)
    f = outer.load
    tl.store(out + 3 * B + 1, tl.sum(f()))


def test_methods_static_methods_and_nesting():
    x, y, out = torch.arange(8.0), torch.arange(9.0) * 10, torch.zeros(26)
    kernel[(1,)](x, y, out, 3.0, B=8)
    assert torch.equal(out[:8], 6 * (x + y[1:]))
    assert out[8] == 8
    assert torch.equal(out[9:17], torch.arange(8.0))
    assert torch.equal(out[17:25], torch.arange(8.0) + 8)
    assert out[25] == (6 * x).sum()


@aggregate
class Counter:
    ptr: tl.tensor

    @triton.constexpr_function
    def __init__(self, ptr):
        self.ptr = ptr

    @triton.jit
    def add(self, n, sem: tl.constexpr = "acq_rel"):
        return tl.atomic_add(self.ptr, n, sem=sem, scope="sys")


@triton.jit
def through(counter, n):
    counter.add(n)
    return counter


@triton.jit
def passing_kernel(ptr):
    pair = (Counter(ptr), Counter(ptr + 1))
    through(pair[0], 3).add(4, sem="relaxed")
    through(pair[1], tl.program_id(0))


def test_aggregates_as_arguments_results_and_in_tuples():
    out = torch.zeros(2, dtype=torch.int32)
    passing_kernel[(3,)](out)
    assert out.tolist() == [21, 3]


@aggregate
class Broken:
    value: tl.tensor

    @triton.constexpr_function
    def __init__(self, value):
        pass


@triton.jit
def broken_kernel(x):
    Broken(tl.load(x))


def test_uninitialised_fields_are_refused_as_by_the_compiler():
    with pytest.raises(AttributeError, match="did not initialize attribute 'value'"):
        broken_kernel[(1,)](torch.zeros(1))
