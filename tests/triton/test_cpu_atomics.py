"""Atomics within one process: every operation and type, masks, memory orders, results."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from iris_triton import interpreter


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


INTS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SEMS = ["relaxed", "acquire", "release", "acq_rel"]
SCOPES = ["cta", "gpu", "sys"]


@triton.jit
def rmw_kernel(p, v, old, OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    mask = i % 2 == 0
    v = tl.load(v + i)
    if OP == "add":
        r = tl.atomic_add(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    elif OP == "max":
        r = tl.atomic_max(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    elif OP == "min":
        r = tl.atomic_min(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    elif OP == "and":
        r = tl.atomic_and(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    elif OP == "or":
        r = tl.atomic_or(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    elif OP == "xor":
        r = tl.atomic_xor(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    else:
        r = tl.atomic_xchg(p + i, v, mask=mask, sem=SEM, scope=SCOPE)
    tl.store(old + i, r)


def expected(op, a, b):
    wide = torch.float64 if a.dtype.is_floating_point else torch.int64
    x, y = a.to(wide), b.to(wide)
    if op == "add":
        return (x + y).to(a.dtype)
    if op in ("max", "min"):
        return (torch.maximum if op == "max" else torch.minimum)(x, y).to(a.dtype)
    if op == "xchg":
        return b
    return {"and": x & y, "or": x | y, "xor": x ^ y}[op].to(a.dtype)


CASES = [
    *itertools.product(["add", "max", "min", "and", "or", "xor", "xchg"], INTS),
    *itertools.product(["add"], FLOATS),
    *itertools.product(["max", "min", "xchg"], [torch.float32, torch.float64]),
]


def test_operations_on_blocks():
    for op, dtype in CASES:
        values = [1, -2, 3, -4, 5, 6, -7, 8] if dtype not in INTS[2:] else [1, 2, 3, 4, 2**31, 6, 7, 8]
        others = [2, 1, -9, 4, -6, -5, 3, 0] if dtype not in INTS[2:] else [2, 1, 9, 4, 7, 5, 3, 0]
        start, v = torch.tensor(values).to(dtype), torch.tensor(others).to(dtype)
        p, old = start.clone(), torch.full((8,), 99).to(dtype)
        rmw_kernel[(1,)](p, v, old, OP=op, SEM="acq_rel", SCOPE="sys", N=8)
        even = torch.arange(8) % 2 == 0
        want = torch.tensor(
            [e if k else s for e, s, k in zip(expected(op, start, v).tolist(), values, even, strict=True)]
        )
        assert p.tolist() == want.tolist()
        # Lanes that are masked off do nothing and return 0.
        assert old.tolist() == [s if k else 0 for s, k in zip(values, even, strict=True)]


def test_all_orders_and_scopes():
    for sem, scope in [*itertools.product(SEMS, SCOPES)]:
        p, old = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        rmw_kernel[(1,)](p, torch.ones(8, dtype=torch.int32), old, OP="add", SEM=sem, SCOPE=scope, N=8)
        assert p.tolist() == [1, 0] * 4


@triton.jit
def same_address_kernel(p, v, N: tl.constexpr):
    tl.atomic_add(p + tl.arange(0, N) * 0, tl.load(v + tl.arange(0, N)))


def test_lanes_with_the_same_address_all_count():
    for dtype in [torch.int32, *FLOATS]:
        p = torch.zeros(1, dtype=dtype)
        same_address_kernel[(4,)](p, torch.ones(64, dtype=dtype), N=64)
        assert p.item() == 256


@triton.jit
def cas_kernel(p, old, cmp, val, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_cas(p + i, tl.load(cmp + i), tl.load(val + i)))


def test_compare_and_swap():
    for dtype in [torch.int32, torch.int64, torch.int16, torch.float32, torch.float64]:
        p = torch.tensor([1, 2, 3, 4]).to(dtype)
        old = torch.zeros(4, dtype=dtype)
        cas_kernel[(1,)](p, old, torch.tensor([1, 0, 3, 0]).to(dtype), torch.tensor([10, 20, 30, 40]).to(dtype), N=4)
        assert p.tolist() == [10, 2, 30, 4]
        assert old.tolist() == [1, 2, 3, 4]


@triton.jit
def scalar_kernel(p, out, m):
    tl.store(out, tl.atomic_add(p, 5, mask=m))
    tl.store(out + 1, tl.atomic_cas(p, 5, 7))
    tl.store(out + 2, tl.atomic_xchg(p, 9))


@pytest.mark.parametrize(("mask", "expected"), [(True, [0, 5, 7]), (False, [0, 0, 0])])
def test_scalars(mask, expected):
    p, out = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    scalar_kernel[(1,)](p, out, mask)
    assert out.tolist() == expected
    assert p.item() == 9


@triton.jit
def lock_kernel(lock, counter, N: tl.constexpr):
    for _ in range(N):
        while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
            pass
        tl.store(counter, tl.load(counter) + 1)
        tl.atomic_xchg(lock, 0, sem="release")


def test_a_lock_among_programs():
    lock, counter = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lock_kernel[(8,)](lock, counter, N=5)
    assert counter.item() == 40
