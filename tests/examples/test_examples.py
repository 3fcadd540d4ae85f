"""Every example runs as it is run by a reader, on CPU ranks and on GPUs, and says in its first lines what it shows."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import forked
import jobs_examples
import pytest
from tables import table

import iris_core

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
SHARED = {"example_tools.py", "torch_training.py"}

EXPECTED = {
    "01_load.py": "rank 3 of 4 on cpu read 5000 numbers of rank 0", "02_store.py": "rank 3 of 4 on cpu got 2",
    "03_all_load.py": "rank 3 of 4 on cpu added 5000 numbers of 4 ranks",
    "04_all_store.py": "rank 3 of 4 on cpu has 4 rows of 5000 numbers",
    "05_atomic_add.py": "rank 0 of 3 on cpu has 12000 numbers in 16 bins",
    "06_atomic_xchg.py": "rank 0 of 3 on cpu: 150 nodes in one list", "07_memory.py": "[4096, 8192, 4096, 0]",
    "10_message_passing_load_store.py": "rank 1 used 6 blocks of 1024 numbers",
    "11_message_passing_put.py": "rank 1 received 8 messages of 1024 numbers",
    "12_message_passing_context.py": "rank 2 of 3 on cpu: the sum came around 3 times",
    "13_message_passing_gluon.py": "rank 2 of 3 on cpu used 57 blocks",
    "20_gemm_all_scatter.py": "rank 1 of 2 on cpu: C is right 2 times",
    "21_gemm_all_scatter_producer_consumer.py": "rank 1 of 2 on cpu: C is right 2 times",
    "22_gemm_all_scatter_specialised.py": "rank 1 of 2 on cpu: C is right 2 times",
    "23_gemm_all_scatter_bulk_synchronous.py": "rank 1 of 2 on cpu: C is right 2 times",
    "24_gluon_gemm_all_scatter.py": "rank 1 of 2 on cpu: C is right; the portable kernel, because wgmma and TMA",
    "25_gemm_all_reduce.py": "rank 1 of 2 on cpu: C is right 3 times, and the same on all ranks",
    "26_gemm_all_reduce_atomics.py": "rank 1 of 2 on cpu: C is right 2 times",
    "27_gemm_all_reduce_one_shot.py": "rank 1 of 2 on cpu: C is right 4 times",
    "28_gemm_all_reduce_ring.py": "rank 1 of 2 on cpu: C is right 3 times",
    "29_all_gather_gemm_pull.py": "rank 1 of 2 on cpu: C is right 2 times",
    "30_all_gather_gemm_push.py": "rank 1 of 2 on cpu: C is right 2 times",
    "31_flash_decode.py": "tokens for 3 sequences, error", "32_ring_attention.py": "rank 1 of 2 on cpu: error",
    "33_moe.py": "experts, error", "34_norm.py": "norms of", "35_collectives.py": "18 calls are right",
    "36_operations.py": "rank 1 of 2 on cpu: matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul",
    "38_jacobi.py": "rank 0 of 1 on cpu: 4 x 8 cells", "40_overlap.py": "rank 2 of 3 on cpu: the sum is right 3 times",
    "54_mem_pool.py": "rank 1 of 2 on cpu added 2 products of torch",
}  # fmt: skip
"""What an example prints on CPU ranks, among other things.  test_models looks closer at 31 to 38, and runs 37."""

ANY_NUMBER = [
    name
    for name in EXPECTED
    if "[ranks]" in (ROOT / "examples" / name).read_text() and (name < "31" or name.startswith(("40", "54")))
]
"""Those that are told how many ranks they get."""

# What makes an example compute nonsense, and it has to say so.  Each on two ranks, of which both notice.
MISTAKES = [
    ("01_load.py", "(ctx.rank + 1) % WORLD, mask", "ctx.rank, mask"),
    ("03_all_load.py", "(ctx.rank + step) % WORLD, mask", "ctx.rank, mask"),
    ("04_all_store.py", "ctx.rank.to(tl.int64) * numel", "0 * ctx.rank.to(tl.int64)"),
    ("20_gemm_all_scatter.py", "(ctx.rank + step) % WORLD, mask", "ctx.rank, mask"),
    ("21_gemm_all_scatter_producer_consumer.py", "tl.static_range(1, WORLD)", "tl.static_range(1, 1)"),
    ("22_gemm_all_scatter_specialised.py", "program - computing, tiles_m", "program - computing + 1, tiles_m"),
    ("23_gemm_all_scatter_bulk_synchronous.py", "number // tiles_n, number % tiles_n", "number // tiles_n, 0"),
    ("25_gemm_all_reduce.py", "Tile(row, column", "Tile(row, 0 * column"),
    ("26_gemm_all_reduce_atomics.py", "c.zero_()", "c.fill_(1)"),
    ("27_gemm_all_reduce_one_shot.py", "range(WORLD)", "range(WORLD - 1)"),
    ("28_gemm_all_reduce_ring.py", "total += tl.load(arrival", "total = tl.load(arrival"),
    ("29_all_gather_gemm_pull.py", "b_tile, acc)", "b_tile)"),
    ("30_all_gather_gemm_push.py", "range(tl.cdiv(K, BLOCK_K))", "range(1, tl.cdiv(K, BLOCK_K))"),
]

GPU_TIERS = [
    pytest.param(1, marks=pytest.mark.gpu),
    *(pytest.param(count, marks=pytest.mark.multigpu(count)) for count in (2, 4, 8)),
]


@pytest.fixture
def run_example(pool, monkeypatch, capsys):
    """Returns a function (path, *arguments, device): run a script, with the pool's processes for `iris_core.run`.

    Everything else is as a reader has it: its arguments, the number of ranks that it asks for, what it prints.
    """

    def run(path, *arguments, device="cpu"):
        def on_pool(fn, num_ranks, *args):
            return pool.run(jobs_examples.call, num_ranks, str(path), fn.__name__, args, device)

        monkeypatch.setattr(iris_core, "run", on_pool)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


# -- the collection ---------------------------------------------------------------------------------------------------
def test_examples_are_numbered():
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in SHARED or re.fullmatch(r"\d\d_[a-z0-9_]+\.py", path.name), path.name
    numbers = [path.name[:2] for path in EXAMPLES]
    assert len(numbers) == len(set(numbers))


def test_every_example_is_tested():
    tests = "".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES:
        assert f'"{path.name}"' in tests, f"no test names {path.name}"
    assert set(EXPECTED) <= {path.name for path in EXAMPLES}


@table("path", EXAMPLES)
def test_an_example_says_what_it_is_and_how_it_is_run(path):
    text = path.read_text()
    header = re.match(r'"""(.+?)"""', text, re.DOTALL)
    assert header, "no docstring"
    for shown in re.findall(r"python (examples/\S+)", header[1]):
        assert shown == f"examples/{path.name}"
    assert 'if __name__ == "__main__":' in text


# -- running them -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EXPECTED)
def test_example(run_example, name):
    arguments = (
        (1,) if name == "38_jacobi.py" else ()
    )  # four ranks need many steps: test_models has them on a small plate
    assert EXPECTED[name] in "\n".join(run_example(ROOT / "examples" / name, *arguments))


@table("count", [1, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (3, 5))])
@table("name", ANY_NUMBER)
def test_on_other_numbers_of_ranks(run_example, name, count):
    """Each rank checks its own data; a rank alone is its own neighbour."""
    lines = run_example(ROOT / "examples" / name, count)
    assert [line[: len(f"rank {rank} ")] for rank, line in enumerate(lines)] == [f"rank {r} " for r in range(count)]


@table(("name", "count"), [
    pytest.param("13_message_passing_gluon.py", 5, marks=pytest.mark.exhaustive),
    pytest.param("24_gluon_gemm_all_scatter.py", 3, marks=pytest.mark.exhaustive),
    pytest.param("24_gluon_gemm_all_scatter.py", 5, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_on_more_ranks(run_example, name, count):
    """Those that no test gives other sizes."""
    assert len(run_example(ROOT / "examples" / name, count)) == count


@pytest.mark.parametrize("launcher", ["its variables", pytest.param("itself", marks=pytest.mark.exhaustive)])
def test_message_passing_under_torchrun(launcher):
    path = ROOT / "examples" / "11_message_passing_put.py"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")} | {"CUDA_VISIBLE_DEVICES": ""}
    if launcher == "itself":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        ended = [subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)]
    else:
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2") | {"TORCHELASTIC_RUN_ID": "test"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs_examples.free_port())}
        ranks = [variables | dict.fromkeys(("RANK", "LOCAL_RANK"), rank) for rank in "01"]
        with ThreadPoolExecutor(2) as threads:
            ended = list(threads.map(lambda each: forked.run(jobs_examples.script, path, environ=each), ranks))
    assert [each.returncode for each in ended] == [0] * len(ended), ended
    assert "rank 1 received 8 messages of 1024 numbers" in ended[-1].stdout


@table(("name", "right", "wrong"), MISTAKES)
def test_an_example_notices_its_mistakes(run_example, tmp_path, name, right, wrong):
    text = (ROOT / "examples" / name).read_text()
    assert right in text
    path = tmp_path / name
    path.write_text(text.replace(right, wrong))
    with pytest.raises(iris_core.errors.IrisError, match="AssertionError"):
        run_example(path, 2)


# -- on GPUs ----------------------------------------------------------------------------------------------------------
ON_GPUS = {
    "01_load.py": r"read 16777216 numbers of rank \d; [\d.]+ us, [\d.]+ GB/s",
    "03_all_load.py": r"added 16777216 numbers of \d ranks; .*",
    "04_all_store.py": r"has \d rows of 8388608 numbers; .*",
    "05_atomic_add.py": r"(has \d+ numbers in 16 bins: .*|counted 4000 numbers)",
    "06_atomic_xchg.py": r"(\d+ nodes in one list, which changes ranks \d+ times|pushed 50 nodes)",
    "12_message_passing_context.py": "the sum came around 3 times",
    "13_message_passing_gluon.py": "used 57 blocks",
    "24_gluon_gemm_all_scatter.py": "C is right; the (kernel for Hopper|portable kernel, because .*)",
    "25_gemm_all_reduce.py": r"C is right 3 times, and the same on all ranks; [\d.]+ us, \d+ TFLOP/s",
} | {
    name: r"C is right \d times; [\d.]+ us, \d+ TFLOP/s"
    for name in EXPECTED
    if name[:2] in ("20", "21", "22", "23", "26", "27", "28", "29", "30")
}
"""Behind the rank and its device."""


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", ON_GPUS)
def test_on_gpus(run_example, name, num_ranks):
    import torch

    if name.startswith("24") and torch.cuda.get_device_capability() == (9, 0):
        wanted = "C is right; the kernel for Hopper"
    else:
        wanted = ON_GPUS[name]
    lines = run_example(ROOT / "examples" / name, num_ranks, device="cuda")
    assert len(lines) == num_ranks
    for rank, line in enumerate(lines):  # with --ranks-per-gpu, some ranks share a GPU
        where = f"cuda:{rank % torch.cuda.device_count()}"
        assert re.fullmatch(rf"rank {rank} of {num_ranks} on {where}:? {wanted}", line), line


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("name", ["10_message_passing_load_store.py", "11_message_passing_put.py"])
def test_message_passing_between_gpus(run_example, name):
    assert EXPECTED[name] in "\n".join(run_example(ROOT / "examples" / name, device="cuda"))
