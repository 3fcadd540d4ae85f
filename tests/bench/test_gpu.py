"""The timers on GPUs."""

import contextlib
import time

import pytest
import torch

from iris_core.bench.state import Provider

CYCLES, MOST_HZ = 2_000_000, 4e9  # about a millisecond
CALLS = 5
align = lambda: None  # one rank


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["events", "graph"])
def test_device_time(timer):
    """It lies within what the host has waited, and no clock of a GPU is so fast that it could be shorter."""
    calls = []

    def call():
        calls.append(1)
        torch.cuda._sleep(CYCLES)

    batch = Provider("a", timer, call, units=4)
    if timer == "graph":
        batch.capture(CALLS, contextlib.ExitStack())
    batch.time(0, align)
    calls.clear()
    begin = time.perf_counter()
    seconds = batch.time(1, align)
    waited = time.perf_counter() - begin
    assert CYCLES / MOST_HZ < seconds < waited / (4 * batch.calls_per_unit)
    assert len(calls) == (0 if timer == "graph" else 1 + 4), "a graph leaves out what the host does"


@pytest.mark.gpu
def test_a_replay_runs_the_calls_that_were_captured():
    x = torch.zeros((), device="cuda")
    batch = Provider("a", "graph", lambda: x.add_(1), units=3)
    batch.capture(CALLS, contextlib.ExitStack())
    assert x.item() == 0  # capturing runs nothing
    batch.time(0, align)
    assert x.item() == CALLS * (1 + 3)  # the first replay is not timed
    batch.time(2 * CALLS, align)
    assert x.item() == CALLS * (1 + 3 + 2 + 3)
