"""Every example runs as it is run by a reader."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))

EXPECTED = {
    "02_store.py": "rank 3 of 4 on cpu got 2",
    "11_message_passing_put.py": "rank 1 received 8 messages of 1024 numbers",
    "05_atomic_add.py": "[",
    "07_memory.py": "[4096, 8192, 4096, 0]",
    "13_message_passing_gluon.py": "rank 2 of 3 on cpu used 57 blocks",
    "24_gluon_gemm_all_scatter.py": "rank 1 of 2 on cpu: C is right; the portable kernel, because wgmma and TMA need",
    "25_gemm_all_reduce.py": "rank 1 of 2 on cpu: C is right 3 times, and the same on all ranks",
    "40_overlap.py": "rank 2 of 3 on cpu: the sum is right 3 times",
}

GPU_TIERS = [
    pytest.param(1, marks=pytest.mark.gpu),
    *(pytest.param(count, marks=pytest.mark.multigpu(count)) for count in (2, 4, 8)),
]


def run(*command, **environ):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", **environ}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_gpus(name, count):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))) if visible is None else visible}
    lines = run(sys.executable, str(ROOT / "examples" / name), str(count), **environ).splitlines()
    assert len(lines) == count
    return lines


def test_every_example_is_listed():
    assert [path.name for path in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path):
    assert EXPECTED[path.name] in run(sys.executable, str(path))


def test_message_passing_under_torchrun():
    out = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "examples" / "11_message_passing_put.py"),
    )  # fmt: skip
    assert "rank 1 received 8 messages of 1024 numbers" in out


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive), 5])
@pytest.mark.parametrize("name", ["13_message_passing_gluon.py", "24_gluon_gemm_all_scatter.py"])
def test_gluon_examples_on_cpu_ranks(name, count):
    """Each rank checks its own data; the pipeline of one rank feeds itself."""
    lines = run(sys.executable, str(ROOT / "examples" / name), str(count)).splitlines()
    assert [line[: len(f"rank {rank}")] for rank, line in enumerate(lines)] == [f"rank {rank}" for rank in range(count)]


@pytest.mark.parametrize("count", GPU_TIERS)
def test_gluon_pipeline_on_gpus(count):
    for rank, line in enumerate(run_on_gpus("13_message_passing_gluon.py", count)):
        assert line == f"rank {rank} of {count} on cuda:{rank} used 57 blocks"


@pytest.mark.parametrize("count", GPU_TIERS)
def test_gluon_gemm_all_scatter_on_gpus(count):
    import torch

    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    kernel = "the kernel for Hopper" if on_hopper else "the portable kernel, because"
    for rank, line in enumerate(run_on_gpus("24_gluon_gemm_all_scatter.py", count)):
        assert line.startswith(f"rank {rank} of {count} on cuda:{rank}: C is right; {kernel}")


@pytest.mark.parametrize("count", GPU_TIERS)
def test_gemm_all_reduce_on_gpus(count):
    for rank, line in enumerate(run_on_gpus("25_gemm_all_reduce.py", count)):
        assert line == f"rank {rank} of {count} on cuda:{rank}: C is right 3 times, and the same on all ranks"
