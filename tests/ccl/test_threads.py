"""Calls from any thread, whatever its current device."""

import types
import weakref

import pytest
import torch
from jobs_threads import from_new_threads

from iris_core import Iris
from iris_core.ccl import api
from iris_core.device.launch_order import StreamWork
from iris_core.dispatch import calls
from iris_core.ops import FusedWorkspace
from iris_core.ops import api as ops_api
from iris_core.types import DeviceTarget, DeviceType


@pytest.mark.parametrize("num_ranks", [2])
def test_calls_from_new_threads(pool, num_ranks, device):
    assert pool.run(from_new_threads, num_ranks, device) == [([[3.0], [2.0], [64.0]] * 2, [""] * 6)] * num_ranks


class Guard:
    """What torch.cuda.device does, of devices that are not there."""

    current = 0

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before, Guard.current = Guard.current, self.index

    def __exit__(self, *error):
        Guard.current = self.before


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_runs_with_the_contexts_device_current(monkeypatch, current):
    devices = []
    call = types.SimpleNamespace(run=lambda *tensors: devices.append(Guard.current), workspace=FusedWorkspace())

    def bind(found):
        def bind(*question):
            devices.append(Guard.current)
            return found

        return bind

    target = DeviceTarget(DeviceType.CUDA, 1)
    binder = types.SimpleNamespace(
        gpu=1, here=types.SimpleNamespace(heap=(0, 1)), target=target,
        bound={}, fused={}, held={}, workspaces=weakref.WeakSet(),
    )  # fmt: skip
    binder.open = lambda: None
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: Guard.current, raising=False)
    monkeypatch.setattr(Guard, "current", current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    for module in (api, ops_api, calls):
        monkeypatch.setattr(module, "current_device", lambda: Guard.current)
    x = torch.zeros(4, 4)
    binder.bind = bind(call)
    api.Collectives(binder).all_reduce(x, x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    operations = ops_api.Operations(binder)
    operations.matmul_all_reduce(torch.zeros(4, 4), x, x)
    operations.matmul_all_reduce_preamble(torch.zeros(4, 4), x, x)
    api.Collectives(binder).bind("all_reduce", x, x)()
    binder.barrier = bind(None)
    api.Collectives(binder).barrier()
    barriers = types.SimpleNamespace(bind=lambda *which: types.SimpleNamespace(launch=lambda stream: binder.bind()))
    reports = types.SimpleNamespace(watch=lambda: None, alarm=[0], heard=0)
    context = {"_check_open": lambda: None, "_reports": reports, "_device_barriers": barriers, "target": target}
    Iris.device_barrier(types.SimpleNamespace(**context))
    assert devices == [1] * 9
    assert Guard.current == current


def test_a_handle_lets_the_stream_of_its_own_device_wait(monkeypatch):
    waited = []
    stream = lambda device=None: types.SimpleNamespace(wait_event=lambda event: waited.append((device, event)))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    event = types.SimpleNamespace(device=torch.device("cuda", 1))
    StreamWork(event, "all_reduce", ()).wait()
    assert waited == [(event.device, event)]
