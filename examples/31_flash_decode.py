"""Flash decode over ranks: a new token of each sequence attends to keys and values that are spread over all ranks.

Decoding reads the whole cache for one query, so the cache is divided: among the ranks by pages, and on each rank into
pieces, one program for each.  A piece gives a partial result: the largest score, the sum of exp(score - largest), and
the values summed with these weights.  A program stores it into an inbox on every rank and raises a counter of its own
rank there; once all pieces of a sequence's head have arrived, another program weighs them against each other and adds
them up.  It is one kernel, the small partial results are all that travels, and all ranks get the same bits.

Query heads share key heads in groups (GQA).  A sequence may have any length, on each rank another one, also none.

Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.

    python examples/31_flash_decode.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import num_programs, on_gpu, timing

import iris_core
from iris_triton import DeviceContext

BLOCK_KEYS, PAGE = 32, 16


@triton.jit
def attend(q, k, v, first, last, scale, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The partial result of keys first ... last - 1: largest scores, sums of weights, weighted values."""
    d = tl.arange(0, HEAD_DIM)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, HEAD_DIM), tl.float32)
    for start in range(first, last, BLOCK_KEYS):  # each block has at least one key, so `higher` is finite
        n = start + tl.arange(0, BLOCK_KEYS)
        at, mask = n[:, None] * HEAD_DIM + d[None, :], n[:, None] < last
        keys = tl.load(k + at, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys)) * scale
        scores = tl.where(n[None, :] < last, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(largest - higher)
        values = tl.load(v + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        largest = higher
    return largest, total, acc


@triton.jit
def flash_decode_kernel(
    q, k, v, lengths, out, parts, sums, arrived, turns, context, scale, batch, kv_heads, capacity,
    WORLD: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Programs take pieces in turn, then results: nobody waits before all of its own pieces are on their way."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    # Launches are counted here and not on the host, so that a captured graph can be replayed.  Two halves of the inbox
    # alternate: who begins launch n + 2 has the results of n + 1, so all ranks have finished n and read its half.
    # A rank that has begun n + 1 raises its counters while another one is late in n: each sender has its own.
    turn = tl.load(turns + tl.program_id(0)) + 1
    rows = batch * kv_heads
    half = (turn % 2) * (WORLD * PIECES)
    d = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, BLOCK_H)  # heads of a group, filled up to what a dot takes

    for item in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
        row, piece = item // PIECES, item % PIECES
        head = row.to(tl.int64) * GROUP + lane  # counted through all sequences
        mine = lane < GROUP
        length = tl.load(lengths + row // kv_heads)
        step = tl.cdiv(tl.cdiv(length, PIECES), BLOCK_KEYS) * BLOCK_KEYS
        first = tl.minimum(piece * step, length)
        cache = row.to(tl.int64) * capacity * HEAD_DIM
        queries = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=mine[:, None], other=0.0)
        largest, total, acc = attend(
            queries, k + cache, v + cache, first, tl.minimum(first + step, length), scale, HEAD_DIM, BLOCK_H, BLOCK_KEYS
        )
        place = (half + ctx.rank * PIECES + piece) * (rows * GROUP) + head
        for i in range(WORLD):  # the next rank first, so that the ranks do not all store to rank 0
            peer = (ctx.rank + 1 + i) % WORLD
            ctx.store(parts + place[:, None] * HEAD_DIM + d[None, :], acc, peer, mask=mine[:, None])
            ctx.store(sums + place * 2, largest, peer, mask=mine)
            ctx.store(sums + place * 2 + 1, total, peer, mask=mine)
            ctx.signal(arrived + ctx.rank * rows + row, 1, peer, op="add")

    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for sender in range(WORLD):
            ctx.wait(arrived + sender * rows + row, turn * PIECES)
        head = row.to(tl.int64) * GROUP + lane
        mine = lane < GROUP
        largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, HEAD_DIM), tl.float32)
        for i in range(WORLD * PIECES):  # in the same order on all ranks
            place = (half + i) * (rows * GROUP) + head
            theirs = tl.load(sums + place * 2, mask=mine, other=float("-inf"))
            higher = tl.maximum(largest, theirs)
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: all weights are exp(-inf)
            shrink, weight = tl.exp(largest - base), tl.exp(theirs - base)
            total = total * shrink + tl.load(sums + place * 2 + 1, mask=mine, other=0.0) * weight
            part = tl.load(parts + place[:, None] * HEAD_DIM + d[None, :], mask=mine[:, None], other=0.0)
            acc = acc * shrink[:, None] + part * weight[:, None]
            largest = higher
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + head[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mine[:, None])
    tl.store(turns + tl.program_id(0), turn)


class FlashDecode:
    """Decode attention for one shape.  Collective: every rank makes it, and calls it equally often, on one stream.

    Args:
        ctx: the open Iris.
        batch: sequences.
        heads: query heads, a multiple of `kv_heads`.
        kv_heads: key heads.
        head_dim: a power of two, at least 16.
        pieces: programs that share one key head of one sequence on one rank.
    """

    def __init__(self, ctx, batch, heads, kv_heads, head_dim, pieces=4):
        if heads % kv_heads or head_dim < 16 or head_dim & (head_dim - 1):
            raise ValueError(f"{heads=} must be a multiple of {kv_heads=}, and {head_dim=} a power of two from 16 on")
        self.ctx, self.shape, self.kv_heads, self.pieces = ctx, (batch, heads, head_dim), kv_heads, pieces
        inbox = (2, ctx.num_ranks * pieces, batch, heads)
        self.parts = ctx.zeros(*inbox, head_dim, dtype=torch.float32)
        self.sums = ctx.zeros(*inbox, 2, dtype=torch.float32)
        self.arrived = ctx.zeros(ctx.num_ranks, batch * kv_heads, dtype=torch.int64)
        # programs that wait for each other must all be on the device at the same time
        self.programs = min(batch * kv_heads * pieces, num_programs(ctx))
        self.turns = torch.zeros(self.programs, dtype=torch.int64, device=ctx.device)
        ctx.barrier()

    def __call__(self, q, k, v, lengths):
        """Return softmax(q k^T / sqrt(head_dim)) v over the keys of all ranks, the same bits on all ranks.

        Args:
            q: (batch, heads, head_dim), the same on all ranks.
            k, v: (batch, kv_heads, capacity, head_dim), contiguous: this rank's part of the cache, any ranks' sizes.
            lengths: int32 (batch,) on the device: how many of this rank's keys each sequence has, from 0 on.  A
                sequence without any key on any rank gets zeros.
        """
        batch, heads, head_dim = self.shape
        if q.shape != self.shape or k.shape != v.shape or k.shape[:2] != (batch, self.kv_heads):
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit {self.shape}")
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            raise ValueError("q, k and v must be contiguous")
        out = torch.empty_like(q)
        group = heads // self.kv_heads
        flash_decode_kernel[(self.programs,)](
            q, k, v, lengths, out, self.parts, self.sums, self.arrived, self.turns, self.ctx.get_device_context(),
            head_dim**-0.5, batch, self.kv_heads, k.shape[2], WORLD=self.ctx.num_ranks, GROUP=group, PIECES=self.pieces,
            HEAD_DIM=head_dim, BLOCK_H=max(16, triton.next_power_of_2(group)), BLOCK_KEYS=BLOCK_KEYS,
        )  # fmt: skip
        return out


def reference(q, keys, values):
    """One sequence in float64: q (heads, head_dim), keys and values (kv_heads, length, head_dim)."""
    grouped = q.double().view(keys.shape[0], -1, q.shape[1])
    scores = grouped @ keys.double().mT * q.shape[1] ** -0.5
    return (scores.softmax(dim=2) @ values.double()).view(q.shape)  # without any key: zeros


def main(lengths=None, heads=8, kv_heads=2, head_dim=32, pieces=2, tokens=3):
    """Decode some tokens: each step appends one to every sequence.  `lengths`: keys at the beginning."""
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if lengths is None:
            lengths = 200, 37, 5
            if on_gpu(ctx):
                lengths, heads, kv_heads, head_dim, pieces = (20_000, 3000, 777, 5), 32, 8, 128, 8
        rank, world, batch, end = ctx.cur_rank, ctx.num_ranks, len(lengths), max(lengths) + tokens
        generator = torch.Generator().manual_seed(31)  # the same numbers on all ranks
        shape = batch, kv_heads, end, head_dim
        whole_k, whole_v = (torch.randn(shape, generator=generator).half().to(ctx.device) for _ in range(2))
        kept = [t for t in range(end) if t // PAGE % world == rank]  # pages are dealt to the ranks in turn
        k, v = (x[:, :, kept].contiguous() for x in (whole_k, whole_v))
        decode = FlashDecode(ctx, batch, heads, kv_heads, head_dim, pieces)
        worst = 0.0
        for token in range(tokens):
            now = [length + token for length in lengths]
            mine = torch.tensor([sum(t < n for t in kept) for n in now], dtype=torch.int32, device=ctx.device)
            q = torch.randn(batch, heads, head_dim, generator=generator).half().to(ctx.device)
            out = decode(q, k, v, mine)
            for b, n in enumerate(now):
                expected = reference(q[b], whole_k[b, :, :n], whole_v[b, :, :n])
                error = (out[b].double() - expected).abs().max().item()
                assert error < 4e-3, f"sequence {b}: the largest error is {error}"  # float16 has 11 bits
                worst = max(worst, error)
            first = out.clone()
            ctx.ccl.broadcast(first, src=0)
            assert torch.equal(out.view(torch.int16), first.view(torch.int16)), "the ranks' results differ in bits"
        time = timing(ctx, lambda: decode(q, k, v, mine), nbytes=4 * int(mine.sum()) * kv_heads * head_dim)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: {tokens} tokens for {batch} sequences, error {worst:.1e}{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
