"""Planted mistakes between programs of one rank, in small elements, and between hosts and kernels; see `corpus`."""

import inspect
from operator import methodcaller

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from corpus import Case, N, flags, given, heap, kernel, launch, local, marks, marks_in_kernel, out, registry
from torch.distributed import barrier as imported_barrier

CASES, case, planted = registry()

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
