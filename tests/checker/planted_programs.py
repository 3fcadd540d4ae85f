"""Planted mistakes between programs of one rank, in small elements, and between hosts and kernels; see `corpus`."""

import inspect

import torch
import torch.distributed as dist
from corpus import Case, N, flags, given, heap, kernel, launch, local, marks, marks_in_kernel, out, registry

CASES, case, planted = registry()

# -- programs of one rank ---------------------------------------------------------------------------------------------
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


# -- host and device --------------------------------------------------------------------------------------------------
def by_kernel(text):
    """A step that is a launch, and the line that is marked in it."""
    made, (line,) = kernel(text, "data", "out"), marks_in_kernel(f"{text}  # A")["A"]
    return lambda ctx, data: launch(ctx, made, data, out(ctx)), line


def _changes(ctx, data):
    data.add_(3)  # A


_lines, _first = inspect.getsourcelines(_changes)
CHANGES = _changes, *marks("".join(_lines), _first)["A"]
STORES = by_kernel("ctx.store(data + i, x, peer)")
LOADS, READS = (
    by_kernel("tl.store(out + i, ctx.load(data + i, peer))"),
    by_kernel("tl.store(out + i, tl.load(data + i))"),
)


def exchanged(ctx):
    ctx.barrier()


def device(ctx):
    ctx.device_barrier()


def relaxed(ctx):
    ctx.device_barrier(sem="relaxed")


def in_turn(name, about, first, barrier, second, wrong=lambda ctx: None):
    """Enter two steps of the host or of kernels, with a barrier between them, or what is wrong in its place."""

    def run(ctx, bug):
        data = ctx.zeros(N)
        ctx.barrier()
        first[0](ctx, data)
        (wrong if bug else barrier)(ctx)
        second[0](ctx, data)
        ctx.barrier()

    run.__doc__ = about
    CASES[name] = Case(run, 2, "race", {"A": {first[1]}, "B": {second[1]}})


in_turn("kernels_without_barrier", "A kernel stores to the peer, the next one reads there.", STORES, device, READS)
in_turn("entry_barrier", "The host's own change comes after the peer's store.", CHANGES, exchanged, STORES)
in_turn("exit_barrier", "A rank stores what its peer still reads of the turn before.", READS, relaxed, STORES)
in_turn("host_overwrites", "The host overwrites what the peer's kernel still reads.", LOADS, exchanged, CHANGES)
in_turn("host_fills", "A peer's kernel reads what the host has just written.", CHANGES, exchanged, LOADS)
in_turn("torch_barrier", "As before; the barrier is torch's.", CHANGES, lambda ctx: dist.barrier(), LOADS)
in_turn("relaxed_barrier", "A barrier between a store and a load of it is relaxed.", CHANGES, device, LOADS, relaxed)
in_turn("relaxed_overwrites", "Behind reads a relaxed barrier is enough.", LOADS, relaxed, CHANGES)


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
