"""The timers for GPUs, on a pretended one; do_bench: what is called when, and what becomes of the times."""

import contextlib
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from tables import raises, table

from iris_core.bench import do_bench, runner
from iris_core.bench.state import Provider
from iris_core.device import timers
from iris_core.errors import BenchmarkError

from .conftest import PretendedWorld

BATCH_MS = 0.4


@pytest.fixture
def log(monkeypatch):
    """Which of the functions that the timers use on a GPU have been called; there every batch takes as long."""
    log = []
    noted = lambda name: lambda *_: log.append(name)
    monkeypatch.setattr(runner, "warm_clocks", noted("warm"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=noted("replay"), reset=noted("reset")))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **how: contextlib.nullcontext(log.append("capture")))
    event = MagicMock(**{"record.side_effect": noted("record"), "elapsed_time.return_value": BATCH_MS})
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", noted("sleep"))
    return log


def test_what_a_graph_uses_lives_as_long_as_its_provider(log):
    """A graph knows addresses only: torch unmaps free memory when the next one is captured."""
    x = torch.zeros(3)
    memory = weakref.ref(x)
    provider = Provider("a", "graph", lambda x=x: x.numel())
    del x
    provider.capture(5, contextlib.ExitStack())
    assert memory() is not None
    del provider
    assert memory() is None


@pytest.mark.parametrize(("number", "fastest"), [(1, 5), (2, 20)])
def test_of_several_graphs_the_fastest_calls_are_replayed_and_verified(log, measure, number, fastest):
    torch.cuda.Event(True).elapsed_time.side_effect = lambda _: BATCH_MS / (1 + 99 * (log.count("capture") == number))

    def benchmark(state, ctx):
        state.set_timer("graph")
        state.set_repeat(200)
        state.provider("kernel", lambda: log.append("call"), check=lambda: log.append("check"))

    ctx = SimpleNamespace(
        device="cuda:0", num_ranks=2, num_nodes=1, scope=contextlib.nullcontext,
        barrier=lambda: log.append("barrier"), device_barrier=lambda: log.append("align"),
    )  # fmt: skip
    (result,) = measure(benchmark, world=PretendedWorld(2), ctx=ctx)
    eager = ["align", "sleep", "record", "call", "record"]
    timed = lambda replays: ["replay", "align", "sleep", "record", *["replay"] * replays, "record"]
    captured = lambda calls: ["capture", *["call"] * calls, *timed(200 // calls)]
    first = [*eager * 3, *captured(5), *captured(20), *captured(100), *timed(2), "check", "warm"]
    assert log == [*first, *timed(200 // fastest) * 3, "check", *["reset"] * 3, "barrier"]
    assert result.time_us == pytest.approx(BATCH_MS * 1e3 / 200)
    assert (result.calls, result.timer, result.num_ranks) == (200, "graph", 2)


@pytest.fixture
def calls(monkeypatch):
    """The names of what was called, on a machine without a GPU whose calls take 1, 2, 3, ... ms."""
    made = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(timers, "seconds_by_clock", lambda fn, units: (fn(), made.count("fn") / 1e3)[1])
    return made


def bench(calls, **options):
    return do_bench(*(lambda word=word: calls.append(word) for word in ("fn", "barrier", "preamble")), **options)


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, 4.0), ({"return_mode": "min"}, 3.0), ({"return_mode": "all"}, [3.0, 4.0, 5.0]),
    ({"quantiles": [0.25, 1.0]}, [3.5, 5.0]), ({"quantiles": (0.5,)}, 4.0),
], ids=str)  # fmt: skip
def test_what_is_returned(calls, options, wanted):
    assert bench(calls, n_warmup=1, n_repeat=3, **options) == pytest.approx(wanted)
    assert calls == ["barrier", "preamble", "barrier", "fn"] * 5 + ["barrier"]


@table("options", [{"return_mode": "best"}, {"n_warmup": -1}, {"n_repeat": 0}, {"quantiles": [1.5]}])
def test_refuses(calls, options):
    with raises(BenchmarkError, name=next(iter(options))):
        bench(calls, **options)
    assert calls == []
