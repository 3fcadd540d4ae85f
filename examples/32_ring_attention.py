"""Ring attention: a sequence is divided among the ranks; keys and values travel round the ring during the computation.

Each rank has the queries, keys and values of its part of the sequence.  In each step it attends to one block of keys
and values, its own at first, while some programs already pass that block on to the next rank.  After as many steps as
ranks, every query has met every key, and no rank ever held more than three blocks.

A rank receives into two slots in turn.  `full` counts, for each head, the blocks that have come; `free` counts, on the
rank that sends, how many readers are done with a slot.  No reader is ahead of another one by a use of a slot, since the
next block comes only after all have read the last one.  Both only grow, so nothing is reset, launches may follow each
other at once, and a head's computation begins when that head is here.

With `causal`, a query sees the keys before it.  Ranks with consecutive tokens then have unequal work: the last rank
needs all blocks, the first one only its own.  With `striped`, rank r has the tokens r, r + ranks, r + 2 ranks, ...,
and all have about the same.

Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.  Brandon et al.:
Striped Attention, 2023.

    python examples/32_ring_attention.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import num_programs, on_gpu, timing

import iris_core
from iris_triton import DeviceContext
from iris_triton.language.asm import wait_stores

BLOCK_COPY = 1024


@triton.jit
def pass_on(ctx, k, v, to_k, to_v, numel, peer, BLOCK: tl.constexpr):
    """Copy one head's keys and values to a peer."""
    for start in range(0, numel, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ctx.put(k + i, to_k + i, peer, mask=i < numel)
        ctx.put(v + i, to_v + i, peer, mask=i < numel)


@triton.jit
def send(
    ctx, k, v, ring_k, ring_v, full, free, before, readers, heads, numel, SENDERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Pass every block on, a head at a time.  `before`: blocks that came in earlier launches; `readers` of each."""
    next_rank = (ctx.rank + 1) % ctx.world_size
    previous = (ctx.rank + ctx.world_size - 1) % ctx.world_size
    for step in range(ctx.world_size):
        n = before + step  # number of the block at hand, from 1; that of step 0 is our own
        for head in range(tl.program_id(0), heads, SENDERS):
            here = ((n % 2) * heads + head).to(tl.int64) * numel
            there = (((n + 1) % 2) * heads + head).to(tl.int64) * numel
            if step > 0:
                ctx.wait(full + head, n)
            if step < ctx.world_size - 1:
                ctx.wait(free + head * 2 + (n + 1) % 2, readers * (n // 2))  # those of n - 1, n - 3, ...: the same slot
                if step == 0:
                    own = head.to(tl.int64) * numel
                    pass_on(ctx, k + own, v + own, ring_k + there, ring_v + there, numel, next_rank, BLOCK)
                else:
                    pass_on(ctx, ring_k + here, ring_v + here, ring_k + there, ring_v + there, numel, next_rank, BLOCK)
                ctx.signal(full + head, n + 1, next_rank)
            if step > 0:
                ctx.signal(free + head * 2 + n % 2, 1, previous, op="add")


@triton.jit
def attend(
    q, k, v, largest, total, acc, q_place, k_first, stride, keys, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Attend to `keys` keys, and add them to what is known: largest scores, sums of weights, weighted values.

    `q_place`: places of the queries in the sequence; the keys' are k_first, k_first + stride, ...
    """
    d = tl.arange(0, HEAD_DIM)
    for start in range(0, keys, BLOCK_KEYS):
        n = start + tl.arange(0, BLOCK_KEYS)
        at, mask = n[:, None] * HEAD_DIM + d[None, :], n[:, None] < keys
        scores = tl.dot(q, tl.trans(tl.load(k + at, mask=mask, other=0.0))) * scale
        seen = n[None, :] < keys
        if CAUSAL:
            seen &= (k_first + n * stride)[None, :] <= q_place[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key: all weights are exp(-inf)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        values = tl.load(v + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        largest = higher
    return largest, total, acc


@triton.jit
def compute(
    ctx, q, k, v, out, accs, sums, ring_k, ring_v, full, free, before, heads, rows, length, scale,
    SENDERS: tl.constexpr, CAUSAL: tl.constexpr, STRIPED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Attend to every block as it comes.  A program has the same tiles of queries in each step."""
    previous = (ctx.rank + ctx.world_size - 1) % ctx.world_size
    stride = ctx.world_size if STRIPED else 1
    q_first = ctx.rank if STRIPED else ctx.rank * rows
    tiles = tl.cdiv(rows, BLOCK_Q)
    d = tl.arange(0, HEAD_DIM)
    for step in range(ctx.world_size):
        n = before + step
        origin = (ctx.rank + ctx.world_size - step) % ctx.world_size
        k_first = origin if STRIPED else origin * rows
        keys = tl.minimum(tl.maximum((length - k_first + stride - 1) // stride, 0), rows)
        for item in range(tl.program_id(0) - SENDERS, heads * tiles, tl.num_programs(0) - SENDERS):
            head, first = item // tiles, item % tiles * BLOCK_Q
            i = first + tl.arange(0, BLOCK_Q)
            q_place = q_first + i * stride
            row = head.to(tl.int64) * rows + i
            at, valid = row[:, None] * HEAD_DIM + d[None, :], (i < rows) & (q_place < length)
            visible = keys
            if CAUSAL:  # not beyond the tile's last query
                last = q_first + (first + BLOCK_Q - 1) * stride
                visible = tl.minimum(tl.maximum((last - k_first + stride) // stride, 0), keys)
            own, slot = head.to(tl.int64) * rows * HEAD_DIM, ((n % 2) * heads + head).to(tl.int64) * rows * HEAD_DIM
            queries = tl.load(q + at, mask=valid[:, None], other=0.0)
            if step == 0:
                largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_Q,), tl.float32)
                acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
                largest, total, acc = attend(
                    queries, k + own, v + own, largest, total, acc, q_place, k_first, stride, visible, scale,
                    CAUSAL, HEAD_DIM, BLOCK_KEYS,
                )  # fmt: skip
            else:
                ctx.wait(full + head, n)
                largest = tl.load(sums + row * 2, mask=valid, other=float("-inf"))
                total = tl.load(sums + row * 2 + 1, mask=valid, other=0.0)
                acc = tl.load(accs + at, mask=valid[:, None], other=0.0)
                largest, total, acc = attend(
                    queries, ring_k + slot, ring_v + slot, largest, total, acc, q_place, k_first, stride, visible,
                    scale, CAUSAL, HEAD_DIM, BLOCK_KEYS,
                )  # fmt: skip
            if step < ctx.world_size - 1:
                tl.store(sums + row * 2, largest, mask=valid)
                tl.store(sums + row * 2 + 1, total, mask=valid)
                tl.store(accs + at, acc, mask=valid[:, None])
                wait_stores()  # other threads of the program may be those that read it in the next step
                tl.debug_barrier()
            else:  # every query has seen a key by now, at least its own
                acc = acc / tl.where(valid, total, 1.0)[:, None]
                tl.store(out + at, acc.to(out.dtype.element_ty), mask=valid[:, None])
            if step > 0:
                ctx.signal(free + head * 2 + n % 2, 1, previous, op="add")


@triton.jit
def ring_attention_kernel(
    q, k, v, out, accs, sums, ring_k, ring_v, full, free, turns, context, heads, rows, length, scale,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, CAUSAL: tl.constexpr, STRIPED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_COPY: tl.constexpr
):  # fmt: skip
    """The first SENDERS programs send, the others compute."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(turns + tl.program_id(0))  # launches before, counted here so that a graph can be replayed
    before = turn * (WORLD - 1)
    if tl.program_id(0) < SENDERS:
        readers = tl.cdiv(rows, BLOCK_Q) + 1  # each tile of queries, and who passes the block on
        send(ctx, k, v, ring_k, ring_v, full, free, before, readers, heads, rows * HEAD_DIM, SENDERS, BLOCK_COPY)
    else:
        compute(
            ctx, q, k, v, out, accs, sums, ring_k, ring_v, full, free, before, heads, rows, length, scale,
            SENDERS, CAUSAL, STRIPED, HEAD_DIM, BLOCK_Q, BLOCK_KEYS,
        )  # fmt: skip
    tl.store(turns + tl.program_id(0), turn + 1)


class RingAttention:
    """Attention over a divided sequence.  Collective: every rank makes it, and calls it equally often, on one stream.

    Args:
        ctx: the open Iris.
        heads: heads, times the sequences of a batch.
        length: tokens of the whole sequence; a rank has room for `rows` = ceil(length / ranks) of them.
        head_dim: a power of two, at least 16.
        dtype: of queries, keys and values.
    """

    def __init__(self, ctx, heads, length, head_dim, dtype=torch.float16):
        if length < 1 or head_dim < 16 or head_dim & (head_dim - 1):
            raise ValueError(f"{length=} must be positive, and {head_dim=} a power of two from 16 on")
        self.ctx, self.length, self.rows = ctx, length, -(-length // ctx.num_ranks)
        self.shape, self.dtype = (heads, self.rows, head_dim), dtype
        self.ring_k, self.ring_v = ctx.zeros(2, *self.shape, dtype=dtype), ctx.zeros(2, *self.shape, dtype=dtype)
        self.full, self.free = ctx.zeros(heads, dtype=torch.int64), ctx.zeros(heads, 2, dtype=torch.int64)
        self.accs = torch.empty(self.shape, dtype=torch.float32, device=ctx.device)  # what is known between two steps
        self.sums = torch.empty(*self.shape[:2], 2, dtype=torch.float32, device=ctx.device)
        self.block = 64 if on_gpu(ctx) else 32  # queries and keys of a tile
        # programs that wait for each other must all be on the device at the same time
        units = num_programs(ctx)
        self.senders = min(heads, max(1, units // 8))
        self.programs = self.senders + max(1, min(heads * -(-self.rows // self.block), units - self.senders))
        self.turns = torch.zeros(self.programs, dtype=torch.int64, device=ctx.device)
        ctx.barrier()

    def part(self, whole, striped=False):
        """Return this rank's part of (heads, length, head_dim), filled up with zeros to `rows` tokens."""
        rank, world = self.ctx.cur_rank, self.ctx.num_ranks
        mine = whole[:, rank::world] if striped else whole[:, rank * self.rows : (rank + 1) * self.rows]
        part = torch.zeros(self.shape, dtype=whole.dtype, device=whole.device)
        part[:, : mine.shape[1]] = mine
        return part

    def __call__(self, q, k, v, causal=False, striped=False):
        """Return this rank's rows of softmax(q k^T / sqrt(head_dim)) v; those beyond the sequence are undefined.

        Args:
            q, k, v: (heads, rows, head_dim), contiguous: this rank's tokens, as `part` gives them.
            causal: a query sees the keys up to its own place.
            striped: which tokens the ranks have, see `part`.  The same on all ranks, as `causal` is.
        """
        for x in (q, k, v):
            if x.shape != self.shape or x.dtype != self.dtype or not x.is_contiguous():
                raise ValueError(f"q, k and v must be contiguous, {self.shape} and {self.dtype}")
        out = torch.empty_like(q)
        heads, rows, head_dim = self.shape
        ring_attention_kernel[(self.programs,)](
            q, k, v, out, self.accs, self.sums, self.ring_k, self.ring_v, self.full, self.free, self.turns,
            self.ctx.get_device_context(), heads, rows, self.length, head_dim**-0.5, WORLD=self.ctx.num_ranks,
            SENDERS=self.senders, CAUSAL=causal, STRIPED=striped, HEAD_DIM=head_dim, BLOCK_Q=self.block,
            BLOCK_KEYS=self.block, BLOCK_COPY=BLOCK_COPY, num_stages=2,
        )  # fmt: skip
        return out


def reference(q, k, v, causal):
    """The whole sequence in float64."""
    scores = q.double() @ k.double().mT * q.shape[2] ** -0.5
    if causal:
        after = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(after, float("-inf"))
    return scores.softmax(dim=2) @ v.double()


def main(length=None, heads=2, head_dim=32):
    """Attention over one sequence in all forms, one launch behind the other."""
    forms = {"full": (False, False), "causal": (True, False), "striped": (True, True)}
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if length is None:
            length = 150
            if on_gpu(ctx):
                length, heads, head_dim = 8190, 4, 128
        attention = RingAttention(ctx, heads, length, head_dim)
        generator = torch.Generator().manual_seed(32)  # the same numbers on all ranks
        shape = heads, length, head_dim
        worst, times = 0.0, []
        for form, (causal, striped) in forms.items():
            whole = [torch.randn(shape, generator=generator).half().to(ctx.device) for _ in range(3)]
            parts = [attention.part(x, striped) for x in whole]
            out = attention(*parts, causal, striped)
            expected = reference(*whole, causal)
            mine = attention.part(torch.ones_like(expected), striped) > 0  # without what was filled up
            errors = (out.double() - attention.part(expected, striped))[mine].abs()
            if errors.numel():  # with more ranks than tokens, some have none
                assert errors.max() < 4e-3, f"{form}: the largest error is {errors.max()}"  # float16 has 11 bits
                worst = max(worst, errors.max().item())
            flops = 4 * heads * head_dim * length * attention.rows / (2 if causal else 1)
            times.append(timing(ctx, lambda: attention(*parts, causal, striped), flops=flops))  # noqa: B023 - called now
        ctx.barrier()
        results = ", ".join(form + time.replace(";", ":") for form, time in zip(forms, times, strict=True))
        return f"rank {ctx.cur_rank} of {ctx.num_ranks} on {ctx.device}: error {worst:.1e}; {results}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
