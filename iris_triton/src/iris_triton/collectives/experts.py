"""Tokens to their experts and back (`ctx.ops.experts`): rows go to where they are used, in one copy.

`count` numbers the tokens of each expert and gives all members their counts, from which each computes the row of each
of its tokens in the inbox of the expert's member, sorted by expert and then by sender; `send` stores the tokens there.
Results come back the same way (`give_back`), to a place for each choice of each token, and `gather` adds them up.  No
host waits, and no number of tokens is known to one.

A member that is gone has the rank -1: nothing is stored to it, and no member waits for it.

Calls of a group follow each other on each member's stream, and one turn cannot pass another: a member's numbers of turn
n + 1 say that it is done with what others stored for it in turn n, and all wait for them before they store again; where
no numbers are to be told, `meet` says the same.  Each flag has one sender, which only raises it.

Backwards, `send` multiplies gradients by the weights of their tokens' choices, and `weigh` makes those of the weights.

Lepikhin et al., GShard (2020), for the layer.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from iris_core.ops.experts import RETURNED, SENT
from iris_triton.collectives.parts.barrier import await_members, is_last, signal_members
from iris_triton.context import DeviceContext

if TYPE_CHECKING:
    from iris_core.ops.experts import Turn, Workspace

_ENTRIES = 1024  # of the list of choices, at a time
_PROGRAMS_PER_UNIT = 4
_VECTORS = 1024  # elements of a row, at a time
_SENT, _RETURNED = tl.constexpr(SENT), tl.constexpr(RETURNED)


@triton.jit
def count(
    chosen, numbers, own, slots, table, told, first, counts, offsets, done, state, members, me, context,
    WORLD: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Number the choices of one expert; in the last program, tell all members this one's numbers (`exchange`).

    Args:
        numbers, own: int32, out: the place of each choice among those of its expert, and how many each expert has.
        done: see `is_last`.
    """
    expert = tl.program_id(0)
    total = 0
    for start in range(0, slots, BLOCK):
        at = start + tl.arange(0, BLOCK)
        choice = tl.load(chosen + at, mask=at < slots, other=-1)
        tl.device_assert(choice < SIZE * LOCAL, "a token chooses an expert that there is not")
        is_mine = (choice == expert).to(tl.int32)
        tl.store(numbers + at, total + tl.cumsum(is_mine, 0) - 1, mask=is_mine > 0)
        total += tl.sum(is_mine, 0)
    tl.store(own + expert, total)
    if is_last(done, tl.num_programs(0)):
        ctx = DeviceContext.from_tensor(context, WORLD)
        exchange(ctx, own, table, told, first, counts, offsets, state, members, me, SIZE, LOCAL, LANES, WIDTH)


@triton.jit
def exchange(
    ctx, own, table, told, first, counts, offsets, state, members, me,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Tell all members this one's numbers, and compute from theirs where this one's tokens go; one program.

    Args:
        own: int32[experts], from `count`.
        table: int32[2, SIZE, experts] on the heap, one half for each turn.
        told: int64[SIZE] on the heap: the last turn of which each member has told its numbers.
        first: int32[experts], out: the row of this member's first token for each expert, in the inbox of its member.
        counts, offsets: int32[LOCAL] and [LOCAL + 1], out: tokens of this member's experts, and where they begin.
        state: int64[3]: the turn, and those of the last `send` and the last `give_back`.
        LANES, WIDTH: powers of two, at least SIZE and LOCAL.
    """
    turn = tl.load(state) + 1
    owner, local = tl.arange(0, LANES)[:, None], tl.arange(0, WIDTH)[None, :]
    valid = (owner < SIZE) & (local < LOCAL)
    expert = owner * LOCAL + local
    half = table + turn % 2 * (SIZE * SIZE * LOCAL)
    numbers = tl.load(own + expert, mask=valid, other=0)
    for i in range(SIZE):
        peer = tl.load(members + (me + 1 + i) % SIZE)
        if peer >= 0:
            ctx.store(half + me * (SIZE * LOCAL) + expert, numbers, peer, mask=valid)
    signal_members(ctx, told + me, turn, members, SIZE)
    totals = tl.zeros((LANES, WIDTH), tl.int32)
    before = tl.zeros((LANES, WIDTH), tl.int32)  # of the members before this one
    await_members(ctx, told, turn, members, me, SIZE)
    for sender in range(SIZE):
        if tl.load(members + sender) >= 0:
            theirs = tl.load(half + sender * (SIZE * LOCAL) + expert, mask=valid, other=0)
            totals += theirs
            before += tl.where(sender < me, theirs, 0)
    starts = tl.cumsum(totals, 1) - totals
    tl.store(first + expert, starts + before, mask=valid)
    mine = valid & (owner == me)
    tl.store(counts + local + owner * 0, totals, mask=mine)
    tl.store(offsets + local + owner * 0, starts, mask=mine)
    tl.store(offsets + local + 1 + owner * 0, starts + totals, mask=mine & (local == LOCAL - 1))
    tl.store(state, turn)


@triton.jit
def meet(told, state, members, me, context, WORLD: tl.constexpr, SIZE: tl.constexpr):
    """Begin a turn in which no tokens are sent; one program."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(state) + 1
    signal_members(ctx, told + me, turn, members, SIZE)
    await_members(ctx, told, turn, members, me, SIZE)
    tl.store(state, turn)


@triton.jit
def owner_of(expert, members, SIZE: tl.constexpr, LOCAL: tl.constexpr):
    """Return the rank that has an expert; -1 if there is no such expert, or its member is gone."""
    is_one = (expert >= 0) & (expert < SIZE * LOCAL)
    return tl.load(members + expert // LOCAL, mask=is_one, other=-1)


@triton.jit
def send(
    x, scales, chosen, weights, numbers, first, inbox, inbox_scales, origin, arrived, done, state, members, me, slots,
    most_slots, words, context, WORLD: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr,
    SCALES: tl.constexpr, LANES: tl.constexpr, WEIGHTED: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store this member's tokens into the inboxes of their experts' members; slot s is choice s % TOP_K of s // TOP_K.

    Args:
        x, inbox: rows of `words` elements.
        weights: float32, one for each slot; with WEIGHTED, what is stored is multiplied by it.
        scales, inbox_scales: float32, SCALES for each row; LANES is a power of two, at least that.
        origin: int32 on the heap: for each row of the inbox, its member times `most_slots` plus its slot there.
        arrived: int64[SIZE] on the heap: the last turn of each sender whose tokens are all there.
        done: see `is_last`.
        WAITS: end when those of all members have come, as `receive` does.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    for s in range(tl.program_id(0), slots, tl.num_programs(0)):
        expert = tl.load(chosen + s).to(tl.int32)
        peer = owner_of(expert, members, SIZE, LOCAL)
        if peer >= 0:
            row = (tl.load(first + expert) + tl.load(numbers + s)).to(tl.int64)
            token = tl.cast(s // TOP_K, tl.int64)
            for start in range(0, words, BLOCK):
                at = start + tl.arange(0, BLOCK)
                if WEIGHTED:
                    value = tl.load(x + token * words + at, mask=at < words, other=0.0).to(tl.float32)
                    value *= tl.load(weights + s)
                    ctx.store(inbox + row * words + at, value.to(inbox.dtype.element_ty), peer, mask=at < words)
                else:
                    ctx.put(x + token * words + at, inbox + row * words + at, peer, mask=at < words)
            if SCALES > 0:
                at = tl.arange(0, LANES)
                ctx.put(scales + token * SCALES + at, inbox_scales + row * SCALES + at, peer, mask=at < SCALES)
            ctx.store(origin + row, me * most_slots + s, peer)
    tell_all(ctx, arrived, done, state, members, me, SIZE, _SENT, WAITS)


@triton.jit
def tell_all(ctx, flags, done, state, members, me, SIZE: tl.constexpr, PLACE: tl.constexpr, WAITS: tl.constexpr):
    """Let the last program of a launch tell all members that this one has stored everything, and wait for theirs."""
    if is_last(done, tl.num_programs(0)):
        turn = tl.load(state)
        tl.store(state + PLACE, turn)
        signal_members(ctx, flags + me, turn, members, SIZE)
        if WAITS:
            await_members(ctx, flags, turn, members, me, SIZE)


@triton.jit
def receive(flags, state, members, me, context, WORLD: tl.constexpr, SIZE: tl.constexpr, PLACE: tl.constexpr):
    """Wait until every member has stored everything of the turn at a place of the state; one program."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    await_members(ctx, flags, tl.load(state + PLACE), members, me, SIZE)


@triton.jit
def give_back(
    y, origin, offsets, back, returned, done, state, members, me, most_slots, words, context,
    WORLD: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the experts' results to where the tokens came from: row `slot` of `back`, of the token's member."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    for row in range(tl.program_id(0), tl.load(offsets + LOCAL), tl.num_programs(0)):
        came_from = tl.load(origin + row)
        peer, slot = tl.load(members + came_from // most_slots), tl.cast(came_from % most_slots, tl.int64)
        begin = tl.cast(row, tl.int64) * words
        if peer >= 0:
            for start in range(0, words, BLOCK):
                at = start + tl.arange(0, BLOCK)
                ctx.put(y + begin + at, back + slot * words + at, peer, mask=at < words)
    tell_all(ctx, returned, done, state, members, me, SIZE, _RETURNED, WAITS)


@triton.jit
def gather(
    out, back, chosen, weights, members, tokens, hidden, SIZE: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up each token's results, in float32 and in the order of its choices."""
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(t, tl.int64)
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for choice in range(TOP_K):
                slot = token * TOP_K + choice
                if owner_of(tl.load(chosen + slot).to(tl.int32), members, SIZE, LOCAL) >= 0:
                    result = tl.load(back + slot * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
                    total += result * tl.load(weights + slot) if WEIGHTED else result
            tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


@triton.jit
def weigh(
    grad, results, chosen, out, members, slots, hidden, SIZE: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Multiply each choice's result by the gradient of its token's sum: the gradient of its weight, in float32."""
    for s in range(tl.program_id(0), slots, tl.num_programs(0)):
        slot = tl.cast(s, tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        if owner_of(tl.load(chosen + s).to(tl.int32), members, SIZE, LOCAL) >= 0:
            for start in range(0, hidden, BLOCK):
                at = start + tl.arange(0, BLOCK)
                result = tl.load(results + slot * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
                of_sum = tl.load(grad + slot // TOP_K * hidden + at, mask=at < hidden, other=0.0)
                total += result * of_sum.to(tl.float32)
        tl.store(out + s, tl.sum(total, 0))


class ExpertKernels:
    """Launches the kernels of one group, on the current stream."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        size, local = space.size, space.local
        lanes = {"LANES": triton.next_power_of_2(size), "WIDTH": triton.next_power_of_2(local)}
        self._group = {"WORLD": space.world, "SIZE": size}
        self._shape = {**self._group, "LOCAL": local}
        self._padded = {**self._shape, **lanes}
        self._many = space.units * _PROGRAMS_PER_UNIT

    def _programs(self, work: int) -> tuple[int]:
        return (max(1, min(work, self._many)),)

    def dispatch(self, turn: Turn, x: Any, scales: Any, weights: Any, waits: bool) -> None:
        """Store tokens, with their scales or times their weights, where there are any, tell the others, and wait."""
        s, slots, experts = self._space, turn.chosen.numel(), self._space.size * self._space.local
        count[(experts,)](
            turn.chosen, turn.numbers, s.own, slots, s.table, s.told, s.first, turn.counts, turn.offsets, s.done,
            s.state, s.members, s.me, s.context, **self._padded,
            BLOCK=max(16, min(_ENTRIES, triton.next_power_of_2(slots))),
        )  # fmt: skip
        x, inbox = (x, s.inbox) if weights is not None else (as_words(x), as_words(s.inbox))
        nothing = s.state  # not read
        send[self._programs(slots)](
            x, nothing if scales is None else scales, turn.chosen, nothing if weights is None else weights,
            turn.numbers, s.first, inbox, s.inbox_scales, s.origin, s.arrived, s.done, s.state, s.members, s.me, slots,
            s.most_slots, x.shape[1], s.context, **self._shape, TOP_K=s.top_k, SCALES=s.scales,
            LANES=triton.next_power_of_2(max(1, s.scales)), WEIGHTED=weights is not None, WAITS=waits, BLOCK=_VECTORS,
        )  # fmt: skip

    def meet(self) -> None:
        """Let the stream wait until all members are done with what others have stored for them."""
        s = self._space
        meet[(1,)](s.told, s.state, s.members, s.me, s.context, **self._group, num_warps=1)

    def receive(self, flags: Any, place: int) -> None:
        """Let the stream wait for all members' tokens, or results."""
        s = self._space
        receive[(1,)](flags, s.state, s.members, s.me, s.context, **self._group, PLACE=place, num_warps=1)

    def give_back(self, turn: Turn, y: Any, waits: bool) -> None:
        """Store results to where their tokens came from, tell the others, and wait for theirs."""
        s = self._space
        rows, back = as_words(y), as_words(s.back)
        give_back[self._programs(rows.shape[0])](
            rows, s.origin if turn.origin is None else turn.origin, turn.offsets, back, s.returned, s.done, s.state,
            s.members, s.me, s.most_slots, rows.shape[1], s.context, **self._shape, WAITS=waits, BLOCK=_VECTORS,
        )  # fmt: skip

    def gather(self, turn: Turn, out: Any) -> None:
        """Add up what has come back."""
        s, weights = self._space, turn.weights
        gather[self._programs(out.shape[0])](
            out, s.back, turn.chosen, s.state if weights is None else weights, s.members, out.shape[0], out.shape[1],
            SIZE=s.size, LOCAL=s.local, TOP_K=s.top_k, WEIGHTED=weights is not None, BLOCK=_VECTORS,
        )  # fmt: skip

    def weigh(self, turn: Turn, grad: Any, results: Any, out: Any) -> None:
        """Store the gradients of a turn's weights."""
        s = self._space
        weigh[self._programs(out.numel())](
            grad, results, turn.chosen, out, s.members, out.numel(), grad.shape[1], SIZE=s.size, LOCAL=s.local,
            TOP_K=s.top_k, BLOCK=_VECTORS,
        )  # fmt: skip


def as_words(rows):
    """View rows as int32, which all element types are copied as."""
    import torch

    return rows.view(torch.int32)
