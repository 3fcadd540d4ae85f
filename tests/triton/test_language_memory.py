"""Device functions on other ranks' memory: which rank is meant, blocks, conversions, hints.

tests/multirank moves and changes every element type, with every mask, order and scope.
"""

import pytest
import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_triton.interpreter import OutOfBoundsError


@triton.jit
def touch_one(x, out, bases, first, second, op: tl.constexpr):
    if op == "load":
        tl.store(out, iris.load(x, first, second, bases))
    else:
        iris.store(x, 9.0, first, second, bases)


def test_the_first_rank_owns_the_pointer(make_world):
    """Called with a pointer into rank 1's heap, whoever calls."""
    world = make_world(2)
    x, out = world.tensors(torch.tensor([1.0]), torch.tensor([2.0])), torch.zeros(1)
    for first, second in ((0, 1), (1, 0), (0, 0), (1, 1)):
        touch_one[(1,)](x[first], out, world.bases, first, second, "load")
        assert out.item() == second + 1
    touch_one[(1,)](x[1], out, world.bases, 1, 0, "store")
    assert [t.item() for t in x] == [9.0, 2.0]
    # swapped ranks lead to an address in no heap, which the CPU executor refuses
    with pytest.raises(OutOfBoundsError):
        touch_one[(1,)](x[1], out, world.bases, 0, 1, "load")


@triton.jit
def transpose_to(x, y, bases, R: tl.constexpr, C: tl.constexpr, rank: tl.constexpr):
    rows, columns = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    tile = iris.load(x + rows * C + columns, rank, 1 - rank, bases, hint=(1, C))
    iris.store(y + rows + columns * R, tile, rank, 1 - rank, bases)


def test_blocks_of_two_dimensions(make_world):
    world = make_world(2)
    x, y = world.tensors(torch.zeros(8, 16), torch.randn(8, 16)), world.zeros(16, 8)
    transpose_to[(1,)](x[0], y[0], world.bases, R=8, C=16, rank=0)
    assert torch.equal(y[1], x[1].T)
    assert not y[0].any()


@triton.jit
def scatter_rows(x, bases, me, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ranks = tl.arange(0, world_size)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    iris.store(x + ranks * 0 + i, ranks * 10.0 + i, me, ranks, bases)


def test_a_block_of_ranks(make_world):
    """One store may go to several ranks."""
    world = make_world(4)
    x = world.zeros(8)
    scatter_rows[(1,)](x[2], world.bases, 2, world_size=4, BLOCK=8)
    for rank in range(4):
        assert x[rank].tolist() == [rank * 10.0 + i for i in range(8)]


@triton.jit
def store_words(x, value, bases, rank: tl.constexpr):
    iris.store(x, value, 0, rank, bases)


def test_values_are_converted_to_the_element_type(make_world):
    world = make_world(2)
    x = world.zeros(1, dtype=torch.bfloat16)
    store_words[(1,)](x[0], 3.14159, world.bases, rank=1)
    assert x[1].item() == torch.tensor(3.14159).to(torch.bfloat16).item()


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
def hinted(x, bases, hint: tl.constexpr):
    i = tl.arange(0, 4)
    iris.store(x + i[:, None] * 4 + i[None, :], 1.0, 0, 1, bases, hint=hint)


def test_a_hint_of_the_wrong_number_of_dimensions_is_refused(make_world):
    world = make_world(2)
    x = world.zeros(16)
    with pytest.raises(Exception, match="3 dimensions, but the block of pointers has 2"):
        hinted[(1,)](x[0], world.bases, hint=(1, 1, 4))
    hinted[(1,)](x[0], world.bases, hint=(1, 4))
    assert x[1].sum().item() == 16


def test_a_hint_that_is_no_power_of_two_is_refused(make_world):
    world = make_world(2)
    for hint in (0, -4, 3, 16.0, "x", (1, 0), (1, 12)):
        with pytest.raises(Exception, match="a hint must be a power of two"):
            hinted[(1,)](world.zeros(16)[0], world.bases, hint=hint)


@triton.jit
def load_from(x, out, context, peer, world_size: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, 0, world_size)
    tl.store(out, ctx.load(x, peer))


def test_a_rank_outside_the_world_is_named():
    with Iris("1MiB", device="cpu") as ctx:
        x, out = ctx.ones(1), torch.zeros(1)
        load_from[(1,)](x, out, ctx.get_device_context(), 0, 1)
        assert out.item() == 1
        for peer in (-1, 1, 7):
            with pytest.raises(AssertionError, match="a rank outside the world is addressed"):
                load_from[(1,)](x, out, ctx.get_device_context(), peer, 1)
