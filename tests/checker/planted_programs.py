"""Planted mistakes in messages between ranks, between programs of one, and between hosts and kernels; see `corpus`."""

import inspect
from operator import methodcaller

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from corpus import Case, N, flags, given, heap, kernel, launch, local, marks, marks_in_kernel, out, registry
from torch.distributed import barrier as imported_barrier

CASES, case, planted = registry()

STORE, SIGNAL, WAIT = "ctx.store(data + i, x, 1)  # A", "ctx.signal(flag, 1, 1)", "ctx.wait(flag, 1)"
MESSAGE = f"""
if RANK == 0:
    {STORE}
    {SIGNAL}
else:
    {WAIT}
    tl.store(out + i, tl.load(data + i))  # B
"""
HELD = {"data": heap(N), "flag": flags(2)}
GPU = {SIGNAL: "ctx.signal(flag, 1, 1, scope='gpu')  # A", WAIT: "ctx.wait(flag, 1)  # B"}
GPU_WAIT = {SIGNAL: f"{SIGNAL}  # A", WAIT: "ctx.wait(flag, 1, scope='gpu')  # B"}
planted(
    ("missing_wait", "The receiver does not wait.", MESSAGE, {WAIT: "ctx.wait(flag + 1, 0)"}, HELD),
    ("missing_release", "The signal is relaxed.", MESSAGE, {SIGNAL: "ctx.signal(flag, 1, 1, sem='relaxed')"}, HELD),
    ("missing_acquire", "The wait is relaxed.", MESSAGE, {WAIT: "ctx.wait(flag, 1, sem='relaxed')"}, HELD),
    ("gpu_signal", "The signal has the scope of one GPU.", MESSAGE, GPU, HELD),
    ("gpu_wait", "The wait has the scope of one GPU.", MESSAGE, GPU_WAIT, HELD),
)  # fmt: skip
IN_GLUON = tuple(CASES)

POLL = "while tl.atomic_cas(flag, 1, 1, sem='acquire', scope='sys') == 0: pass"
XCHG, ADDED = "ctx.atomic_xchg(flag, 1, 1)", "ctx.atomic_add(flag, 1, 1, sem='release', scope='sys')"
BY_HAND = MESSAGE.replace(WAIT, POLL)
planted(
    ("xchg_scope", "An exchange with the scope of one GPU as a signal.", BY_HAND.replace(SIGNAL, XCHG),
     {XCHG: "ctx.atomic_xchg(flag, 1, 1, sem='release', scope='gpu')  # A", POLL: f"{POLL}  # B"}, HELD),
    ("add_scope", "Triton's own atomic on a peer's memory, whose scope is one GPU by default.",
     BY_HAND.replace(SIGNAL, ADDED),
     {ADDED: "tl.atomic_add(translate(flag, 0, 1, ctx.heap_bases), 1)  # A", POLL: f"{POLL}  # B"}, HELD),
    ("volatile_poll", "A volatile load polls, and acquires nothing.", BY_HAND,
     {POLL: "while tl.load(flag, volatile=True) == 0: pass"}, HELD),
    ("signal_before_store", "The signal comes before the store.", BY_HAND,
     {f"{STORE}\n    {SIGNAL}": f"{SIGNAL}\n    {STORE}"}, HELD),
    ("plain_store_as_signal", "A plain store, beside the atomic look of the wait.", MESSAGE,
     {SIGNAL: "ctx.store(flag, 1, 1)  # A", WAIT: f"{WAIT}  # B"}, HELD),
)  # fmt: skip
PUT = "ctx.put_signal(out + i, data + i, flag, 1, 1"
planted(
    ("relaxed_put_signal", "A relaxed put_signal.", MESSAGE.replace(STORE, f"{PUT})").replace(SIGNAL, ""),
     {f"{PUT})": f"{PUT}, sem='relaxed')  # A"}, HELD),
)  # fmt: skip
FENCED = MESSAGE.replace(SIGNAL, "fence('sys')\n    ctx.signal(flag, 1, 1, sem='relaxed')")
planted(
    ("missing_fence", "A fence for one GPU before a relaxed signal to another.",
     FENCED.replace(WAIT, 'ctx.wait(flag, 1, sem="relaxed")\n    fence("sys")'), {"fence('sys')": "fence('gpu')"},
     HELD),
)  # fmt: skip

STREAM = """
for turn in range(1, 5):
    slot = 0
    if RANK == 0:
        ctx.wait(empty, turn - 1)
        ctx.store(data + slot * N + i, turn + x, 1)  # A
        ctx.signal(full, turn, 1)
    else:
        ctx.wait(full, turn)
        tl.store(out + i, tl.load(data + slot * N + i))  # B
        ctx.signal(empty, turn, 0)
"""
TWO_SLOTS = STREAM.replace("slot = 0", "slot = turn % 2").replace("turn - 1", "turn - 2")
WORDS = {"data": heap(2 * N), "full": flags(), "empty": flags()}
planted(
    ("reused_early", "A message is overwritten before it is said to be read.", STREAM,
     {"ctx.wait(empty, turn - 1)": "pass"}, WORDS),
    ("double_buffer", "As before, with two slots.", TWO_SLOTS, {"ctx.wait(empty, turn - 2)": "pass"}, WORDS),
    ("wrong_turn", "The receiver waits for the first turn in all turns.", STREAM, {"(full, turn)": "(full, 1)"}, WORDS),
)  # fmt: skip

WITH_RESET = """
for turn in range(1, 4):
    if RANK == 0:
        ctx.wait(empty, turn - 1)
        ctx.store(data + i, turn + x, 1)  # A
        ctx.signal(full, 1, 1)
    else:
        ctx.wait(full, 1, "eq")
        tl.store(out + i, tl.load(data + i))  # B
        RESET
        ctx.signal(empty, turn, 0)
"""
RELAXED_RESET, PLAIN_RESET = "ctx.signal(full, 0, 1, sem='relaxed')", "tl.store(full, 0)"
planted(
    ("flag_not_reset", "A flag of the last turn satisfies the next wait.", WITH_RESET.replace("RESET", RELAXED_RESET),
     {RELAXED_RESET: "pass"}, WORDS),
    ("flag_reset_late", "A flag is reset by a plain store when the sender may go on.",
     WITH_RESET.replace("RESET", PLAIN_RESET),
     {f"{PLAIN_RESET}\n        ctx.signal(empty, turn, 0)": f"ctx.signal(empty, turn, 0)\n        {PLAIN_RESET}  # B",
     "ctx.signal(full, 1, 1)": "ctx.signal(full, 1, 1)  # A", '"eq")': '"eq")  # B'}, WORDS),
    ("polled_by_hand", "A loop of the program's own polls a flag, which has its value from the turn before.", """
for turn in range(1, 3):
    if RANK == 0:
        ctx.store(data + turn * N + i, x, 1)  # A
        ctx.atomic_xchg(flag, turn, 1, sem="release")
        if turn == 2:
            ctx.signal(flag + 1, 1, 1, sem="relaxed")
    else:
        ctx.wait(flag + 1, 1, sem="relaxed")  # both turns are over: by luck
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < turn: pass
        tl.store(out + i, tl.load(data + turn * N + i))  # B
""", {"(flag, turn, 1": "(flag, 1, 1", "< turn": "< 1"}, given(data=heap(3 * N), flag=flags(2))),
)  # fmt: skip

AHEAD = """
if RANK == 0:
    for turn in range(1, COUNT + 1):
        ctx.store(data + turn * N + i, x, 1)  # A
        ctx.signal(flag, HOW, 1)
    ctx.signal(flag + 1, 1, 1, sem="relaxed")
else:
    ctx.wait(flag + 1, 1, sem="relaxed")  # all turns are over: by luck
    ctx.wait(flag, 5)
    tl.store(out + i, tl.load(data + 5 * N + i))  # B
"""
planted(
    *(
        (f"ahead_by_{count}_{name}", "The receiver, which comes late, waits for one turn too few.",
         AHEAD.replace("HOW, 1", how).replace("COUNT", str(count)), {"wait(flag, 5)": "wait(flag, 4)"},
         given(data=heap((count + 1) * N), flag=flags(2)))
        for count in (20, 40, 200)
        for name, how in (("set", "turn, 1"), ("added", "1, 1, op='add'"))
    ),
    ("many_flags", "A block of flags is raised by a relaxed atomic.", """
if RANK == 0:
    ctx.store(data + i, x, 1)  # A
    ctx.atomic_add(flag + tl.arange(0, 512), 1, 1, sem="release")
else:
    ctx.wait(flag + tl.arange(0, 512), 1)
    tl.store(out + i, tl.load(data + i))  # B
""", {"release": "relaxed"}, given(data=heap(N), flag=flags(512))),
)  # fmt: skip

planted(
    ("several_senders", "A counter of several senders, of whom one is a turn ahead: flash decode as it was.", """
# two launches in one: ranks 1 and 2 store into the inbox of rank 0 and raise a counter there
if RANK == 1:
    for turn in range(1, 3):
        ctx.store(inbox + turn * 2 * N + i, x, 0)
        ctx.signal(arrived + 1, 1, 0, op="add")
    ctx.signal(go, 1, 2, sem="relaxed")
    ctx.signal(go, 1, 0, sem="relaxed")
elif RANK == 2:
    ctx.wait(go, 1, sem="relaxed")
    ctx.store(inbox + 3 * N + i, x, 0)  # A
    ctx.signal(arrived + 2, 1, 0, op="add")
    ctx.signal(go + 1, 1, 0, sem="relaxed")
else:
    ctx.wait(go, 1, sem="relaxed")
    ctx.wait(go + 1, 1, sem="relaxed")  # all have arrived: by luck
    ctx.wait(arrived + 1, 1)
    ctx.wait(arrived + 2, 1)
    tl.store(out + i, tl.load(inbox + 3 * N + i))  # B
""", {"arrived + 1, 1, 0": "arrived, 1, 0", "arrived + 2, 1, 0": "arrived, 1, 0",
      "wait(arrived + 1, 1)": "wait(arrived, 2)", "ctx.wait(arrived + 2, 1)": "pass"},
     given(ranks=3, inbox=heap(8 * N), arrived=flags(3), go=flags(2))),
    ("one_counter", "All senders raise one counter, as flash decode did; which of them is ahead is up to the run.", """
for turn in range(1, 4):
    half = (turn % 2) * WORLD
    for step in range(WORLD):
        to = (RANK + 1 + step) % WORLD
        ctx.store(inbox + (half + RANK) * N + i, x, to)  # A
        ctx.signal(arrived + RANK, 1, to, op="add")
    ctx.wait(arrived + tl.arange(0, 4) % WORLD, turn)
    for sender in range(WORLD):
        tl.store(out + i, tl.load(inbox + (half + sender) * N + i))  # B
""", {'arrived + RANK, 1, to, op="add")': 'arrived, 1, to, op="add")  # A',
      "arrived + tl.arange(0, 4) % WORLD, turn)": "arrived, turn * WORLD)  # B"},
     given(ranks=3, kind="counter", inbox=heap(6 * N), arrived=flags(4))),
    ("wrong_sender", "After wait_any, the data of the other sender are read.", """
if RANK != 0:
    ctx.store(inbox + RANK * N + i, x, 0)  # A
    ctx.signal(flag + RANK, 1, 0)
else:
    sender = ctx.wait_any(flag + 1 + tl.arange(0, 2), 1) + 1
    tl.store(out + i, tl.load(inbox + sender * N + i))  # B
""", {"inbox + sender": "inbox + (3 - sender)"}, given(ranks=3, inbox=heap(3 * N), flag=flags(3))),
    ("passed_on", "A rank between two passes on what it has not acquired.", """
if RANK == 0:
    ctx.store(data + i, x, 2)  # A
    ctx.signal(flag, 1, 1)
elif RANK == 1:
    ctx.wait(flag, 1, sem="acquire")
    ctx.signal(flag, 1, 2)
else:
    ctx.wait(flag, 1)
    tl.store(out + i, tl.load(data + i))  # B
""", {'"acquire"': '"relaxed"'}, given(ranks=3, **HELD)),
)  # fmt: skip


AWAIT, ADD = "while tl.atomic_add(flag, 0) == 0: pass", "tl.atomic_add(flag, 1)"
NEIGHBOURS = f"""
if pid == 0:
    tl.store(data + i, x)  # A
    {ADD}
else:
    {AWAIT}
    tl.store(out + i, tl.load(data + i))  # B
"""
ONE_RANK = {"ranks": 1, "programs": 2, "data": heap(N), "flag": local(1, dtype=torch.int32)}
planted(
    ("programs_without_flag", "One program reads what another one writes.", NEIGHBOURS, {AWAIT: "pass"}, ONE_RANK),
    ("ticket_relaxed", "The last program is found by a relaxed counter.", NEIGHBOURS,
     {ADD: ADD.replace("1)", "1, sem='relaxed')"), AWAIT: AWAIT.replace("0)", "0, sem='relaxed')")}, ONE_RANK),
    ("lock_relaxed", "A lock that is taken without acquiring.", """
for _ in range(3):
    while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire") != 0: pass
    y = ctx.load(data + i, 0)  # A B
    ctx.store(data + i, y + 1, 0)  # A B
    ctx.atomic_xchg(lock, 0, 0, sem="release")
""", {"acquire": "relaxed"}, given(data=heap(N), lock=flags())),
    ("last_of_eight", "One of the programs that raise a counter waits for one too few.", """
tl.store(data + pid * N + i, x)  # A
tl.atomic_add(flag, 1, sem="release")
if pid == 7:
    ctx.wait(flag, 8, scope="gpu")
    tl.store(out + i, tl.load(data + 3 * N + i))  # B
""", {"wait(flag, 8": "wait(flag, 7"}, given(ranks=1, programs=8, data=heap(8 * N), flag=flags())),
    ("barrier_of_one_program", "A barrier inside the kernel that only one of two programs calls.", """
ctx.store(data + pid * N + i, x, peer)  # A
if pid < 2:
    ctx.barrier(words, program=pid)
tl.store(out + i, tl.load(data + pid * N + i))  # B
""", {"pid < 2": "pid < 1"}, given(programs=2, data=heap(2 * N), words=flags(6))),
    ("overlapping_byte", "Ranges that overlap in one byte.", """
j = tl.arange(0, 16)
ctx.store(data + 13 * RANK + j, j.to(tl.int8), 0, mask=j < 13)  # A B
""", {"13 * RANK": "12 * RANK"}, given(data=heap(64, dtype=torch.int8))),
)  # fmt: skip


def by_kernel(text):
    """A step that is a launch, and the line that is marked in it."""
    made, (line,) = kernel(text, "data", "out"), marks_in_kernel(f"{text}  # A")["A"]
    return lambda ctx, data: launch(ctx, made, data, out(ctx)), line


def _changes(ctx, data):
    data.add_(3)  # A


_lines, _first = inspect.getsourcelines(_changes)
CHANGES = _changes, *marks("".join(_lines), _first)["A"]
STORES = by_kernel("ctx.store(data + i, x, peer)")
LOADS = by_kernel("tl.store(out + i, ctx.load(data + i, peer))")
READS = by_kernel("tl.store(out + i, tl.load(data + i))")
exchanged, device = methodcaller("barrier"), methodcaller("device_barrier")
relaxed = methodcaller("device_barrier", sem="relaxed")


def in_turn(name, about, first, barrier, second, wrong=lambda ctx: None, ranks=2):
    """Enter two steps of the host or of kernels, with a barrier between them, or what is wrong in its place."""

    def run(ctx, bug):
        data = ctx.zeros(N)
        ctx.barrier()
        first[0](ctx, data)
        (wrong if bug else barrier)(ctx)
        second[0](ctx, data)
        ctx.barrier()

    run.__doc__ = about
    CASES[name] = Case(run, ranks, "race", {"A": {first[1]}, "B": {second[1]}})


in_turn("kernels_without_barrier", "A kernel stores to the peer, the next one reads there.", STORES, device, READS)
in_turn("entry_barrier", "The host's own change comes after the peer's store.", CHANGES, exchanged, STORES)
in_turn("exit_barrier", "A rank stores what its peer still reads of the turn before.", READS, relaxed, STORES)
in_turn("host_overwrites", "The host overwrites what the peer's kernel still reads.", LOADS, exchanged, CHANGES)
in_turn("host_fills", "A peer's kernel reads what the host has just written.", CHANGES, exchanged, LOADS)
for name, order in {
    "barrier": lambda ctx: dist.barrier(),
    "imported_barrier": lambda ctx: imported_barrier(dist.group.WORLD),
    "all_reduce": lambda ctx: dist.all_reduce(torch.ones(1)),
    "objects": lambda ctx: dist.all_gather_object([None] * 2, 1),
    "functional": lambda ctx: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 1,
}.items():
    in_turn(f"torch_{name}", "As before; torch.distributed orders the ranks.", CHANGES, order, LOADS)
in_turn("relaxed_barrier", "A barrier between a store and a load of it is relaxed.", CHANGES, device, LOADS, relaxed)
in_turn("relaxed_overwrites", "Behind reads a relaxed barrier is enough.", LOADS, relaxed, CHANGES)


def by(rank, step):
    return lambda ctx, data: ctx.cur_rank == rank and step[0](ctx, data), step[1]


def of_one(name, about, order, ranks=2):
    """Enter a change by rank 0, and a load of it by rank 1, with something between them that both call."""
    right, wrong = (lambda ctx, bug=bug: order(ctx.cur_rank, bug) for bug in (False, True))
    in_turn(name, about, by(0, CHANGES), right, by(1, LOADS), wrong, ranks)


unawaited = []


def awaited(rank, bug):
    handle = dist.barrier(async_op=rank == 1)
    if handle is not None:
        unawaited.append(handle) if bug else handle.wait()


of_one("torch_handle", "A barrier orders when its handle is awaited.", awaited)
of_one("torch_group", "Of some ranks.", lambda rank, bug: dist.barrier(dist.new_group([0, 1 + bug])), ranks=3)
of_one("torch_root_sends", "A broadcast.", lambda rank, bug: dist.broadcast(torch.ones(1), src=int(bug)))
of_one("torch_root_receives", "A sum on one rank.", lambda rank, bug: dist.reduce(torch.ones(1), dst=int(not bug)))
sends = lambda rank, bug: (dist.send if rank == bug else dist.recv)(torch.ones(1), 1 - rank)
of_one("torch_message", "A message.", sends)

PICKS = {
    "index": lambda data, at: data[at],
    "index_put": lambda data, at: data.__setitem__(at, 1.0),
    "mask_put": lambda data, at: data.__setitem__(torch.arange(2 * N) == at, 1.0),
    "index_select": lambda data, at: data.index_select(0, at),
    "index_fill": lambda data, at: data.index_fill_(0, at, 1.0),
    "index_add": lambda data, at: data.index_add_(0, at, torch.ones(1)),
    "index_copy_of_rows": lambda data, at: data.view(2, N).index_copy_(0, at // N, torch.ones(1, N)),
    "columns": lambda data, at: data.view(N, 2).t()[:, at // 2],
    "gather": lambda data, at: data.gather(0, at),
    "scatter": lambda data, at: data.scatter_(0, at, 1.0),
    "take": lambda data, at: data.take(at),
    "put": lambda data, at: data.put_(at, torch.ones(1)),
    "masked_fill": lambda data, at: data.masked_fill_(torch.arange(2 * N) == at, 1.0),
}
"""Operations of torch on some elements, those of an index."""


def picked(name, operation):
    """Enter an operation of rank 1 on an element that rank 0 writes at the same time, or on another one."""
    upper, line = STORES_UPPER

    def run(ctx, bug):
        data = ctx.zeros(2 * N)
        ctx.barrier()
        if ctx.cur_rank == 0:
            upper(ctx, data)
        else:
            operation(data, torch.tensor([2 * N - 1 if bug else 0]))
        ctx.barrier()

    CASES[f"picked_by_{name}"] = Case(run, 2, "race", {"A": {line}, "B": {operation.__code__.co_firstlineno}})


STORES_UPPER = by_kernel("ctx.store(data + N + i, x, peer)")
for name, operation in PICKS.items():
    picked(name, operation)


@case()
def put_without_wait(ctx, bug):
    """The host puts data and a signal, and the peer does not wait for it."""
    data, flag = heap(N)(ctx), flags()(ctx)
    ctx.barrier()
    if ctx.cur_rank == 0:
        ctx.put(data, 1, torch.ones(N), signal=flag)  # A
    else:
        if not bug:
            ctx.signal_wait(flag, 1)
        READS[0](ctx, data)
    ctx.barrier()


CASES["put_without_wait"].marks["B"].add(READS[1])
