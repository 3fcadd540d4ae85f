"""Planted mistakes in messages between ranks; see `corpus`."""
# mypy: ignore-errors

import triton
import triton.language as tl
from corpus import N, flags, heap, out, registry

import iris_triton as iris
from iris_triton.language.address import translate

CASES, _, planted = registry()


# -- one message ------------------------------------------------------------------------------------------------------
@triton.jit
def message(
    context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, WAITS: tl.constexpr = True,
    RELEASES: tl.constexpr = "release", SEND: tl.constexpr = "sys", ACQUIRES: tl.constexpr = "acquire",
    RECEIVE: tl.constexpr = "sys"
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 1)  # A missing_wait missing_release missing_acquire gpu_signal gpu_wait
        ctx.signal(flag, 1, 1, sem=RELEASES, scope=SEND)  # A gpu_signal gpu_wait
    else:
        if WAITS:
            ctx.wait(flag, 1, sem=ACQUIRES, scope=RECEIVE)  # B gpu_signal gpu_wait
        else:
            ctx.wait(flag + 1, 0)
        tl.store(out + i, tl.load(data + i))  # B missing_wait missing_release missing_acquire gpu_signal gpu_wait


MESSAGE = message, heap(N), flags(2), out
planted("missing_wait", "The receiver does not wait.", *MESSAGE, WAITS=(True, False))
planted("missing_release", "The signal is relaxed.", *MESSAGE, RELEASES=("release", "relaxed"))
planted("missing_acquire", "The wait is relaxed.", *MESSAGE, ACQUIRES=("acquire", "relaxed"))
planted("gpu_signal", "The signal has the scope of one GPU.", *MESSAGE, SEND=("sys", "gpu"))
planted("gpu_wait", "The wait has the scope of one GPU.", *MESSAGE, RECEIVE=("sys", "gpu"))


@triton.jit
def by_hand(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        if HOW == "early":
            ctx.signal(flag, 1, 1)
        ctx.store(data + i, i.to(tl.float32), 1)  # A xchg_scope add_scope volatile_poll signal_before_store
        if HOW == "xchg":
            ctx.atomic_xchg(flag, 1, 1)
        elif HOW == "xchg_bug":
            ctx.atomic_xchg(flag, 1, 1, sem="release", scope="gpu")  # A xchg_scope
        elif HOW == "add":
            ctx.atomic_add(flag, 1, 1, sem="release", scope="sys")
        elif HOW == "add_bug":
            tl.atomic_add(translate(flag, 0, 1, ctx.heap_bases), 1)  # A add_scope
        elif HOW != "early":
            ctx.signal(flag, 1, 1)
    else:
        if HOW == "volatile_bug":
            while tl.load(flag, volatile=True) == 0:
                pass
        else:
            while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") == 0:  # B xchg_scope add_scope
                pass
        tl.store(out + i, tl.load(data + i))  # B xchg_scope add_scope volatile_poll signal_before_store


BY_HAND = by_hand, heap(N), flags(), out
planted("xchg_scope", "An exchange with the scope of one GPU as a signal.", *BY_HAND, HOW=("xchg", "xchg_bug"))
planted(
    "add_scope", "Triton's own atomic on a peer's memory, whose scope is one GPU by default.", *BY_HAND,
    HOW=("add", "add_bug"),
)  # fmt: skip
planted("volatile_poll", "A volatile load polls, and acquires nothing.", *BY_HAND, HOW=("cas", "volatile_bug"))
planted("signal_before_store", "The signal comes before the store.", *BY_HAND, HOW=("late", "early"))


@triton.jit
def announced(
    context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr,
    SEM: tl.constexpr = "release"
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        if HOW == "put_signal":
            ctx.put_signal(out + i, data + i, flag, 1, 1, sem=SEM)  # A relaxed_put_signal
        else:
            ctx.store(data + i, i.to(tl.float32), 1)  # A plain_store_as_signal
            if HOW == "plain":
                ctx.store(flag, 1, 1)  # A plain_store_as_signal
            else:
                ctx.signal(flag, 1, 1)
    else:
        ctx.wait(flag, 1)  # B plain_store_as_signal
        tl.store(out + i, tl.load(data + i))  # B relaxed_put_signal plain_store_as_signal


ANNOUNCED = announced, heap(N), flags(), out
planted(
    "plain_store_as_signal", "A plain store, beside the atomic look of the wait.", *ANNOUNCED, HOW=("signal", "plain")
)
planted("relaxed_put_signal", "A relaxed put_signal.", *ANNOUNCED, HOW="put_signal", SEM=("release", "relaxed"))


@triton.jit
def fence_of(SCOPE: tl.constexpr):
    if SCOPE == "gpu":
        text: tl.constexpr = "fence.acq_rel.gpu; mov.u32 $0, 0;"
    else:
        text: tl.constexpr = "fence.acq_rel.sys; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fenced(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, FENCE: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 1)  # A missing_fence
        fence_of(FENCE)
        ctx.signal(flag, 1, 1, sem="relaxed")
    else:
        ctx.wait(flag, 1, sem="relaxed")
        fence_of("sys")
        tl.store(out + i, tl.load(data + i))  # B missing_fence


planted(
    "missing_fence", "A fence for one GPU before a relaxed signal to another.", fenced, heap(N), flags(), out,
    FENCE=("sys", "gpu"),
)  # fmt: skip


# -- several messages -------------------------------------------------------------------------------------------------
@triton.jit
def stream(
    context, data, full, empty, out, turns, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr = 1, ACK: tl.constexpr = True, WANT: tl.constexpr = 0
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, turns + 1):
        slot = turn % SLOTS
        if RANK == 0:
            if ACK:
                ctx.wait(empty, turn - SLOTS)
            ctx.store(data + slot * N + i, turn.to(tl.float32) + i, 1)  # A reused_early double_buffer wrong_turn
            ctx.signal(full, turn, 1)
        else:
            if WANT == 0:
                ctx.wait(full, turn)
            else:
                ctx.wait(full, WANT)
            tl.store(out + i, tl.load(data + slot * N + i))  # B reused_early double_buffer wrong_turn
            ctx.signal(empty, turn, 0)


STREAM = stream, heap(2 * N), flags(), flags(), out, 4
planted("reused_early", "A message is overwritten before it is said to be read.", *STREAM, ACK=(True, False))
planted("double_buffer", "As before, with two slots.", *STREAM, SLOTS=2, ACK=(True, False))
planted("wrong_turn", "The receiver waits for the first turn in all turns.", *STREAM, WANT=(0, 1))


@triton.jit
def with_reset(
    context, data, flag, empty, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, RESET: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, 4):
        if RANK == 0:
            ctx.wait(empty, turn - 1)
            ctx.store(data + i, turn.to(tl.float32) + i, 1)  # A flag_not_reset flag_reset_late
            ctx.signal(flag, 1, 1)  # A flag_reset_late
        else:
            ctx.wait(flag, 1, "eq")  # B flag_reset_late
            tl.store(out + i, tl.load(data + i))  # B flag_not_reset flag_reset_late
            if RESET == "relaxed":
                ctx.signal(flag, 0, 1, sem="relaxed")
            elif RESET == "plain":
                tl.store(flag, 0)
            ctx.signal(empty, turn, 0)
            if RESET == "late":
                tl.store(flag, 0)  # B flag_reset_late


WITH_RESET = with_reset, heap(N), flags(), flags(), out
planted("flag_not_reset", "A flag of the last turn satisfies the next wait.", *WITH_RESET, RESET=("relaxed", "never"))
planted(
    "flag_reset_late", "A flag is reset by a plain store when the sender may go on.", *WITH_RESET,
    RESET=("plain", "late"),
)  # fmt: skip


@triton.jit
def polled(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, 3):
        if RANK == 0:
            ctx.store(data + turn * N + i, i.to(tl.float32), 1)  # A polled_by_hand
            ctx.atomic_xchg(flag, 1 if BUG else turn, 1, sem="release")
            if turn == 2:
                ctx.signal(flag + 1, 1, 1, sem="relaxed")
        else:
            ctx.wait(flag + 1, 1, sem="relaxed")  # both turns are over: by luck
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < (1 if BUG else turn):
                pass
            tl.store(out + i, tl.load(data + turn * N + i))  # B polled_by_hand


planted(
    "polled_by_hand", "A loop of the program's own polls a flag, which has its value from the turn before.", polled,
    heap(3 * N), flags(2), out,
)  # fmt: skip


# -- several senders --------------------------------------------------------------------------------------------------
@triton.jit
def counted(
    context, inbox, arrived, go, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):
    """Two launches in one, of three ranks: ranks 1 and 2 store into the inbox of rank 0 and raise a counter there."""
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 1:
        for turn in range(1, 3):
            ctx.store(inbox + turn * 2 * N + i, i.to(tl.float32), 0)
            ctx.signal(arrived + (0 if BUG else 1), 1, 0, op="add")
        ctx.signal(go, 1, 2, sem="relaxed")
        ctx.signal(go, 1, 0, sem="relaxed")
    elif RANK == 2:
        ctx.wait(go, 1, sem="relaxed")
        ctx.store(inbox + 3 * N + i, i.to(tl.float32), 0)  # A several_senders
        ctx.signal(arrived + (0 if BUG else 2), 1, 0, op="add")
        ctx.signal(go + 1, 1, 0, sem="relaxed")
    else:
        ctx.wait(go, 1, sem="relaxed")
        ctx.wait(go + 1, 1, sem="relaxed")  # all have arrived: by luck
        if BUG:
            ctx.wait(arrived, 2)
        else:
            ctx.wait(arrived + 1, 1)
            ctx.wait(arrived + 2, 1)
        tl.store(out + i, tl.load(inbox + 3 * N + i))  # B several_senders


planted(
    "several_senders", "A counter that several senders raise, of whom one is a turn ahead: flash decode as it was.",
    counted, heap(8 * N), flags(3), flags(2), out, ranks=3,
)  # fmt: skip


@triton.jit
def to_all(
    context, inbox, arrived, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, 4):
        half = (turn % 2) * WORLD
        for step in range(WORLD):
            peer = (RANK + 1 + step) % WORLD
            ctx.store(inbox + (half + RANK) * N + i, i.to(tl.float32), peer)  # A one_counter
            if BUG:
                ctx.signal(arrived, 1, peer, op="add")  # A one_counter
            else:
                ctx.signal(arrived + RANK, 1, peer, op="add")
        if BUG:
            ctx.wait(arrived, turn * WORLD)  # B one_counter
        else:
            ctx.wait(arrived + tl.arange(0, 4) % WORLD, turn)
        for sender in range(WORLD):
            tl.store(out + i, tl.load(inbox + (half + sender) * N + i))  # B one_counter


planted(
    "one_counter", "All senders raise one counter, as flash decode did; which of them is ahead is up to the run.",
    to_all, heap(6 * N), flags(4), out, ranks=3, kind="counter",
)  # fmt: skip


@triton.jit
def from_any(context, inbox, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK != 0:
        ctx.store(inbox + RANK * N + i, i.to(tl.float32), 0)  # A wrong_sender
        ctx.signal(flag + RANK, 1, 0)
    else:
        sender = ctx.wait_any(flag + 1 + tl.arange(0, 2), 1) + 1
        if BUG:
            sender = 3 - sender
        tl.store(out + i, tl.load(inbox + sender * N + i))  # B wrong_sender


planted(
    "wrong_sender", "After wait_any, the data of the other sender are read.", from_any, heap(3 * N), flags(3), out,
    ranks=3,
)  # fmt: skip


@triton.jit
def other_rank(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, SEM: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 2)  # A passed_on
        ctx.signal(flag, 1, 1)
    elif RANK == 1:
        ctx.wait(flag, 1, sem=SEM)
        ctx.signal(flag, 1, 2)
    else:
        ctx.wait(flag, 1)
        tl.store(out + i, tl.load(data + i))  # B passed_on


planted(
    "passed_on", "A rank between two passes on what it has not acquired.", other_rank, heap(N), flags(), out, ranks=3,
    SEM=("acquire", "relaxed"),
)  # fmt: skip
