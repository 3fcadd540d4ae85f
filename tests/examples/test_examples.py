"""Every example runs as it is run by a reader, on CPU ranks and on GPUs."""

import pathlib
import re

import pytest
import torch
from rank_counts import GPU_TIERS
from tables import table

ROOT = pathlib.Path(__file__).parents[2]
EXPECTED = {
    "01_load.py": r"read \d+ numbers of rank \d", "02_store.py": r"got \d",
    "03_all_load.py": r"added \d+ numbers of \d ranks", "04_all_store.py": r"has \d rows of \d+ numbers",
    "05_atomic_add.py": r"(has \d+ numbers in 16 bins: .*|counted 4000 numbers)",
    "06_atomic_xchg.py": r"(\d+ nodes in one list, which changes ranks \d+ times|pushed 50 nodes)",
    "07_memory.py": "[4096, 8192, 4096, 0]",
    "10_message_passing_load_store.py": "rank 1 used 6 blocks of 1024 numbers",
    "11_message_passing_put.py": "rank 1 received 8 messages of 1024 numbers",
    "12_message_passing_context.py": "the sum came around 3 times", "13_message_passing_gluon.py": "used 57 blocks",
    "20_gemm_all_scatter.py": "C is right 2 times", "21_gemm_all_scatter_producer_consumer.py": "C is right 2 times",
    "22_gemm_all_scatter_specialised.py": "C is right 2 times",
    "23_gemm_all_scatter_bulk_synchronous.py": "C is right 2 times",
    "24_gluon_gemm_all_scatter.py": "C is right; the (kernel for Hopper|portable kernel, because .*)",
    "25_gemm_all_reduce.py": "C is right 3 times, and the same on all ranks",
    "26_gemm_all_reduce_atomics.py": "C is right 2 times", "27_gemm_all_reduce_one_shot.py": "C is right 4 times",
    "28_gemm_all_reduce_ring.py": "C is right 3 times", "29_all_gather_gemm_pull.py": "C is right 2 times",
    "30_all_gather_gemm_push.py": "C is right 2 times",
    "31_flash_decode.py": r"\d tokens for \d sequences, error \S+", "32_ring_attention.py": r"error \S+",
    "33_moe.py": r"3 calls, \d+ experts, error \S+", "34_norm.py": r"3 norms of \d+ tokens, error \S+",
    "35_collectives.py": r"\d+ calls are right", "38_jacobi.py": r"\d+ x \d+ cells, \d+ steps, error \S+",
    "36_operations.py": "matmul_all_reduce, .*, layers, sequence-parallel layers are right",
    "40_overlap.py": "the sum is right 3 times", "54_mem_pool.py": r"added \d products of torch",
}  # fmt: skip
"""What a rank prints behind its number and device, and before times; test_models runs 37."""

ONE_LINE = [name for name in EXPECTED if name[:2] in ("07", "10", "11")]
"""Those of which one line of all is looked for."""

ANY_NUMBER = [name for name in EXPECTED if "[ranks]" in (ROOT / "examples" / name).read_text()]
"""Those that are told how many ranks they get."""

exhaustive = pytest.mark.exhaustive


def check(name, lines, device="cpu"):
    """Whether an example has said what it should; each rank has checked its own data."""
    if name in ONE_LINE:
        assert EXPECTED[name] in "\n".join(lines)
        return
    for rank, line in enumerate(lines):
        where = device if device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"  # some ranks may share a GPU
        assert re.fullmatch(rf"rank {rank} of {len(lines)} on {where}:? {EXPECTED[name]}(; .*)?", line), line


@pytest.mark.parametrize("name", EXPECTED)
def test_example(run_program, name):
    arguments = (1,) if name == "38_jacobi.py" else ()  # four ranks need many steps: test_models has a small plate
    check(name, run_program(ROOT / "examples" / name, *arguments))


@table("count", [1, *(pytest.param(count, marks=exhaustive) for count in (3, 5))])
@table("name", [pytest.param(name, marks=[exhaustive] * (i % 2)) for i, name in enumerate(ANY_NUMBER)])
def test_on_other_numbers_of_ranks(run_program, name, count):
    """A rank alone is its own neighbour."""
    lines = run_program(ROOT / "examples" / name, count)
    assert len(lines) == count
    check(name, lines)


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", [name for name in EXPECTED if name[:2] not in ("02", "07", "10", "11", "40")])
def test_on_gpus(run_program, name, num_ranks):
    lines = run_program(ROOT / "examples" / name, num_ranks, device="cuda")
    assert len(lines) == num_ranks
    check(name, lines, "cuda")
    if name.startswith("24") and torch.cuda.get_device_capability() == (9, 0):
        assert all("kernel for Hopper" in line for line in lines)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("name", ["10_message_passing_load_store.py", "11_message_passing_put.py"])
def test_message_passing_between_gpus(run_program, name):
    check(name, run_program(ROOT / "examples" / name, device="cuda"), "cuda")
