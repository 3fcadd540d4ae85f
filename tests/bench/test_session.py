"""Runs on ranks."""

import pathlib
import sys

import pytest

from iris_core import bench
from iris_core.bench import registry
from iris_core.bench.runner import DEVICE_TIMEOUT_S
from iris_core.errors import PeerLostError

HERE = pathlib.Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
OPTIONS = bench.RunOptions(
    num_ranks=2, device="cpu", heap_size="16MiB", rounds=1, batch_ms=0.2, quick=True,
    axes={"call": ["one_shot"], "op": ["all_gather_matmul"], "layers": [1]},
)  # fmt: skip


@pytest.fixture(scope="module")
def of_file(fork_ranks):
    """Results by file, of one run with all benchmarks of several: starting ranks takes longer than measuring here."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.setattr(registry, "BENCHMARKS", {})
        patch.setattr(sys, "path", list(sys.path))
        bench.load(HERE / "rank_benchmarks.py")
        for name in ("rma", "ccl_launch", "ops_launch", "torch_backend"):
            bench.load(BENCHMARKS / f"{name}.py")
        report = bench.run([*bench.registered(), *bench.registered(pattern="resets")], OPTIONS, name="ranks")
    assert report.run | {"num_ranks": 2, "allocator": "host", "device": "cpu"} == report.run
    assert report.run["device_timeout_s"] == DEVICE_TIMEOUT_S
    assert len(report.errors) == 1
    return lambda name: [each for each in report.results if each.benchmark.startswith(f"{name}.")]


def test_two_ranks(of_file):
    right, wrong, alone, *frees, turns, resets = of_file("rank_benchmarks")
    assert (right.params, right.local_us) == ({"nbytes": 8}, (2000, 4000))
    assert (right.time_us, right.min_us, right.skew_pct) == (4000, 2000, 50)
    assert right.verified
    assert right.gb_per_s == pytest.approx(8 / right.time_us / 1e3, rel=1e-4)
    assert (wrong.error, wrong.time_us) == ("rank 1: the data is wrong", None)
    assert (alone.local_us[0], alone.skew_pct, alone.ratio) == (None, None, 1)
    assert [each.params for each in frees] == [{"point": 0}, {"point": 1}]
    assert all(each.verified for each in (*frees, turns, resets))
    assert None not in turns.local_us  # the protocol of the copy engine's latency, whose copies need a GPU


def test_a_rank_that_hangs_ends_the_run(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench.load(HERE / "rank_benchmarks.py")
    options = bench.RunOptions(device="cpu", heap_size="1MiB", limit_s=5.0)
    with pytest.raises(PeerLostError) as caught:
        bench.run(bench.registered(pattern="hangs"), options)
    assert 0 in caught.value.ranks
    assert "rank_benchmarks.py" in capfd.readouterr().err  # where it was


def test_our_benchmarks_on_cpu_ranks(of_file):
    """Each is right, or says what it needs; of launches only the time is of interest."""
    skipped = {}
    for name in ("rma", "torch_backend", "ccl_launch", "ops_launch"):
        results = [each for each in of_file(name) if each.provider]
        skipped |= {each.provider: each.skipped for each in results if each.skipped}
        measured = [each for each in results if not each.skipped]
        assert measured
        assert all(each.time_us > 0 and (each.verified or "launch" in name) for each in measured)
    engine = dict.fromkeys(("engine push", "engine pull", "engine"), "the copy engine needs a GPU")
    assert skipped == engine | {"nccl async-tp": "it needs GPUs"}
