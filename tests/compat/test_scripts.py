"""Whole scripts in the manner of AMD's Iris, of which only the line `import iris_triton.as_iris` is ours."""

import importlib
import json
import linecache
import os
import pathlib
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
from tables import says, table

import iris_gluon as iris_gl
import iris_triton as iris
from iris_core.torch_backend.library import name_of
from iris_triton.language.blocks import lanes
from iris_triton.rocm_iris import ported_context
from iris_triton.testing.languages import in_gluon

HERE = pathlib.Path(__file__).parent
SCRIPTS = [
    ("ported_rma", "accesses"), ("ported_rma", "context_tensor"), ("ported_rma", "allocations"),
    ("ported_collectives", "all_reduce"), ("ported_collectives", "gathers_and_scatters"),
    ("ported_collectives", "groups"), ("ported_collectives", "fused"), ("ported_gluon", "pipeline"),
]  # fmt: skip


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
        ctx = ported_context.Iris(1 << 22)
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    x = torch.arange(size * 4.0, device=ctx.device).view(size, 4) + 100 * rank
    found = torch.ops.iris.all_to_all(x, name_of(ctx))
    assert found.tolist() == [[rank * 4.0 + i + 100 * other for i in range(4)] for other in range(size)]
    ones = torch.ones(size, 4, device=ctx.device)
    assert torch.ops.iris.matmul_all_reduce(ones, ones.T @ ones, None, name_of(ctx)).unique().tolist() == [4 * size**2]
    ctx.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize("num_ranks", [2])
def test_traced_by_hand(pool, num_ranks, device):
    pool.run(run_script, num_ranks, "ported_gluon", "pipeline", device, True)


def test_benchmark_on_the_command_line(tmp_path):
    out = tmp_path / "result.json"
    options = "--benchmark_filter=gather --heap_size=4194304 --n_warmup=1 --n_repeat=2 --axis_num_ranks=1 --use_gluon"
    axes = "--axis_dtype=fp16,bf16", "--skip_n=pow2:10:10"
    command = [sys.executable, str(HERE / "ported_bench.py"), *options.split(), *axes, f"--benchmark_out={out}"]
    environ = {**os.environ, "IRIS_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    dtypes = ("torch.float16", "torch.bfloat16")
    points = [{"n": n, "dtype": dtype, "num_ranks": 1} for n in (256, 512) for dtype in dtypes]
    assert [each["params"] for each in results] == points
    assert [bool(each.get("skipped")) for each in results] == [False, False, True, True]
    assert results[0]["counters"] == {"backend": len("gluon")}
    assert results[0]["time_us"] > 0


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
        with pytest.warns(RuntimeWarning, match=says("hint.where")) as caught:
            kernel[(3,)](x[1:], y, shmem.get_heap_bases(), 0, 99, 128)
        lines = [linecache.getline(each.filename, each.lineno) for each in caught]
        assert [("assume(" in line, "hint=" in line) for line in lines] == [(True, False), (False, True)]
        assert torch.equal(y[:99], x[1:100])


@table(("variable", "options", "wanted"), [
    ("1", {}, 1), ("0", {}, 0), ("1", {"triton": {"allocation_barrier": False}}, 0),
])  # fmt: skip
def test_what_allocates_ends_with_a_barrier(monkeypatch, variable, options, wanted):
    variables = {"IRIS_DEVICE": "cpu", "IRIS_TRITON__ALLOCATION_BARRIER": variable}
    with environment(**variables), iris.Iris(1 << 20, options=options) as ctx:
        calls = []
        monkeypatch.setattr(ctx, "barrier", lambda: calls.append("barrier"))
        x = ctx.zeros(3)
        ctx.ones(3, out=x)
        monkeypatch.setattr(ctx.heap.streams, "is_capturing", lambda: True)
        ctx.as_symmetric(x)
        assert len(calls) == wanted


def test_calls_end_with_a_barrier_unless_they_are_asynchronous(monkeypatch):
    met = []
    with environment(IRIS_DEVICE="cpu"), iris.iris(1 << 20) as shmem:
        monkeypatch.setattr(type(shmem.ccl), "_meet", lambda self, group: met.append(group))
        x, out = shmem.zeros(4, 4), shmem.zeros(4, 4)
        for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
            getattr(shmem.ccl, name)(out, x, async_op=True)
            assert None not in met
            getattr(shmem.ccl, name)(out, x, group=[0])
        shmem.ccl.broadcast(x)  # which AMD's Iris has not
        assert met == [[0]] * 4
