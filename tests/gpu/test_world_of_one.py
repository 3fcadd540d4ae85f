"""One rank on one GPU, in this very process and without torch.distributed: a program that was simply started."""

import pytest
import torch
from jobs_atomics import LEGAL, run_atomic
from jobs_rma import run_rma
from jobs_sync import run_barrier, run_count

from iris_core import Iris

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _bounded_waits(monkeypatch):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "30")


def test_rma_with_itself():
    for op in ["load", "store", "get", "put", "copy"]:
        assert run_rma(op, False, "cuda") == []


def test_atomics_on_itself():
    for op in list(LEGAL):
        assert run_atomic(op, "cuda") == []


def test_signals_to_itself():
    assert run_count("int64", 100, "cuda") == 100
    assert run_barrier(0, 1, 1, 50, 3, "cuda") == 0


def test_torch_and_the_heap_work_on_the_same_memory():
    with Iris("64MiB", device="cuda") as ctx:
        a = ctx.full((512, 512), 0.5)
        eye = torch.eye(512, device=ctx.device)
        out = ctx.empty(512, 512)
        torch.matmul(a, eye, out=out)
        ctx.barrier()
        assert ctx.is_symmetric(out)
        assert bool((out == 0.5).all())
