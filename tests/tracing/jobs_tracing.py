"""What the ranks of the tracing tests do."""

import pathlib
from functools import partial

import torch
from jobs_common import environment, said_by
from trace_kernels import MINE, everything, record, record_gluon

from iris_core import Iris
from iris_core.tracing import TraceEvent
from iris_gluon import IrisDeviceCtx
from iris_triton.clocks import measure

OF_RECORD = TraceEvent.COMPUTE, TraceEvent.LOAD, TraceEvent.STORE, TraceEvent.ATOMIC_ADD


def _launch(ctx, language, tracing=True, programs=2):
    x, y = ctx.ones(programs * 32, dtype=torch.int32), ctx.zeros(programs * 32, dtype=torch.int32)
    word = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    return lambda: _run(ctx, language, tracing, programs, x, y, word), (x, y, word)


def _run(ctx, language, tracing, programs, x, y, word):
    context = ctx.get_device_context()
    if language == "triton":
        record[(programs,)](x, y, word, context, ctx.cur_rank, ctx.num_ranks, tracing, 32, num_warps=1)
    else:
        lanes = 64 if torch.version.hip else 32
        record_gluon[(programs,)](IrisDeviceCtx, context, x, y, word, tracing, 32, lanes, num_warps=1)
    ctx.barrier()


def events(device, language):
    """What kernels record, and when."""
    with Iris("4MiB", device=device, backend=language) as ctx:
        launch, (x, y, word) = _launch(ctx, language)
        launch()
        ctx.tracing.enable(100)
        assert len(ctx.tracing.events()) == 0
        _run(ctx, language, False, 2, x, y, word)
        assert len(ctx.tracing.events()) == 0
        launch()
        _check(ctx.tracing.events(), ctx, x, y, word)
        ctx.tracing.reset()
        assert len(ctx.tracing.events()) == 0
        ctx.tracing.enable(7)
        launch()
        events = ctx.tracing.events()
        assert (len(events), events.dropped) == (7, 3)
        ctx.tracing.disable()
        launch()  # nobody writes into buffers that are gone
        assert int(word) == 10  # two programs, five launches: recorded or not, they do their work
        ctx.barrier()


def _check(events, ctx, x, y, word):
    """The events of two programs."""
    rank, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    columns = {name: values.tolist() for name, values in events.columns.items()}
    assert events.dropped == 0
    for program in (0, 1):
        rows = [i for i, pid in enumerate(columns["pid"]) if pid == program]
        of = {name: [values[i] for i in rows] for name, values in columns.items()}
        assert of["event_id"] == [*map(int, OF_RECORD), MINE]
        assert of["cur_rank"] == [rank] * 5
        assert of["target_rank"] == [rank, peer, peer, peer, rank]
        places = [x.data_ptr() + 128 * program, y.data_ptr() + 128 * program, word.data_ptr(), x.data_ptr()]
        assert of["address"] == [7, *places]
        assert of["payload_size"] == [0, 4 * (32 if program == 0 else 28), 128, 4, 4]
        assert of["pid_m"] == [3, program, program, program, 5]
        assert of["pid_n"] == [4, 0, 0, 0, 6]
        assert of["timestamp"] == sorted(of["timestamp"])
        whole, *parts, moment = of["duration_cycles"]
        assert moment == -1
        assert all(each >= 0 for each in parts)
        assert of["timestamp"][0] + whole >= of["timestamp"][3] + parts[2]  # nested
    operations = [n for n, event in zip(columns["op_index"], columns["event_id"], strict=True) if event < 1024]
    assert sorted(operations) == list(range(6))


def every_operation(device):
    """Numbers of the events of every operation."""
    with Iris("4MiB", device=device, backend="triton") as ctx:
        x, y = ctx.ones(16, dtype=torch.int32), ctx.zeros(16, dtype=torch.int32)
        flags = ctx.zeros(64, dtype=torch.int32)
        ctx.barrier()
        ctx.tracing.enable(64)
        everything[(1,)](x, y, flags, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, True, num_warps=1)
        ctx.barrier()
        columns = ctx.tracing.events().columns
        return columns["event_id"].tolist(), columns["target_rank"].tolist(), columns["duration_cycles"].tolist()


def export(device, folder):
    """Write the files; returns what `export` has returned."""
    with Iris("4MiB", device=device, backend="triton") as ctx:
        off = ctx.tracing.export(pathlib.Path(folder) / "off.json")
        ctx.tracing.enable(9)
        ctx.tracing.name_event(MINE, "my own")
        _launch(ctx, "triton")[0]()
        merged = ctx.tracing.export(pathlib.Path(folder) / "trace.json", merge=True)
        ctx.barrier()
        return off, merged


def clocks(device):
    """Offset of the own clock by words, in ticks, and what is said of its error."""
    with Iris("4MiB", device=device) as ctx:
        first, second = measure(ctx), measure(ctx)
        return (first.at, first.ahead, first.error), (second.at, second.ahead, second.error)


def mistakes(device, folder):
    """Rank 1 asks for no events, has nowhere to write to, and switches tracing off; what all ranks get.

    Before, what is said of calls that are wrong on all, or empty ones; at last, what a closed context says.
    """
    with environment(IRIS_BARRIER_TIMEOUT="30"), Iris("1MiB", device=device) as ctx:
        tracing, last = ctx.tracing, ctx.cur_rank == 1
        wrong = [said_by(partial(tracing.enable, number)) for number in (0, -1, 1.5, True, 1 << 31)]
        wrong += [said_by(partial(tracing.name_event, *each)) for each in ((0, "mine"), (-1, "mine"), (5000, ""))]
        wrong.append(said_by(tracing.events))
        tracing.disable()
        tracing.reset()
        assert not tracing.enabled
        on_one = [said_by(lambda: tracing.enable(0 if last else 16)), said_by(lambda: tracing.enable(16))]
        on_one.append(said_by(lambda: tracing.export(f"{folder}/{'missing/' if last else ''}trace.json")))
        if last:
            tracing.disable()
        off = tracing.export(f"{folder}/trace.json")
        ctx.barrier()
    return wrong, on_one, off, said_by(tracing.enable)
