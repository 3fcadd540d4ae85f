"""Whole scripts in the manner of AMD's Iris, with nothing changed but their import lines."""

import ast
import importlib
import json
import linecache
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from jobs_common import environment
from kernel_text import kernel_of
from rank_counts import rank_counts
from recording import record
from tables import table

import iris_gluon as iris_gl
import iris_triton as iris
from iris_core.bench import load, registry
from iris_core.torch_backend.library import name_of
from iris_triton.language.blocks import lanes
from iris_triton.rocm_iris import ported_context
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for
from iris_triton.testing.languages import in_gluon

HERE = pathlib.Path(__file__).parent
SCRIPTS = [
    (path.stem, node.name)
    for path in sorted(HERE.glob("ported_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list and not node.name.startswith("_")
]
SCRIPTS.remove(("ported_rma", "peers_memory"))  # which has a test of its own
LINE = "import iris_triton.as_iris"


# -- rank jobs --------------------------------------------------------------------------------------------------------
def run_script(module, script, device, *args):
    """Call a script; its contexts take their device from the environment, since their constructor has no such name."""
    with environment(IRIS_DEVICE=device):
        return getattr(importlib.import_module(module), script)(*args)


def load_from_torchs_symmetric_memory():
    """Kernels are given the addresses that torch's own symmetric memory has of the peers; there is no context."""
    from ported_rma import BLOCK, load_and_add
    from torch.distributed import _symmetric_memory

    rank, world = dist.get_rank(), dist.get_world_size()
    device, partner = torch.device("cuda", rank % torch.cuda.device_count()), (rank + 1) % world
    torch.cuda.set_device(device)
    x = _symmetric_memory.empty(2 * BLOCK, dtype=torch.int32, device=device)
    handle = _symmetric_memory.rendezvous(x, dist.group.WORLD)
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    found = torch.zeros(BLOCK, dtype=torch.int32, device=device)
    x.fill_(rank)
    handle.barrier()
    load_and_add[(1,)](x, found, rank, partner, peers, BLOCK)
    handle.barrier()
    assert (found == partner).all()
    assert (x[BLOCK:] == rank + 1 + (rank - 1) % world).all()
    handle.barrier()
    torch.cuda.synchronize()


def operators_of_torch(device):
    """They work with a script's context, and have torch's layouts: all_to_all exchanges rows."""
    with environment(IRIS_DEVICE=device):
        ctx = ported_context.iris(1 << 22)
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    x = torch.arange(size * 4.0, device=ctx.device).view(size, 4) + 100 * rank
    found = torch.ops.iris.all_to_all(x, name_of(ctx))
    assert found.tolist() == [[rank * 4.0 + i + 100 * other for i in range(4)] for other in range(size)]
    ones = torch.ones(size, 4, device=ctx.device)
    assert torch.ops.iris.matmul_all_reduce(ones, ones.T @ ones, None, name_of(ctx)).unique().tolist() == [4 * size**2]
    ctx.barrier()


# -- tests ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@table(("module", "script"), SCRIPTS)
def test_script(pool, module, script, num_ranks, device):
    pool.run(run_script, num_ranks, module, script, device)


@pytest.mark.parametrize("num_ranks", [2])
def test_operators_of_torch(pool, num_ranks, device):
    pool.run(operators_of_torch, num_ranks, device)


@pytest.mark.parametrize("num_ranks", [4])
def test_allocations_of_late_ranks(pool, num_ranks, device):
    pool.run(run_script, num_ranks, "ported_rma", "allocations", device, 45, 0.01)


ALLOCATORS = [("cpu", "host"), *(pytest.param("cuda", name, marks=pytest.mark.multigpu) for name in ("torch", "vmem"))]


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize(("device", "allocator"), ALLOCATORS)
def test_peers_memory(pool, num_ranks, device, allocator):
    pool.run(run_script, num_ranks, "ported_rma", "peers_memory", device, allocator)


@pytest.mark.multigpu(shared=False)  # which torch's own memory refuses
@pytest.mark.parametrize("num_ranks", [2])
def test_torchs_symmetric_memory(pool, num_ranks):
    pool.run(load_from_torchs_symmetric_memory, num_ranks)


@pytest.mark.parametrize("num_ranks", [1])
@table(("module", "script"), SCRIPTS)
def test_script_of_a_rank_alone(pool, module, script, num_ranks, device):
    pool.run(run_script, num_ranks, module, script, device)


@pytest.mark.parametrize("num_ranks", [2])
def test_traced_by_hand(pool, num_ranks, device, tmp_path):
    pool.run(run_script, num_ranks, "ported_gluon", "pipeline", device, str(tmp_path))


def test_one_line_is_ours():
    for path in HERE.glob("ported_*.py"):
        tree = ast.parse(path.read_text())
        lines = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert [line for line in lines if re.match(r"(import|from) iris_", line)] == [LINE], path
        assert lines[-1] != LINE, f"{path.name} imports nothing of iris"


def run(name, *arguments, launcher=()):
    """Run a program on the CPU, and return its exit status and what it says."""
    environ = {**os.environ, "IRIS_LOG_LEVEL": "INFO", "IRIS_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(HERE / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    return done.returncode, done.stderr


def test_benchmark_on_the_command_line(tmp_path):
    out = tmp_path / "result.json"
    options = "--benchmark_filter=gather --heap_size=4194304 --n_warmup=1 --n_repeat=2 --axis_num_ranks=1 --use_gluon"
    axes = "--axis_dtype=fp16,bf16", "--skip_n=pow2:10:10"
    status, said = run("ported_bench.py", *options.split(), *axes, f"--benchmark_out={out}")
    assert status == 0, said
    results = json.loads(out.read_text())["results"]
    points = [(each["params"]["n"], each["params"]["dtype"], each["params"]["num_ranks"]) for each in results]
    dtypes = ("torch.float16", "torch.bfloat16")
    assert points == [(n, dtype, 1) for n in (256, 512) for dtype in dtypes]
    assert [bool(each.get("skipped")) for each in results] == [False, False, True, True]
    assert results[0]["counters"] == {"backend": len("gluon")}
    assert results[0]["time_us"] > 0


WRONG = {
    "--axis_m=3": "no chosen benchmark has an axis 'm'", "--skip_m=3": "no chosen benchmark has an axis 'm'",
    "--skip_dtype=fp16,fp32": "nothing is left to run", "--skip_num_ranks=2": "nothing is left to run",
    "--axis_n=pow2:3:1": "exponents", "--axis_num_ranks=0": "num_ranks must be at least 1",
}  # fmt: skip


@table("option", WRONG)
def test_benchmark_refuses(monkeypatch, capsys, option):
    monkeypatch.setattr(registry, "BENCHMARKS", {})
    load(HERE / "ported_bench.py")
    assert iris.bench.main([option]) == 2
    assert WRONG[option] in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        iris.bench.main(["--what"])


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_gpus(target):
    """A rank alone runs the script; what it launches is compiled for a GPU on the way."""
    with record({target: TARGETS[target]}) as found:
        run_script("ported_rma", "accesses", "cpu", (torch.bfloat16,))
    assert {each.target for each in found} == {target}


FRESH = {"sm_90": r"ld\.volatile\.global", "gfx942": r"global_load_dword \S+ .* sc0 sc1"}


@triton.jit
def load_fresh(x, y, bases, rank: tl.constexpr, MODIFIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, iris.load(x + i, rank, rank, bases, cache_modifier=MODIFIER, volatile=True))


@table("target", FRESH)
@table("modifier", [None, "", ".ca", ".cv"])
def test_volatile_goes_before_cache_modifiers(modifier, target):
    arguments = torch.float32, torch.float32, torch.int64, 0, modifier, 128
    assert re.search(FRESH[target], assembly(compile_for(load_fresh, arguments, target=target)))
    with environment(IRIS_DEVICE="cpu"), iris.iris(1 << 20) as shmem:
        x, y = shmem.rand(128), shmem.zeros(128)
        load_fresh[(1,)](x, y, shmem.get_heap_bases(), 0, modifier, 128)
        assert torch.equal(x, y)


HINTED = """
i = lanes(BLOCK)
tl.assume(n % 16 == 0)
value = iris.load(x + i, rank, rank, bases, mask=i < n, hint=(16,))
tl.store(y + i, value, mask=i < n)
"""


@table("language", ["triton", "gluon"])
def test_hints_that_are_not_true_stop_no_script(language):
    parameters = "x, y, bases, rank: tl.constexpr, n, BLOCK: tl.constexpr"
    kernel, iris_here = kernel_of(triton.jit, parameters, HINTED, iris=iris, tl=tl, lanes=lanes), iris
    if language == "gluon":  # of a line, it is said once
        kernel, iris_here = in_gluon(kernel), iris_gl
    with environment(IRIS_DEVICE="cpu"), iris_here.iris(1 << 20) as shmem:
        x, y = shmem.rand(129), shmem.zeros(128)
        with pytest.warns(RuntimeWarning, match="may go wrong by it") as caught:
            kernel[(3,)](x[1:], y, shmem.get_heap_bases(), 0, 99, 128)
        lines = [linecache.getline(each.filename, each.lineno) for each in caught]
        assert [("assume(" in line, "hint=" in line) for line in lines] == [(True, False), (False, True)]
        assert torch.equal(y[:99], x[1:100])


@pytest.mark.exhaustive
def test_benchmark_under_torchrun(tmp_path):
    out = tmp_path / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = "--heap_size=4194304 --n_repeat=2 --axis_n=256 --axis_num_ranks=2,4"
    status, said = run("ported_bench.py", *options.split(), f"--benchmark_out={out}", launcher=launcher)
    assert status == 0, said
    assert "num_ranks=4 is left out" in said
    assert {each["params"]["num_ranks"] for each in json.loads(out.read_text())["results"]} == {2}
