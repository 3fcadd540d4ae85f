"""The language: what the kit's programs do not touch, and every refusal."""

import numpy as np
import pytest
import torch

from iris_core import Iris
from iris_core.errors import ArgumentError, DeviceTimeoutError, NotOnHeapError, PeerLostError, UnsupportedError
from iris_core.testing.conformance.backend import OneHeap
from iris_example_backend import heaps, ring_gemm
from iris_example_backend import language as ex
from iris_example_backend.kernels import Pointer

ATOMICS = {
    "add": lambda old, val: old + val,
    "sub": lambda old, val: old - val,
    "xchg": lambda old, val: val,
    "xor": lambda old, val: old ^ val,
    "and": lambda old, val: old & val,
    "or": lambda old, val: old | val,
    "min": min,
    "max": max,
}


def open_context():
    return Iris("1MiB", allocator="example", backend="example", device="cpu")


@pytest.fixture
def ctx():
    with open_context() as ctx:
        yield ctx


@pytest.fixture
def bases(ctx):
    return Pointer(ctx.get_heap_bases().numpy())


def pointer_to(tensor):
    return Pointer(tensor.numpy().reshape(-1))


# -- kernels and pointers ---------------------------------------------------------------------------------------------
def test_a_kernel_runs_once_per_program():
    seen = []

    @ex.kernel
    def note(name):
        seen.append((name, ex.program_id(0), ex.program_id(1)))

    note[(2, 3)](name="x")
    assert seen == [("x", i, j) for i in range(2) for j in range(3)]


def test_masks_and_other():
    pointer = pointer_to(torch.arange(5)) + np.arange(8)
    mask = np.arange(8) < 5
    assert pointer.load(mask).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert pointer.load(mask, other=9).tolist() == [0, 1, 2, 3, 4, 9, 9, 9]
    pointer.store(np.arange(8) + 10, mask)
    assert pointer.array.tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("index", [-1, 5])
def test_beyond_a_tensor_is_an_error(index):
    tensor = torch.zeros(5)
    with pytest.raises(ex.BoundsError, match=f"element {index} of a tensor of 5"):
        (pointer_to(tensor) + index).load()
    with pytest.raises(ex.BoundsError):
        (pointer_to(tensor) + np.array([0, index])).store(1)
    assert not tensor.any()


def test_tensors_that_kernels_cannot_take():
    @ex.kernel
    def nothing(x):
        raise AssertionError("the kernel was started")

    with pytest.raises(ArgumentError, match="contiguous"):
        nothing[(1,)](torch.zeros(4, 4).t())
    with pytest.raises(UnsupportedError, match="bfloat16"):
        nothing[(1,)](torch.zeros(4, dtype=torch.bfloat16))


# -- remote memory ----------------------------------------------------------------------------------------------------
def test_only_live_blocks_of_the_heap_can_be_reached(ctx, bases):
    with pytest.raises(NotOnHeapError, match="no symmetric heap"):
        ex.load(pointer_to(torch.zeros(4)), 0, 0, bases)
    tensor = ctx.zeros(4)
    pointer = pointer_to(tensor)
    assert ex.load(pointer, 0, 0, bases) == 0
    ctx.free(tensor)
    with pytest.raises(NotOnHeapError, match="not in one allocated block"):
        ex.store(pointer, 1, 0, 0, bases)


def test_a_closed_context_takes_its_heap_away():
    with open_context() as ctx:
        pointer, bases = pointer_to(ctx.zeros(4)), Pointer(ctx.get_heap_bases().numpy())
    with pytest.raises(NotOnHeapError):
        ex.store(pointer, 1, 0, 0, bases)


@pytest.mark.parametrize("rank", [-1, 1])
def test_there_is_no_such_rank(ctx, bases, rank):
    with pytest.raises(ArgumentError, match=f"no rank {rank}"):
        ex.load(pointer_to(ctx.zeros(4)), 0, rank, bases)


def test_tensors_without_elements(ctx, bases):
    nothing, mask = pointer_to(ctx.zeros(0, dtype=torch.int64)) + np.arange(4), np.zeros(4, bool)
    assert ex.load(nothing, 0, 0, bases, mask, other=3).tolist() == [3] * 4
    assert ex.atomic_add(nothing, 1, 0, 0, bases, mask).tolist() == [0] * 4
    with pytest.raises(ex.BoundsError, match="element 0 of a tensor of 0"):
        ex.store(nothing, 1, 0, 0, bases)


# -- atomics ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(ctx, bases, name):
    words = ctx.zeros(4, dtype=torch.int64)
    words.copy_(torch.tensor([12, 5, 7, 9]))
    operation = getattr(ex, f"atomic_{name}")
    old = operation(pointer_to(words) + np.arange(4), 10, 0, 0, bases, mask=np.arange(4) != 2)
    assert old.tolist() == [12, 5, 0, 9]
    expected = [ATOMICS[name](12, 10), ATOMICS[name](5, 10), 7, ATOMICS[name](9, 10)]
    assert words.tolist() == expected


def test_a_block_may_name_a_word_twice(ctx, bases):
    words = ctx.zeros(1, dtype=torch.int32)
    old = ex.atomic_add(pointer_to(words) + np.zeros(4, int), 2, 0, 0, bases)
    assert old.tolist() == [0, 2, 4, 6]
    assert words.item() == 8


def test_sums_wrap_around(ctx, bases):
    words = ctx.full((1,), 2**31 - 1, dtype=torch.int32)
    assert ex.atomic_add(pointer_to(words), 1, 0, 0, bases) == 2**31 - 1
    assert words.item() == -(2**31)


def test_compare_and_swap(ctx, bases):
    words = ctx.zeros(1, dtype=torch.int64)
    assert ex.atomic_cas(pointer_to(words), 1, 5, 0, 0, bases) == 0
    assert words.item() == 0
    assert ex.atomic_cas(pointer_to(words), 0, 5, 0, 0, bases) == 0
    assert words.item() == 5


def test_unknown_orders_are_refused(ctx, bases):
    words = pointer_to(ctx.zeros(1, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="sem"):
        ex.atomic_add(words, 1, 0, 0, bases, sem="seq_cst")
    with pytest.raises(ArgumentError, match="scope"):
        ex.atomic_cas(words, 0, 1, 0, 0, bases, scope="world")
    assert words.load() == 0


# -- synchronisation --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cmp", "value"), [("eq", 3), ("ne", 2), ("gt", 2), ("ge", 3), ("lt", 4), ("le", 3)])
def test_wait_returns_what_it_saw(ctx, bases, cmp, value):
    flag = pointer_to(ctx.zeros(1, dtype=torch.int64))
    ex.signal(flag, 1, 0, 0, bases)
    ex.signal(flag, 2, 0, 0, bases, op="add")
    assert ex.wait(flag, value, cmp) == 3


def test_a_wait_ends_after_its_bound(ctx):
    flag = pointer_to(ctx.zeros(1, dtype=torch.int64))
    with pytest.raises(DeviceTimeoutError, match=r"rank 0 waited 0\.05 s for flags that are 0 to be ge 1"):
        ex.wait(flag, 1, timeout_ns=50_000_000)


def test_the_bound_of_the_context_is_the_default(monkeypatch):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "0.05")
    with open_context() as ctx, pytest.raises(DeviceTimeoutError, match=r"rank 0 waited 0\.05 s"):
        ex.wait(pointer_to(ctx.zeros(1, dtype=torch.int64)), 1)


def test_a_wait_notices_that_a_peer_is_gone(tmp_path):
    class Lonely(OneHeap):
        def check_peers(self):
            raise PeerLostError("rank 1 is gone", ranks=[1])

    heap = heaps.AttachedHeap(Lonely(), 0, tmp_path)
    try:
        with pytest.raises(PeerLostError):
            heap.wait_until(lambda: False, lambda: "")
    finally:
        heap.detach()


def test_unknown_words_are_refused(ctx, bases):
    flag = pointer_to(ctx.zeros(1, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="op of signal"):
        ex.signal(flag, 1, 0, 0, bases, op="sub")
    with pytest.raises(ArgumentError, match="cmp of wait"):
        ex.wait(flag, 0, cmp="==")


# -- several ranks ----------------------------------------------------------------------------------------------------
@ex.kernel
def _count_and_gather(counter, lock_free, found, offered, flags, rank, world, bases):
    for peer in range(world):
        for _ in range(50):
            ex.atomic_add(counter, 1, rank, peer, bases)
    ex.copy(offered, lock_free + rank, (rank + 1) % world, rank, rank, bases)
    members = (world + 1) // 2
    if rank % 2 == 0:
        ex.barrier(flags, rank, world, bases, rank_start=0, rank_stride=2, group_size=members)
    ex.get(offered, found, rank, (rank + 1) % world, bases)


def work():
    with open_context() as ctx:
        counter, flags = ctx.zeros(1, dtype=torch.int64), ctx.zeros(ctx.num_ranks + 1, dtype=torch.int64)
        offered, copied = ctx.full((1,), 7 + ctx.cur_rank), ctx.zeros(ctx.num_ranks)
        found = torch.zeros(1)
        ctx.barrier()
        _count_and_gather[(1,)](
            counter, copied, found, offered, flags, ctx.cur_rank, ctx.num_ranks, ctx.get_heap_bases()
        )
        for _ in range(5):
            ctx.device_barrier()
        ctx.barrier()
        result = ring_gemm.run(ctx)
        return counter.item(), copied[ctx.cur_rank].item(), found.item(), result.ok


def check_pairs():
    with open_context() as ctx:
        begun = []
        checks = list(ctx.backend.self_test(ctx, lambda op, peer: begun.append(op)))
        return checks, set(begun)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_self_test_covers_all_pairs(pool, num_ranks):
    results = pool.run(check_pairs, num_ranks)
    ops = {"write", "read", "atomic_add", "signal"}
    assert all(begun == {*ops, "barrier"} for _, begun in results)
    checks = [check for own, _ in results for check in own]
    assert [str(check) for check in checks if not check.ok] == []
    pairs = [(one, two) for one in range(num_ranks) for two in range(num_ranks) if one != two or num_ranks == 1]
    seen = sorted((check.op, check.rank, check.peer) for check in checks)
    assert seen == sorted((op, *pair) for op in ops for pair in pairs)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_together(pool, num_ranks):
    for rank, (count, copied, found, ok) in enumerate(pool.run(work, num_ranks)):
        assert count == 50 * num_ranks
        assert copied == found == 7 + (rank + 1) % num_ranks
        assert ok
