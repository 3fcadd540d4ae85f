"""Scripts in the manner of AMD's Iris: accesses, atomics, context tensor, allocations, peers' memory."""

import random
import time

import torch
import triton
import triton.language as tl

import iris_triton.as_iris
import iris

BLOCK = 128


@triton.jit
def exchange(
    data, got, put, copied, sums, cur_rank: tl.constexpr, heap_bases, context, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Every function once, in the positional order of AMD's Iris."""
    partner = int((cur_rank + world // 2) % world)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < BLOCK
    iris.get(data + offsets, got + offsets, cur_rank, partner, heap_bases, mask=mask)
    iris.put(data + offsets, put + offsets, cur_rank, partner, heap_bases, mask=mask)
    iris.copy(data + offsets, copied + offsets, partner, cur_rank, cur_rank, heap_bases, mask)
    iris.atomic_add(sums, cur_rank + 1, cur_rank, partner, heap_bases, sem="relaxed", scope="sys")
    iris.atomic_max(sums + 1, cur_rank, cur_rank, 0, heap_bases)
    iris.atomic_or(sums + 2, 1 << cur_rank, cur_rank, 0, heap_bases, None, "acq_rel", "sys")
    ctx = iris.Context.initialize(context, cur_rank, world, tracing=False)
    ctx.atomic_xor(sums + 3, 1 << cur_rank, 0)
    value = ctx.load(data + offsets, partner, mask, hint=(16,))
    fresh = iris.load(data + offsets, cur_rank, partner, heap_bases, mask, 0, ".cv", True)
    ctx.store(copied + BLOCK + offsets, value + fresh, cur_rank, mask, ".wt")
    iris.quiet(None, partner)


def accesses(dtypes=(torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32)):
    shmem = iris.Iris(1 << 20)
    rank, world = shmem.cur_rank, shmem.num_ranks
    partner = (rank + world // 2) % world
    for dtype in dtypes:
        data = shmem.full((BLOCK,), rank + 1, dtype=dtype)
        got, put = shmem.zeros((BLOCK,), dtype=dtype), shmem.zeros(BLOCK, dtype=dtype)
        copied = shmem.zeros((2, BLOCK), dtype=dtype)
        sums = shmem.zeros(4, dtype=torch.int32)
        shmem.barrier()
        context = shmem.get_device_context()
        launched = exchange[(1,)](data, got, put, copied, sums, rank, shmem.heap_bases, context, world, BLOCK)
        assert min(launched.n_regs, launched.n_spills) >= 0
        shmem.barrier()
        want = torch.full((BLOCK,), partner + 1, dtype=dtype)
        for found in (got, put, copied[0]):
            assert torch.equal(found.cpu(), want), dtype
        assert torch.equal(copied[1].cpu(), want * 2)
        assert sums[0] == partner + 1
        if rank == 0:
            assert sums[1:].tolist() == [world - 1, (1 << world) - 1, (1 << world) - 1]
        shmem.barrier()


def context_tensor():
    shmem = iris.iris(heap_size=1 << 20)
    words = shmem.get_device_context()
    world = shmem.get_num_ranks()
    assert (words.dtype, words[:2].tolist()) == (torch.int64, [shmem.get_rank(), world])
    assert torch.equal(words[2 : 2 + world], shmem.get_heap_bases())
    tensor, peers = shmem.allocate_symmetric(3, 5, dtype=torch.float16)
    assert peers[shmem.cur_rank] == tensor.data_ptr()
    there = [shmem.heap.translate(tensor.data_ptr(), shmem.cur_rank, rank) for rank in range(world)]
    assert peers.tolist() == there
    assert shmem.is_symmetric(tensor)
    assert shmem.heap.is_symmetric(tensor)
    assert not shmem.is_symmetric(torch.zeros(3))
    view = iris.tensor_from_ptr(tensor.data_ptr(), tensor.nbytes, tensor.dtype, shmem.get_device(), tensor.shape)
    tensor.fill_(3)
    assert torch.equal(view, tensor)
    shmem.barrier()
    last = world - 1
    from_other = shmem.broadcast(torch.arange(4) if shmem.cur_rank == last else None, src_rank=last)
    assert from_other.tolist() == [0, 1, 2, 3]
    assert type(from_other).__name__ == "ndarray"
    assert shmem.broadcast({"rank": shmem.cur_rank}, last) == {"rank": last}
    shmem.device_barrier()
    shmem.barrier()


@triton.jit
def give_and_take(inp, out, got, n, cur_rank: tl.constexpr, world: tl.constexpr, heap_bases, BLOCK: tl.constexpr):
    """Put into the peers' new memory, and copy from what they have written just before."""
    offsets = tl.arange(0, BLOCK)
    for remote in range(world):
        iris.put(inp + offsets, out + cur_rank * n + offsets, cur_rank, remote, heap_bases, mask=offsets < n)
        iris.copy(inp + offsets, got + remote * n + offsets, remote, cur_rank, cur_rank, heap_bases, offsets < n)


def allocations(turns=15, latest_s=0.0):
    """Write the input, allocate the output, launch: no barrier in between, and ranks that are late at random."""
    shmem = iris.iris(1 << 20)
    rank, world, n = shmem.get_rank(), shmem.get_num_ranks(), 100
    chance = random.Random(rank)
    inp, total = shmem.zeros(n), world * n
    got = shmem.zeros(total)
    makers = (
        lambda: shmem.zeros(total), lambda: shmem.ones(total), lambda: shmem.full((total,), 7.0),
        lambda: shmem.empty(total, dtype=torch.float32), lambda: shmem.zeros_like(got),
        lambda: shmem.arange(total, dtype=torch.float32), lambda: shmem.linspace(0, 1, total),
        lambda: shmem.rand(total), lambda: shmem.randn(total),
        lambda: shmem.randint(0, 9, (total,), dtype=torch.float32), lambda: shmem.uniform(total),
        lambda: shmem.allocate(total, torch.float32), lambda: shmem.allocate_symmetric(total)[0],
        lambda: shmem.as_symmetric(torch.zeros(total, device=shmem.device)),
        lambda: shmem.as_symmetric(shmem.zeros(total)),
    )  # fmt: skip
    for turn in range(turns):
        time.sleep(chance.random() * latest_s)
        inp.fill_(turn * world + rank)
        time.sleep(chance.random() * latest_s)
        out = makers[turn % len(makers)]()
        give_and_take[(1,)](inp, out, got, n, rank, world, shmem.get_heap_bases(), BLOCK)
        shmem.barrier()
        want = torch.arange(turn * world, (turn + 1) * world, dtype=torch.float32).repeat_interleave(n)
        assert torch.equal(out.cpu(), want), ("put", turn)
        assert torch.equal(got.cpu(), want), ("copy", turn)
        shmem.zeros(n, out=inp)  # fills own memory, as there: no rank waits
    shmem.barrier()


@triton.jit
def load_and_add(x, found, rank: tl.constexpr, partner: tl.constexpr, peers, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(found + offsets, iris.load(x + offsets, rank, partner, peers))
    iris.atomic_add(x + BLOCK + offsets, rank + 1, rank, partner, peers)


def peers_memory(allocator="torch"):
    """`as_remote` of several types and strides; kernels that are given the peers' addresses of one tensor."""
    shmem = iris.iris(1 << 22, allocator)
    rank, world = shmem.cur_rank, shmem.num_ranks
    partner = (rank + world // 2) % world
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2):
        values = [(torch.arange(24).view(4, 6) % (r + 2)).to(dtype) for r in range(world)]
        x = shmem.zeros((4, 6), dtype=dtype)
        x.copy_(values[rank])
        shmem.barrier()
        for part in (slice(None), (slice(None), slice(1, None, 2))):
            there = shmem.as_remote(x[part], partner)
            form = x[part].shape, x[part].stride(), dtype, x.device
            assert (there.shape, there.stride(), there.dtype, there.device) == form
            assert there.data_ptr() == shmem.heap.translate(x[part].data_ptr(), rank, partner)
            assert torch.equal(there.cpu().float(), values[partner][part].float()), dtype
        assert shmem.as_remote(x, rank).data_ptr() == x.data_ptr()
        shmem.barrier()
        shmem.as_remote(x[:2], partner).copy_(values[rank][2:])
        shmem.barrier()
        assert torch.equal(x[:2].cpu().float(), values[(rank - world // 2) % world][2:].float()), dtype

    x, peers = shmem.allocate_symmetric(2 * BLOCK, dtype=torch.int32)
    found = torch.zeros(BLOCK, dtype=torch.int32, device=shmem.device)
    x.fill_(rank)
    shmem.barrier()
    load_and_add[(1,)](x, found, rank, partner, peers, BLOCK)
    shmem.barrier()
    assert (found == partner).all()
    assert (x[BLOCK:] == rank + 1 + (rank - world // 2) % world).all()
    shmem.barrier()
