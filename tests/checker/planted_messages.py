"""Planted mistakes in messages between ranks; see `corpus`."""

from corpus import N, flags, given, heap, registry

CASES, _, planted = registry()

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
XCHG, ADD = "ctx.atomic_xchg(flag, 1, 1)", "ctx.atomic_add(flag, 1, 1, sem='release', scope='sys')"
BY_HAND = MESSAGE.replace(WAIT, POLL)
planted(
    ("xchg_scope", "An exchange with the scope of one GPU as a signal.", BY_HAND.replace(SIGNAL, XCHG),
     {XCHG: "ctx.atomic_xchg(flag, 1, 1, sem='release', scope='gpu')  # A", POLL: f"{POLL}  # B"}, HELD),
    ("add_scope", "Triton's own atomic on a peer's memory, whose scope is one GPU by default.",
     BY_HAND.replace(SIGNAL, ADD),
     {ADD: "tl.atomic_add(translate(flag, 0, 1, ctx.heap_bases), 1)  # A", POLL: f"{POLL}  # B"}, HELD),
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
