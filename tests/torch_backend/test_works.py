"""How long an asynchronous operation on a GPU keeps its tensors, and what it waits for: with stand-ins for the GPU."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from iris_core.device.launch_order import SideStream
from iris_core.torch_backend import operations
from iris_core.torch_backend.operations import GroupOperations

CUDA = torch.device("cuda", 0)


class Event:
    def record(self, stream):
        self.recorded = stream

    def wait(self, stream):
        stream.waits.append(self.recorded.name)


class Tensor:
    def __init__(self):
        self.streams, self.real = [], torch.zeros(3)

    def record_stream(self, stream):
        self.real.add_(1)
        self.streams.append(stream.name)


@pytest.fixture
def gpu(monkeypatch):
    """A group that runs operations on a side stream: `begin` runs one; `current` is the current stream."""
    main, other, side = (SimpleNamespace(name=name, cuda_stream=n, waits=[]) for n, name in enumerate("mos"))
    found = SimpleNamespace(main=main, other=other, side=side, current=main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index, priority: side)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: found.current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current.cuda_stream, raising=False)
    monkeypatch.setattr(operations, "on_stream", lambda stream, run: run())
    group = SimpleNamespace(_sides={CUDA: SideStream(0)})
    found.spare = group._sides[CUDA].spare
    found.begin = lambda tensor, run=int: GroupOperations._run(group, "name", run, True, CUDA, [tensor], [tensor])
    return found


def test_tensors_live_until_the_stream_of_the_call_waits(gpu):
    x, y = Tensor(), Tensor()
    work = gpu.begin(x)
    assert gpu.side.waits == ["m"]
    gpu.current = gpu.other
    work.wait()
    assert x in work._tensors
    gpu.current = gpu.main
    work.wait()
    work.wait()
    assert not work._tensors
    assert work.result() == [x]
    assert (gpu.main.waits, gpu.other.waits) == (["s", "s"], ["s"])
    first, second = work._event, gpu.begin(y)
    assert second._event is not first
    del work
    assert gpu.spare == [first]
    third = gpu.begin(Tensor())  # which only the work knows, as in the join of DDP
    third.wait()
    assert (third._event, len(third.result())) == (first, 1)
    gpu.current = gpu.other
    second.wait()
    del second
    assert (x.streams, y.streams) == ([], ["s"])


def test_torch_knows_of_tensors_whose_operation_nobody_waits_for(gpu):
    def fail():
        raise ValueError("of the second tensor, when the first one is on its way")

    x, y = Tensor(), Tensor()
    work = gpu.begin(x)
    with FakeTensorMode():
        del work
    with pytest.raises(ValueError, match="second"):
        gpu.begin(y, fail)
    gc.collect()
    assert (x.streams, y.streams) == (["s"], ["s"])
