"""Device tracing of a Gluon kernel: what each program of each rank did, and when, in one picture.

The kernel prepares a block and sends it round a ring of ranks; each rank adds up the blocks that come by.  With
tracing, every put and every wait is recorded by itself, and the kernel records two things of its own: "prepare", a
number of ours with a name, and `TraceEvent().reduce`.  Without tracing the kernel has not one instruction more.

The file has all ranks on one time axis, in microseconds.  To look at it:

    python examples/37_gluon_tracing.py [ranks] [trace.json]

and open the file in https://ui.perfetto.dev or chrome://tracing.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_core
from iris_core import tracing
from iris_gluon import IrisDeviceCtx, TraceEvent, default_layout

BLOCK, PROGRAMS, WORK = 512, 4, 20
PREPARE = gl.constexpr(5000)  # any number that TraceEvent does not have


@gluon.jit
def ring_sum(
    IrisDeviceCtx: gl.constexpr, context, x, inbox, arrived, out, turn, BLOCK: gl.constexpr, WORK: gl.constexpr,
    TRACING: gl.constexpr
):  # fmt: skip
    """A block for each program.  `inbox`: [step, program, BLOCK], what comes in a step; `arrived`: [step, program]."""
    ctx = IrisDeviceCtx.initialize(context, tracing=TRACING)
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = program * BLOCK + gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    next_rank = (ctx.cur_rank + 1) % ctx.num_ranks

    event = ctx.tracing.record_event_start(PREPARE, ctx.cur_rank, x + i, program, 0)
    total = gl.load(x + i)
    for _ in range(WORK):
        total = total * 0.5 + 1.0
    gl.store(out + i, total)
    ctx.tracing.record_event_end(event)

    for step in range(ctx.num_ranks - 1):
        slot, flag = inbox + step * programs * BLOCK + i, arrived + step * programs + program
        if step == 0:
            ctx.put_signal(out + i, slot, flag, turn, next_rank)
        else:  # what came in the last step goes on
            ctx.put_signal(slot - programs * BLOCK, slot, flag, turn, next_rank)
        ctx.wait(flag, turn)
        event = ctx.tracing.record_event_start(TraceEvent().reduce, ctx.cur_rank, slot, program, step)
        total += gl.load(slot)
        ctx.tracing.record_event_end(event)
    gl.store(out + i, total)


def data_of(rank):
    return torch.arange(PROGRAMS * BLOCK, dtype=torch.float32) % 97 + rank


def prepared(x):
    for _ in range(WORK):
        x = x * 0.5 + 1.0
    return x


def main(folder, name="trace.json"):
    """Run with and without tracing, write the files to `folder`, and see that everything is in them."""
    path = pathlib.Path(folder) / name
    with iris_core.Iris(heap_size="16MiB", backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        steps = max(1, world - 1)
        inbox = ctx.zeros(steps, PROGRAMS, BLOCK, dtype=torch.float32)
        arrived = ctx.zeros(steps, PROGRAMS, dtype=torch.int64)
        x = data_of(rank).to(ctx.device)
        expected = sum(prepared(data_of(r)) for r in range(world))

        ctx.tracing.enable(max_events=10_000)  # collective: the ranks compare their clocks
        ctx.tracing.name_event(PREPARE.value, "prepare")
        for turn, traced in ((1, False), (2, True)):  # the first one also compiles; it records nothing
            out = torch.zeros_like(x)
            ctx.barrier()
            ring_sum[(PROGRAMS,)](
                IrisDeviceCtx, ctx.get_device_context(), x, inbox, arrived, out, turn, BLOCK=BLOCK, WORK=WORK,
                TRACING=traced,
            )  # fmt: skip
            ctx.barrier()  # all have read their inboxes
            torch.testing.assert_close(out.cpu(), expected)

        # what this rank has recorded, as arrays ...
        columns = ctx.tracing.events().columns
        found = {each: int(np.count_nonzero(columns["event_id"] == each)) for each in np.unique(columns["event_id"])}
        a_step = PROGRAMS * (world - 1)
        recorded = {PREPARE.value: PROGRAMS, tracing.TraceEvent.REDUCE: a_step}
        recorded |= {tracing.TraceEvent.PUT: a_step, tracing.TraceEvent.WAIT: a_step}
        assert found == {event: count for event, count in recorded.items() if count}, found

        # ... and all ranks' in a file
        metadata = ctx.tracing.export(path, merge=True)
        ctx.barrier()
        shown = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]
        assert len(shown) == world * len(columns["event_id"]), "events are missing in the file"
        assert {event["pid"] for event in shown} == set(range(world))
        named = {event["name"] for event in shown}
        assert named == ({"prepare", "put", "wait", "reduce"} if world > 1 else {"prepare"}), named
        text = f"rank {rank} of {world} on {ctx.device}: {len(columns['event_id'])} events"
        if rank == 0:
            text += f"; open {path} in ui.perfetto.dev (clocks differ by up to {metadata['clock_error_us']:.2g} us)"
        return text


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    where = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(tempfile.mkdtemp(), "trace.json")
    print("\n".join(iris_core.run(main, ranks, str(where.parent), where.name)))
