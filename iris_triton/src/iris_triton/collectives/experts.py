"""Tokens to their experts and back (`ctx.ops.experts`): rows are stored to where they are used.

`count` numbers the tokens of each expert and, beside that, gives all members their counts, from which each computes the
row of each of its tokens in the inbox of the expert's member, sorted by expert and then by sender; `send` stores the
tokens there, and on GPUs that can do so it is launched while `count` still runs.  A token with several experts of one
member travels once, and the member copies it (`spread`), as memory is faster than links.
Results come back the same way (`give_back`), to a place for each choice of each token, and `gather` adds them up; or
those of a token are added up where they are (`merge_back`), and their sum travels.  No host waits, and no number of
tokens is known to one.

A member that is gone has the rank -1: nothing is stored to it, and no member waits for it.

Calls of a group follow each other on each member's stream, and one turn cannot pass another: a member's numbers of turn
n + 1 say that it is done with what others stored for it in turn n, and all wait for them before they store again; where
no numbers are to be published, `meet` says the same.  Each flag has one sender, which only raises it.

Backwards, `send` multiplies gradients by the weights of their tokens' choices, and `weigh` makes those of the weights.

Lepikhin et al., GShard (2020), for the layer.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.device.context_words import MismatchCode
from iris_core.ops.experts import RETURNED, SENT, Turn, Workspace
from iris_triton.context import DeviceContext
from iris_triton.language.address import translate
from iris_triton.language.asm import follow, let_next_start
from iris_triton.language.flags import await_flags, lanes_for, report_difference, set_flags
from iris_triton.language.sync import gather_stores
from iris_triton.launcher import BoundKernels, early_launch
from iris_triton.tiles.protocol import wait_bound

_ENTRIES = 4096  # of the list of choices, at a time
_PROGRAMS_PER_UNIT = 8
_WORDS, _ELEMENTS = 2048, 1024  # of a row, at a time: 32-bit words that are copied, elements that are added up
_SENT, _RETURNED, _LENGTH = tl.constexpr(SENT), tl.constexpr(RETURNED), tl.constexpr(int(MismatchCode.LENGTH))


@triton.jit
def is_last(done, number):
    """Count programs in `done` (int32, 0); return whether all `number` have come, whose stores are then visible."""
    tl.debug_barrier()  # the atomic is one thread's, and covers what it has seen
    last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == number - 1
    if last:
        tl.store(done, 0)
        tl.debug_barrier()
    return last


@triton.jit
def signal_members(ctx, flag, value, members, SIZE: tl.constexpr):
    """Set a flag on all members but those that are gone (rank -1), after all earlier stores of this program.

    One release orders the stores before all flags; of `ctx.signal` in a loop, each would wait for the flag before.
    """
    lanes = lanes_for(SIZE)
    ranks = tl.load(members + lanes % SIZE)
    gather_stores()
    targets = translate(flag + lanes * 0, ctx.rank, tl.maximum(ranks, 0), ctx.heap_bases)
    set_flags(targets, value, (lanes < SIZE) & (ranks >= 0), "release", "sys")


@triton.jit
def await_members(ctx, flags, value, members, me, SIZE: tl.constexpr, step=1):
    """Wait until the flags of all members but those that are gone, one every `step` words, are at least `value`.

    Those of members that are gone are replaced by the flag of `me`, the caller's own number.
    """
    lanes = lanes_for(SIZE)
    is_there = (lanes < SIZE) & (tl.load(members + lanes % SIZE) >= 0)
    places = tl.where(is_there, lanes, me)
    timeout_ns, status = wait_bound(ctx.heap_bases, ctx.world_size)
    await_flags(flags + places * step, value, is_there, "ge", "acquire", "sys", timeout_ns, status, ctx.rank)


@triton.jit
def count(
    chosen, numbers, slots, table, published, first, counts, offsets, capacity, state, members, me, context,
    WORLD: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Exchange the numbers of tokens in the first program, and number an expert's choices in each other one.

    Args:
        numbers: int32, out: the place of each choice among those of its expert.
        LANES, WIDTH: powers of two, at least SIZE and LOCAL.
        EARLY: let the next kernel start before this one has ended.
    """
    expert = tl.program_id(0) - 1
    if expert < 0:
        own = tl.zeros((LANES * WIDTH,), tl.int32)
        for start in range(0, slots, BLOCK):
            at = start + tl.arange(0, BLOCK)
            choice = tl.load(chosen + at, mask=at < slots, other=-1)
            member = member_of(choice, EXPERTS, LOCAL)
            place = tl.where(member >= 0, member * WIDTH + choice % LOCAL, 0).to(tl.int32)
            own += tl.histogram(place, LANES * WIDTH, mask=member >= 0)
        ctx = DeviceContext.from_tensor(context, WORLD)
        own = tl.reshape(own, (LANES, WIDTH))
        exchange(ctx, own, table, published, first, counts, offsets, capacity, state, members, me, SIZE, EXPERTS, LOCAL)
        tl.debug_barrier()
        let_next_start(EARLY)
    else:
        total = 0
        for start in range(0, slots, BLOCK):
            at = start + tl.arange(0, BLOCK)
            is_mine = (tl.load(chosen + at, mask=at < slots, other=-1) == expert).to(tl.int32)
            tl.store(numbers + at, total + tl.cumsum(is_mine, 0) - 1, mask=is_mine > 0)
            total += tl.sum(is_mine, 0)


@triton.jit
def exchange(
    ctx, own, table, published, first, counts, offsets, capacity, state, members, me,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr
):  # fmt: skip
    """Tell all members this one's numbers, and compute from theirs where this one's tokens go; one program.

    Args:
        own: int32, a power of two of at least SIZE and LOCAL each: this member's tokens for each expert.
        table: int32[2, SIZE, SIZE * LOCAL] on the heap, one half for each turn; 0 for what is no expert.
        published: int64[SIZE] on the heap: the last turn of which each member has published its numbers.
        first: int32[SIZE * LOCAL], out: the row of this member's first token for each expert, in its member's inbox.
        counts, offsets: int32[held] and [held + 1], out: tokens of this member's experts, and where they begin, up to
            `capacity`: there are no more, but where a token names an expert twice, which `send` reports.
        state: int64[3]: the turn, and those of the last `send` and the last `give_back`.
    """
    turn = tl.load(state) + 1
    owner, local = tl.arange(0, own.shape[0])[:, None], tl.arange(0, own.shape[1])[None, :]
    valid = (owner < SIZE) & (local < LOCAL)
    expert = owner * LOCAL + local
    half = table + turn % 2 * (SIZE * SIZE * LOCAL)
    for i in range(SIZE):
        peer = tl.load(members + (me + 1 + i) % SIZE)
        if peer >= 0:
            ctx.store(half + me * (SIZE * LOCAL) + expert, own, peer, mask=valid)
    signal_members(ctx, published + me, turn, members, SIZE)
    totals = tl.zeros_like(own)
    before = tl.zeros_like(own)  # of the members before this one
    await_members(ctx, published, turn, members, me, SIZE)
    for sender in range(SIZE):
        if tl.load(members + sender) >= 0:
            theirs = tl.load(half + sender * (SIZE * LOCAL) + expert, mask=valid, other=0)
            totals += theirs
            before += tl.where(sender < me, theirs, 0)
    starts = tl.cumsum(totals, 1) - totals
    tl.store(first + expert, starts + before, mask=valid)
    mine = valid & (owner == me) & (expert < EXPERTS)
    ends = tl.minimum(starts + totals, capacity)
    tl.store(counts + local + owner * 0, ends - tl.minimum(starts, capacity), mask=mine)
    tl.store(offsets, 0)
    tl.store(offsets + local + 1 + owner * 0, ends, mask=mine)
    tl.store(state, turn)


@triton.jit
def meet(published, state, members, me, context, WORLD: tl.constexpr, SIZE: tl.constexpr):
    """Begin a turn in which no tokens are sent; one program."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    turn = tl.load(state) + 1
    signal_members(ctx, published + me, turn, members, SIZE)
    await_members(ctx, published, turn, members, me, SIZE)
    tl.store(state, turn)


@triton.jit
def member_of(expert, EXPERTS: tl.constexpr, LOCAL: tl.constexpr):
    """Return the number of the member that has an expert, of 32 or 64 bits; -1 if there is no such expert."""
    return tl.where((expert >= 0) & (expert < EXPERTS), expert // LOCAL, -1)


@triton.jit
def owner_of(expert, members, EXPERTS: tl.constexpr, LOCAL: tl.constexpr):
    """Return the rank that has an expert; -1 if there is no such expert, or its member is gone."""
    member = member_of(expert, EXPERTS, LOCAL)
    return tl.load(members + member, mask=member >= 0, other=-1)


@triton.jit
def words_of(x, begin, at, mask, weight, DTYPE: tl.constexpr, WEIGHTED: tl.constexpr):
    """Load words of a row; with WEIGHTED, times `weight`."""
    value = tl.load(x + begin + at, mask=mask, other=0)
    return (value.to(tl.float32) * weight).to(DTYPE) if WEIGHTED else value


@triton.jit
def like(
    chosen, slot, expert, EXPERTS: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr
):  # fmt: skip
    """Return the first slot of the same token whose expert has the same member, and how many are before and in all.

    CHOICES: a power of two, at least TOP_K.
    """
    choice, begin = tl.arange(0, CHOICES), slot // TOP_K * TOP_K
    others = tl.load(chosen + begin + choice, mask=choice < TOP_K, other=-1)
    is_like = (member_of(others, EXPERTS, LOCAL) == member_of(expert, EXPERTS, LOCAL)) & (choice < TOP_K)
    before = tl.sum((is_like & (choice < slot - begin)).to(tl.int32), 0)
    return begin + tl.min(tl.where(is_like, choice, slot - begin), 0), before, tl.sum(is_like.to(tl.int32), 0)


@triton.jit
def send(
    x, scales, chosen, weights, numbers, first, capacity, inbox, inbox_scales, origin, listed, shares, arrived, done,
    state, members, me, slots, most_slots, words, context, WORLD: tl.constexpr, SIZE: tl.constexpr,
    EXPERTS: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, MOST: tl.constexpr,
    SCALES: tl.constexpr, LANES: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, ONCE: tl.constexpr,
    WAITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Store this member's tokens into the inboxes of their experts' members; slot s is choice s % TOP_K of s // TOP_K.

    Args:
        x, inbox: rows of `words` elements.
        weights: float32, one for each slot; with WEIGHTED, what is stored is multiplied by it.
        scales, inbox_scales: float32, SCALES for each row; LANES is a power of two, at least that.
        origin: int32 on the heap: for each row of the inbox, its member times `most_slots` plus its slot there.
        listed, shares: int32 and float32 on the heap, if MOST > 1: MOST for each row, how many rows its token has and
            the others of them, or, if it was not stored, -1 minus the row to `spread` to it; its weight, or 1.
        arrived: int64[SIZE] on the heap: the last turn of each sender whose tokens are all there.
        done: see `is_last`.
        ONCE: store a token once for all its experts of a member.
        WAITS: end when those of all members have come, as `receive` does.
        EARLY: see `follow`.
    """
    follow(EARLY)
    ctx = DeviceContext.from_tensor(context, WORLD)
    DTYPE: tl.constexpr = inbox.dtype.element_ty
    for s in range(tl.program_id(0), slots, tl.num_programs(0)):
        expert = tl.load(chosen + s)
        stored, before, alike = like(chosen, s, expert, EXPERTS, LOCAL, TOP_K, CHOICES)
        if not ONCE:
            stored, alike = s, 1
        is_stored = stored == s
        at, token = tl.arange(0, BLOCK), tl.cast(s // TOP_K, tl.int64)
        weight = tl.load(weights + s) if WEIGHTED else 1.0
        value = words_of(x, token * words, at, (at < words) & is_stored, weight, DTYPE, WEIGHTED)
        number = tl.load(numbers + s)  # both before what waits for other loads
        peer = owner_of(expert, members, EXPERTS, LOCAL)
        if (LOCAL < TOP_K) & (before == LOCAL) & (peer >= 0):
            _, status = wait_bound(ctx.heap_bases, ctx.world_size)
            report_difference(status.to(tl.int64), ctx.rank, 0, token.to(tl.int32), LOCAL, peer, 1, 0, _LENGTH)
        row = (tl.load(first + expert, mask=peer >= 0, other=0) + number).to(tl.int64)
        if (peer >= 0) & (before < LOCAL) & (row < capacity):
            there = inbox + row * words
            if is_stored:
                ctx.store(there + at, value, peer, mask=at < words)
                for start in range(BLOCK, words, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    value = words_of(x, token * words, at, at < words, weight, DTYPE, WEIGHTED)
                    ctx.store(there + at, value, peer, mask=at < words)
                if SCALES > 0:
                    lane = tl.arange(0, LANES)
                    theirs = inbox_scales + row * SCALES + lane
                    ctx.put(scales + token * SCALES + lane, theirs, peer, mask=lane < SCALES)
            ctx.store(origin + row, me * most_slots + s, peer)
            if MOST > 1:
                begin = tl.minimum(tl.load(first + tl.load(chosen + stored)) + tl.load(numbers + stored), capacity - 1)
                ctx.store(listed + row * MOST, tl.where(is_stored, alike, -1 - begin), peer)
                if not is_stored:
                    ctx.store(listed + begin.to(tl.int64) * MOST + before, row.to(tl.int32), peer)
                ctx.store(shares + row, tl.load(weights + s) if SHARED else 1.0, peer)
    tell_all(ctx, arrived, done, state, members, me, SIZE, _SENT, WAITS, EARLY)


@triton.jit
def spread(
    inbox, inbox_scales, listed, offsets, held, words, MOST: tl.constexpr, SCALES: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Copy the rows of tokens that came once to where their further experts of this member look for them."""
    follow(EARLY)
    for row in range(tl.program_id(0), tl.load(offsets + held), tl.num_programs(0)):
        to = tl.cast(row, tl.int64)
        come = -1 - tl.load(listed + to * MOST).to(tl.int64)
        if come >= 0:
            for start in range(0, words, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(inbox + come * words + at, mask=at < words, other=0)
                tl.store(inbox + to * words + at, value, mask=at < words)
            if SCALES > 0:
                lane = tl.arange(0, LANES)
                value = tl.load(inbox_scales + come * SCALES + lane, mask=lane < SCALES, other=0.0)
                tl.store(inbox_scales + to * SCALES + lane, value, mask=lane < SCALES)


@triton.jit
def tell_all(
    ctx, flags, done, state, members, me, SIZE: tl.constexpr, PLACE: tl.constexpr, WAITS: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Let the last program of a launch tell all members that this one has stored everything, and wait for theirs."""
    if is_last(done, tl.num_programs(0)):
        turn = tl.load(state)
        tl.store(state + PLACE, turn)
        signal_members(ctx, flags + me, turn, members, SIZE)
        if WAITS:
            await_members(ctx, flags, turn, members, me, SIZE)
            tl.debug_barrier()
        let_next_start(EARLY)


@triton.jit
def receive(flags, state, members, me, context, WORLD: tl.constexpr, SIZE: tl.constexpr, PLACE: tl.constexpr):
    """Wait until every member has stored everything of the turn at a place of the state; one program."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    await_members(ctx, flags, tl.load(state + PLACE), members, me, SIZE)


@triton.jit
def give_back(
    y, origin, offsets, held, back, returned, done, state, members, me, most_slots, words, context,
    WORLD: tl.constexpr, SIZE: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Store the experts' results to where the tokens came from: row `slot` of `back`, of the token's member."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    for row in range(tl.program_id(0), tl.load(offsets + held), tl.num_programs(0)):
        begin, at = tl.cast(row, tl.int64) * words, tl.arange(0, BLOCK)
        value = tl.load(y + begin + at, mask=at < words, other=0)  # before what waits for other loads
        came_from = tl.load(origin + row)
        peer, slot = tl.load(members + came_from // most_slots), tl.cast(came_from % most_slots, tl.int64)
        if peer >= 0:
            ctx.store(back + slot * words + at, value, peer, mask=at < words)
            for start in range(BLOCK, words, BLOCK):
                at = start + tl.arange(0, BLOCK)
                ctx.put(y + begin + at, back + slot * words + at, peer, mask=at < words)
    tell_all(ctx, returned, done, state, members, me, SIZE, _RETURNED, WAITS, EARLY)


@triton.jit
def merge_back(
    y, origin, listed, shares, offsets, held, back, returned, done, state, members, me, most_slots, hidden,
    context, WORLD: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Add up a token's results, times their weights, and store the sum as `give_back` the first of them."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    for row in range(tl.program_id(0), tl.load(offsets + held), tl.num_programs(0)):
        rows = tl.load(listed + tl.cast(row, tl.int64) * MOST)
        if rows > 0:
            came_from = tl.load(origin + row)
            peer, slot = tl.load(members + came_from // most_slots), tl.cast(came_from % most_slots, tl.int64)
            if peer >= 0:
                for start in range(0, hidden, BLOCK):
                    at, total = start + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32)
                    for i in tl.static_range(MOST):  # without branches: all loads are on their way at once
                        is_one, place = i < rows, tl.cast(row, tl.int64)
                        if i > 0:
                            place = tl.load(listed + place * MOST + i, mask=is_one, other=0).to(tl.int64)
                        result = tl.load(y + place * hidden + at, mask=(at < hidden) & is_one, other=0.0).to(tl.float32)
                        total += result * tl.load(shares + place, mask=is_one, other=0.0)
                    there = back + slot * hidden + at
                    ctx.store(there, total.to(back.dtype.element_ty), peer, mask=at < hidden)
    tell_all(ctx, returned, done, state, members, me, SIZE, _RETURNED, WAITS, EARLY)


@triton.jit
def gather(
    out, back, chosen, weights, members, tokens, hidden, EXPERTS: tl.constexpr, LOCAL: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Add up each token's results, in float32 and in the order of its choices; programs take a block of a token.

    With MERGED, one of each member is there, in the place of its first choice.
    """
    follow(EARLY)
    blocks = tl.cdiv(hidden, BLOCK)
    for item in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        token, at = tl.cast(item // blocks, tl.int64), item % blocks * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for choice in tl.static_range(TOP_K):  # without branches: all loads are on their way at once
            slot = token * TOP_K + choice
            expert = tl.load(chosen + slot)
            is_there = owner_of(expert, members, EXPERTS, LOCAL) >= 0
            if MERGED:
                is_there = is_there & (like(chosen, slot, expert, EXPERTS, LOCAL, TOP_K, CHOICES)[1] == 0)
            result = tl.load(back + slot * hidden + at, mask=(at < hidden) & is_there, other=0.0).to(tl.float32)
            total += result * tl.load(weights + slot, mask=is_there, other=0.0) if WEIGHTED else result
        tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


@triton.jit
def weigh(
    grad, results, chosen, out, members, slots, hidden, EXPERTS: tl.constexpr, LOCAL: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Multiply each choice's result by the gradient of its token's sum: the gradient of its weight, in float32."""
    for s in range(tl.program_id(0), slots, tl.num_programs(0)):
        slot = tl.cast(s, tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        if owner_of(tl.load(chosen + s), members, EXPERTS, LOCAL) >= 0:
            for start in range(0, hidden, BLOCK):
                at = start + tl.arange(0, BLOCK)
                result = tl.load(results + slot * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
                of_sum = tl.load(grad + slot // TOP_K * hidden + at, mask=at < hidden, other=0.0)
                total += result * of_sum.to(tl.float32)
        tl.store(out + s, tl.sum(total, 0))


class ExpertKernels:
    """Launches the kernels of one group, on the current stream."""

    def __init__(self, space: Workspace) -> None:
        self._space, device = space, str(space.members.device)
        size, local, early = space.size, space.local, early_launch(device)
        group, experts = {"WORLD": space.world, "SIZE": size}, {"EXPERTS": space.experts, "LOCAL": local}
        choices, start = {**experts, "TOP_K": space.top_k}, {"EARLY": bool(early)}
        lanes = {"LANES": triton.next_power_of_2(size), "WIDTH": triton.next_power_of_2(local)}
        blocks = {"BLOCK": _WORDS}

        def launches(kernel: Any, constants: dict[str, Any], tensors: str = "", **options: Any) -> BoundKernels:
            given = tensors.split()
            fixed = [name for name in kernel.arg_names if name not in given and hasattr(space, name)]
            return BoundKernels(
                kernel, {name: getattr(space, name) for name in fixed} | constants, given, device, options
            )

        self._count = launches(count, group | experts | lanes | start, "chosen numbers counts offsets")
        rows = {"SCALES": space.scales, "LANES": triton.next_power_of_2(max(1, space.scales)), **start, **blocks}
        choices["CHOICES"], most = triton.next_power_of_2(space.top_k), {"MOST": space.listed.shape[1]}
        self._send = launches(send, group | choices | most | rows, "x scales chosen weights numbers inbox", **early)
        self._spread = launches(spread, most | rows, "inbox offsets", **early)
        self._meet = launches(meet, group, num_warps=1)
        self._receive = launches(receive, group, "flags", num_warps=1)
        self._give_back = launches(give_back, group | start | blocks, "y origin offsets back")
        merged = group | most | start | {"BLOCK": _ELEMENTS}
        self._merge_back = launches(merge_back, merged, "y origin listed shares offsets back")
        self._gather = launches(gather, choices | start | {"BLOCK": _ELEMENTS}, "out back chosen weights", **early)
        self._weigh = launches(weigh, experts | {"TOP_K": space.top_k, "BLOCK": _ELEMENTS}, "grad results chosen out")

    def _programs(self, work: int) -> int:
        return max(1, min(work, self._space.units * _PROGRAMS_PER_UNIT))

    def dispatch(self, turn: Turn, x: Any, scales: Any, weights: Any, weighted: bool, waits: bool) -> None:
        """Store tokens, with their scales and weights, or times these; tell the others, and wait."""
        s, slots = self._space, turn.chosen.numel()
        block = max(16, min(_ENTRIES, triton.next_power_of_2(slots)))
        self._count(s.experts + 1, turn.chosen, turn.numbers, turn.counts, turn.offsets, slots=slots, BLOCK=block)
        x, inbox = (x, s.inbox) if weighted else (x.view(torch.int32), s.inbox.view(torch.int32))
        nothing = s.state  # not read
        self._send(
            self._programs(slots), x, nothing if scales is None else scales, turn.chosen,
            nothing if weights is None else weights, turn.numbers, inbox, slots=slots, words=x.shape[1],
            WEIGHTED=weighted, SHARED=weights is not None and not weighted, ONCE=turn.once, WAITS=waits,
        )  # fmt: skip

    def spread(self, turn: Turn) -> None:
        """Copy the rows of tokens that came once for several experts."""
        inbox = self._space.inbox.view(torch.int32)
        self._spread(self._programs(inbox.shape[0]), inbox, turn.offsets, words=inbox.shape[1])

    def meet(self) -> None:
        """Let the stream wait until all members are done with what others have stored for them."""
        self._meet(1)

    def receive(self, flags: Any, place: int) -> None:
        """Let the stream wait for all members' tokens, or results."""
        self._receive(1, flags, PLACE=place)

    def give_back(self, turn: Turn, y: Any, waits: bool) -> None:
        """Store results, or sums of them, to where their tokens came from, tell the others, and wait for theirs."""
        s, rows = self._space, y.view(torch.int32)
        places = turn.places or (s.origin, s.listed, s.shares)
        if turn.merged:
            self._merge_back(
                self._programs(y.shape[0]), y, *places, turn.offsets, s.back, hidden=y.shape[1], WAITS=waits
            )
        else:
            self._give_back(
                self._programs(y.shape[0]), rows, places[0], turn.offsets, s.back.view(torch.int32),
                words=rows.shape[1], WAITS=waits,
            )  # fmt: skip

    def gather(self, turn: Turn, out: Any) -> None:
        """Add up what has come back."""
        (tokens, hidden), is_merged = out.shape, turn.merged and turn.once
        weights = None if is_merged else turn.weights
        self._gather(
            self._programs(tokens * triton.cdiv(hidden, _ELEMENTS)), out, self._space.back, turn.chosen,
            self._space.state if weights is None else weights, tokens=tokens, hidden=hidden,
            WEIGHTED=weights is not None, MERGED=is_merged,
        )  # fmt: skip

    def weigh(self, turn: Turn, grad: Any, results: Any, out: Any) -> None:
        """Store the gradients of a turn's weights."""
        slots = out.numel()
        self._weigh(self._programs(slots), grad, results, turn.chosen, out, slots=slots, hidden=grad.shape[1])
