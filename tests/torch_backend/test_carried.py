"""Which calls NCCL carries, in which order, and what happens where it cannot: with stand-ins for it and for the GPU."""

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from tables import raises

from iris_core.device.launch_order import DeviceOrder
from iris_core.errors import IrisError, PeerLostError
from iris_core.torch_backend import carried

BLOCKING, BESIDE = (SimpleNamespace(asyncOp=each, reduceOp=dist.ReduceOp.SUM) for each in (False, True))
SMALL, LARGE = torch.zeros(8), torch.zeros(carried._LARGE_NBYTES // 4)


@pytest.fixture
def made(monkeypatch):
    """Returns a function that makes a `Carried` for two ranks, and what its stand-ins have noted."""
    noted = MagicMock(compared=[], engines=[], is_usual=True, is_captured=False, aborted=threading.Event())
    monkeypatch.setattr(carried, "SideStream", lambda index: SimpleNamespace(follow=noted.follow, stream=None))
    monkeypatch.setattr(carried, "on_stream", lambda stream, run: run())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: noted.is_captured)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU 0"))
    monkeypatch.setattr(carried, "_LOOK_S", 0.01)

    def run(launch, *arguments, engine=None):
        noted.engines.append(engine)
        return launch(*arguments)

    def make(other="GPU 1", refuses=None, fails=None):
        def compare(members, facts, row):
            noted.compared.append(facts)
            return [row, other if row == "GPU 0" else noted.is_usual if isinstance(row, bool) else ""]

        def call(*arguments):
            if fails:
                raise fails
            first = arguments[0]
            (first if isinstance(first, torch.Tensor) else first[0]).fill_(7)
            return SimpleNamespace(wait=lambda: None, arguments=arguments)

        noted.connect.side_effect = refuses
        methods = {"eager_connect_single_device": noted.connect, "abort": noted.aborted.set}
        continues = lambda engine: noted.engines[-1:] == [engine]
        order = MagicMock(spec=DeviceOrder, **{"run.side_effect": run, "continues.side_effect": continues})
        here = SimpleNamespace(heap=(SMALL.data_ptr(), SMALL.data_ptr() + SMALL.nbytes), world_size=2)
        members = SimpleNamespace(gather=compare)
        binder = SimpleNamespace(order=lambda _: order, here=here, members=members, members_of=lambda _: (0, 1))
        ctx = SimpleNamespace(_binder=binder, heap=SimpleNamespace(check_peers=noted.check_peers))
        return carried.Carried(ctx, lambda name: methods.get(name, call), torch.device("cpu"))

    return make, noted


def reduce(each, x, opts=BESIDE):
    return each.call("allreduce", x, x, opts)


def test_what_it_carries(made):
    make, noted = made
    each, x, part = make(), torch.zeros(4), torch.zeros(LARGE.numel() // 2)
    assert reduce(each, x) is None  # the first of its kind
    assert reduce(each, x).arguments == ([x], BESIDE)
    assert noted.follow.call_count == 1  # the current stream does not wait for the launch of ours before
    reduce(each, x)
    assert noted.follow.call_count == 1
    noted.is_captured = True
    assert reduce(each, x) is None
    noted.is_captured = False
    assert reduce(each, x, BLOCKING) is None
    assert reduce(each, SMALL) is None  # on the heap
    for other in (torch.zeros(4, dtype=torch.int32), torch.zeros(4, device="meta")):
        assert reduce(each, other) is None
        assert reduce(each, other) is None
    for opts in (BLOCKING, BLOCKING):
        found = each.call("all_gather_single", LARGE, part, opts)
    assert found is each._done
    for _ in range(2):  # parts that do not fit, which Iris refuses
        assert each.call("all_gather_single", LARGE, part[1:], BLOCKING) is None
    assert reduce(each, LARGE, BLOCKING) is None  # nothing runs beside a sum that is waited for
    assert set(noted.engines) == {carried._ENGINE}
    assert len(noted.engines) == 3
    assert [facts["operation"] for facts in noted.compared] == ["allreduce"] * 4 + ["all_gather_single"]
    each.close()


def test_members_decide_alike_wherever_tensors_lie(made):
    make, noted = made
    each = make()
    for x in (SMALL, torch.zeros(4, 2).T):  # on the heap; strided
        assert [reduce(each, given) for given in (x, torch.zeros(x.shape))] == [None, None]
    noted.is_usual = False  # another member's
    assert [reduce(each, torch.zeros(5)) for _ in range(2)] == [None, None]
    noted.is_usual = True
    assert reduce(each, torch.zeros(2, 3)) is None
    assert noted.engines == []
    for x in (torch.zeros(3, 2).T, torch.zeros(2, 3)):
        assert reduce(each, x) is not None
        assert (x == 7).all()
    for whole, x in ((torch.zeros(8), torch.zeros(4)), (torch.zeros(16)[::2], torch.zeros(8)[::2])):
        found = each.call("reduce_scatter_single", whole, x, BESIDE)
    assert found is each._done
    assert x.tolist() == [7.0] * 4
    assert not whole.any()
    each.close()


@pytest.mark.parametrize("how", [{"other": "GPU 0"}, {"refuses": RuntimeError("no NCCL here")}])
def test_iris_serves_where_nccl_cannot(made, how):
    make, noted = made
    each = make(**how)
    assert [reduce(each, torch.zeros(4)) for _ in range(3)] == [None] * 3
    assert noted.connect.call_count == ("refuses" in how)
    assert noted.engines == []


def test_a_lost_peer_is_named(made):
    make, noted = made
    each = make()
    reduce(each, torch.zeros(4))
    noted.check_peers.side_effect = PeerLostError("rank 1 is gone")
    assert noted.aborted.wait(60)
    with raises(PeerLostError, name="rank 1"):
        reduce(each, torch.zeros(4))


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_nccl_raises_is_an_error_of_iris(made, is_lost):
    make, noted = made
    each = make(fails=RuntimeError("NCCL error"))
    reduce(each, torch.zeros(4))
    each.close()
    noted.check_peers.side_effect = PeerLostError("rank 1 is gone") if is_lost else None
    with raises(PeerLostError if is_lost else IrisError, name="rank 1" if is_lost else "NCCL error"):
        reduce(each, torch.zeros(4))
