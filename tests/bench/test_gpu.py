"""The timers on GPUs."""

import pathlib
import subprocess
import sys
import time

import pytest
import torch

from iris_core import bench
from iris_core.bench import timers
from iris_core.bench.options import RunOptions

CYCLES = 2_000_000  # about a millisecond
CALLS = 5


def align():
    """Nothing: one rank."""


def spin():
    """Keep the device busy for a known time."""
    torch.cuda._sleep(CYCLES)


@pytest.fixture(scope="module")
def spin_s():
    """Seconds of `spin`, measured by the host around many of them."""
    timers.warm_clocks(50)
    spin()
    timers.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        spin()
    timers.synchronize()
    return (time.perf_counter() - start) / 50


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("timer", ["events", "graph"])
def test_device_time(timer, spin_s):
    batch = timers.make_batch(timer, spin, warmup=1, align=align, graph_calls=CALLS)
    assert batch.calls_per_unit == (CALLS if timer == "graph" else 1)
    batch.once()
    assert batch.time(4) == pytest.approx(spin_s, rel=0.1)
    batch.close()


@pytest.mark.gpu
def test_a_replay_runs_the_calls_that_were_captured():
    x = torch.zeros((), device="cuda")
    batch = timers.make_batch("graph", lambda: x.add_(1), warmup=1, align=align, graph_calls=CALLS)
    assert x.item() == 0  # capturing runs nothing
    batch.once()
    assert x.item() == CALLS
    batch.time(3)
    assert x.item() == CALLS * (1 + 1 + 3)  # once, warm-up, timed
    batch.close()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_graph_leaves_out_what_the_host_does():
    def slow_on_the_host():
        time.sleep(0.002)
        spin()

    eager = timers.make_batch("events", slow_on_the_host, warmup=0, align=align, graph_calls=CALLS)
    graph = timers.make_batch("graph", slow_on_the_host, warmup=0, align=align, graph_calls=CALLS)
    assert graph.time(2) < 0.8 * eager.time(10)
    graph.close()


@pytest.mark.gpu
def test_an_idle_rank_joins_the_alignment_only():
    joined = []
    for timer in timers.GPU_TIMERS:
        batch = timers.make_batch(timer, None, warmup=1, align=lambda: joined.append(1), graph_calls=CALLS)
        batch.once()
        assert batch.time(5) == 0
    assert len(joined) == 2


@pytest.mark.multigpu
def test_two_gpus(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench.load(str(pathlib.Path(__file__).parent / "rank_benchmarks.py"))
    options = RunOptions(num_ranks=2, device="cuda", heap_size="64MiB", rounds=3)
    report = bench.run(bench.registered(pattern="on_gpus"), options)
    by_timer = {(each.params["timer"], each.provider): each for each in report.results}
    assert not report.errors
    for timer in timers.GPU_TIMERS:
        both, alone = by_timer[timer, "fill"], by_timer[timer, "fill alone"]
        assert all(each > 0 for each in both.local_us)
        assert alone.local_us[0] is None
        assert both.verified
        assert both.gb_per_s > 100  # 32 MiB in the memory of a GPU
    clocks = report.run["sm_clock_mhz"]
    assert len(clocks) == 2


@pytest.mark.multigpu
def test_rma_on_two_gpus(tmp_path):
    rma = pathlib.Path(__file__).parents[2] / "benchmarks" / "rma.py"
    out = tmp_path / "rma.json"
    command = [sys.executable, str(rma), "--ranks", "2", "--quick", "--out", str(out), "--limit", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = bench.Report.read(out).results
    assert {each.provider for each in results if each.time_us} == {
        "engine push", "engine pull", "push", "pull", "engine", "signal", "cuMemcpyDtoDAsync", "cuMemcpyPeerAsync",
        "barrier",
    }  # fmt: skip
    assert all(each.verified for each in results if each.provider)
