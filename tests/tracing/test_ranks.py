"""Kernels on ranks record what they do."""

import json

import pytest
import torch
from jobs_tracing import clocks, events, every_operation, export, mistakes
from rank_counts import rank_counts
from trace_kernels import by_function, by_method, everything, record_gluon

from iris_core.tracing import TraceEvent
from iris_gluon import IrisDeviceCtx
from iris_triton.testing.compile_only import assembly, compile_for


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1]))
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_events(pool, num_ranks, language, device):
    pool.run(events, num_ranks, device, language)


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
    assert (merged["total_events"], merged["dropped_events"]) == (18, 2)
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
    for wrong, (refused, enabled, written), off, closed in pool.run(mistakes, num_ranks, device, str(tmp_path)):
        assert all(each.startswith("ArgumentError: ") for each in wrong[:8])
        assert "from 1 to 2**31 - 1" in wrong[0]
        assert "TraceEvent.LOAD" in wrong[5]
        assert wrong[8].startswith("UnsupportedError: ")
        assert refused.startswith("ArgumentError: rank 1 could not begin to trace: tracing.enable: max_events must be")
        assert (enabled, off) == ("", {})
        assert written.startswith("IrisError: rank 1 could not write its part of the trace: ")
        assert closed.startswith("HeapClosedError: ")


# -- without a GPU: what is compiled ----------------------------------------------------------------------------------
WORDS = (torch.int32, torch.int32, torch.int32, torch.int64, 1, 8)
TARGETS = ["sm_90", "gfx942", pytest.param("gfx950", marks=pytest.mark.exhaustive)]


def instructions(text):
    """Assembly without what names files, lines and functions."""
    lines = (line.split("//")[0].split(";")[0].strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith((".", "$", "@$", "}"))]
    return [line.replace("by_method", "k").replace("by_function", "k") for line in kept if ":" not in line]


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_and_nothing_is_left_of_it_where_it_is_off(target):
    lanes, clock = (32, "globaltimer") if target == "sm_90" else (64, "s_memrealtime")
    in_gluon = (IrisDeviceCtx, torch.int64, torch.int32, torch.int32, torch.int32, True, 4 * lanes, lanes)
    off = (torch.int32, torch.int32, torch.int64, 1, 8)
    calls = [(everything, (*WORDS, True), {}), (record_gluon, in_gluon, {"num_warps": 4})]
    calls += [(by_method, off, {}), (by_function, off, {})]
    texts = {kernel: assembly(compile_for(kernel, *arguments, target)) for kernel, *arguments in calls}
    assert all(texts[kernel].count(clock) >= 6 for kernel in (everything, record_gluon))
    method, function = instructions(texts[by_method]), instructions(texts[by_function])
    assert len(method) > 20
    assert method == function
