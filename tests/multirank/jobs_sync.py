"""Kernels and rank jobs of test_sync: signal, wait, put_signal and barrier on the device."""

import contextlib
import hashlib
import itertools
import os
import time

import torch
import triton
import triton.language as tl
from delays import late_after_signals
from jobs_common import compile_together, environment

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import DeviceTimeoutError, PeerLostError
from iris_triton import DeviceContext
from iris_triton.language.blocks import lanes  # so that Gluon can compile the kernels, too: tests/gluon

threads_meet = tl.debug_barrier

BLOCK = 128
ORDERS = (("release", "acquire"), ("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed"))
"""sem of the signal and of the wait."""
COMPARE_TIMEOUT_S = 0.1
COMPARISONS = {"eq": (5, 4), "ne": (4, 5), "gt": (4, 5), "ge": (5, 6), "lt": (6, 5), "le": (5, 4)}
"""By comparison: a value with which it holds for 5, and one with which it does not."""


@triton.jit
def ring(
    data, flag, out, context, rank: tl.constexpr, world: tl.constexpr, rounds, form: tl.constexpr, BLOCK: tl.constexpr
):
    """Pass a block around the ring `rounds` times; every rank adds one."""
    ctx = DeviceContext.initialize(context, rank, world)
    i = lanes(BLOCK)
    succ = (rank + 1) % world
    for r in range(rounds):
        if rank == 0:
            value = i * 0 + r
        else:
            ctx.wait(flag, r + 1)
            value = tl.load(data + i)
        if form == "store":
            if rank < world - 1:
                ctx.store(data + i, value + 1, succ)
                ctx.signal(flag, r + 1, succ)
        else:
            tl.store(out + i, value + 1)
            threads_meet()
            if rank < world - 1:
                ctx.put_signal(out + i, data + i, flag, r + 1, succ)
        if rank == world - 1:  # the end of the ring hands the token back, so that round r + 1 cannot overtake
            tl.store(out + i, value + 1)
            ctx.signal(flag, r + 1, 0)
        if rank == 0:
            ctx.wait(flag, r + 1)


@triton.jit
def count_signals(flag, context, rank: tl.constexpr, world: tl.constexpr, rounds):
    """Every rank signals rank 0 by adding; rank 0 waits for all signals of the test, so none is too early."""
    ctx = DeviceContext.initialize(context, rank, world)
    for _ in range(rounds):
        ctx.signal(flag, 1, 0, op="add")
    if rank == 0:
        ctx.wait(flag, rounds * world, cmp="eq")


@triton.jit
def compare(flag, value, out, timeout_ns, cmp: tl.constexpr):
    """Wait alone, and note what the wait returns."""
    tl.store(out, iris.wait(flag, value, cmp=cmp, timeout_ns=timeout_ns))


@triton.jit(do_not_specialize=["rank", "peer", "n"])
def handshake(
    x, y, flags, meeting, out, bases, context, rank, peer, world: tl.constexpr, n, form: tl.constexpr,
    method: tl.constexpr, op: tl.constexpr, sem: tl.constexpr, wait_sem: tl.constexpr, scope: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a block to `peer`, signal, await the own flag, meet; `out` is what the wait and then the memory said."""
    i = lanes(BLOCK)
    ctx = DeviceContext.from_tensor(context, world)
    if form == "signal":
        iris.put(x + i, y + i, rank, peer, bases, i < n)
        if method:
            ctx.signal(flags, 3, peer, op, sem, scope)
        else:
            iris.signal(flags, 3, rank, peer, bases, op, sem, scope)
    else:
        if method:
            ctx.put_signal(x + i, y + i, flags, 3, peer, op, i < n, sem=sem, scope=scope)
        else:
            iris.put_signal(x + i, y + i, flags, 3, rank, peer, bases, op, i < n, sem=sem, scope=scope)
    if method:
        seen = ctx.wait(flags, 3, "ge", wait_sem, scope)
        ctx.barrier(meeting)
    else:
        seen = iris.wait(flags, 3, "ge", wait_sem, scope)
        iris.barrier(meeting, rank, world, bases)
    tl.store(out, seen)
    tl.store(out + 1 + i, tl.load(y + i))


@triton.jit
def barriers(
    flags, data, bad, context, rank: tl.constexpr, world: tl.constexpr, rounds,
    start: tl.constexpr, stride: tl.constexpr, size: tl.constexpr
):  # fmt: skip
    """Between two barriers every member writes its slot on every member; all must see all."""
    ctx = DeviceContext.initialize(context, rank, world)
    for r in range(rounds):
        for m in range(size):
            ctx.store(data + rank, r + 1, start + m * stride)
        ctx.barrier(flags, start, stride, size)
        for m in range(size):
            if tl.load(data + start + m * stride, volatile=True) != r + 1:
                tl.store(bad, r + 1)
        ctx.barrier(flags, start, stride, size)


@triton.jit
def serve(
    inbox, arrived, granted, out, context, rank: tl.constexpr, world: tl.constexpr, rounds, LANES: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Rank 0 takes from whoever has sent, and lets that rank send again."""
    ctx = DeviceContext.initialize(context, rank, world)
    i = lanes(BLOCK)
    if rank > 0:
        for r in range(rounds):
            ctx.store(inbox + rank * BLOCK + i, 1000 * (r + 1) + rank, 0)
            ctx.signal(arrived + rank, r + 1, 0)
            ctx.wait(granted, r + 1)
    else:
        for taken in range(rounds * (world - 1)):
            sender = ctx.wait_any(arrived + lanes(LANES), 0, "gt")
            turn = ctx.load_acquire(arrived + sender)
            holds = ctx.test(arrived + sender, turn, "eq") & ~ctx.test(arrived + sender, turn + 1)
            tl.store(out + taken * BLOCK + i, tl.load(inbox + sender * BLOCK + i) * holds.to(tl.int32))
            tl.store(arrived + sender, 0)
            ctx.signal(granted, turn, sender)


@triton.jit
def wait_for_nothing(flag, context, rank: tl.constexpr, world: tl.constexpr):
    """A signal that nobody sends."""
    ctx = DeviceContext.initialize(context, rank, world)
    ctx.wait(flag, 42)


def run_ring(form: str, rounds: int, device: str = "cpu") -> list[int]:
    with Iris("4MiB", device=device) as ctx:
        data, flag = ctx.zeros(BLOCK, dtype=torch.int32), ctx.zeros(1, dtype=torch.int64)
        out = torch.zeros(BLOCK, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        ring[(1,)](data, flag, out, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, rounds, form, BLOCK=BLOCK)
        ctx.barrier()
        return sorted(set(out.tolist()))


def backend_name(device: str = "cpu") -> str:
    with Iris("1MiB", device=device) as ctx:
        return ctx.backend.info.name


def run_handshake(device: str = "cpu") -> tuple[list[str], str]:
    """Try signal and put_signal with every sem and scope, and with op "add", by function and by method.

    Returns:
        What went wrong; and a digest of all memory afterwards, to be compared with another language's.
    """
    problems, digest = [], hashlib.sha256()
    with Iris("4MiB", device=device) as ctx:
        rank, world, n = ctx.cur_rank, ctx.num_ranks, BLOCK - 5
        x, y = ctx.arange(BLOCK, dtype=torch.int64) + 1000 * rank, ctx.empty(BLOCK, dtype=torch.int64)
        flags = {dtype: ctx.empty(1, dtype=dtype) for dtype in (torch.int64, torch.uint32)}
        meeting, out = ctx.zeros(world + 1, dtype=torch.int64), ctx.empty(BLOCK + 1, dtype=torch.int64)
        launches = []
        for form, method, op, (sem, wait_sem), scope in itertools.product(
            ("signal", "put_signal"), (False, True), ("set", "add"), ORDERS, ("sys", "gpu")
        ):
            if op == "add" and (sem, scope) != ("release", "sys"):
                continue
            peer = (rank + 1) % world if scope == "sys" else rank  # "gpu" is for flags of the own device
            args = (
                x, y, flags[torch.int64 if method else torch.uint32], meeting, out, ctx.get_heap_bases(),
                ctx.get_device_context(), rank, peer, world, n, form, method, op,
            )  # fmt: skip
            launches.append((handshake, args, {"sem": sem, "wait_sem": wait_sem, "scope": scope, "BLOCK": BLOCK}))
        compile_together(ctx, launches)
        for kernel, args, kwargs in launches:
            flag, op = args[2], args[-1]
            flag.copy_(torch.full((1,), 2 if op == "add" else 0).to(flag.dtype))
            y.fill_(-1)
            ctx.barrier()
            kernel[(1,)](*args, **kwargs)
            ctx.barrier()
            sender = (rank - 1) % world if kwargs["scope"] == "sys" else rank
            value = 5 if op == "add" else 3
            wanted = [value, *range(1000 * sender, 1000 * sender + n), *[-1] * (BLOCK - n)]
            if out.tolist() != wanted or int(flag.item()) != value:
                problems.append(f"rank {rank}: {args[-3:]} {kwargs}: {out.tolist()[:3]}..., flag {flag.item()}")
            for tensor in (out, y, flag, meeting):
                digest.update(bytes(tensor.cpu().view(torch.uint8).numpy()))
    return problems, digest.hexdigest()


def run_count(dtype_name: str, rounds: int, device: str = "cpu") -> int:
    with Iris("4MiB", device=device) as ctx:
        flag = ctx.zeros(1, dtype=getattr(torch, dtype_name))
        ctx.barrier()
        count_signals[(1,)](flag, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, rounds)
        ctx.barrier()
        return flag.item()


def run_serve(rounds: int, shared_file: str, device: str = "cpu") -> list[int]:
    """Return what rank 0 took, an element of each block; blocks of different elements are an error."""
    with Iris("4MiB", device=device) as ctx:
        rank, world, lanes = ctx.cur_rank, ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks)
        inbox, arrived = ctx.zeros(world, BLOCK, dtype=torch.int32), ctx.zeros(lanes, dtype=torch.int64)
        granted = ctx.zeros(1, dtype=torch.int64)
        out = torch.zeros(rounds * (world - 1), BLOCK, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        late = late_after_signals(shared_file, rank, world, 0.1) if device == "cpu" else contextlib.nullcontext()
        with late:
            serve[(1,)](inbox, arrived, granted, out, ctx.get_device_context(), rank, world, rounds, lanes, BLOCK=BLOCK)
            ctx.barrier()
        assert (out == out[:, :1]).all()
        return out[:, 0].tolist()


def check_served(served: list[int], num_ranks: int, rounds: int) -> None:
    """Every rank was served once a round, and its rounds in order."""
    for sender in range(1, num_ranks):
        mine = [value for value in served if value % 1000 == sender]
        assert mine == [1000 * (r + 1) + sender for r in range(rounds)]
    assert len(served) == rounds * (num_ranks - 1)


def run_barrier(start: int, stride: int, size: int, rounds: int, launches: int, device: str = "cpu") -> int:
    """Return the first round that saw a stale slot, 0 if none did."""
    with Iris("4MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        flags = ctx.zeros(world + 1, dtype=torch.int64)
        data, bad = ctx.zeros(world, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        for _ in range(launches):  # no reset of the flags in between
            if rank in range(start, start + stride * size, stride):
                barriers[(1,)](flags, data, bad, ctx.get_device_context(), rank, world, rounds, start, stride, size)
        ctx.barrier()
        return bad.item()


def run_timeout(device: str = "cpu") -> tuple[str, bool]:
    """Rank 1 waits for a signal that never comes; returns its error and whether it names the flag."""
    with environment(IRIS_DEVICE_TIMEOUT="0.3"), Iris("4MiB", device=device) as ctx:
        flag = ctx.zeros(1, dtype=torch.int64)
        ctx.barrier()
        if ctx.cur_rank == 1:
            wait_for_nothing[(1,)](flag, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks)
        text = ""
        try:
            ctx.barrier()
        except DeviceTimeoutError as e:
            text = str(e)
        ctx.barrier()  # reported once
        return text, hex(flag.data_ptr()) in text


def wait_for_a_dead_peer(device: str = "cpu") -> str:
    """Rank 1 dies while rank 0 waits for its signal inside a kernel."""
    with environment(IRIS_DEVICE_TIMEOUT="100" if device == "cpu" else "2"):  # a GPU's kernel does not notice
        ctx = Iris("4MiB", device=device)
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if ctx.cur_rank == 1:
        time.sleep(0.5)
        os._exit(5)
    try:
        wait_for_nothing[(1,)](flag, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks)
        ctx.barrier()  # on a GPU the launch returns at once
    except PeerLostError as e:
        raise RuntimeError(f"as it should be: {e}") from None
    finally:
        ctx.close()
    return "nothing was noticed"


def run_compare(dtype_name: str, device: str = "cpu") -> dict[str, tuple[int, int, float]]:
    """Wait for a flag that is 5 already, by every comparison, with values for which it holds and does not hold.

    Returns:
        By comparison: what a wait returns that holds, and has no bound, and one that does not; and how long the latter
        took at least (seconds).
    """
    results = {}
    with Iris("1MiB", device=device) as ctx:
        flag, out = ctx.full((1,), 5, dtype=getattr(torch, dtype_name)), ctx.zeros(1, dtype=getattr(torch, dtype_name))
        for cmp, (holds, fails) in COMPARISONS.items():
            seen = []
            for value, bound_s in ((holds, 0), (fails, COMPARE_TIMEOUT_S)):
                out.zero_()
                ctx.barrier()
                begin = time.monotonic()
                compare[(1,)](flag, value, out, int(bound_s * 1e9), cmp=cmp)
                ctx.barrier()
                seen.append(int(out.item()))
            results[cmp] = *seen, time.monotonic() - begin
    return results
