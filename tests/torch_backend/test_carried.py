"""Which calls NCCL carries, in which order, and what happens where it cannot: with stand-ins for it and for the GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from iris_core.device.launch_order import DeviceOrder
from iris_core.errors import IrisError, PeerLostError
from iris_core.torch_backend import carried

BLOCKING, BESIDE = (SimpleNamespace(asyncOp=each, reduceOp=dist.ReduceOp.SUM) for each in (False, True))
SMALL, LARGE = torch.zeros(8), torch.zeros(carried._LARGE_NBYTES // 4)


class Order(DeviceOrder):
    def __init__(self):
        self.log, self.engine = [], None

    def run(self, launch, *arguments, engine=None):
        self.log.append(engine)
        self.engine = engine
        return launch(*arguments)

    def continues(self, engine):
        return self.engine == engine


@pytest.fixture
def made(monkeypatch):
    """Returns a function that makes a `Carried` for two ranks, and what its stand-ins have noted."""
    noted = SimpleNamespace(
        streams=0, compared=[], connected=0, is_usual=True, aborted=threading.Event(), lost=None, is_captured=False
    )
    order = Order()

    def follow():
        noted.streams += 1

    monkeypatch.setattr(carried, "SideStream", lambda index: SimpleNamespace(follow=follow, stream=None))
    monkeypatch.setattr(carried, "on_stream", lambda stream, run: run())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: noted.is_captured)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU 0"))
    monkeypatch.setattr(carried, "_LOOK_S", 0.01)

    def make(other="GPU 1", refuses=None, fails=None):
        def compare(members, facts, row):
            noted.compared.append(facts)
            return [row, other if row == "GPU 0" else noted.is_usual if isinstance(row, bool) else ""]

        def connect(device):
            noted.connected += 1
            if refuses:
                raise RuntimeError(refuses)

        def call(*arguments):
            if fails:
                raise fails
            first = arguments[0]
            (first if isinstance(first, torch.Tensor) else first[0]).fill_(7)
            return SimpleNamespace(wait=lambda: None, arguments=arguments)

        def check_peers(failed=False):
            if noted.lost:
                raise noted.lost

        methods = {"eager_connect_single_device": connect, "abort": noted.aborted.set}
        here = SimpleNamespace(heap=(SMALL.data_ptr(), SMALL.data_ptr() + SMALL.nbytes), world_size=2)
        members = SimpleNamespace(gather=compare)
        binder = SimpleNamespace(order=lambda _: order, here=here, members=members, members_of=lambda _: (0, 1))
        ctx = SimpleNamespace(_binder=binder, heap=SimpleNamespace(check_peers=check_peers))
        return carried.Carried(ctx, lambda name: methods.get(name, call), torch.device("cpu"))

    return make, noted, order


def reduce(each, x, opts=BESIDE):
    return each.call("allreduce", x, x, opts)


def test_what_it_carries(made):
    make, noted, order = made
    each, x, part = make(), torch.zeros(4), torch.zeros(LARGE.numel() // 2)
    assert reduce(each, x) is None  # the first of its kind
    assert reduce(each, x).arguments == ([x], BESIDE)
    assert noted.streams == 1  # the current stream does not wait for the launch of ours before
    reduce(each, x)
    assert noted.streams == 1
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
    assert set(order.log) == {carried._ENGINE}
    assert len(order.log) == 3
    assert [facts["operation"] for facts in noted.compared] == ["allreduce"] * 4 + ["all_gather_single"]
    each.close()


def test_members_decide_alike_wherever_tensors_lie(made):
    make, noted, order = made
    each = make()
    for x in (SMALL, torch.zeros(4, 2).T):  # on the heap; strided
        assert [reduce(each, given) for given in (x, torch.zeros(x.shape))] == [None, None]
    noted.is_usual = False  # another member's
    assert [reduce(each, torch.zeros(5)) for _ in range(2)] == [None, None]
    noted.is_usual = True
    assert reduce(each, torch.zeros(2, 3)) is None
    assert order.log == []
    for x in (torch.zeros(3, 2).T, torch.zeros(2, 3)):
        assert reduce(each, x) is not None
        assert (x == 7).all()
    for whole, x in ((torch.zeros(8), torch.zeros(4)), (torch.zeros(16)[::2], torch.zeros(8)[::2])):
        found = each.call("reduce_scatter_single", whole, x, BESIDE)
    assert found is each._done
    assert x.tolist() == [7.0] * 4
    assert not whole.any()
    each.close()


@pytest.mark.parametrize("how", [{"other": "GPU 0"}, {"refuses": "no NCCL here"}])
def test_iris_serves_where_nccl_cannot(made, how):
    make, noted, order = made
    each = make(**how)
    assert [reduce(each, torch.zeros(4)) for _ in range(3)] == [None] * 3
    assert noted.connected == ("refuses" in how)
    assert order.log == []


def test_a_lost_peer_is_named(made):
    make, noted, _ = made
    each = make()
    reduce(each, torch.zeros(4))
    noted.lost = PeerLostError("rank 1 is gone")
    assert noted.aborted.wait(60)
    with pytest.raises(PeerLostError, match="rank 1"):
        reduce(each, torch.zeros(4))


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_nccl_raises_is_an_error_of_iris(made, is_lost):
    make, noted, _ = made
    each = make(fails=RuntimeError("NCCL error"))
    reduce(each, torch.zeros(4))
    each.close()
    noted.lost = PeerLostError("rank 1 is gone") if is_lost else None
    with pytest.raises(PeerLostError if is_lost else IrisError, match="rank 1" if is_lost else "NCCL error"):
        reduce(each, torch.zeros(4))
