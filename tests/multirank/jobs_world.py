"""Rank jobs of test_world: what happens when ranks differ, die or diverge."""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from jobs_common import environment, said

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import CollectiveTimeoutError
from iris_core.testing.conformance import oracle


def different_heap_sizes(device: str) -> str:
    return said(lambda: Iris("1MiB" if dist.get_rank() == 0 else "2MiB", device=device))


def different_allocators(device: str) -> str:
    """Only one rank asks for something that does not exist: the others must hear of it."""
    return said(lambda: Iris("1MiB", device=device, allocator="auto" if dist.get_rank() else "hots"))


def diverging_allocations(device: str) -> str:
    with Iris("1MiB", device=device) as ctx:
        ctx.zeros(4)
        ctx.zeros(8 if ctx.cur_rank != 1 else 9999)
        return said(ctx.barrier)


def a_rank_dies(device: str) -> str:
    ctx = Iris("1MiB", device=device)
    ctx.barrier()
    if ctx.cur_rank == 1:
        os._exit(3)
    try:
        return said(ctx.barrier)
    finally:
        ctx.close()


def a_rank_stays_away(device: str) -> str:
    try:
        with environment(IRIS_BARRIER_TIMEOUT="30"), Iris("1MiB", device=device) as ctx:
            if ctx.cur_rank == 1:
                dist.all_reduce(torch.zeros(1))  # when rank 0 has given up
                return "late"
            ctx._world.timeout_s = 0.5
            ctx.barrier()
    except CollectiveTimeoutError as e:
        dist.all_reduce(torch.zeros(1))
        return f"{e.missing_ranks} {e}"
    return ""


def heap_of_64_gib() -> int:
    """Return how many bytes of shared memory came into being."""
    with Iris("1MiB", device="cpu"):
        pass  # what the first one takes is not what is measured
    before = _shared_kib()
    ctx = Iris("64GiB", device="cpu")
    far = ctx.empty(60 << 30, dtype=torch.uint8)
    far[-1] = 1
    grown = _shared_kib() - before
    ctx.close()
    return grown * 1024


def use_after_close(device: str) -> list[float]:
    ctx = Iris("1MiB", device=device)
    x = ctx.ones(1000)
    view = x[10:20]
    ctx.close()
    ctx.close()
    x += 1
    del x
    return view.tolist()


def subgroups(device: str) -> tuple[int, int, float]:
    """Two worlds of two ranks inside a world of four."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    with Iris("1MiB", device=device, group=mine) as ctx:
        x = ctx.full((4,), float(dist.get_rank()))
        ctx.barrier()
        ctx.barrier(group=mine)
        other = ctx.broadcast(x, src=1)
        return ctx.cur_rank, ctx.num_ranks, float(other[0])


def broadcasts(device: str) -> list[str]:
    with Iris("1MiB", device=device) as ctx:
        mine = ctx.cur_rank == 1
        sent = [torch.arange(3), [1, 2, 3], {"a": 1}, "text", None, True, 2.5, torch.ones(2, dtype=torch.bfloat16)]
        back = [ctx.broadcast(v if mine else None, src=1) for v in sent]
        back.append(ctx.broadcast(ctx.cur_rank, source_rank=0))
        return [f"{type(v).__name__} {v}" for v in back]


def broadcast_from_nowhere(device: str) -> None:
    with Iris("1MiB", device=device) as ctx:
        ctx.broadcast(1, src=5)


def translated_addresses(device: str) -> bool:
    """The address that a rank computes for a peer's tensor shows the peer's data."""
    with Iris("1MiB", device=device) as ctx:
        x, bases = ctx.allocate_symmetric(4, dtype=torch.int32)
        x.fill_(ctx.cur_rank + 100)
        ctx.barrier()
        ok = bases[ctx.cur_rank].item() == x.data_ptr()
        for peer in range(ctx.num_ranks):
            there = ctx.heap.translate(x.data_ptr(), ctx.cur_rank, peer)
            ok &= there == bases[peer].item()
            ok &= int.from_bytes(oracle.read_bytes(there, 4, ctx.device), "little") == peer + 100
        ctx.barrier()
        return ok


def _shared_kib() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssShmem"))


def another_default_device(device: str) -> list[float]:
    """torch's default device is not the context's; the exchanges between hosts stay on the CPU."""
    torch.set_default_device("meta")
    try:
        with Iris("1MiB", device=device) as ctx:
            x = ctx.full((2,), float(ctx.cur_rank))
            ctx.barrier()
            return x.tolist()
    finally:
        torch.set_default_device(None)


@triton.jit
def store_to(x, bases, rank: tl.constexpr, peer: tl.constexpr):
    iris.store(x, 1.0, rank, peer, bases)


def store_through_an_ordinary_tensor() -> str:
    with Iris("1MiB", device="cpu") as ctx:
        peer = (ctx.cur_rank + 1) % ctx.num_ranks
        try:
            store_to[(1,)](torch.zeros(4), ctx.get_heap_bases(), ctx.cur_rank, peer)
        except IndexError as e:
            return str(e)
        finally:
            ctx.barrier()
    return ""
