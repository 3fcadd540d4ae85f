"""Bounds: what a kernel may touch, and what the message says when it touches something else; promises of addresses."""

import itertools
import linecache
import threading

import gluon_kernels
import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import raises, says, table
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import ArgumentError
from iris_gluon._compat import tma_store
from iris_gluon.bulk import await_bulk_stores, peer_descriptor
from iris_triton import DeviceContext, interpreter
from iris_triton import x as tiles
from iris_triton.interpreter import OutOfBoundsError
from iris_triton.interpreter.memory import regions
from iris_triton.interpreter.memory.regions import current_regions
from iris_triton.language.address import translate
from iris_triton.language.blocks import lanes
from iris_triton.testing.languages import in_gluon

I64 = torch.int64


@pytest.fixture
def heap(make_heap):
    return make_heap(2, (256, 400, "x"), (1024, 64, ""), (2048, 10, "odd"))


def test_a_heap_may_go_while_the_table_is_made(monkeypatch, make_heap):
    """The garbage collector closes dropped contexts wherever this thread allocates: also while it makes the table."""
    monkeypatch.setattr(regions, "_heaps", {})
    other, dropped = make_heap(2), make_heap(2)
    (token, _) = regions._heaps
    blocks = dropped.live_blocks
    dropped.live_blocks = lambda: interpreter.unregister_memory(token) or blocks()
    making = threading.Thread(target=current_regions, daemon=True)
    making.start()
    making.join(60)
    assert not making.is_alive()
    assert other not in regions.registered_heaps() == [dropped]
    assert len(current_regions().heaps) == 2


def touching(text):
    text = f"i = tl.arange(0, N)\nq = p + offset + i\n{text}"
    return kernel_of(triton.jit, "p, offset, N: tl.constexpr", text, tl=tl)


TOUCH = {
    "load": touching("tl.load(q)"), "store": touching("tl.store(q, i.to(p.dtype.element_ty))"),
    "masked": touching("tl.store(q, i.to(p.dtype.element_ty), mask=i < 2)"),
    "volatile": touching("tl.load(q, volatile=True)"),
    "atomic": touching("tl.atomic_add(q, 1.0)"), "cas": touching("tl.atomic_cas(q, 0.0, 1.0)"),
}  # fmt: skip
ACCESSES = {"load": "load", "store": "store", "volatile": "load", "atomic": "atomic_fadd", "cas": "atomic_cas"}


@table("access", ACCESSES)
def test_accesses_beyond_a_block_are_refused_on_every_rank(heap, access):
    for rank in [0, 1]:
        x = heap.tensor(rank, 256, 100)
        TOUCH[access][(1,)](x, 96, N=4)
        before = [m.clone() for m in heap.memory]
        with raises(OutOfBoundsError, "memory.beyond", rank=rank) as info:
            TOUCH[access][(1,)](x, 98, N=4)
        error = info.value
        assert isinstance(error, IndexError)
        assert (error.kernel, error.program, error.lane, error.nbytes) == ("kernel", (0, 0, 0), 2, 4)
        assert (error.access, error.address) == (ACCESSES[access], heap.heap_bases[rank] + 256 + 400)
        assert all(torch.equal(a, b) for a, b in zip(before, heap.memory, strict=True))


@table("rank, offset, first, access, lanes, lane, key", [
    (0, 256, 98, "masked", 8, 0, ""), (0, 256, 99, "masked", 8, 1, "any"),  # masked lanes may point anywhere
    (0, 2048, 0, "load", 2, 0, ""), (0, 2048, 2, "load", 1, 0, "memory.past"),  # its exact size, to the last byte
    (0, 1024, 0, "load", 16, 0, ""), (1, 256, -2, "load", 1, 0, "memory.before"),
    (0, 256, 2**29, "store", 4, 0, "any"),  # far from both heaps
])  # fmt: skip
def test_a_block_and_what_is_around_it(heap, rank, offset, first, access, lanes, lane, key):
    heap.tensor(0, 2048, 3).zero_()
    x = heap.tensor(rank, offset, 1)
    beyond = {"distance": 2, "block": "odd"} if offset == 2048 else {"distance": 8, "block": "x"}
    with raises(OutOfBoundsError, key, **beyond) as caught:
        TOUCH[access][(4,)](x, first, N=lanes)
    assert not key or caught.value.lane == lane
    TOUCH["store"][(4,)](heap.tensor(0, 256, 1), 10, N=4)  # a failed launch leaves everything usable
    assert heap.tensor(0, 256, 14)[10:].tolist() == [0, 1, 2, 3]


def test_freed_blocks_and_tensors_to_the_end_of_their_storage(heap):
    first, storage = current_regions(), torch.zeros(64)
    assert current_regions() is first
    heap.free(1024)
    assert current_regions() is not first
    TOUCH["store"][(1,)](storage[:8], 56, N=8)
    TOUCH["store"][(1,)](storage[32:40], -32, N=8)
    for access, tensor, offset, count, key, block in (
        ("load", heap.tensor(0, 1024, 16), 0, 16, "past", "x"), ("store", storage[:8], 60, 8, "past", "p"),
        ("load", storage[:8], -1, 1, "before", "p"),
    ):  # fmt: skip
        with raises(OutOfBoundsError, f"memory.{key}", distance=4 if offset < 0 else "", block=block):
            TOUCH[access][(1,)](tensor, offset, N=count)


@triton.jit
def indirect(addresses, out, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.load(addresses + i % 2).to(tl.pointer_type(tl.float32)) + i // 2
    tl.store(out + i, tl.load(p))
    tl.store(p, -i.to(tl.float32))


def test_addresses_from_memory_need_a_named_region(heap):
    values, out = [torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0])], torch.zeros(4)
    addresses = torch.tensor([v.data_ptr() for v in values])
    first = interpreter.allow_region(values[0].data_ptr(), 8, "first")
    with raises(OutOfBoundsError, name="allow_region"):
        indirect[(1,)](addresses, out, N=4)
    second = interpreter.allow_region(values[1].data_ptr(), 8)
    indirect[(1,)](addresses, out, N=4)
    assert out.tolist() == [5, 7, 6, 8]
    interpreter.unregister_memory(second)
    with pytest.raises(OutOfBoundsError):
        indirect[(1,)](addresses, out, N=4)
    interpreter.unregister_memory(first)
    interpreter.unregister_memory(first)
    for address, nbytes in ((0, 8), (100, 0), (100, -1), (2**64 - 4, 8)):
        with raises(ValueError, name=f"{nbytes} bytes at {address:#x}"):
            interpreter.allow_region(address, nbytes)
    with interpreter.configured(bounds_check=False):
        indirect[(1,)](addresses, out, N=4)
    assert out.tolist() == [0, -1, -2, -3]
    on_heaps = torch.tensor([base + 256 for base in heap.heap_bases])  # lanes of one access on several ranks
    indirect[(1,)](on_heaps, out, N=4)
    assert not out.any()
    assert [heap.tensor(rank, 256, 2).tolist() for rank in (0, 1)] == [[0, -2], [-1, -3]]


MISALIGNED = """
q, i = (p.to(tl.int64) + 1).to(tl.pointer_type(tl.int32)), tl.arange(0, 2)
tl.store(out + i, tl.load(q + i))
tl.store(q + i, i + 1)
"""


def test_misaligned_elements():
    data, out = torch.arange(16, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    expected = data[1:9].clone().view(torch.int32)
    kernel_of(triton.jit, "p, out", MISALIGNED, tl=tl)[(1,)](data, out)
    assert torch.equal(out, expected)
    assert data[1:9].tolist() == [1, 0, 0, 0, 2, 0, 0, 0]


MULTIPLE, CONTIGUOUS = "where = tl.multiple_of(where, 16)", "where = tl.max_contiguous(where, {})"
ROWS = """
rows = tl.multiple_of(x + i[:, None] * apart + i[None, :], (1, 16))
tl.store(out, tl.sum(tl.sum(tl.load(rows), 1), 0))
"""


@table("text, skipped, apart, key, nbytes", [
    (MULTIPLE, 0, 1, "", 0), (MULTIPLE, 4, 1, "", 0), (MULTIPLE, 1, 1, "hint.multiple", 4), (MULTIPLE, 0, 4, "", 0),
    (MULTIPLE, 0, 2, "hint.multiple", 8), (ROWS, 0, 20, "", 0), (ROWS, 0, 21, "hint.multiple", 4),
    (CONTIGUOUS.format(16), 1, 1, "", 0), (CONTIGUOUS.format(4), 0, 2, "hint.contiguous", 0),
    ("where = tl.multiple_of(x, 16) + i", 1, 1, "", 0),  # kernels promise before they branch
    # of numbers more is promised than is meant
    ("where = x + tl.max_contiguous(tl.multiple_of(i * apart % 8, 16), 16)", 0, 3, "", 0),
    ("tl.assume(apart == 3)", 0, 3, "", 0), ("tl.assume(apart == 4)", 0, 3, "hint.condition", 0),
])  # fmt: skip
def test_promises_about_addresses(text, skipped, apart, key, nbytes):
    x, out = torch.randn(512), torch.zeros(16)
    text = f"i = tl.arange(0, 16)\nwhere = x + i * apart\n{text}\ntl.store(out + i, tl.load(where))"
    kernel = kernel_of(triton.jit, "x, out, apart", text, tl=tl)
    if key:
        with interpreter.configured(hints="raise"), raises(AssertionError, key, nbytes=nbytes):
            kernel[(1,)](x[skipped:], out, apart)
        with pytest.warns(RuntimeWarning, match=says("hint.where", key, nbytes=nbytes)) as caught:
            kernel[(2,)](x[skipped:], out, apart)
        (each,) = caught
        assert "tl." in linecache.getline(each.filename, each.lineno)
    kernel[(1,)](x[skipped:], out, apart)  # pytest makes another warning an error
    places = torch.arange(16) * apart
    assert torch.equal(out, x[skipped + (places if "% 8" not in text else places % 8)])


CALLS = [
    "ctx.load(x + offsets, 0)", "ctx.store(x + offsets, 1, 0)", "ctx.get(x + offsets, own + offsets, 0)",
    "ctx.put(own + offsets, x + offsets, 0)", "ctx.copy(x + offsets, own + offsets, 0, 0)",
    "ctx.copy(own + offsets, x + offsets, 0, 0)", "ctx.atomic_add(x, 1, 0)", "ctx.atomic_cas(x, 1, 0, 0)",
    "ctx.signal(x, 1, 0)", "ctx.put_signal(own + offsets, own + offsets, x, 1, 0)",
    "tiles.gather(tiles.TileView(0, 0, 2, 2, LAYOUT), tiles.make_tensor_view(x, 2, 2, 2, 1), 0, ctx)",
    "iris.load(x + offsets, 0, 0, ctx.heap_bases)",
]  # fmt: skip
DESCRIPTOR = """
there = peer_descriptor(x, 0, 0, ctx.heap_bases, [1, 4], [4, 1], [8, 16], SHARED)
content = gl.allocate_shared_memory(gl.int64, [8, 16], SHARED, gl.full([8, 16], 1, gl.int64, LAYOUT))
fence_async_shared()
tma_store(there, [0, 0], content)
await_bulk_stores()
"""
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([8, 16], gl.int64))


def calling(text):
    names = {"tl": tl, "gl": gl, "iris": iris, "tiles": tiles, "lanes": lanes, "DeviceContext": DeviceContext}
    names |= {"peer_descriptor": peer_descriptor, "fence_async_shared": fence_async_shared, "tma_store": tma_store}
    names |= {"await_bulk_stores": await_bulk_stores, "LAYOUT": tl.constexpr(None), "SHARED": SHARED}
    text = f"ctx = DeviceContext.initialize(context, rank, world)\noffsets = lanes(4)\n{text}"
    return kernel_of(triton.jit, "context, own, x, rank, world: tl.constexpr", text, **names)


@table("text, language", [
    *itertools.product(CALLS, ("triton", "gluon")), ("ctx.put_bulk(own, x, 4, 0)", "gluon"), (DESCRIPTOR, "gluon")
])  # fmt: skip
def test_a_pointer_off_the_heap_is_an_error_for_the_own_rank_too(text, language):
    kernel, off = calling(text), torch.zeros(4, dtype=I64)
    if language == "gluon":
        kernel = in_gluon(kernel, DeviceContext=gluon_kernels, LAYOUT=BLOCKED)
    with Iris("1MiB", device="cpu", backend=language) as ctx:
        context, own = ctx.get_device_context(), ctx.zeros(4, dtype=I64)
        kernel[(1,)](context, own, ctx.zeros(4, dtype=I64), 0, 1)
        with pytest.raises(OutOfBoundsError) as caught:
            kernel[(1,)](context, own, off, 0, 1)
        with pytest.raises(ArgumentError):
            kernel[(1,)](torch.zeros(64, dtype=I64), own, own, 0, 1)
        assert not own.any()
    error = caught.value
    assert (error.kernel, error.program, error.address) == ("kernel", (0, 0, 0), off.data_ptr())
    (note,) = error.__notes__
    assert ", rank 0 of 1, at kernel_" in note
    assert not off.any()


@table("given, rank, world", [
    ("zeros", 0, 1), ("zeros", 1, 2), ("own", 0, 2), ("own", 1, 1), ("own", -1, 1), ("own", 0, 0), ("closed", 0, 1),
    ("peer's", 0, 3),
])  # fmt: skip
def test_a_context_tensor_of_another_world_is_refused(make_world, given, rank, world):
    with Iris("1MiB", device="cpu") as ctx:
        x = ctx.zeros(4, dtype=I64)
        context = ctx.get_device_context() if given == "own" else torch.zeros(64, dtype=I64)
        if given == "closed":
            with Iris("1MiB", device="cpu") as other:
                context = other.get_device_context().clone()
        elif given == "peer's":
            context = make_world(3).context(2)
        with raises(ArgumentError, name="rank 2" if given == "peer's" else "") as caught:
            calling("ctx.store(x + offsets, 1, 0)")[(1,)](context, x, x, rank, world)
        assert not x.any()
    (note,) = caught.value.__notes__
    assert note.startswith("in kernel 'kernel', program (0, 0, 0) of grid (1, 1, 1), rank 0 of 1, ")


@triton.jit
def move(x, bases, out, to_rank, mask, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    there = translate(x + offsets, 0, to_rank, bases)
    tl.store(out + offsets, tl.load(there, mask=offsets < mask, other=-1))


def test_bases_of_no_heap_are_refused_and_masked_elements_may_lie_anywhere(make_world):
    world = make_world(2, 4096)
    (x, _), out = world.tensors(torch.arange(4), torch.arange(4) + 10), torch.zeros(1024, dtype=I64)
    for bases, rank in ((torch.zeros(2, dtype=I64), 1), (world.context(0), 0), (world.bases, 2)):
        with pytest.raises((ArgumentError, OutOfBoundsError)):
            move[(1,)](x, bases, out, rank, 4, BLOCK=4)
    move[(1,)](x, world.bases, out, 1, 4, BLOCK=1024)  # beyond both heaps
    assert out[:6].tolist() == [10, 11, 12, 13, -1, -1]
    with pytest.raises(OutOfBoundsError) as caught:
        move[(1,)](x, world.bases, out, 1, 1024, BLOCK=1024)
    assert caught.value.lane == 512
