"""The soak: a few turns of each part, and that it sees what grows."""

import jobs_soak
import pytest

import iris_core
from iris_core.bench.results import Report


def test_a_short_soak_writes_a_report(pool, tmp_path, monkeypatch, capsys):
    """On ranks that are started already."""
    run = lambda soak, size, part, most, *how: pool.run(jobs_soak.part, size, part.__name__, most // 1000, *how)
    monkeypatch.setattr(iris_core, "run", run)
    path = tmp_path / "soak.json"
    status = jobs_soak.load().main(["--seconds", "1e9", "--output", str(path), "--device", "cpu"])
    report = Report.read(path)
    assert status == bool(report.errors)
    assert capsys.readouterr().out.count("soak.") == 4
    assert [each.benchmark for each in report.results] == ["soak.allocations", "soak.contexts", "soak.collectives"]
    for each in report.results:
        assert each.counters["turns"] >= each.counters["samples"] >= 8


@pytest.mark.parametrize("leaks", [["descriptors", "threads", "private_kib"], []])
def test_what_grows_is_seen(pool, leaks):
    error = jobs_soak.load().judge("leak", "cpu", pool.run(jobs_soak.leaking, 2, leaks)).error
    assert all(f"{leak}, of rank 0" in error for leak in leaks)
    assert bool(error) == bool(leaks)
