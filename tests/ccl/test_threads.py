"""Calls from any thread, whatever its current device."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from iris_core import Iris
from iris_core.ccl import api
from iris_core.device.launch_order import StreamWork
from iris_core.dispatch import calls
from iris_core.ops import FusedWorkspace
from iris_core.ops import api as ops_api
from iris_core.types import DeviceTarget, DeviceType


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
    devices, target, x = [], DeviceTarget(DeviceType.CUDA, 1), torch.zeros(4, 4)

    def noted(found=None):
        return mock.Mock(side_effect=lambda *given: devices.append(Guard.current) or found)

    call = mock.Mock(run=noted(), workspace=FusedWorkspace())
    here = mock.Mock(heap=(0, 1))
    binder = mock.Mock(gpu=1, here=here, target=target, bound={}, fused={}, held={}, workspaces=weakref.WeakSet())
    binder.bind, binder.barrier = noted(call), noted()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: Guard.current, raising=False)
    monkeypatch.setattr(Guard, "current", current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (api, ops_api, calls):
        monkeypatch.setattr(module, "current_device", lambda: Guard.current)
    collectives, operations = api.Collectives(binder), ops_api.Operations(binder)
    collectives.all_reduce(x, x)
    operations.matmul_all_reduce(torch.zeros(4, 4), x, x)
    operations.matmul_all_reduce_preamble(torch.zeros(4, 4), x, x)
    collectives.bind("all_reduce", x, x)()
    collectives.barrier()
    context = mock.Mock(_reports=mock.Mock(alarm=[0], heard=0), target=target)
    context._device_barriers.bind.return_value.launch = noted()
    Iris.device_barrier(context)
    assert devices == [1] * 9
    assert Guard.current == current


def test_a_handle_lets_the_stream_of_its_own_device_wait(monkeypatch):
    waited = []
    stream = lambda device=None: SimpleNamespace(wait_event=lambda event: waited.append((device, event)))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    event = SimpleNamespace(device=torch.device("cuda", 1))
    StreamWork(event, "all_reduce", ()).wait()
    assert waited == [(event.device, event)]
