"""What kernels report reaches the next call of every rank that it concerns; and long waits are warned about."""

import operator

import jobs_reports as jobs
import pytest
import torch
from rank_counts import rank_counts
from tables import table

from iris_core import Iris
from iris_core.device import status
from iris_core.device.context_words import Status
from iris_core.device.status import StatusPage
from iris_core.errors import DeviceError
from iris_core.types import DeviceTarget, DeviceType
from iris_core.world import SingleWorld

FOLLOWING = [
    "all_reduce", "all_reduce of another kind", "async", "matmul_all_reduce", "device_barrier", "ccl.barrier",
    "barrier",
]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_member_raises_at_its_next_call(pool, some, num_ranks, device):
    for following in FOLLOWING if device == "cuda" or num_ranks == 2 else some(FOLLOWING, 7):  # all_reduce
        for said in pool.run(jobs.gives_up, num_ranks, device, following):
            assert said in [("DeviceTimeoutError", rank, 1, "all_reduce") for rank in (0, 2)[: num_ranks - 1]], (
                following
            )


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("following", ["all_reduce", None])
def test_after_a_barrier_every_member_raises_or_resets(pool, num_ranks, device, following):
    wanted = ("DeviceTimeoutError", 0, 1, "device_barrier") if following else None  # a reset drops what was not raised
    found = pool.run(jobs.gives_up, num_ranks, device, following, "device_barrier" if following else "all_reduce")
    assert found == [wanted] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_member_hears_of_a_different_call(pool, num_ranks, device):
    for (kind, rank, peer, op), (text,) in pool.run(jobs.goes_wrong, num_ranks, device, "another call"):
        assert (kind, op) == ("DeviceError", "all_reduce")
        assert 1 in (rank, peer)
        assert rank != peer
        for who in (rank, peer):
            elements = 8 if who == 1 else 4
            assert f"on rank {who}, operation all_reduce, dtype float32, elements {elements}," in text


@pytest.mark.parametrize(("num_ranks", "how", "wanted"), [
    *(pytest.param(number, "own kernel", [("DeviceTimeoutError", 1, None, "")] * number, marks=marks)
      for number, marks in ((2, pytest.mark.exhaustive(device="cpu")), (3, ()))),
    (4, "group", [("DeviceTimeoutError", 0, 1, "all_reduce")] * 2 + [None] * 2),  # other groups go on
    (3, "message", [("DeviceError", 1, 0, "recv")] * 2 + [None]),  # other ranks hear nothing of messages
])  # fmt: skip
def test_who_hears_of_what_goes_wrong(pool, num_ranks, device, how, wanted):
    assert [said for said, _ in pool.run(jobs.goes_wrong, num_ranks, device, how)] == wanted


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages_at_the_same_time_are_reported(pool, op):
    """Two graphs on two streams do the same on GPUs."""
    assert pool.run(jobs.messages_at_the_same_time, 2, "cpu", op) == [None] * 2


@pytest.mark.multigpu(2)
def test_replays_of_graphs(pool):
    for captured, said, after, sums in pool.run(jobs.in_graphs, 2, "cuda", 20):
        assert captured == "captured"
        assert said == ("DeviceTimeoutError", 0, 1, "all_reduce")
        assert (after, sums) == (None, [2.0])


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_a_long_wait_is_warned_about(pool, num_ranks, device, tmp_path):
    assert pool.run(jobs.late, num_ranks, device, str(tmp_path)) == [None] * num_ranks


# -- one rank ---------------------------------------------------------------------------------------------------------
@table("begin", ["", "get_device_context", "device_barrier", "ccl.barrier", "ccl.all_reduce"])
def test_the_watchdog_begins_with_the_first_kernel_unless_it_is_switched_off(monkeypatch, begin):
    monkeypatch.delenv("IRIS_DEVICE_TIMEOUT", raising=False)
    if not begin:
        monkeypatch.setenv("IRIS_WATCHDOG", "0")
    with Iris("1MiB", device="cpu") as ctx:
        assert begin or ctx._reports.timeout_ns == 0
        assert jobs.threads() == []
        tensors = [torch.zeros(1)] * 2 if begin == "ccl.all_reduce" else []
        operator.attrgetter(begin or "get_device_context")(ctx)(*tensors)
        assert jobs.threads() == ["iris-watchdog"] * bool(begin)


class Driver:
    """A driver that refuses to register what is registered already, as NVIDIA's does; `code` is its answer."""

    def __init__(self):
        self.registered, self.code = set(), 0

    def register(self, address, nbytes, flags):
        if self.code or address.value in self.registered:
            return self.code or 712
        self.registered.add(address.value)
        return 0

    def locate(self, found, address, flags):
        found._obj.value = address.value
        return 0

    def unregister(self, address):
        self.registered.discard(address.value)
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(status, "_DRIVERS", {DeviceType.CUDA: ("a driver", "register", "locate", "unregister")})
    monkeypatch.setattr(status.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(status, "_registered", {})
    return found


def test_registered_pages(driver):
    """Kernels of a context that was dropped may still write there: else the next context could not register its own."""
    gpu, pages = DeviceTarget(DeviceType.CUDA), []
    for _ in range(4):
        pages.append(StatusPage(SingleWorld()))
        assert pages[-1].register(gpu) == pages[-1].address
    last = pages.pop()
    del pages
    assert len(driver.registered) == 4
    for _ in range(2):
        last.close()
    assert len(driver.registered) == len(status._registered) == 3
    driver.code = 801
    with pytest.raises(DeviceError, match="register failed with code 801"):
        StatusPage(SingleWorld()).register(gpu)


def test_a_report_that_is_being_written_is_not_read():
    with Iris("1MiB", device="cpu") as ctx:
        page = ctx._reports._page
        page.words[page.first(0) + Status.CODE] = 1  # claimed
        assert not any(page.read(0, Status.CODE))
        ctx.barrier()
