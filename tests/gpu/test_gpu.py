"""On GPUs: the kit's tiers on our allocators, a program that was simply started, and a pool that survives errors."""

import pytest
import torch
from jobs_rma import run_rma
from tables import raises
from test_plugin import OnOurRanks

from iris_core import Iris
from iris_core.errors import CollectiveTimeoutError
from iris_core.world.launch import RankError

HANG_CYCLES = 60_000_000_000  # about half a minute


class TestTorchWithTriton(OnOurRanks):
    allocator, backend = "torch", "triton"


class TestVmemWithTriton(OnOurRanks):
    allocator, backend = "vmem", "triton"


@pytest.mark.gpu
def test_kernels_and_torch_work_on_the_same_memory(monkeypatch):
    """One rank in this very process and without torch.distributed."""
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "30")
    for op in ["load", "put"]:
        run_rma(op, "cuda")
    with Iris("64MiB", device="cuda") as ctx:
        a = ctx.full((512, 512), 0.5)
        eye = torch.eye(512, device=ctx.device)
        out = ctx.empty(512, 512)
        torch.matmul(a, eye, out=out)
        ctx.barrier()
        assert ctx.is_symmetric(out)
        assert bool((out == 0.5).all())


def hang():
    torch.cuda._sleep(HANG_CYCLES)
    torch.cuda.synchronize()


def index_out_of_range():
    """An assertion fails inside a kernel; from then on the driver refuses every call of this process."""
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([9], device="cuda")].sum().item()


def add_on_gpu():
    return torch.ones(1000, device="cuda").sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize(("job", "error", "key"), [
    (hang, CollectiveTimeoutError, "world.late"), (index_out_of_range, RankError, "any"),
])  # fmt: skip
def test_the_next_job_finds_a_gpu(pool, job, error, key):
    assert pool.run(add_on_gpu, 1) == [1000.0]
    with raises(error, key, job="hang", rank=0, size=1):
        pool.run(job, 1, timeout_s=3.0 if job is hang else 60.0)
    assert pool.run(add_on_gpu, 1) == [1000.0]
