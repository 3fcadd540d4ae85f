"""One rank on one GPU, in this very process and without torch.distributed: a program that was simply started."""

import pytest
import torch
from jobs_rma import run_rma

from iris_core import Iris

pytestmark = pytest.mark.gpu


def test_kernels_and_torch_work_on_the_same_memory(monkeypatch):
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
