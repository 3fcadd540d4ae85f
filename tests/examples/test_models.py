"""Examples 31 to 38: on CPU ranks with other shapes than those they show, on GPUs as they are, compiled for GPUs."""

import json
import re
import textwrap

import jobs_examples
import jobs_models
import pytest
import torch
from tables import table

from iris_core.errors import IrisError
from iris_triton.testing.compile_only import assembly, compile_for

EXAMPLES = jobs_examples.EXAMPLES

LINES = {
    "31_flash_decode.py": r": \d tokens for \d sequences, error \S+",
    "32_ring_attention.py": r": error \S+; full(:.*)?, causal(:.*)?, striped(:.*)?",
    "33_moe.py": r": 3 calls, \d+ experts, error \S+",
    "34_norm.py": r": 3 norms of \d+ tokens, error \S+",
    "35_collectives.py": r": \d+ calls are right; all_reduce: \w+, .+",
    "36_operations.py": r": matmul_all_reduce, .*, layers, sequence-parallel layers are right",
    "38_jacobi.py": r": \d+ x \d+ cells, \d+ steps, error \S+",
}
"""What an example says behind its rank and device; 37 is run with a folder."""

GPU_TIERS = [
    pytest.param(1, marks=pytest.mark.gpu),
    *(pytest.param(count, marks=pytest.mark.multigpu(count)) for count in (2, 4, 8)),
]


def run(pool, name, num_ranks, *args, device="cpu", path=None):
    """Call `main(*args)` of an example; every rank checks its own result and says so."""
    lines = pool.run(jobs_examples.call, num_ranks, str(path or EXAMPLES / name), "main", args, device)
    for rank, line in enumerate(lines):
        # with --ranks-per-gpu, some ranks share a GPU
        where = "cpu" if device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"
        assert line.startswith(f"rank {rank} of {num_ranks} on {where}"), line
        if name in LINES:
            assert re.fullmatch(rf"rank {rank} of {num_ranks} on {where}{LINES[name]}(; [\d.]+ us.*)?", line), line
    return lines


# -- as they are; test_examples runs them on 2 ranks, or on 4 ---------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["35_collectives.py", "36_operations.py"])
def test_calls_of_the_library(pool, name, num_ranks):
    (first, *_) = run(pool, name, num_ranks)
    if name.startswith("35"):  # a rank alone sends nothing to itself
        assert (int(re.search(r"(\d+) calls", first)[1]) == 18) == (num_ranks > 1)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_tracing(pool, tmp_path, num_ranks):
    lines = run(pool, "37_gluon_tracing.py", num_ranks, str(tmp_path))
    events = 4 + 4 * 3 * (num_ranks - 1)
    assert all(f": {events} events" in line for line in lines)
    assert f"open {tmp_path}/trace.json" in lines[0]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["metadata"]["total_events"] == events * num_ranks


def test_every_call_of_ccl_and_ops_is_shown():
    from iris_core import nn
    from iris_core.dispatch.products import OPS as PRODUCTS
    from iris_core.dispatch.requests import OPS as COLLECTIVES

    shown = (EXAMPLES / "35_collectives.py").read_text()
    for call in (*COLLECTIVES, "barrier", "reset", "explain"):
        assert f"ccl.{call}(" in shown
    shown = (EXAMPLES / "36_operations.py").read_text()
    for call in (*PRODUCTS, "explain"):
        assert f"ops.{call}(" in shown
    for name in nn.__all__:
        assert f"{name}(" in shown


# -- other shapes -----------------------------------------------------------------------------------------------------
@table(
    ("num_ranks", "args"),
    [
        (3, ((0, 1, 97), 6, 2, 16, 3, 2)),  # no key on any rank, then on one; groups of three heads
        (2, ((70,), 5, 5, 16, 1, 1)),  # every head has keys of its own
        (1, ((33, 2), 20, 1, 16, 2, 1)),  # one key head for more heads than a product needs
    ],
)
def test_flash_decode(pool, num_ranks, args):
    run(pool, "31_flash_decode.py", num_ranks, *args)


@table(("num_ranks", "args"), [(3, (2, 1, 16)), (3, (97, 3, 16)), (2, (64, 1, 32)), (1, (70, 1, 16))])
def test_ring_attention(pool, num_ranks, args):
    """More ranks than tokens; parts that are no multiples of a tile, or exactly one; a rank alone."""
    run(pool, "32_ring_attention.py", num_ranks, *args)


@table(
    ("num_ranks", "args"),
    [
        (3, ((0, 50, 7), 1, 20, 33, 2, 3, [])),  # a rank without tokens, sizes that are no multiples of anything
        (3, ((30, 11), 2, 16, 16, 2, 3, [0, 1])),  # a rank whose experts get nothing
        (2, ((40,), 2, 32, 48, 2, 3, [1, 2])),  # everything to the same experts
        (1, ((13,), 4, 16, 24, 3, 3, 0)),
    ],
)
def test_moe(pool, num_ranks, args):
    run(pool, "33_moe.py", num_ranks, *args)


@table(("num_ranks", "args"), [(3, (1, 7, 3)), (3, (34, 300, 3)), (2, (3, 1500, 3)), (1, (20, 64, 3))])
def test_norm(pool, num_ranks, args):
    """Ranks without tokens, odd sizes, rows that fill a tile."""
    run(pool, "34_norm.py", num_ranks, *args)


@table(("num_ranks", "tiles"), [(1, (2, 2)), (4, (1, 2))])
def test_jacobi(pool, num_ranks, tiles):
    """Four tiles on one rank are a square, and so are four ranks."""
    run(pool, "38_jacobi.py", num_ranks, tiles, (2, 8 // tiles[1]), 20, 3e-2)


# -- again and again --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "num_ranks"), [
    pytest.param(name, num_ranks, marks=[pytest.mark.exhaustive] if num_ranks > 3 else [])
    for name in jobs_models.PREPARE
    for num_ranks in (3, 4)
])  # fmt: skip
def test_calls_in_a_row(pool, tmp_path, name, num_ranks):
    """From three ranks on, one can be a launch ahead of a second one while a third one still waits for the second."""
    calls, share = (6, 0.15) if "decode" in name else (6, 0.1)
    args = str(EXAMPLES / name), calls, "cpu", False, share, str(tmp_path / "delays")
    assert all(pool.run(jobs_models.in_a_row, num_ranks, *args))


def slow(tmp_path, name, line, variable, loops):
    """An example whose rank 1 takes its time before it reads what others would overwrite if nothing kept them."""
    text = (EXAMPLES / name).read_text()
    assert text.count(line) == 1
    indent = line[: -len(line.lstrip())]
    late = f"if ctx.rank == 1:\n    for _ in range({loops}):\n        {variable} = {variable} * 1\n"
    path = tmp_path / name
    path.write_text(text.replace(line, textwrap.indent(late, indent) + line))
    return str(path)


def test_a_slow_reader_of_the_table(pool, tmp_path):
    """Rank 0 has no token in its first call, and its experts get none: it goes on, and writes the other half."""
    path = slow(tmp_path, "33_moe.py", " " * 8 + "tl.store(table", "turn", 5000)
    run(pool, "33_moe.py", 2, (0, 40), 2, 16, 16, 2, 3, [0, 1], path=path)


# What makes an example compute nonsense, and it has to say so.  Each on two ranks, but for a small plate on one.
MISTAKES = [
    ("31_flash_decode.py", "sum(t < n for t", "sum(t <= n for t"),
    ("32_ring_attention.py", "causal=causal", "causal=not causal"), ("33_moe.py", "inner * tl.sigmoid(inner)", "inner"),
    ("34_norm.py", "stream += part", "stream = part"), ("35_collectives.py", "op=ReduceOp.MAX", "op=ReduceOp.MIN"),
    ("36_operations.py", "gather_dim=0)  # shards are rows", "gather_dim=0, bias=on(bias))  # shards are rows"),
    ("38_jacobi.py", "column[None, :] == COLUMNS - 1", "column[None, :] == 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_an_example_notices_its_mistakes(pool, tmp_path, name, right, wrong):
    text = (EXAMPLES / name).read_text()
    assert right in text
    path = tmp_path / name
    path.write_text(text.replace(right, wrong))
    how = (1, (2, 2), (2, 4), 20, 3e-2) if name == "38_jacobi.py" else (2,)
    with pytest.raises(IrisError, match="AssertionError"):
        run(pool, name, *how, path=path)


# -- compiled with the sizes of GPUs ----------------------------------------------------------------------------------
SHARED_MEMORY = {"sm_90": 227 << 10, "gfx942": 64 << 10}  # bytes that a program can have
PRODUCTS = {"sm_90": r"wgmma|mma\.sync", "gfx942": "v_mfma"}
HALF, FLOAT, INT, LONG = torch.float16, torch.float32, torch.int32, torch.int64
TYPES = {
    **dict.fromkeys(("x", "out", "inbox", "back", "w1", "w2"), HALF),
    **dict.fromkeys(("parts", "sums", "residual", "weight", "weights", "tiles", "changes"), FLOAT),
    **dict.fromkeys(("own", "counts", "table", "origin"), INT),
    **dict.fromkeys(("arrived", "turns", "context", "state", "met", "returned", "done"), LONG),
    **dict.fromkeys(("order", "first", "starts", "totals"), LONG),
    **dict.fromkeys(("hidden", "ffn", "tokens", "slots", "max_slots", "first_step"), 4096),
    **{"eps": 1e-6, "WORLD": 8, "BLOCK_H": 256, "EXPERTS": 64, "TOP_K": 2},
}
EXPERTS = {"BLOCK_ROWS": 64}
PLATE = {"STEPS": 500, "RANKS_X": 4, "TILES_Y": 4, "TILES_X": 8, "ROWS": 8, "COLUMNS": 16}
KERNELS = [
    ("33_moe.py", "exchange", {"BLOCK": 64}),
    ("33_moe.py", "dispatch", {"rows": LONG, **EXPERTS}),
    ("33_moe.py", "run_experts", {"BLOCK_FFN": 32, "num_warps": 8, **EXPERTS}),
    ("33_moe.py", "combine", EXPERTS),
    ("34_norm.py", "reduce_norm_gather_kernel", {"rows": 256, "BLOCK_ROWS": 1, "BLOCK_H": 4096}),
    ("38_jacobi.py", "jacobi", PLATE),
]


def cases():
    """Every kernel for one of the targets; for the other one with --exhaustive."""
    for i, (name, kernel, given) in enumerate(KERNELS):
        for j, target in enumerate(SHARED_MEMORY):
            marks = [pytest.mark.exhaustive] if (i + j) % 2 else []
            yield pytest.param(name, kernel, given, target, marks=marks, id=f"{kernel}-{target}")


@table(("name", "kernel", "given", "target"), list(cases()))
def test_kernels_compile(name, kernel, given, target):
    function = vars(jobs_examples.load(EXAMPLES / name))[kernel]
    values = {**TYPES, **given}
    arguments = [values[each] for each in function.arg_names]
    options = {key: value for key, value in given.items() if key not in function.arg_names}
    compiled = compile_for(function, arguments, options, target)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    if kernel == "run_experts":
        assert re.search(PRODUCTS[target], assembly(compiled))


@table("target", SHARED_MEMORY)
def test_the_traced_kernel_compiles(target):
    from iris_gluon import IrisDeviceCtx

    function = jobs_examples.load(EXAMPLES / "37_gluon_tracing.py").ring_sum
    for tracing in (False, True):
        arguments = (IrisDeviceCtx, LONG, FLOAT, FLOAT, LONG, FLOAT, 2)
        text = assembly(compile_for(function, arguments, {"BLOCK": 512, "WORK": 20, "TRACING": tracing}, target))
        assert (("globaltimer" if target == "sm_90" else "s_memrealtime") in text) or not tracing


# -- on GPUs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", LINES)
def test_on_gpus(pool, name, num_ranks):
    run(pool, name, num_ranks, device="cuda")


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
def test_tracing_on_gpus(pool, tmp_path, num_ranks):
    run(pool, "37_gluon_tracing.py", num_ranks, str(tmp_path), device="cuda")


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", jobs_models.PREPARE)
def test_calls_in_a_row_on_gpus(pool, name, num_ranks):
    assert all(pool.run(jobs_models.in_a_row, num_ranks, str(EXAMPLES / name), 50, "cuda", False))


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", jobs_models.PREPARE)
def test_graphs(pool, name, num_ranks):
    """A graph is replayed with changing data, and each rank's device rests before some of the replays."""
    assert all(pool.run(jobs_models.in_a_row, num_ranks, str(EXAMPLES / name), 2000, "cuda", True, timeout_s=600.0))
