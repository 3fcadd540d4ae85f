"""Planted mistakes in messages between ranks; see `corpus`."""
# mypy: ignore-errors

import triton
import triton.language as tl
from corpus import N, flags, launch, out, registry

import iris_triton as iris
from iris_triton.language.address import translate

CASES, case = registry()


# -- one message ------------------------------------------------------------------------------------------------------
@triton.jit
def message(
    context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, WAITS: tl.constexpr,
    RELEASES: tl.constexpr, SEND: tl.constexpr, ACQUIRES: tl.constexpr, RECEIVE: tl.constexpr
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


def _message(ctx, waits=True, releases="release", send="sys", acquires="acquire", receive="sys"):
    data, flag = ctx.zeros(N), flags(ctx, 2)
    ctx.barrier()
    said = {"WAITS": waits, "RELEASES": releases, "SEND": send, "ACQUIRES": acquires, "RECEIVE": receive}
    launch(ctx, message, data, flag, out(ctx), N=N, **said)


@case()
def missing_wait(ctx, bug):
    """The receiver does not wait."""
    _message(ctx, waits=not bug)


@case()
def missing_release(ctx, bug):
    """The signal is relaxed."""
    _message(ctx, releases="relaxed" if bug else "release")


@case()
def missing_acquire(ctx, bug):
    """The wait is relaxed."""
    _message(ctx, acquires="relaxed" if bug else "acquire")


@case()
def gpu_signal(ctx, bug):
    """The signal has the scope of one GPU."""
    _message(ctx, send="gpu" if bug else "sys")


@case()
def gpu_wait(ctx, bug):
    """The wait has the scope of one GPU."""
    _message(ctx, receive="gpu" if bug else "sys")


@triton.jit
def early_signal(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        if BUG:
            ctx.signal(flag, 1, 1)
            ctx.store(data + i, i.to(tl.float32), 1)  # A signal_before_store
        else:
            ctx.store(data + i, i.to(tl.float32), 1)
            ctx.signal(flag, 1, 1)
    else:
        ctx.wait(flag, 1)
        tl.store(out + i, tl.load(data + i))  # B signal_before_store


@case()
def signal_before_store(ctx, bug):
    """The signal comes before the store that it announces."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, early_signal, data, flag, out(ctx), N=N, BUG=bug)


@triton.jit
def by_hand(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 1)  # A xchg_scope add_scope volatile_poll
        if HOW == "xchg":
            ctx.atomic_xchg(flag, 1, 1)
        elif HOW == "xchg_bug":
            ctx.atomic_xchg(flag, 1, 1, sem="release", scope="gpu")  # A xchg_scope
        elif HOW == "add":
            ctx.atomic_add(flag, 1, 1, sem="release", scope="sys")
        elif HOW == "add_bug":
            tl.atomic_add(translate(flag, 0, 1, ctx.heap_bases), 1)  # A add_scope
        else:
            ctx.signal(flag, 1, 1)
    else:
        if HOW == "volatile_bug":
            while tl.load(flag, volatile=True) == 0:
                pass
        else:
            while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") == 0:  # B xchg_scope add_scope
                pass
        tl.store(out + i, tl.load(data + i))  # B xchg_scope add_scope volatile_poll


def _by_hand(ctx, how):
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, by_hand, data, flag, out(ctx), N=N, HOW=how)


@case()
def xchg_scope(ctx, bug):
    """An exchange with the scope of one GPU as a signal."""
    _by_hand(ctx, "xchg_bug" if bug else "xchg")


@case()
def add_scope(ctx, bug):
    """Triton's own atomic on a peer's memory, whose scope is one GPU by default."""
    _by_hand(ctx, "add_bug" if bug else "add")


@case()
def volatile_poll(ctx, bug):
    """A volatile load polls, and acquires nothing."""
    _by_hand(ctx, "volatile_bug" if bug else "cas")


@triton.jit
def plain_flag(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 1)  # A plain_store_as_signal
        if BUG:
            ctx.store(flag, 1, 1)  # A plain_store_as_signal
        else:
            ctx.signal(flag, 1, 1)
    else:
        ctx.wait(flag, 1)  # B plain_store_as_signal
        tl.store(out + i, tl.load(data + i))  # B plain_store_as_signal


@case()
def plain_store_as_signal(ctx, bug):
    """A plain store as a signal, beside the atomic look of the wait."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, plain_flag, data, flag, out(ctx), N=N, BUG=bug)


@triton.jit
def announced(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, SEM: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.put_signal(out + i, data + i, flag, 1, 1, sem=SEM)  # A relaxed_put_signal
    else:
        ctx.wait(flag, 1)
        tl.store(out + i, tl.load(data + i))  # B relaxed_put_signal


@case()
def relaxed_put_signal(ctx, bug):
    """A relaxed put_signal."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, announced, data, flag, out(ctx), N=N, SEM="relaxed" if bug else "release")


@triton.jit
def fence_of(SCOPE: tl.constexpr):
    if SCOPE == "gpu":
        text: tl.constexpr = "fence.acq_rel.gpu; mov.u32 $0, 0;"
    else:
        text: tl.constexpr = "fence.acq_rel.sys; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fenced(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 1)  # A missing_fence
        if BUG:
            tl.inline_asm_elementwise(
                "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        ctx.signal(flag, 1, 1, sem="relaxed")
    else:
        ctx.wait(flag, 1, sem="relaxed")
        fence_of("sys")
        tl.store(out + i, tl.load(data + i))  # B missing_fence


@case()
def missing_fence(ctx, bug):
    """A fence for one GPU before a relaxed signal to another; fences of all on both sides are right."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, fenced, data, flag, out(ctx), N=N, BUG=bug)


# -- several messages -------------------------------------------------------------------------------------------------
@triton.jit
def stream(
    context, data, full, empty, out, turns, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr, ACK: tl.constexpr, WANT: tl.constexpr
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


def _stream(ctx, slots=1, ack=True, want=0):
    data, full, empty = ctx.zeros(slots * N), flags(ctx), flags(ctx)
    ctx.barrier()
    launch(ctx, stream, data, full, empty, out(ctx), 4, N=N, SLOTS=slots, ACK=ack, WANT=want)


@case()
def reused_early(ctx, bug):
    """The sender overwrites its message before the receiver has said that it was read."""
    _stream(ctx, ack=not bug)


@case()
def double_buffer(ctx, bug):
    """As before, with two slots."""
    _stream(ctx, slots=2, ack=not bug)


@case()
def wrong_turn(ctx, bug):
    """The receiver waits for the first turn in all turns."""
    _stream(ctx, want=1 if bug else 0)


@triton.jit
def with_reset(
    context, data, flag, empty, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, 4):
        if RANK == 0:
            ctx.wait(empty, turn - 1)
            ctx.store(data + i, turn.to(tl.float32) + i, 1)  # A flag_not_reset
            ctx.signal(flag, 1, 1)
        else:
            ctx.wait(flag, 1, "eq")
            tl.store(out + i, tl.load(data + i))  # B flag_not_reset
            if not BUG:
                ctx.signal(flag, 0, 1, sem="relaxed")
            ctx.signal(empty, turn, 0)


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


@case()
def polled_by_hand(ctx, bug):
    """A loop of the program's own polls a flag, which has its value from the turn before."""
    data, flag = ctx.zeros(3 * N), flags(ctx, 2)
    ctx.barrier()
    launch(ctx, polled, data, flag, out(ctx), N=N, BUG=bug)


@case()
def flag_not_reset(ctx, bug):
    """A flag of the last turn satisfies the wait of the next one."""
    data, flag, empty = ctx.zeros(N), flags(ctx), flags(ctx)
    ctx.barrier()
    launch(ctx, with_reset, data, flag, empty, out(ctx), N=N, BUG=bug)


@triton.jit
def reset_after(
    context, data, flag, empty, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for turn in range(1, 4):
        if RANK == 0:
            ctx.wait(empty, turn - 1)
            ctx.store(data + i, turn.to(tl.float32) + i, 1)  # A flag_reset_late
            ctx.signal(flag, 1, 1)  # A flag_reset_late
        else:
            ctx.wait(flag, 1, "eq")  # B flag_reset_late
            tl.store(out + i, tl.load(data + i))  # B flag_reset_late
            if BUG:
                ctx.signal(empty, turn, 0)
                tl.store(flag, 0)  # B flag_reset_late
            else:
                tl.store(flag, 0)
                ctx.signal(empty, turn, 0)


@case()
def flag_reset_late(ctx, bug):
    """A flag is reset by a plain store after the sender was told that it may go on."""
    data, flag, empty = ctx.zeros(N), flags(ctx), flags(ctx)
    ctx.barrier()
    launch(ctx, reset_after, data, flag, empty, out(ctx), N=N, BUG=bug)


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


@case(ranks=3)
def several_senders(ctx, bug):
    """A counter that several senders raise, of whom one is a turn ahead: flash decode as it was."""
    inbox, arrived, go = ctx.zeros(8 * N), flags(ctx, 3), flags(ctx, 2)
    ctx.barrier()
    launch(ctx, counted, inbox, arrived, go, out(ctx), N=N, BUG=bug)


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


@case(ranks=3, kind="counter")
def one_counter(ctx, bug):
    """All senders raise one counter, as flash decode did; which of them is ahead is up to the run."""
    inbox, arrived = ctx.zeros(6 * N), flags(ctx, 4)
    ctx.barrier()
    launch(ctx, to_all, inbox, arrived, out(ctx), N=N, BUG=bug)


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


@case(ranks=3)
def wrong_sender(ctx, bug):
    """After wait_any, the data of the other sender are read."""
    inbox, flag = ctx.zeros(3 * N), flags(ctx, 3)
    ctx.barrier()
    launch(ctx, from_any, inbox, flag, out(ctx), N=N, BUG=bug)


@triton.jit
def other_rank(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if RANK == 0:
        ctx.store(data + i, i.to(tl.float32), 2)  # A passed_on
        ctx.signal(flag, 1, 1)
    elif RANK == 1:
        if BUG:
            ctx.wait(flag, 1, sem="relaxed")
        else:
            ctx.wait(flag, 1)
        ctx.signal(flag, 1, 2)
    else:
        ctx.wait(flag, 1)
        tl.store(out + i, tl.load(data + i))  # B passed_on


@case(ranks=3)
def passed_on(ctx, bug):
    """A rank between two passes on what it has not acquired."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, other_rank, data, flag, out(ctx), N=N, BUG=bug)
