"""Attention of new tokens to a cache that is divided among ranks (`ctx.ops.flash_decode`).

Decoding reads the whole cache for one query, so the cache is divided: among the ranks, and on each rank into pieces,
one program for each.  A piece gives a partial result: the largest score, the sum of exp(score - largest), and the
values summed with these weights.  The last program of a sequence's key head adds the pieces up, stores the sum into an
inbox on every rank, and sets this rank's word there; once those of all ranks have come, another program adds them up.
It is one kernel, one small partial result of each rank is all that travels, and all ranks get the same bits.

Launches are counted on the device, so that a graph can be replayed.  Two halves of the inbox alternate: who begins
launch n + 2 has the results of n + 1, so all ranks have finished n and read its half.  A rank that has begun n + 1 sets
its words while another one is late in n: each word has one sender, which raises it by one in each launch.

Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.
"""

import torch
import triton
import triton.language as tl

from iris_core.device.context_words import MismatchCode
from iris_triton.collectives.experts import await_members, is_last, signal_members
from iris_triton.context import DeviceContext
from iris_triton.gemm.parts.attend import attend, programs_at_once, width_of, within
from iris_triton.language.flags import report_difference
from iris_triton.launcher import BoundKernels
from iris_triton.tiles.protocol import wait_bound

_PIECES_OF_A_HEAD, _PIECES_IN_TURNS = 64, 16  # at most, unless the caller says: of few heads, and of many
_OTHER_SHARED_NBYTES = 12 << 10  # beside keys and values
_AT_ONCE = tl.constexpr(8)
_LENGTH = tl.constexpr(int(MismatchCode.LENGTH))


@triton.jit
def _add(parts, sums, at, mine, largest, total, acc, d, HEAD_DIM: tl.constexpr):
    """Add a partial result to what was found."""
    theirs = tl.load(sums + at * 2, mask=mine, other=float("-inf"))
    higher = tl.maximum(largest, theirs)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: all weights are exp(-inf)
    shrink, weight = tl.exp(largest - base), tl.exp(theirs - base)
    total = total * shrink + tl.load(sums + at * 2 + 1, mask=mine, other=0.0) * weight
    part = tl.load(parts + at[:, None] * HEAD_DIM + d[None, :], mask=within(mine[:, None], d, HEAD_DIM), other=0.0)
    return higher, total, acc * shrink[:, None] + part * weight[:, None]


@triton.jit
def merge(parts, sums, place, step, mine, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Weigh COUNT partial results of some heads against each other and add them up, in the same order everywhere."""
    d = tl.arange(0, width_of(HEAD_DIM))
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, width_of(HEAD_DIM)), tl.float32)
    for first in range(0, COUNT, _AT_ONCE):
        for i in tl.static_range(min(COUNT, _AT_ONCE)):  # all loads before what waits for the first
            there = mine & (first + i < COUNT)
            largest, total, acc = _add(parts, sums, place + (first + i) * step, there, largest, total, acc, d, HEAD_DIM)
    return largest, total, acc


@triton.jit
def flash_decode(
    q, k, v, lengths, out, parts, sums, done, inbox, inbox_sums, arrived, turns, members, context, me, scale, rows,
    kv_heads, capacity, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    WORLD: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Programs take pieces in turn, then results: nobody waits before all of its own pieces are done.

    Args:
        q, out: rows * GROUP heads of HEAD_DIM elements, those of a key head (a row) beside each other.
        parts, sums: float32[PIECES, heads, HEAD_DIM] and [PIECES, heads, 2]: partial results of pieces.
        done: int32[rows], 0: pieces that are done.
        inbox, inbox_sums: on the heap, the same of each rank, twice: [2, SIZE, heads, ...].
        arrived: int64[SIZE, rows] on the heap: the last launch of each sender.
        turns: int64[programs]: launches before this one.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(turns + tl.program_id(0)) + 1
    heads = tl.cast(rows, tl.int64) * GROUP
    half = turn % 2 * SIZE
    d = tl.arange(0, width_of(HEAD_DIM))
    lane = tl.arange(0, BLOCK_H)  # heads of a row, filled up to what a dot takes
    mine = lane < GROUP
    of_head = within(mine[:, None], d, HEAD_DIM)

    for item in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
        row, piece = item // PIECES, item % PIECES
        head = tl.cast(row, tl.int64) * GROUP + lane
        at = head[:, None] * HEAD_DIM + d[None, :]
        batch, kv_head = (row // kv_heads).to(tl.int64), row % kv_heads
        length = tl.load(lengths + row // kv_heads)
        if (piece == 0) & ((length < 0) | (length > capacity)):
            _, status = wait_bound(ctx.heap_bases, ctx.world_size)
            report_difference(status.to(tl.int64), ctx.rank, 0, row // kv_heads, capacity, length, 0, 0, _LENGTH)
        length = tl.maximum(tl.minimum(length, capacity), 0)
        step = tl.cdiv(tl.cdiv(length, PIECES), BLOCK_KEYS) * BLOCK_KEYS
        first = tl.minimum(piece * step, length)
        largest, total, acc = attend(
            tl.load(q + at, mask=of_head, other=0.0), k + batch * k_batch + kv_head * k_head,
            v + batch * v_batch + kv_head * v_head, tl.full((BLOCK_H,), float("-inf"), tl.float32),
            tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H, width_of(HEAD_DIM)), tl.float32), first,
            tl.minimum(first + step, length), k_stride, v_stride, lane, 0, 1, scale, False, HEAD_DIM, BLOCK_KEYS,
        )  # fmt: skip
        is_whole = True
        if PIECES > 1:
            place = piece * heads + head
            tl.store(parts + place[:, None] * HEAD_DIM + d[None, :], acc, mask=of_head)
            tl.store(sums + place * 2, largest, mask=mine)
            tl.store(sums + place * 2 + 1, total, mask=mine)
            is_whole = is_last(done + row, PIECES)
            if is_whole:
                largest, total, acc = merge(parts, sums, head, heads, mine, PIECES, HEAD_DIM, BLOCK_H)
        if is_whole:
            place = (half + me) * heads + head
            for i in range(SIZE):  # the next rank first, so that the ranks do not all store to the first one
                peer = tl.load(members + (me + 1 + i) % SIZE)
                ctx.store(inbox + place[:, None] * HEAD_DIM + d[None, :], acc, peer, mask=of_head)
                ctx.store(inbox_sums + place * 2, largest, peer, mask=mine)
                ctx.store(inbox_sums + place * 2 + 1, total, peer, mask=mine)
            signal_members(ctx, arrived + me * rows + row, turn, members, SIZE)

    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        await_members(ctx, arrived + row, turn, members, me, SIZE, rows)
        head = tl.cast(row, tl.int64) * GROUP + lane
        largest, total, acc = merge(inbox, inbox_sums, half * heads + head, heads, mine, SIZE, HEAD_DIM, BLOCK_H)
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + head[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=of_head)
    tl.store(turns + tl.program_id(0), turn)


def pieces_of(rows, units, most):
    """Return into how many pieces to divide each row, for `most` programs that take pieces in turns.

    Measured on H200 with 4096 keys: beside its keys a piece costs a tenth of a whole row, adding it up a hundredth.
    """
    if rows * _PIECES_IN_TURNS <= units:
        return min(units // rows, _PIECES_OF_A_HEAD)
    cost = lambda pieces: triton.cdiv(rows * pieces, most) * (1 / pieces + 0.1) + 0.01 * pieces
    return min(range(1, _PIECES_IN_TURNS + 1), key=cost)


class DecodeKernels:
    """Launches the kernel of one `iris_core.ops.attention.FlashDecode`, on the current stream."""

    def __init__(self, space) -> None:
        device, units, stages = space.members.device, programs_at_once(space), 2 if torch.version.hip else 3
        rows, heads, dim = space.batch * space.kv_heads, space.batch * space.heads, space.head_dim
        group, wide = space.heads // space.kv_heads, width_of(dim) * space.dtype.itemsize
        keys = max(16, min(64 if space.members.is_cuda else 32, 16384 // wide))
        most = units  # programs that run at the same time
        if space.members.is_cuda and torch.version.hip is None:  # with four warps, registers are enough for two
            shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
            most *= max(1, min(2, shared // (2 * stages * keys * wide + _OTHER_SHARED_NBYTES)))
        pieces = space.pieces or pieces_of(rows, units, most)
        self._programs = min(rows * pieces, most)
        constants = {
            "WORLD": space.world, "SIZE": space.size, "GROUP": group, "PIECES": pieces, "HEAD_DIM": dim,
            "BLOCK_H": max(16, triton.next_power_of_2(group)), "BLOCK_KEYS": keys,
        }  # fmt: skip
        fixed = {
            "parts": torch.empty(pieces, heads, dim, dtype=torch.float32, device=device),
            "sums": torch.empty(pieces, heads, 2, dtype=torch.float32, device=device),
            "done": torch.zeros(rows, dtype=torch.int32, device=device),
            "turns": torch.zeros(self._programs, dtype=torch.int64, device=device), "inbox": space.inbox,
            "inbox_sums": space.inbox_sums, "arrived": space.arrived, "members": space.members,
            "context": space.context, "me": space.me, "rows": rows, "kv_heads": space.kv_heads,
        }  # fmt: skip
        options = {"num_stages": stages}
        tensors = "q", "k", "v", "lengths", "out"
        self._launch = BoundKernels(flash_decode, fixed | constants, tensors, str(device), options)

    def __call__(self, q, k, v, lengths, out, scale) -> None:
        """Decode."""
        (k_batch, k_head, k_stride), (v_batch, v_head, v_stride) = k.stride()[:3], v.stride()[:3]
        self._launch(
            self._programs, q, k, v, lengths, out, scale=scale, capacity=k.shape[2], k_batch=k_batch, k_head=k_head,
            k_stride=k_stride, v_batch=v_batch, v_head=v_head, v_stride=v_stride,
        )  # fmt: skip
