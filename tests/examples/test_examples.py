"""Every example runs as it is run by a reader, on CPU ranks and on GPUs, and says in its first lines what it shows."""

import pathlib
import re

import pytest
import torch
from rank_counts import GPU_TIERS
from tables import table

import iris_core

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))

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

# What makes an example compute nonsense, and it has to say so.  Each on two ranks, but for a small plate on one.
MISTAKES = [
    ("01_load.py", "(ctx.rank + 1) % WORLD, mask", "ctx.rank, mask"),
    ("04_all_store.py", "ctx.rank.to(tl.int64) * numel", "0 * ctx.rank.to(tl.int64)"),
    ("21_gemm_all_scatter_producer_consumer.py", "tl.static_range(1, WORLD)", "tl.static_range(1, 1)"),
    ("23_gemm_all_scatter_bulk_synchronous.py", "number // tiles_n, number % tiles_n", "number // tiles_n, 0"),
    ("26_gemm_all_reduce_atomics.py", "c.zero_()", "c.fill_(1)"),
    ("28_gemm_all_reduce_ring.py", "total += tl.load(arrival", "total = tl.load(arrival"),
    ("30_all_gather_gemm_push.py", "range(tl.cdiv(K, BLOCK_K))", "range(1, tl.cdiv(K, BLOCK_K))"),
    ("32_ring_attention.py", "causal=causal", "causal=not causal"),
    ("34_norm.py", "stream += part", "stream = part"),
    ("36_operations.py", "gather_dim=0)  # shards are rows", "gather_dim=0, bias=on(bias))  # shards are rows"),
]

exhaustive = pytest.mark.exhaustive


@table("path", EXAMPLES)
def test_an_example_has_a_number_and_a_test_and_says_how_it_is_run(path):
    assert [other.name[:2] for other in EXAMPLES].count(path.name[:2]) == 1
    assert any(f'"{path.name}"' in test.read_text() for test in pathlib.Path(__file__).parent.glob("test_*.py"))
    text = path.read_text()
    header = re.match(r'"""(.+?)"""', text, re.DOTALL)
    assert header, "no docstring"
    for shown in re.findall(r"python (examples/\S+)", header[1]):
        assert shown == f"examples/{path.name}"
    assert 'if __name__ == "__main__":' in text


def check(name, lines, device="cpu"):
    """Whether an example has said what it should; each rank has checked its own data."""
    if name in ONE_LINE:
        assert EXPECTED[name] in "\n".join(lines)
        return
    for rank, line in enumerate(lines):
        where = device if device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"  # some ranks may share a GPU
        assert re.fullmatch(rf"rank {rank} of {len(lines)} on {where}:? {EXPECTED[name]}(; .*)?", line), line


# -- running them -----------------------------------------------------------------------------------------------------
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


@table(("name", "right", "wrong"), MISTAKES)
def test_an_example_notices_its_mistakes(run_program, tmp_path, name, right, wrong):
    text = (ROOT / "examples" / name).read_text()
    assert right in text
    path = tmp_path / name
    path.write_text(text.replace(right, wrong))
    with pytest.raises(iris_core.errors.IrisError, match="AssertionError"):
        run_program(path, 1 if name == "38_jacobi.py" else 2)


# -- on GPUs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", [name for name in EXPECTED if name[:2] not in ("02", "07", "10", "11", "40", "54")])
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
