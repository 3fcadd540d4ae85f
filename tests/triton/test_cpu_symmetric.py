"""Context tensors and pointers off the heap: what the CPU executor checks of them, also in a world of one."""

import pytest
import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import ArgumentError
from iris_triton import interpreter
from iris_triton import x as tiles
from iris_triton.interpreter import OutOfBoundsError
from iris_triton.language.address import translate


@triton.jit
def through_context(context, own, x, rank, world: tl.constexpr, what: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offsets = tl.arange(0, 4)
    if what == "load":
        ctx.load(x + offsets, 0)
    elif what == "store":
        ctx.store(x + offsets, 1, 0)
    elif what == "get":
        ctx.get(x + offsets, own + offsets, 0)
    elif what == "put":
        ctx.put(own + offsets, x + offsets, 0)
    elif what == "copy":
        ctx.copy(x + offsets, own + offsets, 0, 0)
    elif what == "copy to":
        ctx.copy(own + offsets, x + offsets, 0, 0)
    elif what == "atomic_add":
        ctx.atomic_add(x, 1, 0)
    elif what == "atomic_cas":
        ctx.atomic_cas(x, 1, 0, 0)
    elif what == "signal":
        ctx.signal(x, 1, 0)
    elif what == "put_signal":
        ctx.put_signal(own + offsets, own + offsets, x, 1, 0)
    elif what == "tile":
        view = tiles.make_tensor_view(x, 2, 2, 2, 1)
        tiles.gather(tiles.TileView(0, 0, 2, 2), view, 0, ctx)
    else:
        iris.load(x + offsets, 0, 0, ctx.heap_bases)


OPERATIONS = (
    *("load", "store", "get", "put", "copy", "copy to", "atomic_add", "atomic_cas", "signal", "put_signal", "tile"),
    "function",
)


def test_a_pointer_off_the_heap_is_an_error_for_the_own_rank_too():
    for what in OPERATIONS:
        with Iris("1MiB", device="cpu") as ctx:
            context, own, off = (
                ctx.get_device_context(),
                ctx.zeros(4, dtype=torch.int64),
                torch.zeros(4, dtype=torch.int64),
            )
            through_context[(1,)](context, own, ctx.zeros(4, dtype=torch.int64), 0, 1, what)
            with pytest.raises(OutOfBoundsError) as caught:
                through_context[(1,)](context, own, off, 0, 1, what)
        error = caught.value
        assert (error.kernel, error.program, error.address) == ("through_context", (0, 0, 0), off.data_ptr())
        assert "on the heap" in str(error)
        (note,) = error.__notes__
        assert ", rank 0 of 1, at " in note
        assert f"{__file__}:" in note
        assert not off.any()


@pytest.mark.parametrize(
    ("given", "rank", "world"),
    [("zeros", 0, 1), ("zeros", 1, 2), ("own", 0, 2), ("own", 1, 1), ("own", -1, 1), ("own", 0, 0), ("closed", 0, 1)],
)
def test_a_context_tensor_of_another_world_is_refused(given, rank, world):
    with Iris("1MiB", device="cpu") as ctx:
        x = ctx.zeros(4, dtype=torch.int64)
        context = ctx.get_device_context() if given == "own" else torch.zeros(64, dtype=torch.int64)
        if given == "closed":
            with Iris("1MiB", device="cpu") as other:
                context = other.get_device_context().clone()
        with pytest.raises(ArgumentError) as caught:
            through_context[(1,)](context, x, x, rank, world, "store")
        assert not x.any()
    (note,) = caught.value.__notes__
    assert "in kernel 'through_context', program (0, 0, 0) of grid (1, 1, 1), rank 0 of 1, at " in note


def test_a_context_tensor_of_a_peer_is_refused(make_world):
    world = make_world(3)
    (x, *_) = world.zeros(4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="rank 0 was given, but the context tensor is that of rank 2"):
        through_context[(1,)](world.context(2), x, x, 0, 3, "store")


@triton.jit
def move(x, bases, out, to_rank, mask, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    there = translate(x + offsets, 0, to_rank, bases)
    tl.store(out + offsets, tl.load(there, mask=offsets < mask, other=-1))


def test_bases_of_no_heap_are_refused(make_world):
    world = make_world(2)
    x, _ = world.tensors(*(torch.arange(4) for _ in range(2)))
    out = torch.zeros(4, dtype=torch.int64)
    for bases, rank in ((torch.zeros(2, dtype=torch.int64), 1), (world.context(0), 0), (world.bases, 2)):
        with pytest.raises((ArgumentError, OutOfBoundsError)):
            move[(1,)](x, bases, out, rank, 4, BLOCK=4)


def test_a_table_of_other_memory_will_do_if_it_is_accessible(tmp_path):
    """Memory of any origin, here files that are mapped: they begin at multiples of a page."""
    files = [torch.from_file(str(tmp_path / f"{r}"), shared=True, size=2048, dtype=torch.int64) for r in range(2)]
    for r, each in enumerate(files):
        each.copy_(torch.arange(2048) + 10000 * r)
    table, out = torch.tensor([each.data_ptr() for each in files]), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"allow_region makes accessible"):
        move[(1,)](files[0][8:], table, out, 1, 4, BLOCK=4)
    tokens = [interpreter.allow_region(each.data_ptr(), each.nbytes, "file") for each in files]
    try:
        move[(1,)](files[0][8:], table, out, 1, 4, BLOCK=4)
        assert out.tolist() == [10008, 10009, 10010, 10011]
        with pytest.raises(OutOfBoundsError, match="not on the heap of the rank that it was translated from"):
            move[(1,)](out, table, out, 1, 4, BLOCK=4)
        table[1] += 8
        with pytest.raises(ArgumentError, match="differ by multiples of 4096 bytes"):
            move[(1,)](files[0], table, out, 1, 4, BLOCK=4)
    finally:
        for token in tokens:
            interpreter.unregister_memory(token)


def test_elements_that_are_masked_off_may_lie_anywhere(make_world):
    world = make_world(2, 4096)
    x, _ = world.tensors(torch.arange(4), torch.arange(4) + 10)
    out = torch.zeros(1024, dtype=torch.int64)
    move[(1,)](x, world.bases, out, 1, 4, BLOCK=1024)  # beyond both heaps
    assert out[:6].tolist() == [10, 11, 12, 13, -1, -1]
    with pytest.raises(OutOfBoundsError) as caught:
        move[(1,)](x, world.bases, out, 1, 1024, BLOCK=1024)
    assert caught.value.lane == 512
