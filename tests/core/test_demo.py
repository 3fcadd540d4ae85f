"""`iris demo`: rows of all ranks, the exit status, JSON, and where it runs."""

import json
import math

import torch
from tables import table

import iris_core
from iris_core.cli import demo, main

ROW = {
    **{"name": "heat", "title": "heat solver", "ranks": 2, "backend": "triton", "allocator": "host", "device": "cpu"},
    **{"time_s": 1.0, "error": 1e-6, "tolerance": 1e-5, "detail": "64 x 64", "ok": True},
}


def test_the_worst_rank_counts():
    slow = ROW | {"time_s": 3.0, "error": 2e-6}
    wrong = ROW | {"error": math.nan, "ok": False}
    (merged,) = demo.merge([[ROW], [slow]])
    assert (merged["time_s"], merged["error"], merged["ok"]) == (3.0, 2e-6, True)
    (merged,) = demo.merge([[ROW], [wrong], [slow]])
    assert math.isnan(merged["error"])
    assert not merged["ok"]


@table(("error", "ok", "status"), [(1e-6, True, 0), (0.5, False, 1), (math.nan, False, 1)])
@table("as_json", [False, True])
def test_a_wrong_result_exits_with_1(monkeypatch, capsys, error, ok, status, as_json):
    row = ROW | {"error": error, "ok": ok}
    monkeypatch.setattr(iris_core, "run", lambda *args: [([ROW], "chosen"), ([row], "chosen")])
    assert main(["demo", "--ranks", "2", "--device", "cpu", *(["--json"] if as_json else [])]) == status
    out = capsys.readouterr().out
    if as_json:
        (shown,) = json.loads(out)["rows"]
        assert shown["ok"] is ok
        assert shown["error"] == (None if math.isnan(error) else max(error, ROW["error"]))
    else:
        assert ("WRONG" in out) is not ok


@table(("options", "name", "ranks"), [
    (["--ranks", "2"], "message-passing", 2), (["--nodes", "2x2"], "between-nodes", 4),
])  # fmt: skip
def test_a_real_run(capsys, monkeypatch, fork_ranks, options, name, ranks):
    """Programs run in each node, collectives between all."""
    fork_ranks(monkeypatch)
    assert main(["demo", "--device", "cpu", "--only", name, "--json", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    shown = [row[key] for key in ("name", "ranks", "backend", "allocator", "ok")]
    assert shown == [name, ranks, "triton", "host", True]
    assert row["error"] <= row["tolerance"]


def test_an_unknown_demonstration_lists_those_there_are(capsys, forked_ranks):
    assert main(["demo", "--ranks", "1", "--device", "cpu", "--only", "heet"]) != 0
    assert "message-passing, gemm-all-scatter" in capsys.readouterr().err


@table(("gpus", "ranks", "device", "expected"), [
    (0, None, None, (4, "cpu")), (0, 2, None, (2, "cpu")), (8, None, None, (4, None)), (2, None, None, (2, None)),
    (1, None, None, (4, "cpu")), (2, 4, None, (4, "cpu")), (8, 3, "cpu", (3, "cpu")), (8, None, "cuda", (4, "cuda")),
    (1, None, "cuda", (1, "cuda")), (2, 4, "cuda", (4, "cuda")), (8, 2, "cuda:1", (2, "cuda:1")),
])  # fmt: skip
def test_where_it_runs(monkeypatch, gpus, ranks, device, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    *chosen, note = demo.choose_ranks(ranks, device)
    assert tuple(chosen) == expected
    assert ("run on the CPU" in note) == (gpus > 0 and expected[1] == "cpu" and device is None)
    assert ("share a GPU" in note) == (expected in [(4, "cuda"), (2, "cuda:1")] and (gpus, ranks) != (8, None))
