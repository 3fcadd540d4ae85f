"""Kernels of examples 20 to 38 compile for GPUs, with the tiles that they have there; signals are in tests/compile."""

import re

import jobs_examples
import pytest
import torch
import triton
from tables import table

from iris_gluon import IrisDeviceCtx
from iris_triton.testing.compile_only import assembly, compile_for

EXAMPLES = jobs_examples.EXAMPLES
TARGETS = ("sm_90", "gfx942")
SHARED_MEMORY = {"sm_90": 227 << 10, "gfx942": 64 << 10}  # bytes that a program can have
PRODUCTS = {"sm_90": r"wgmma|mma\.sync", "gfx942": "v_mfma"}
WIDE = {"sm_90": r"st\.global\.v4\.b32", "gfx942": r"global_(load|store)_dwordx4"}

GEMMS = sorted(path.name for path in EXAMPLES.glob("[23]*.py") if "gemm_options" in path.read_text())

VALUES = {
    **dict.fromkeys(("a", "b", "c", "slab", "shard"), torch.bfloat16),
    **dict.fromkeys(("parts", "inbox"), torch.float32),
    **dict.fromkeys(("ready", "arrived", "computed", "summed", "finished"), torch.int32),
    **dict.fromkeys(("M", "N", "K"), 4096), **dict.fromkeys(("stride_am", "stride_bk", "stride_cm"), 4096),
    **dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1), **dict.fromkeys(("context", "locks"), torch.int64),
    "turn": 3, "computing": 116, "sending": 16, "WORLD": 8,
}  # fmt: skip
"""Arguments of the kernels, by name: rows as long as on GPUs, where one may be rank 7 of 8."""


def compiled(function, values, given, target):
    """Compile a function with values by name; those `given` that are no arguments of it are options."""
    options = {key: value for key, value in given.items() if key not in function.arg_names}
    made = compile_for(function, [(values | given)[each] for each in function.arg_names], options, target)
    assert made.metadata.shared <= SHARED_MEMORY[target]
    return made


def for_a_target(rows):
    """Every second row for AMD; all for both with --exhaustive: GPU tests run them on NVIDIA's."""
    every = [(i % 2 and target.startswith("gfx"), row, target) for i, row in enumerate(rows) for target in TARGETS]
    return [pytest.param(*row, target, marks=[pytest.mark.exhaustive] * (not now)) for now, row, target in every]


@table(("name", "target"), for_a_target((name,) for name in GEMMS))
def test_gemms(name, target):
    module = jobs_examples.load(EXAMPLES / name)
    options = module.gemm_options.__globals__["AMD_OPTIONS" if target.startswith("gfx") else "NVIDIA_OPTIONS"]
    values = {**VALUES, **({"c": torch.float32} if "atomics" in name else {})}
    kernels = [each for each in vars(module).values() if isinstance(each, triton.runtime.JITFunction)]
    texts = []
    for kernel in (each for each in kernels if each.__module__ == module.__name__):
        given = {key: value for key, value in options.items() if key in kernel.arg_names or key.startswith("num_")}
        texts.append(assembly(compiled(kernel, values, given, target)))
    text = "\n".join(texts)
    assert re.search(PRODUCTS[target], text)
    assert "atomics" in name or re.search(WIDE[target], text)


LONG, INT, FLOAT, HALF = torch.int64, torch.int32, torch.float32, torch.float16
TYPES = {
    **dict.fromkeys(("x", "out", "inbox", "back", "w1", "w2"), HALF),
    **dict.fromkeys(("parts", "sums", "residual", "weight", "weights", "tiles", "changes"), FLOAT),
    **dict.fromkeys(("own", "counts", "table", "origin"), INT),
    **dict.fromkeys(("arrived", "turns", "context", "state", "met", "returned", "done"), LONG),
    **dict.fromkeys(("order", "first", "starts", "totals"), LONG),
    **dict.fromkeys(("hidden", "ffn", "tokens", "slots", "max_slots", "first_step"), 4096),
    **{"eps": 1e-6, "WORLD": 8, "BLOCK_H": 256, "EXPERTS": 64, "TOP_K": 2, "BLOCK_ROWS": 64},
}
MODELS = [
    ("33_moe.py", "exchange", {"BLOCK": 64}), ("33_moe.py", "dispatch", {"rows": LONG}),
    ("33_moe.py", "run_experts", {"BLOCK_FFN": 32, "num_warps": 8}), ("33_moe.py", "combine", {}),
    ("34_norm.py", "reduce_norm_gather_kernel", {"rows": 256, "BLOCK_ROWS": 1, "BLOCK_H": 4096}),
    ("38_jacobi.py", "jacobi", {"STEPS": 500, "RANKS_X": 4, "TILES_Y": 4, "TILES_X": 8, "ROWS": 8, "COLUMNS": 16}),
]  # fmt: skip


@table(("name", "kernel", "given", "target"), for_a_target(MODELS))
def test_models(name, kernel, given, target):
    made = compiled(vars(jobs_examples.load(EXAMPLES / name))[kernel], TYPES, given, target)
    assert kernel != "run_experts" or re.search(PRODUCTS[target], assembly(made))


@table("target", SHARED_MEMORY)
def test_the_traced_kernel(target):
    function = jobs_examples.load(EXAMPLES / "37_gluon_tracing.py").ring_sum
    for tracing in (False, True):
        arguments = (IrisDeviceCtx, LONG, FLOAT, FLOAT, LONG, FLOAT, 2)
        text = assembly(compile_for(function, arguments, {"BLOCK": 512, "WORK": 20, "TRACING": tracing}, target))
        assert (("globaltimer" if target == "sm_90" else "s_memrealtime") in text) or not tracing
