"""Bounds: what a kernel may touch, and what the message says when it touches something else."""

import dataclasses
import linecache
import threading

import pytest
import torch
import triton
import triton.language as tl

from iris_core.types import Block
from iris_triton import interpreter
from iris_triton.interpreter import OutOfBoundsError, hints
from iris_triton.interpreter.memory import regions
from iris_triton.interpreter.memory.regions import BoundsChecker, current_regions


@dataclasses.dataclass
class FakeHeap:
    """Two ranks' heaps in one buffer each, with the same blocks."""

    nbytes: int = 4096
    rank: int = 0
    version: int = 0
    nodes: tuple = ((0, 1),)

    def __post_init__(self):
        self.memory = [torch.zeros(self.nbytes, dtype=torch.uint8) for _ in range(2)]
        self.blocks = []

    @property
    def heap_bases(self):
        return tuple(m.data_ptr() for m in self.memory)

    def live_blocks(self):
        return sorted(self.blocks, key=lambda b: b.offset_bytes)

    def allocate(self, offset, nbytes, label=""):
        self.blocks.append(Block(offset, nbytes, label))
        self.version += 1

    def free(self, offset):
        self.blocks = [b for b in self.blocks if b.offset_bytes != offset]
        self.version += 1

    def tensor(self, rank, offset, count):
        return self.memory[rank][offset : offset + 4 * count].view(torch.float32)

    def stands_still(self, quiet):
        return False

    def elsewhere(self):
        return ()

    def check_peers(self):
        pass


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


@pytest.fixture
def heap():
    heap = FakeHeap()
    heap.allocate(256, 400, "x")
    heap.allocate(1024, 64)
    token = interpreter.register_memory(heap)
    yield heap
    interpreter.unregister_memory(token)


def test_a_heap_may_go_while_the_table_is_made(monkeypatch):
    """The garbage collector closes dropped contexts wherever this thread allocates: also while it makes the table."""

    class Dropped(FakeHeap):
        def live_blocks(self):
            interpreter.unregister_memory(other)
            return super().live_blocks()

    monkeypatch.setattr(regions, "_heaps", {})
    other = interpreter.register_memory(FakeHeap())
    interpreter.register_memory(Dropped())
    making = threading.Thread(target=current_regions, daemon=True)
    making.start()
    making.join(60)
    assert not making.is_alive()
    assert [type(each) for each in regions.registered_heaps()] == [Dropped]
    assert len(current_regions().heaps) == 2


@triton.jit
def touch_kernel(p, offset, ACCESS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    q = p + offset + i
    if ACCESS == "load":
        tl.load(q)
    elif ACCESS == "store":
        tl.store(q, i.to(p.dtype.element_ty))
    elif ACCESS == "masked":
        tl.store(q, i.to(p.dtype.element_ty), mask=i < 2)
    elif ACCESS == "volatile":
        tl.load(q, volatile=True)
    elif ACCESS == "atomic":
        tl.atomic_add(q, 1.0)
    else:
        tl.atomic_cas(q, 0.0, 1.0)


ACCESSES = {"load": "load", "store": "store", "volatile": "load", "atomic": "atomic_fadd", "cas": "atomic_cas"}


@pytest.mark.parametrize("access", ACCESSES)
def test_accesses_beyond_a_block_are_refused_on_every_rank(heap, access):
    for rank in [0, 1]:
        x = heap.tensor(rank, 256, 100)
        touch_kernel[(1,)](x, 96, ACCESS=access, N=4)
        before = [m.clone() for m in heap.memory]
        with pytest.raises(OutOfBoundsError) as info:
            touch_kernel[(1,)](x, 98, ACCESS=access, N=4)
        error = info.value
        assert isinstance(error, IndexError)
        assert (error.kernel, error.program, error.lane) == ("touch_kernel", (0, 0, 0), 2)
        assert error.access == ACCESSES[access]
        assert error.address == heap.heap_bases[rank] + 256 + 400
        assert error.nbytes == 4
        message = str(error)
        assert (
            f"begins 0 bytes past the end of block 'x' of 400 bytes at offset 256 of the heap of rank {rank}" in message
        )
        assert "1 more lanes" in message
        assert all(torch.equal(a, b) for a, b in zip(before, heap.memory, strict=True))


def test_masked_lanes_may_point_anywhere(heap):
    touch_kernel[(1,)](heap.tensor(0, 256, 100), 98, ACCESS="masked", N=8)
    with pytest.raises(OutOfBoundsError, match="lane 1:"):
        touch_kernel[(1,)](heap.tensor(0, 256, 100), 99, ACCESS="masked", N=8)


def test_a_block_counts_with_its_exact_size_and_to_the_last_byte(heap):
    heap.allocate(2048, 10, "odd")
    odd = heap.tensor(0, 2048, 4)
    touch_kernel[(1,)](odd, 0, ACCESS="load", N=2)
    with pytest.raises(OutOfBoundsError, match="it ends 2 bytes past the end of block 'odd'"):
        touch_kernel[(1,)](odd, 2, ACCESS="load", N=1)


def test_before_a_block_and_freed_blocks(heap):
    x = heap.tensor(1, 256, 100)
    with pytest.raises(OutOfBoundsError, match=r"begins 8 bytes before block 'x'.*rank 1"):
        touch_kernel[(1,)](x, -2, ACCESS="load", N=1)
    touch_kernel[(1,)](heap.tensor(0, 1024, 16), 0, ACCESS="load", N=16)
    heap.free(1024)
    with pytest.raises(OutOfBoundsError, match="past the end of block 'x'"):
        touch_kernel[(1,)](heap.tensor(0, 1024, 16), 0, ACCESS="load", N=16)


def test_a_failed_launch_leaves_everything_usable(heap):
    x = heap.tensor(0, 256, 100)
    for _ in range(3):
        with pytest.raises(OutOfBoundsError):
            touch_kernel[(4,)](x, 2**29, ACCESS="store", N=4)  # far from both heaps
        touch_kernel[(4,)](x, 10, ACCESS="store", N=4)
    assert x[10:14].tolist() == [0, 1, 2, 3]


def test_tensor_arguments_are_accessible_to_the_end_of_their_storage():
    storage = torch.zeros(64)
    touch_kernel[(1,)](storage[:8], 56, ACCESS="store", N=8)
    touch_kernel[(1,)](storage[32:40], -32, ACCESS="store", N=8)
    with pytest.raises(OutOfBoundsError, match="past the end of block 'p' of 256 bytes"):
        touch_kernel[(1,)](storage[:8], 60, ACCESS="store", N=8)
    with pytest.raises(OutOfBoundsError, match="4 bytes before block 'p'"):
        touch_kernel[(1,)](storage[:8], -1, ACCESS="load", N=1)


@triton.jit
def indirect_kernel(addresses, out, N: tl.constexpr):
    for k in range(N):
        p = tl.load(addresses + k).to(tl.pointer_type(tl.float32))
        tl.store(out + k, tl.load(p))


def test_addresses_from_memory_need_a_named_region():
    values = [torch.tensor([5.0]), torch.tensor([7.0])]
    addresses = torch.tensor([v.data_ptr() for v in values])
    out = torch.zeros(2)
    first = interpreter.allow_region(values[0].data_ptr(), 4, "first")
    with pytest.raises(OutOfBoundsError, match="allow_region"):
        indirect_kernel[(1,)](addresses, out, N=2)
    second = interpreter.allow_region(values[1].data_ptr(), 4)
    indirect_kernel[(1,)](addresses, out, N=2)
    assert out.tolist() == [5, 7]
    interpreter.unregister_memory(second)
    with pytest.raises(OutOfBoundsError):
        indirect_kernel[(1,)](addresses, out, N=2)
    interpreter.unregister_memory(first)
    interpreter.unregister_memory(first)
    with interpreter.configured(bounds_check=False):
        indirect_kernel[(1,)](addresses, out.zero_(), N=2)
    assert out.tolist() == [5, 7]


@triton.jit
def pointers_kernel(table, out, N: tl.constexpr):
    i = tl.arange(0, N)
    first = tl.load(table + 0).to(tl.pointer_type(tl.pointer_type(tl.float32)))
    tl.store(out + i, tl.load(tl.load(first + i)))


def test_pointers_to_pointers():
    values = torch.arange(4.0)
    pointers = torch.tensor([values[k:].data_ptr() for k in (2, 0, 3, 1)])
    table, out = torch.tensor([pointers.data_ptr()]), torch.zeros(4)
    tokens = [interpreter.allow_region(t.data_ptr(), t.nbytes) for t in (values, pointers)]
    pointers_kernel[(1,)](table, out, N=4)
    for token in tokens:
        interpreter.unregister_memory(token)
    assert out.tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(("address", "nbytes"), [(0, 8), (100, 0), (100, -1), (2**64 - 4, 8)])
def test_impossible_regions_are_refused(address, nbytes):
    with pytest.raises(ValueError, match="give a positive address"):
        interpreter.allow_region(address, nbytes)


@triton.jit
def scatter_kernel(bases, out, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.load(bases + i % 2).to(tl.pointer_type(tl.float32)) + 64 + i
    tl.store(p, i.to(tl.float32))
    tl.store(out + i, tl.load(p))


def test_lanes_of_one_access_may_lie_on_several_ranks(heap):
    out = torch.zeros(8)
    scatter_kernel[(1,)](torch.tensor(heap.heap_bases), out, N=8)
    assert torch.equal(out, torch.arange(8.0))
    assert heap.tensor(0, 256, 8)[::2].tolist() == [0, 2, 4, 6]
    assert heap.tensor(1, 256, 8)[1::2].tolist() == [1, 3, 5, 7]


@triton.jit
def misaligned_kernel(p, out):
    q = (p.to(tl.int64) + 1).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, 2)
    tl.store(out + i, tl.load(q + i))
    tl.store(q + i, i + 1)


def test_misaligned_elements():
    data = torch.arange(16, dtype=torch.uint8)
    expected = data[1:9].clone().view(torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    misaligned_kernel[(1,)](data, out)
    assert torch.equal(out, expected)
    assert data[1:9].tolist() == [1, 0, 0, 0, 2, 0, 0, 0]


def test_the_table_is_rebuilt_only_when_something_changes(heap):
    first = current_regions()
    assert current_regions() is first
    heap.allocate(3000, 4)
    assert current_regions() is not first


def test_the_checker_agrees_with_a_plain_search(heap):
    heap.allocate(3000, 7)
    checker = BoundsChecker(current_regions(), [])
    live = [(base + b.offset_bytes, base + b.offset_bytes + b.nbytes) for base in heap.heap_bases for b in heap.blocks]
    for base in heap.heap_bases:
        for address in range(base + 200, base + 3100, 3):
            for nbytes in (1, 8):
                inside = any(start <= address and address + nbytes <= end for start, end in live)
                assert (checker.find(address, address + nbytes) is not None) is inside
                bad = checker.outside(torch.tensor([address]).numpy().view("u8"), nbytes)
                assert bool(bad[0]) is not inside


def test_without_any_memory_the_message_says_so():
    checker = BoundsChecker(current_regions(), [])
    addresses = torch.tensor([4096]).numpy().view("u8")
    error = checker.error("k", (0, 0, 0), "load", addresses, addresses * 0, 4)
    assert "no memory is accessible" in str(error)


@triton.jit
def promise(x, out, apart, what: tl.constexpr, number: tl.constexpr):
    i = tl.arange(0, 16)
    where = x + i * apart
    if what == "multiple":
        where = tl.multiple_of(where, number)
    elif what == "contiguous":
        where = tl.max_contiguous(where, number)
    elif what == "rows":
        rows = tl.multiple_of(x + i[:, None] * apart + i[None, :], (1, number))
        tl.store(out, tl.sum(tl.sum(tl.load(rows), 1), 0))
    elif what == "scalar":
        where = tl.multiple_of(x, number) + i
    elif what == "assume":
        tl.assume(apart == number)
    elif what == "offsets":  # of numbers more is promised than is meant
        where = x + tl.max_contiguous(tl.multiple_of(i * apart % 8, number), number)
    tl.store(out + i, tl.load(where))


@pytest.mark.parametrize(
    ("what", "skipped", "apart", "number", "message"),
    [
        ("multiple", 0, 1, 16, ""),
        ("multiple", 4, 1, 16, ""),
        ("multiple", 1, 1, 16, "multiples of 16 bytes: .* is 4 bytes behind one"),
        ("multiple", 0, 4, 16, ""),
        ("multiple", 0, 2, 16, "multiples of 16 bytes: .* is 8 bytes behind one"),
        ("contiguous", 1, 1, 16, ""),
        ("contiguous", 0, 2, 4, "groups of 4 neighbouring elements along axis 0: .* is not 4 bytes behind"),
        ("rows", 0, 20, 16, ""),
        ("rows", 0, 21, 16, "multiples of 16 bytes: .* is 4 bytes behind one"),
        ("scalar", 1, 1, 16, ""),  # kernels promise before they branch
        ("offsets", 0, 3, 16, ""),
        ("assume", 0, 3, 3, ""),
        ("assume", 0, 3, 4, "condition that does not hold"),
    ],
)
def test_promises_about_addresses(what, skipped, apart, number, message):
    interpreter.enable()
    x, out = torch.randn(512), torch.zeros(16)
    if message:
        with interpreter.configured(hints="raise"), pytest.raises(AssertionError, match=message):
            promise[(1,)](x[skipped:], out, apart, what, number)
        hints._refuted.clear()
        with pytest.warns(RuntimeWarning, match=rf"'promise', line \d+ of test_cpu_memory.py.*{message}") as caught:
            promise[(2,)](x[skipped:], out, apart, what, number)
        promise[(1,)](x[skipped:], out, apart, what, number)  # pytest makes another warning an error
        assert [(each.filename, "tl." in linecache.getline(__file__, each.lineno)) for each in caught] == [
            (__file__, True)
        ]
    else:
        promise[(1,)](x[skipped:], out, apart, what, number)
    if what != "offsets":
        assert torch.equal(out, x[skipped : skipped + (16 * apart if what != "scalar" else 16) : apart])
