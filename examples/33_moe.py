"""A layer of experts (MoE) whose experts are divided among the ranks: tokens travel to their experts and back.

Every token is worth `top_k` of the experts, which its router has chosen.  Four kernels make the layer:

1. exchange: each rank tells all others how many tokens it has for each expert.  From the table of these numbers, every
   rank knows the row of each of its tokens in the inbox of the expert's rank: rows are sorted by expert, then by the
   rank that they come from.
2. dispatch: a program copies the tokens for one expert straight to these rows, says where they came from, and signals.
3. run_experts: tiles of rows go through their expert's MLP as soon as that expert's tokens are there, and every row of
   the result is stored straight into the memory of the rank where the token lives.
4. combine: once all results are back, a token's results are added up with its router's weights.

No host waits for another host or for its device: sizes stay on the device, and the layer can be captured in a graph.
No token is dropped: the inbox has room for the worst case, ranks * tokens * min(top_k, experts per rank) rows.  Where
that is too much memory, lower `tokens` and call the layer more often.

Every kernel that waits is preceded on each stream by the one that it waits for, and exchange keeps the calls apart: a
rank's numbers for call n + 1 say that it is done with call n, so its inbox may be filled again.

Lepikhin et al.: GShard, 2020, for the layer.

    python examples/33_moe.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import num_programs, on_gpu, timing

import iris_core
from iris_triton import DeviceContext

BLOCK_FFN = 32


@triton.jit
def exchange(
    own, counts, met, table, state, slots, context, WORLD: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill `table`[rank, expert] on all ranks; one program.  `state`: calls so far, and results ordered so far."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(state) + 1
    e = tl.arange(0, BLOCK)
    half = counts + turn % 2 * (WORLD * EXPERTS)  # a rank that is ahead writes the other half
    for i in range(WORLD):
        peer = (ctx.rank + 1 + i) % WORLD
        ctx.put_signal(own + e, half + ctx.rank * EXPERTS + e, met + ctx.rank, turn, peer, mask=e < EXPERTS)
    for peer in range(WORLD):
        ctx.wait(met + peer, turn)
        tl.store(table + peer * EXPERTS + e, tl.load(half + peer * EXPERTS + e, mask=e < EXPERTS), mask=e < EXPERTS)
    tl.store(state, turn)
    tl.store(state + 1, tl.load(state + 1) + slots)


@triton.jit
def dispatch(
    x, order, first, rows, inbox, origin, arrived, state, max_slots, hidden, context, WORLD: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Copy tokens to their experts.  Slot s is choice s % TOP_K of token s // TOP_K.

    `order`: slots sorted by expert; `first`: where an expert's begin in it; `rows`: and in the inbox of its rank.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(state)
    LOCAL: tl.constexpr = EXPERTS // WORLD
    h = tl.arange(0, BLOCK_H)
    for i in range(tl.program_id(0), EXPERTS, tl.num_programs(0)):
        expert = (i + (ctx.rank + 1) * LOCAL) % EXPERTS  # those of the next rank first
        owner = expert // LOCAL
        begin, end = tl.load(first + expert), tl.load(first + expert + 1)
        row = tl.load(rows + expert)
        for start in range(begin, end, BLOCK_ROWS):
            at = start + tl.arange(0, BLOCK_ROWS)
            slot = tl.load(order + at, mask=at < end, other=0)
            to = row + at - begin
            mask = (at < end)[:, None] & (h < hidden)[None, :]
            ctx.put(
                x + (slot // TOP_K)[:, None] * hidden + h[None, :],
                inbox + to[:, None] * hidden + h[None, :],
                owner,
                mask=mask,
            )
            ctx.store(origin + to, ctx.rank * max_slots + slot, owner, mask=at < end)
        ctx.signal(arrived + ctx.rank * LOCAL + expert % LOCAL, turn, owner)  # also where there is no token


@triton.jit
def run_experts(
    inbox, origin, starts, totals, arrived, w1, w2, back, returned, state, max_slots, hidden, ffn, context,
    WORLD: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_FFN: tl.constexpr
):  # fmt: skip
    """silu(x @ w1) @ w2 for all rows of the inbox; programs take tiles in turn, through all experts of this rank."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(state)
    LOCAL: tl.constexpr = EXPERTS // WORLD
    h = tl.arange(0, BLOCK_H)
    programs = tl.num_programs(0)
    before = 0  # tiles of the experts before
    for expert in range(LOCAL):
        begin, total = tl.load(starts + ctx.rank * LOCAL + expert), tl.load(totals + ctx.rank * LOCAL + expert)
        tiles = tl.cdiv(total, BLOCK_ROWS).to(tl.int32)
        matrix = expert.to(tl.int64) * hidden * ffn
        for tile in range((tl.program_id(0) + programs - before % programs) % programs, tiles, programs):
            for peer in range(WORLD):
                ctx.wait(arrived + peer * LOCAL + expert, turn)
            i = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            row, valid = begin + i, i < total
            mask = valid[:, None] & (h < hidden)[None, :]
            x = tl.load(inbox + row[:, None] * hidden + h[None, :], mask=mask, other=0.0)
            y = tl.zeros((BLOCK_ROWS, BLOCK_H), tl.float32)
            for start in range(0, ffn, BLOCK_FFN):
                f = start + tl.arange(0, BLOCK_FFN)
                up = w1 + matrix + h[:, None] * ffn + f[None, :]
                down = w2 + matrix + f[:, None] * hidden + h[None, :]
                inner = tl.dot(x, tl.load(up, mask=(h < hidden)[:, None] & (f < ffn)[None, :], other=0.0))
                inner = inner * tl.sigmoid(inner)
                second = tl.load(down, mask=(f < ffn)[:, None] & (h < hidden)[None, :], other=0.0)
                y = tl.dot(inner.to(second.dtype), second, y)
            came_from = tl.load(origin + row, mask=valid, other=0)
            owner, slot = came_from // max_slots, came_from % max_slots
            ctx.store(
                back + slot.to(tl.int64)[:, None] * hidden + h[None, :],
                y.to(back.dtype.element_ty),
                owner[:, None],
                mask=mask,
            )  # each row to a rank of its own
            for peer in range(WORLD):
                theirs = tl.sum(((owner == peer) & valid).to(tl.int32), axis=0)
                if theirs > 0:
                    ctx.signal(returned, theirs, peer, op="add")
        before += tiles


@triton.jit
def combine(
    out, back, weights, returned, state, tokens, hidden, context, WORLD: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Add up each token's results."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    # all ranks add to it, and none is a call ahead: exchange lets it on only when this rank is done with this call
    ctx.wait(returned, tl.load(state + 1))
    h = tl.arange(0, BLOCK_H)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_ROWS), tl.num_programs(0)):
        t = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (t < tokens)[:, None] & (h < hidden)[None, :]
        acc = tl.zeros((BLOCK_ROWS, BLOCK_H), tl.float32)
        for choice in range(TOP_K):
            slot = t * TOP_K + choice
            result = tl.load(back + slot[:, None] * hidden + h[None, :], mask=mask, other=0.0)
            acc += tl.load(weights + slot, mask=t < tokens, other=0.0)[:, None] * result.to(tl.float32)
        tl.store(out + t[:, None] * hidden + h[None, :], acc.to(out.dtype.element_ty), mask=mask)


class Experts:
    """The layer.  Collective: every rank makes it, and calls it equally often, on one stream.

    Args:
        ctx: the open Iris.
        w1: (experts of this rank, hidden, ffn), contiguous; rank r has the experts r * n and following.
        w2: (experts of this rank, ffn, hidden), contiguous.
        tokens: most tokens that a rank brings to a call; the same on all ranks.
        top_k: experts of a token.
    """

    def __init__(self, ctx, w1, w2, tokens, top_k):
        self.ctx, self.w1, self.w2, self.tokens, self.top_k = ctx, w1, w2, tokens, top_k
        self.local, self.hidden, self.ffn = w1.shape
        if w2.shape != (self.local, self.ffn, self.hidden) or not (w1.is_contiguous() and w2.is_contiguous()):
            raise ValueError(f"w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} do not fit, or are not contiguous")
        if self.hidden > 256:
            raise ValueError(f"a program holds whole rows: hidden is {self.hidden}, and may be up to 256")
        self.block_rows = 64 if on_gpu(ctx) else 16
        world = ctx.num_ranks
        self.experts = world * self.local
        self.counts = ctx.zeros(2, world, self.experts, dtype=torch.int32)
        self.met = ctx.zeros(world, dtype=torch.int64)
        capacity = world * tokens * min(top_k, self.local)
        self.inbox = ctx.zeros(capacity, self.hidden, dtype=w1.dtype)
        self.origin = ctx.zeros(capacity, dtype=torch.int32)
        self.arrived = ctx.zeros(world, self.local, dtype=torch.int64)
        self.back = ctx.zeros(tokens * top_k, self.hidden, dtype=w1.dtype)
        self.returned = ctx.zeros(1, dtype=torch.int64)
        self.table = torch.zeros(world, self.experts, dtype=torch.int32, device=ctx.device)
        self.state = torch.zeros(2, dtype=torch.int64, device=ctx.device)
        ctx.barrier()

    def __call__(self, x, chosen, weights):
        """Return sum over j of weights[:, j] * expert chosen[:, j] (x).

        Args:
            x: (n, hidden) with any n up to `tokens`, also 0 and different on each rank; contiguous, of the dtype of w1.
            chosen: int64 (n, top_k), different experts for each token.
            weights: float32 (n, top_k), contiguous.
        """
        n, world, rank = x.shape[0], self.ctx.num_ranks, self.ctx.cur_rank
        if n > self.tokens or x.shape[1] != self.hidden or not chosen.shape == weights.shape == (n, self.top_k):
            raise ValueError(
                f"x {tuple(x.shape)}, chosen {tuple(chosen.shape)} and weights {tuple(weights.shape)} do not fit"
            )
        if x.dtype != self.w1.dtype or not (x.is_contiguous() and weights.is_contiguous()):
            raise ValueError(f"x must be {self.w1.dtype}, and x and weights contiguous")
        context, slots = self.ctx.get_device_context(), chosen.flatten()
        units, block_h = num_programs(self.ctx), max(16, triton.next_power_of_2(self.hidden))
        constants = {"WORLD": world, "EXPERTS": self.experts}

        own = (slots[:, None] == torch.arange(self.experts, device=slots.device)).sum(dim=0, dtype=torch.int32)
        exchange[(1,)](
            own, self.counts, self.met, self.table, self.state, slots.numel(), context,
            BLOCK=triton.next_power_of_2(self.experts), **constants,
        )  # fmt: skip
        # where everything goes: operations of torch on the device, for which nobody waits
        totals = self.table.sum(dim=0).view(world, self.local)
        starts = totals.cumsum(dim=1) - totals  # of each expert, in the inbox of its rank
        rows = starts.flatten() + self.table[:rank].sum(dim=0)
        first = torch.nn.functional.pad(own.cumsum(dim=0), (1, 0))
        order = slots.argsort(stable=True)
        max_slots = self.tokens * self.top_k
        dispatch[(min(self.experts, units),)](
            x, order, first, rows, self.inbox, self.origin, self.arrived, self.state, max_slots, self.hidden, context,
            TOP_K=self.top_k, BLOCK_ROWS=self.block_rows, BLOCK_H=block_h, **constants,
        )  # fmt: skip
        run_experts[(units,)](  # its programs wait: all must be on the device at the same time
            self.inbox, self.origin, starts, totals, self.arrived, self.w1, self.w2, self.back, self.returned,
            self.state, max_slots, self.hidden, self.ffn, context, BLOCK_ROWS=self.block_rows, BLOCK_H=block_h,
            BLOCK_FFN=BLOCK_FFN, num_warps=8, **constants,
        )  # fmt: skip
        out = torch.empty_like(x)
        combine[(max(1, min(-(-n // self.block_rows), units)),)](
            out, self.back, weights, self.returned, self.state, n, self.hidden, context, WORLD=world, TOP_K=self.top_k,
            BLOCK_ROWS=self.block_rows, BLOCK_H=block_h,
        )  # fmt: skip
        return out


def reference(x, chosen, weights, w1, w2):
    """In float64, with the experts of all ranks."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, (up, down) in enumerate(zip(w1.double(), w2.double(), strict=True)):
        weight = (weights.double() * (chosen == expert)).sum(dim=1, keepdim=True)
        out += weight * (torch.nn.functional.silu(x.double() @ up) @ down)
    return out


def route(logits, top_k):
    """The router's choice, and how much each counts."""
    best, chosen = logits.float().topk(top_k, dim=1)
    return chosen, best.softmax(dim=1)


def main(tokens=None, local=3, hidden=48, ffn=80, top_k=2, calls=3, unused=1):
    """Calls with random routing.  `tokens`: of ranks 0, 1, ..., repeated; `unused`: an expert that gets nothing."""
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if tokens is None:
            tokens = 45, 20, 33
            if on_gpu(ctx):
                tokens, local, hidden, ffn = (2048, 1500, 1999), 8, 256, 1024
        rank, world = ctx.cur_rank, ctx.num_ranks
        generator = torch.Generator().manual_seed(33)  # the same weights on all ranks
        w1 = (torch.randn(world * local, hidden, ffn, generator=generator) * hidden**-0.5).half().to(ctx.device)
        w2 = (torch.randn(world * local, ffn, hidden, generator=generator) * ffn**-0.5).half().to(ctx.device)
        mine = slice(rank * local, (rank + 1) * local)
        layer = Experts(ctx, w1[mine], w2[mine], max(tokens), top_k)
        own, worst = torch.Generator().manual_seed(1000 + rank), 0.0
        for call in range(calls):
            n = tokens[(rank + call) % len(tokens)]
            x = torch.randn(n, hidden, generator=own).half().to(ctx.device)
            logits = torch.randn(n, world * local, generator=own) + torch.linspace(0, 3, world * local)  # unequal load
            logits[:, unused] = float("-inf")
            chosen, weights = route(logits.to(ctx.device), top_k)
            errors = (layer(x, chosen, weights).double() - reference(x, chosen, weights, w1, w2)).abs()
            if n:
                assert errors.max() < 1e-2, f"call {call}: the largest error is {errors.max()}"  # float16 has 11 bits
                worst = max(worst, errors.max().item())
        time = timing(ctx, lambda: layer(x, chosen, weights))
        ctx.barrier()
        return (
            f"rank {rank} of {world} on {ctx.device}: {calls} calls, {world * local} experts, error {worst:.1e}{time}"
        )


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
