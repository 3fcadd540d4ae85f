"""Comparing reports."""

from tables import table

from iris_core.bench import Report, Result
from iris_core.bench.compare import compare, differences
from iris_core.cli import main

MACHINE = {
    "cpu": "a CPU", "gpu": "a GPU", "gpus": 8, "driver": "1", "versions": {"torch": "2"}, "date": "2026-01-02T03:04:05",
}  # fmt: skip
RUN = {"num_ranks": 2, "device": "cuda", "allocator": "torch", "backend": "triton", "seconds": 1.0}


def result(provider="ours", us=10.0, rounds=(), nbytes=1024, **more):
    given = {
        "benchmark": "b.copy", "provider": provider, "params": {"nbytes": nbytes}, "num_ranks": 2, "timer": "graph",
    }  # fmt: skip
    return Result(**given | {"time_us": us, "rounds_us": tuple(rounds) or (us,)} | more)


def report(*results, **machine):
    return Report("b", {**MACHINE, **machine}, RUN, results)


@table(
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
    assert main([*arguments, "--tolerance", "200"]) == 0
    report().write(files[0])
    assert main(["bench", "compare", str(files[0]), str(files[0])]) == 1  # nothing was compared
