"""Comparing reports and drawing them."""

import dataclasses

import pytest

from iris_core.bench import Report, Result
from iris_core.bench.compare import compare, differences
from iris_core.bench.plots import plot
from iris_core.cli import main
from iris_core.errors import BenchmarkError

MACHINE = {
    "cpu": "a CPU", "gpu": "a GPU", "gpus": 8, "driver": "1", "versions": {"torch": "2"}, "date": "2026-01-02T03:04:05",
}  # fmt: skip
RUN = {"num_ranks": 2, "device": "cuda", "allocator": "torch", "backend": "triton", "seconds": 1.0}


def result(provider="ours", us=10.0, rounds=(), nbytes=1024, **more):
    given = {
        "benchmark": "b.copy",
        "provider": provider,
        "params": {"nbytes": nbytes},
        "num_ranks": 2,
        "timer": "graph",
    }
    return Result(**given | {"time_us": us, "rounds_us": tuple(rounds) or (us,)} | more)


def report(*results, **machine):
    return Report("b", {**MACHINE, **machine}, RUN, results)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (result(us=10), result(us=10.4), "same"),
        (result(us=10), result(us=11, rounds=(10.5, 11, 12)), "slower"),
        (result(us=10), result(us=11, rounds=(9.9, 11, 12)), "same"),  # it varies by more than that
        (result(us=10), result(us=9, rounds=(8, 9, 9.5)), "faster"),
        (result(us=10), result(us=9, rounds=(8, 9, 10.5)), "same"),
        (result(us=10), result(us=None, error="the data is wrong"), "wrong"),
        (result(us=10), result(us=None, skipped="no luck"), "gone"),
        (result(us=None, skipped="no luck"), result(us=10), "new"),
        (result(us=None, skipped="no luck"), result(us=None, skipped="no luck"), "same"),
    ],
)
def test_verdicts(old, new, verdict):
    (change,) = compare(report(old), report(new), 0.05)
    assert change.verdict == verdict


def test_what_is_in_one_report_only():
    old, new = report(result("a"), result("b", nbytes=1)), report(result("b", nbytes=2), result("a"))
    assert [(each.result.provider, each.verdict) for each in compare(old, new, 0.05)] == [
        ("b", "new"),
        ("a", "same"),
        ("b", "gone"),
    ]
    assert compare(report(result("a", num_ranks=4)), report(result("a")), 0.05)[1].verdict == "gone"


def test_differences_of_machines():
    assert differences(report(), report()) == []
    other = report(driver="2", versions={"torch": "3"})
    assert differences(report(), other) == ["driver: 1 then, 2 now", "torch: 2 then, 3 now"]


def test_the_command(tmp_path, capsys):
    files = tmp_path / "old.json", tmp_path / "new.json"
    report(result("a"), result("b")).write(files[0])
    report(result("a", us=20.0), result("b")).write(files[1])
    arguments = ["bench", "compare", *map(str, files)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "slower" in shown
    assert "nbytes=1024" in shown
    assert "0.500" in shown
    assert "1 slower, 1 same" in shown
    assert main([*arguments, "--provider", "b"]) == 0
    assert main([*arguments, "--tolerance", "200"]) == 0
    assert main([*arguments, "--only", "nothing"]) == 1  # nothing was compared


def curve(provider, **more):
    return [
        result(provider, us=float(nbytes), nbytes=nbytes, gb_per_s=1.0, ratio_to_best_peer=0.5, **more)
        for nbytes in (1024, 2048, 4096)
    ]


def test_plots(tmp_path, capsys):
    """A picture for each benchmark, number of ranks and point of the other axes."""
    pytest.importorskip("matplotlib")
    with_mode = [dataclasses.replace(each, params={**each.params, "mode": m}) for m in "xy" for each in curve("a")]
    other = [dataclasses.replace(each, num_ranks=4) for each in curve("a")]
    whole = report(*with_mode, *other, *curve("b", benchmark="b.other"))
    names = ["b.copy-2-ranks-mode-x", "b.copy-2-ranks-mode-y", "b.copy-4-ranks"]
    arguments = ["bench", "plot", str(whole.write(tmp_path / "r.json")), "--out", str(tmp_path)]
    assert main([*arguments, "--provider", "a"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{name}.png") for name in names]
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


def test_one_colour_for_one_provider(tmp_path, monkeypatch):
    """However it was timed; and of two bandwidths, that of the bus."""
    Axes = pytest.importorskip("matplotlib.axes").Axes
    timed = [curve("a", timer="graph"), curve("a eager", timer="events"), curve("ab", timer="graph")]
    results = [dataclasses.replace(each, bus_gb_per_s=1.5) for group in timed for each in group]
    looks, plain = {}, Axes.plot

    def noted(self, *points, **look):
        looks[look["label"]] = look
        return plain(self, *points, **look)

    monkeypatch.setattr(Axes, "plot", noted)
    (file,) = plot(report(*results), tmp_path, style="svg")
    first = file.read_text()
    assert looks["a"]["color"] == looks["a eager"]["color"] != looks["ab"]["color"]
    assert [look["linestyle"] for look in looks.values()] == ["-", "--", "-"]
    assert ">bus bandwidth (GB/s)</text>" in first
    assert ">bandwidth (GB/s)</text>" not in first
    (file,) = plot(report(*results), tmp_path, style="svg")
    assert file.read_text() == first, "the same results give the same picture"


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(BenchmarkError, match="no benchmark has an axis with several numbers"):
        plot(report(result()), tmp_path)
    with pytest.raises(BenchmarkError, match="nothing to draw against 'm'"):
        plot(report(*curve("a")), tmp_path, axis="m")
