"""Attention over a sequence that is divided among ranks (`ctx.ops.ring_attention`): keys and values go round a ring.

In each step a rank attends to one block of keys and values, its own at first, while some programs already pass that
block on to the next rank.  After as many steps as ranks, every query has seen every key, and no rank has held more than
three blocks.

A rank receives into two slots in turn.  `full` counts, for each key head, the blocks that have come; `free` counts, on
the rank that sends, how many programs of the next rank are done with a slot.  No reader is ahead of another one by a
use of a slot, since the next block comes only after all have read the last one.  Both only grow, so nothing is reset,
launches may follow each other at once, and a head's computation begins when that head is here.

Backwards, weights are computed again from queries, keys and the logarithms of their sums (Dao et al., FlashAttention,
2022), and the gradients of keys and values follow them: whoever has added its part to a tile passes it on, and
after the last step it is where its keys are.  `came` and `taken` number, for each tile, the messages that have come,
and those that the next rank has read.

Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.  Brandon et al.:
Striped Attention, 2023.
"""

import torch
import triton
import triton.language as tl

from iris_triton.context import DeviceContext
from iris_triton.gemm.parts.attend import attend, programs_at_once, width_of, within
from iris_triton.language.asm import wait_stores


@triton.jit
def send(
    ctx, k, v, ring_k, ring_v, full, free, before, readers, kv_heads, numel, previous, following,
    SIZE: tl.constexpr, SENDERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pass every block on, a head at a time.  `before`: blocks that came in earlier launches; `readers` of each."""
    for step in range(SIZE):
        n = before + step  # number of the block at hand, from 1; that of step 0 is our own
        for head in range(tl.program_id(0), kv_heads, SENDERS):
            own = tl.cast(head, tl.int64) * numel
            slot, there = (n % 2 * kv_heads + head) * numel, ((n + 1) % 2 * kv_heads + head) * numel
            if step > 0:
                ctx.wait(full + head, n)
            if step < SIZE - 1:
                ctx.wait(free + head * 2 + (n + 1) % 2, readers * (n // 2))  # those of n - 1, n - 3, ...: the same slot
                for start in range(0, numel, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    if step == 0:
                        ctx.put(k + own + i, ring_k + there + i, following, mask=i < numel)
                        ctx.put(v + own + i, ring_v + there + i, following, mask=i < numel)
                    else:
                        ctx.put(ring_k + slot + i, ring_k + there + i, following, mask=i < numel)
                        ctx.put(ring_v + slot + i, ring_v + there + i, following, mask=i < numel)
                ctx.signal(full + head, n + 1, following)
            if step > 0:
                ctx.signal(free + head * 2 + n % 2, 1, previous, op="add")


@triton.jit
def ring_attention(
    q, k, v, out, lse, accs, sums, ring_k, ring_v, full, free, turns, members, context, me, heads, rows, length, scale,
    WORLD: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, SENDERS: tl.constexpr, CAUSAL: tl.constexpr,
    STRIPED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_COPY: tl.constexpr
):  # fmt: skip
    """Send, in the first SENDERS programs, or compute; a program has the same tiles of queries in each step.

    Args:
        q, out: [heads, rows, HEAD_DIM]; k, v: [heads / GROUP, rows, HEAD_DIM].
        lse: float32[heads, rows], out: the logarithms of the sums of exp(score).
        accs, sums: float32[heads, rows, HEAD_DIM] and [heads, rows, 2]: what is known between two steps.
        ring_k, ring_v: two slots on the heap, as k and v.
        full, free: int64[heads / GROUP] and [heads / GROUP, 2] on the heap.
        turns: int64[programs]: launches before this one, counted here so that a graph can be replayed.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(turns + tl.program_id(0))
    before = turn * (SIZE - 1)
    previous, following = tl.load(members + (me + SIZE - 1) % SIZE), tl.load(members + (me + 1) % SIZE)
    tiles, kv_heads = tl.cdiv(rows, BLOCK), heads // GROUP
    numel = tl.cast(rows, tl.int64) * HEAD_DIM
    stride, q_first = SIZE if STRIPED else 1, me if STRIPED else me * rows
    d = tl.arange(0, width_of(HEAD_DIM))
    if tl.program_id(0) < SENDERS:
        readers = GROUP * tiles + 1  # each tile of queries, and who passes the block on
        send(
            ctx, k, v, ring_k, ring_v, full, free, before, readers, kv_heads, numel, previous, following,
            SIZE, SENDERS, BLOCK_COPY,
        )  # fmt: skip
    else:
        for step in range(SIZE):
            n = before + step
            origin = (me + SIZE - step) % SIZE
            k_first = origin if STRIPED else origin * rows
            keys = tl.minimum(tl.maximum((length - k_first + stride - 1) // stride, 0), rows)
            for item in range(tl.program_id(0) - SENDERS, heads * tiles, tl.num_programs(0) - SENDERS):
                head, first = item // tiles, item % tiles * BLOCK
                i = first + tl.arange(0, BLOCK)
                q_place = q_first + i * stride
                row = tl.cast(head, tl.int64) * rows + i
                at, valid = row[:, None] * HEAD_DIM + d[None, :], (i < rows) & (q_place < length)
                q_mask = within(valid[:, None], d, HEAD_DIM)
                visible = keys
                if CAUSAL:  # not beyond the tile's last query
                    last = q_first + (first + BLOCK - 1) * stride
                    visible = tl.minimum(tl.maximum((last - k_first + stride) // stride, 0), keys)
                kv_head = head // GROUP
                place = tl.where(step == 0, kv_head, n % 2 * kv_heads + kv_head) * numel
                if step == 0:
                    k_from, v_from = k, v
                    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
                    total = tl.zeros((BLOCK,), tl.float32)
                    acc = tl.zeros((BLOCK, width_of(HEAD_DIM)), tl.float32)
                else:
                    ctx.wait(full + kv_head, n)
                    k_from, v_from = ring_k, ring_v
                    largest = tl.load(sums + row * 2, mask=valid, other=float("-inf"))
                    total = tl.load(sums + row * 2 + 1, mask=valid, other=0.0)
                    acc = tl.load(accs + at, mask=q_mask, other=0.0)
                largest, total, acc = attend(
                    tl.load(q + at, mask=q_mask, other=0.0), k_from + place, v_from + place, largest, total,
                    acc, 0, visible, HEAD_DIM, HEAD_DIM, q_place, k_first, stride, scale, CAUSAL, HEAD_DIM, BLOCK,
                )  # fmt: skip
                if step < SIZE - 1:
                    tl.store(sums + row * 2, largest, mask=valid)
                    tl.store(sums + row * 2 + 1, total, mask=valid)
                    tl.store(accs + at, acc, mask=q_mask)
                    wait_stores()  # other threads of the program may be those that read it in the next step
                    tl.debug_barrier()
                else:  # every query has seen a key by now, at least its own
                    total = tl.where(valid, total, 1.0)
                    tl.store(lse + row, largest + tl.log(total), mask=valid)
                    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=q_mask)
                if step > 0:
                    ctx.signal(free + kv_head * 2 + n % 2, 1, previous, op="add")
    tl.store(turns + tl.program_id(0), turn + 1)


@triton.jit
def slopes(q, keys, values, grad, lse, delta, seen, scale):
    """Compute the weights of a tile of queries and keys again, and the gradients of their scores."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    weights = tl.exp(tl.where(seen, scores - lse[:, None], float("-inf")))
    of_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
    return weights.to(grad.dtype), (weights * (of_weights - delta[:, None]) * scale).to(q.dtype)


@triton.jit
def ring_gradients(
    q, k, v, grad, lse, delta, dq, dk, dv, accs, ring_k, ring_v, ring_dk, ring_dv, full, free, came, taken, turns,
    members, context, me, heads, rows, length, scale,
    WORLD: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, SENDERS: tl.constexpr, CAUSAL: tl.constexpr,
    STRIPED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_COPY: tl.constexpr
):  # fmt: skip
    """Return the gradients of q, k and v; see `ring_attention`.

    Args:
        grad: of the output.
        delta: float32[heads, rows]: the sums of the output times `grad`.
        accs: float32[heads, rows, HEAD_DIM], for dq.
        ring_dk, ring_dv: float32, two slots on the heap.
        came, taken: int64[heads / GROUP, tiles] on the heap.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(turns + tl.program_id(0))
    before = turn * (SIZE - 1)
    previous, following = tl.load(members + (me + SIZE - 1) % SIZE), tl.load(members + (me + 1) % SIZE)
    tiles, kv_heads = tl.cdiv(rows, BLOCK), heads // GROUP
    numel = tl.cast(rows, tl.int64) * HEAD_DIM
    stride, q_first = SIZE if STRIPED else 1, me if STRIPED else me * rows
    d = tl.arange(0, width_of(HEAD_DIM))
    lane = tl.arange(0, BLOCK)
    pid, programs = tl.program_id(0) - SENDERS, tl.num_programs(0) - SENDERS
    if pid < 0:
        readers = (GROUP + 1) * tiles + 1  # each tile of queries and of keys, and who passes the block on
        send(
            ctx, k, v, ring_k, ring_v, full, free, before, readers, kv_heads, numel, previous, following,
            SIZE, SENDERS, BLOCK_COPY,
        )  # fmt: skip
    else:
        for step in range(SIZE):
            n, message = before + step, turn * SIZE + step + 1
            origin = (me + SIZE - step) % SIZE
            k_first = origin if STRIPED else origin * rows
            for item in range(pid, kv_heads * tiles, programs):  # gradients of a tile of keys and values
                kv_head, first = item // tiles, item % tiles * BLOCK
                j = first + lane
                k_place = k_first + j * stride
                is_key = (j < rows) & (k_place < length)
                k_mask = within(is_key[:, None], d, HEAD_DIM)
                at = kv_head * numel + j[:, None] * HEAD_DIM + d[None, :]
                here = at
                k_at, v_at = k, v
                if step > 0:
                    ctx.wait(full + kv_head, n)
                    here = n % 2 * kv_heads * numel + at
                    k_at, v_at = ring_k, ring_v
                keys = tl.load(k_at + here, mask=k_mask, other=0.0)
                values = tl.load(v_at + here, mask=k_mask, other=0.0)
                if step > 0:
                    ctx.signal(free + kv_head * 2 + n % 2, 1, previous, op="add")
                dk_tile = tl.zeros((BLOCK, width_of(HEAD_DIM)), tl.float32)
                dv_tile = tl.zeros((BLOCK, width_of(HEAD_DIM)), tl.float32)
                begin = 0
                if CAUSAL:  # the first tile of queries that sees one of these keys
                    begin = tl.maximum(k_first + first * stride - q_first, 0) // stride // BLOCK * BLOCK
                for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                    for start in range(begin, rows, BLOCK):
                        i = start + lane
                        q_place = q_first + i * stride
                        valid = (i < rows) & (q_place < length)
                        row = tl.cast(head, tl.int64) * rows + i
                        seen = valid[:, None] & is_key[None, :]
                        if CAUSAL:
                            seen &= k_place[None, :] <= q_place[:, None]
                        q_at, q_mask = row[:, None] * HEAD_DIM + d[None, :], within(valid[:, None], d, HEAD_DIM)
                        queries = tl.load(q + q_at, mask=q_mask, other=0.0)
                        of_out = tl.load(grad + q_at, mask=q_mask, other=0.0)
                        weights, of_scores = slopes(
                            queries, keys, values, of_out, tl.load(lse + row, mask=valid, other=0.0),
                            tl.load(delta + row, mask=valid, other=0.0), seen, scale,
                        )  # fmt: skip
                        dv_tile = tl.dot(tl.trans(weights), of_out, dv_tile, input_precision="ieee")
                        dk_tile = tl.dot(tl.trans(of_scores), queries, dk_tile, input_precision="ieee")
                if step > 0:
                    ctx.wait(came + item, message - 1)
                    there = (message - 1) % 2 * kv_heads * numel + at
                    dk_tile += tl.load(ring_dk + there, mask=k_mask, other=0.0)
                    dv_tile += tl.load(ring_dv + there, mask=k_mask, other=0.0)
                    ctx.signal(taken + item, message - 1, previous)
                ctx.wait(taken + item, message - 2)  # what the next rank got before into the same slot
                there = message % 2 * kv_heads * numel + at
                ctx.store(ring_dk + there, dk_tile, following, mask=k_mask)
                ctx.store(ring_dv + there, dv_tile, following, mask=k_mask)
                ctx.signal(came + item, message, following)
            keys_here = tl.minimum(tl.maximum((length - k_first + stride - 1) // stride, 0), rows)
            for item in range(pid, heads * tiles, programs):  # gradients of a tile of queries
                head, first = item // tiles, item % tiles * BLOCK
                kv_head = head // GROUP
                i = first + lane
                q_place = q_first + i * stride
                valid = (i < rows) & (q_place < length)
                row = tl.cast(head, tl.int64) * rows + i
                at, q_mask = row[:, None] * HEAD_DIM + d[None, :], within(valid[:, None], d, HEAD_DIM)
                queries = tl.load(q + at, mask=q_mask, other=0.0)
                of_out = tl.load(grad + at, mask=q_mask, other=0.0)
                lse_tile = tl.load(lse + row, mask=valid, other=0.0)
                delta_tile = tl.load(delta + row, mask=valid, other=0.0)
                block = kv_head * numel
                k_at, v_at = k, v
                acc = tl.zeros((BLOCK, width_of(HEAD_DIM)), tl.float32)
                if step > 0:
                    ctx.wait(full + kv_head, n)
                    block += n % 2 * kv_heads * numel
                    k_at, v_at = ring_k, ring_v
                    acc = tl.load(accs + at, mask=q_mask, other=0.0)
                visible = keys_here
                if CAUSAL:  # not beyond the tile's last query
                    last = q_first + (first + BLOCK - 1) * stride
                    visible = tl.minimum(tl.maximum((last - k_first + stride) // stride, 0), keys_here)
                for start in range(0, visible, BLOCK):
                    j = start + lane
                    here = block + j[:, None] * HEAD_DIM + d[None, :]
                    seen, k_mask = valid[:, None] & (j < visible)[None, :], within(j[:, None] < visible, d, HEAD_DIM)
                    if CAUSAL:
                        seen &= (k_first + j * stride)[None, :] <= q_place[:, None]
                    keys = tl.load(k_at + here, mask=k_mask, other=0.0)
                    values = tl.load(v_at + here, mask=k_mask, other=0.0)
                    weights, of_scores = slopes(queries, keys, values, of_out, lse_tile, delta_tile, seen, scale)
                    acc = tl.dot(of_scores, keys, acc, input_precision="ieee")
                if step > 0:
                    ctx.signal(free + kv_head * 2 + n % 2, 1, previous, op="add")
                if step < SIZE - 1:
                    tl.store(accs + at, acc, mask=q_mask)
                    wait_stores()
                    tl.debug_barrier()
                else:
                    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=within((i < rows)[:, None], d, HEAD_DIM))
        message = (turn + 1) * SIZE
        for item in range(pid, kv_heads * tiles, programs):  # back where the keys are
            kv_head, j = item // tiles, item % tiles * BLOCK + lane
            at = kv_head * numel + j[:, None] * HEAD_DIM + d[None, :]
            there = message % 2 * kv_heads * numel + at
            ctx.wait(came + item, message)
            inside = within((j < rows)[:, None], d, HEAD_DIM)
            is_key = inside & ((q_first + j * stride) < length)[:, None]
            dk_tile = tl.load(ring_dk + there, mask=is_key, other=0.0)
            dv_tile = tl.load(ring_dv + there, mask=is_key, other=0.0)
            ctx.signal(taken + item, message, previous)
            tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=inside)
            tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)
    tl.store(turns + tl.program_id(0), turn + 1)


class RingKernels:
    """Launches the kernels of one `iris_core.ops.attention.RingAttention`, on the current stream."""

    def __init__(self, space) -> None:
        self._space, units, device = space, programs_at_once(space), space.members.device
        heads, rows = space.shape[:2]
        tiles, senders = -(-rows // space.block), max(1, min(space.kv_heads, units // 8))
        self._grid = (senders + max(1, min(heads * tiles, units - senders)),)
        self._accs = torch.empty(space.shape, dtype=torch.float32, device=device)
        self._sums = torch.empty(heads, rows, 2, dtype=torch.float32, device=device)
        self._turns = torch.zeros(2, *self._grid, dtype=torch.int64, device=device)
        self._constants = {
            "WORLD": space.world, "SIZE": space.size, "GROUP": heads // space.kv_heads, "SENDERS": senders,
            "CAUSAL": space.causal, "STRIPED": space.striped, "HEAD_DIM": space.shape[2], "BLOCK": space.block,
            "BLOCK_COPY": 1024, "num_stages": 2,
        }  # fmt: skip

    def _numbers(self, scale):
        s = self._space
        return s.members, s.context, s.me, *s.shape[:2], s.length, scale

    def forward(self, q, k, v, out, lse, scale) -> None:
        """Attend."""
        s = self._space
        ring_attention[self._grid](
            q, k, v, out, lse, self._accs, self._sums, s.ring_k, s.ring_v, s.full, s.free, self._turns[0],
            *self._numbers(scale), **self._constants,
        )  # fmt: skip

    def gradients(self, q, k, v, grad, lse, delta, dq, dk, dv, scale) -> None:
        """Differentiate."""
        s = self._space
        ring_gradients[self._grid](
            q, k, v, grad, lse, delta, dq, dk, dv, self._accs, s.back_k, s.back_v, s.ring_dk, s.ring_dv, s.back_full,
            s.back_free, s.came, s.taken, self._turns[1], *self._numbers(scale), **self._constants, num_warps=8,
        )  # fmt: skip
