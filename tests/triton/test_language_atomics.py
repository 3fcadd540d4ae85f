"""Atomics on other ranks' memory: results, old values, element types, masks."""

import operator

import pytest
import torch
import triton
import triton.language as tl

import iris_triton as iris

INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MODELS = {
    "add": operator.add, "sub": operator.sub, "xchg": lambda old, value: value, "xor": operator.xor,
    "and": operator.and_, "or": operator.or_, "min": min, "max": max,
}  # fmt: skip


@triton.jit
def modify(
    op: tl.constexpr, method: tl.constexpr, x, values, old, context, world_size: tl.constexpr, peer, n,
    sem: tl.constexpr, scope: tl.constexpr, hint: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    mask = i < n
    value = tl.load(values + i)
    p = x + i
    ctx = iris.DeviceContext.from_tensor(context, world_size)
    me = ctx.rank
    bases = ctx.heap_bases
    if op == "add":
        if method:
            got = ctx.atomic_add(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_add(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "sub":
        if method:
            got = ctx.atomic_sub(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_sub(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "xchg":
        if method:
            got = ctx.atomic_xchg(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_xchg(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "xor":
        if method:
            got = ctx.atomic_xor(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_xor(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "and":
        if method:
            got = ctx.atomic_and(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_and(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "or":
        if method:
            got = ctx.atomic_or(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_or(p, value, me, peer, bases, mask, sem, scope, hint)
    elif op == "min":
        if method:
            got = ctx.atomic_min(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_min(p, value, me, peer, bases, mask, sem, scope, hint)
    else:
        if method:
            got = ctx.atomic_max(p, value, peer, mask, sem, scope, hint)
        else:
            got = iris.atomic_max(p, value, me, peer, bases, mask, sem, scope, hint)
    tl.store(old + i, got, mask=mask)


def legal(op: str) -> list[torch.dtype]:
    """Element types of an atomic, as Triton has them."""
    if op in ("add", "sub"):
        return INTEGERS + FLOATS
    if op in ("xchg", "min", "max"):
        return [*INTEGERS, torch.float32, torch.float64]
    return INTEGERS


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op in MODELS for dtype in legal(op)])
def test_changes_the_peer_and_returns_the_old_value(make_world, op, dtype, method):
    world, n = make_world(2), 13
    start, change = [5, 9, 12, 7] * 4, [3, 10, 12, 1] * 4
    x = world.tensors(torch.zeros(16, dtype=dtype), torch.tensor(start, dtype=dtype))
    values, old = torch.tensor(change, dtype=dtype), torch.zeros(16, dtype=dtype)
    modify[(1,)](
        op, method, x[0], values, old, world.context(0), 2, 1, n, sem=None, scope=None, hint=None, BLOCK=16
    )  # fmt: skip
    bits = 8 * dtype.itemsize
    results = [MODELS[op](a, b) for a, b in zip(start, change, strict=True)]
    if not dtype.is_floating_point and not dtype.is_signed:
        results = [value % 2**bits for value in results]
    assert x[1].tolist() == results[:n] + start[n:]
    assert old.tolist() == start[:n] + [0] * 3
    assert x[0].tolist() == [0] * 16


@pytest.mark.parametrize("sem", [None, "acquire", "release", "acq_rel", "relaxed"])
@pytest.mark.parametrize("scope", [None, "cta", "gpu", "sys"])
@pytest.mark.parametrize("hint", [None, 4])
def test_every_order_and_scope(make_world, sem, scope, hint):
    world = make_world(2)
    x, old = world.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    values = torch.arange(16, dtype=torch.int32)
    for op, expected in (("add", values), ("sub", values * 0)):
        modify[(1,)](
            op, False, x[0], values, old, world.context(0), 2, 1, 16, sem=sem, scope=scope, hint=hint, BLOCK=16
        )  # fmt: skip
        assert torch.equal(x[1], expected)


@triton.jit
def subtract_narrow(x, value, bases):
    """The value has fewer bits than the element."""
    iris.atomic_sub(x, value.to(tl.uint32), 0, 1, bases)
    iris.atomic_sub(x, 1, 0, 1, bases)


def test_subtraction_wraps_in_the_element_type(make_world):
    world = make_world(2)
    x = world.tensors(*(torch.tensor([10], dtype=torch.uint64) for _ in range(2)))
    subtract_narrow[(1,)](x[0], 7, world.bases)
    assert x[1].item() == 2
    subtract_narrow[(1,)](x[0], 7, world.bases)
    assert x[1].item() == 2**64 - 6


@triton.jit
def compare_and_swap(method: tl.constexpr, x, cmp, val, old, context, sem: tl.constexpr, scope: tl.constexpr):
    ctx = iris.DeviceContext.from_tensor(context, 2)
    if method:
        tl.store(old, ctx.atomic_cas(x, cmp, val, 1, sem, scope))
    else:
        tl.store(old, iris.atomic_cas(x, cmp, val, ctx.rank, 1, ctx.heap_bases, sem, scope))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize(("sem", "scope"), [(None, None), ("release", "sys"), ("relaxed", "gpu")])
def test_compare_and_swap(make_world, dtype, method, sem, scope):
    world = make_world(2)
    x = world.tensors(*(torch.tensor([5], dtype=dtype) for _ in range(2)))
    old = torch.zeros(1, dtype=dtype)
    compare_and_swap[(1,)](method, x[0], 4, 8, old, world.context(0), sem=sem, scope=scope)
    assert (old.item(), x[1].item()) == (5, 5)
    compare_and_swap[(1,)](method, x[0], 5, 8, old, world.context(0), sem=sem, scope=scope)
    assert (old.item(), x[1].item(), x[0].item()) == (5, 8, 5)


@triton.jit
def count(x, contexts, words, rounds, world_size: tl.constexpr):
    rank = tl.program_id(0)
    ctx = iris.DeviceContext.from_tensor(contexts + rank * words, world_size)
    for i in range(rounds):
        ctx.atomic_add(x + i % 4, 1, (rank + i) % world_size)


def test_concurrent_programs_lose_nothing(make_world):
    """All programs take their pointers from rank 0's heap, so each is a program of rank 0."""
    world = make_world(2)
    x = world.zeros(4, dtype=torch.int32)
    count[(8,)](x[0], world.context(0).repeat(8, 1), world.context(0).numel(), 20, world_size=2)
    assert sum(int(t.sum()) for t in x) == 8 * 20
