"""Kernels of benchmarks/rma.py."""

import triton
import triton.language as tl

from iris_triton import DeviceContext

# The number of the peer is not specialised: one binary serves every pair of ranks.


@triton.jit(do_not_specialize=["peer"])
def push(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Copy own `source` to `target` on the peer; programs stride over the blocks."""
    ctx = DeviceContext.from_tensor(context, world_size)
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + lanes
        ctx.put(source + i, target + i, peer)


@triton.jit(do_not_specialize=["peer"])
def pull(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    """Copy `source` on the peer to own `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + lanes
        ctx.get(source + i, target + i, peer)


@triton.jit
def push_to_all(source, target, chunk, context, world_size: tl.constexpr, BLOCK: tl.constexpr):
    """Copy chunk p of own `source` to this rank's chunk of `target` on every peer p.

    Program i serves peer rank + 1 + i % (world_size - 1), so no two ranks begin with the same peer.
    """
    ctx = DeviceContext.from_tensor(context, world_size)
    PEERS: tl.constexpr = world_size - 1
    peer = (ctx.rank + 1 + tl.program_id(0) % PEERS) % world_size
    lanes = tl.arange(0, BLOCK)
    here, there = source + peer.to(tl.int64) * chunk, target + ctx.rank.to(tl.int64) * chunk
    for start in range(tl.program_id(0) // PEERS * BLOCK, chunk, tl.num_programs(0) // PEERS * BLOCK):
        i = start + lanes
        ctx.put(here + i, there + i, peer)


@triton.jit
def pull_from_all(source, target, chunk, context, world_size: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this rank's chunk of `source` on every peer p to chunk p of own `target`."""
    ctx = DeviceContext.from_tensor(context, world_size)
    PEERS: tl.constexpr = world_size - 1
    peer = (ctx.rank + 1 + tl.program_id(0) % PEERS) % world_size
    lanes = tl.arange(0, BLOCK)
    there, here = source + ctx.rank.to(tl.int64) * chunk, target + peer.to(tl.int64) * chunk
    for start in range(tl.program_id(0) // PEERS * BLOCK, chunk, tl.num_programs(0) // PEERS * BLOCK):
        i = start + lanes
        ctx.get(there + i, here + i, peer)


@triton.jit(do_not_specialize=["peer", "begins"])
def ping_pong(
    flag, epoch, context, world_size: tl.constexpr, rounds, peer, begins, SEND: tl.constexpr, RECEIVE: tl.constexpr
):
    """Two ranks signal each other in turn; `epoch` counts the rounds of all launches."""
    ctx = DeviceContext.from_tensor(context, world_size)
    first = tl.load(epoch)
    for r in range(rounds):
        if begins != 0:
            ctx.signal(flag, first + r + 1, peer, sem=SEND)
            ctx.wait(flag, first + r + 1, sem=RECEIVE)
        else:
            ctx.wait(flag, first + r + 1, sem=RECEIVE)
            ctx.signal(flag, first + r + 1, peer, sem=SEND)
    tl.store(epoch, first + rounds)


@triton.jit(do_not_specialize=["lead"])
def take_turn(flag, epoch, outbox, context, world_size: tl.constexpr, lead):
    """Wait for the next number in `flag`; leave in `outbox` what is sent back, `lead` more than that."""
    ctx = DeviceContext.from_tensor(context, world_size)
    count = tl.load(epoch) + 1
    ctx.wait(flag, count)
    tl.store(epoch, count)
    tl.store(outbox, count + lead)


@triton.jit
def stamp(board, value, context, world_size: tl.constexpr):
    """Write `value` to this rank's word of the board of every rank."""
    ctx = DeviceContext.from_tensor(context, world_size)
    for peer in range(world_size):
        ctx.store(board + ctx.rank, value, peer)
