"""The programs of `iris demo --backend gluon`: right on CPU ranks, and compiled for GPUs."""

import json

import torch

from iris_core.cli import main
from iris_gluon import IrisDeviceCtx, demos
from iris_triton.demos import all_scatter, message_passing
from iris_triton.testing.compile_only import compile_for


def test_they_run_on_three_ranks_and_are_right(capsys, forked_ranks):
    assert main(["demo", "--ranks", "3", "--device", "cpu", "--backend", "gluon", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [demo.name for demo in demos.demos()] != []
    assert all(row["ok"] and row["backend"] == "gluon" and row["error"] <= row["tolerance"] for row in rows)


def test_they_compile_for_gpus():
    float_, word = torch.float32, torch.int64
    sizes = message_passing.ROUNDS, message_passing.BLOCKS
    messages = [IrisDeviceCtx, word, float_, float_, float_, word, word, *sizes]
    assert compile_for(demos.pass_messages, messages, {"BLOCK": message_passing.BLOCK}, "sm_90")
    tiles = {name: getattr(all_scatter, name) for name in ("TILE_M", "TILE_N", "TILE_K", "K")}
    options = {"N": all_scatter.N_PER_RANK, **tiles}
    assert compile_for(demos.gemm_all_scatter, [IrisDeviceCtx, word, *[torch.bfloat16] * 3], options, "gfx942")
