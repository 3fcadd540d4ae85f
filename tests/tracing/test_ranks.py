"""Kernels on ranks record what they do."""

import json
import pathlib
import sys
from functools import partial

import pytest
import torch
from gluon_kernels import kernels_of
from jobs_common import environment, in_language, unlike
from rank_counts import rank_counts
from trace_kernels import MINE, by_function, by_method, everything, record

from iris_core import Iris
from iris_core.tracing import TraceEvent
from iris_triton import DeviceContext  # noqa: F401 - that of another language comes in its place
from iris_triton.clocks import measure
from iris_triton.testing.compile_only import assembly, compile_for

OF_RECORD = TraceEvent.COMPUTE, TraceEvent.LOAD, TraceEvent.STORE, TraceEvent.ATOMIC_ADD


def _prepared(ctx):
    """A function that launches two programs, and the tensors that they use."""
    x, y = ctx.ones(64, dtype=torch.int32), ctx.zeros(64, dtype=torch.int32)
    word = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()

    def launch(tracing=True):
        context = ctx.get_device_context()
        record[(2,)](x, y, word, context, ctx.cur_rank, ctx.num_ranks, tracing, 32, num_warps=1)
        ctx.barrier()

    return launch, (x, y, word)


def events(device):
    with Iris("4MiB", device=device) as ctx:
        launch, (x, y, word) = _prepared(ctx)
        launch()
        ctx.tracing.enable(100)
        assert len(ctx.tracing.events()) == 0
        launch(tracing=False)
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
        launch()  # no kernel writes into buffers that are gone
        assert int(word) == 10  # two programs, five launches: recorded or not, they do their work
        ctx.barrier()


def _check(events, ctx, x, y, word):
    rank, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    columns = {name: values.tolist() for name, values in events.columns.items()}
    assert events.dropped == 0
    for program in (0, 1):
        rows = [i for i, pid in enumerate(columns["pid"]) if pid == program]
        of = {name: [values[i] for i in rows] for name, values in columns.items()}
        assert of["event_id"] == [*map(int, OF_RECORD), MINE]
        assert (of["cur_rank"], of["target_rank"]) == ([rank] * 5, [rank, peer, peer, peer, rank])
        places = [x.data_ptr() + 128 * program, y.data_ptr() + 128 * program, word.data_ptr(), x.data_ptr()]
        assert of["address"] == [7, *places]
        assert of["payload_size"] == [0, 4 * (32 if program == 0 else 28), 128, 4, 4]
        assert (of["pid_m"], of["pid_n"]) == ([3, program, program, program, 5], [4, 0, 0, 0, 6])
        assert of["timestamp"] == sorted(of["timestamp"])
        whole, *parts, moment = of["duration_cycles"]
        assert moment == -1
        assert all(each >= 0 for each in parts)
        assert of["timestamp"][0] + whole >= of["timestamp"][3] + parts[2]  # nested
    operations = [n for n, event in zip(columns["op_index"], columns["event_id"], strict=True) if event < 1024]
    assert sorted(operations) == list(range(6))


def every_operation(device):
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
    with Iris("4MiB", device=device, backend="triton") as ctx:
        off = ctx.tracing.export(pathlib.Path(folder) / "off.json")
        ctx.tracing.enable(9)
        ctx.tracing.name_event(MINE, "my own")
        _prepared(ctx)[0]()
        merged = ctx.tracing.export(pathlib.Path(folder) / "trace.json", merge=True)
        ctx.barrier()
        return off, merged


def clocks(device):
    """Offset of the own clock by words, in ticks, and what is said of its error."""
    with Iris("4MiB", device=device) as ctx:
        first, second = measure(ctx), measure(ctx)
        return (first.at, first.ahead, first.error), (second.at, second.ahead, second.error)


def mistakes(device, folder):
    """Wrong calls on all ranks; then rank 1 asks for no events, has nowhere to write to, and switches tracing off."""
    with environment(IRIS_BARRIER_TIMEOUT="30"), Iris("1MiB", device=device) as ctx:
        tracing, last = ctx.tracing, ctx.cur_rank == 1
        names = (0, "mine"), (-1, "mine"), (5000, "")
        wrong = unlike(
            *(("ArgumentError", partial(tracing.enable, number)) for number in (0, 1.5, True, 1 << 31)),
            *(("ArgumentError: ", partial(tracing.name_event, *each)) for each in names),
            ("UnsupportedError: ", tracing.events),
        )
        tracing.disable()
        tracing.reset()
        assert not tracing.enabled
        begin = "ArgumentError: rank 1 .*max_events"
        write = "IrisError: rank 1 "
        wrong += unlike(
            (begin, lambda: tracing.enable(0 if last else 16)), ("", lambda: tracing.enable(16)),
            (write, lambda: tracing.export(f"{folder}/{'missing/' if last else ''}trace.json")),
        )  # fmt: skip
        if last:
            tracing.disable()
        assert tracing.export(f"{folder}/trace.json") == {}
        ctx.barrier()
    assert wrong + unlike(("HeapClosedError: ", tracing.enable)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1]))
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_events(pool, num_ranks, language, device):
    pool.run(in_language, num_ranks, language, events, device)


@pytest.mark.parametrize("num_ranks", [2])
def test_every_operation_is_recorded(pool, num_ranks, device):
    wanted = [*range(14), TraceEvent.SIGNAL, TraceEvent.WAIT, TraceEvent.PUT, TraceEvent.WAIT, TraceEvent.BARRIER]
    wanted[:2] = [TraceEvent.LOAD, TraceEvent.STORE]
    for rank, (numbers, targets, durations) in enumerate(pool.run(every_operation, num_ranks, device)):
        assert numbers == [int(each) for each in wanted]
        own = (TraceEvent.WAIT, TraceEvent.BARRIER)
        assert [each for n, each in zip(numbers, targets, strict=True) if n not in own] == [1 - rank] * 16
        assert [each for n, each in zip(numbers, targets, strict=True) if n in own] == [rank, rank, -1]
        assert min(durations) >= 0


@pytest.mark.parametrize("num_ranks", [2])
def test_files(pool, tmp_path, num_ranks, device):
    results = pool.run(export, num_ranks, device, str(tmp_path))
    assert [off for off, _ in results] == [{}, {}]
    merged, own = (metadata for _, metadata in results)
    assert (merged["schema_version"], merged["total_events"], merged["dropped_events"]) == ("1.2", 18, 2)
    assert (own["num_events"], own["dropped_events"]) == (9, 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trace.json", "trace_rank0.json", "trace_rank1.json"]
    parts = [json.loads((tmp_path / f"trace_rank{rank}.json").read_text()) for rank in (0, 1)]
    whole = json.loads((tmp_path / "trace.json").read_text())
    assert whole["traceEvents"] == parts[0]["traceEvents"] + parts[1]["traceEvents"]
    assert whole["metadata"] == merged
    shown = [each for each in whole["traceEvents"] if each["ph"] != "M"]
    assert {each["name"] for each in shown} == {"compute", "load", "store", "atomic_add", "my own"}
    assert min(each["ts"] for each in shown) == 0
    assert {each["pid"] for each in shown} == {0, 1}
    for each in shown:
        assert ("dur" in each) == (each["ph"] == "X") == (each["name"] != "my own")
    names = {(each["pid"], each["tid"]) for each in whole["traceEvents"] if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in shown} == names


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1]))
def test_clocks_are_compared(pool, num_ranks, device):
    for rank, (first, second) in enumerate(pool.run(clocks, num_ranks, device)):
        assert second[0] > first[0]
        for _, ahead, error in (first, second):
            assert error > 0
            if rank == 0:
                assert ahead == 0
            elif device == "cpu":
                assert abs(ahead) <= error  # it is one clock, and so the truth is known
        assert abs(second[1] - first[1]) <= first[2] + second[2] + 1e-4 * (second[0] - first[0])


@pytest.mark.parametrize("num_ranks", [2])
def test_what_is_wrong_on_one_rank_all_know(pool, tmp_path, num_ranks, device):
    pool.run(mistakes, num_ranks, device, str(tmp_path))


WORDS = (torch.int32, torch.int32, torch.int32, torch.int64, 1, 8)
TARGETS = ["sm_90", "gfx942", pytest.param("gfx950", marks=pytest.mark.exhaustive)]


def instructions(text):
    """Assembly without what names files, lines and functions."""
    lines = (line.split("//")[0].split(";")[0].strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith((".", "$", "@$", "}"))]
    return [line.replace("by_method", "k").replace("by_function", "k") for line in kept if ":" not in line]


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_and_nothing_is_left_of_it_where_it_is_off(target):
    clock = "globaltimer" if target == "sm_90" else "s_memrealtime"
    off = (torch.int32, torch.int32, torch.int64, 1, 8)
    in_gluon = kernels_of(sys.modules[__name__])["record"]
    calls = [(everything, (*WORDS, True), {}), (in_gluon, (*WORDS, True, 256), {})]
    calls += [(by_method, off, {}), (by_function, off, {})]
    texts = {kernel: assembly(compile_for(kernel, *arguments, target)) for kernel, *arguments in calls}
    assert all(texts[kernel].count(clock) >= 6 for kernel in (everything, in_gluon))
    method, function = instructions(texts[by_method]), instructions(texts[by_function])
    assert len(method) > 20
    assert method == function
