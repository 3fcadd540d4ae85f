"""What kernels report reaches the next call of every rank that it concerns; and long waits are warned about."""

import operator
import re

import jobs_reports as jobs
import pytest
import torch
from rank_counts import rank_counts
from tables import table

from iris_core import Iris
from iris_core.device import status
from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, Status, stamp
from iris_core.device.status import StatusPage
from iris_core.errors import DeviceError, DeviceTimeoutError
from iris_core.types import DeviceTarget, DeviceType
from iris_core.world import SingleWorld

FOLLOWING = [
    "all_reduce", "all_reduce of another kind", "async", "matmul_all_reduce", "device_barrier", "ccl.barrier",
    "barrier",
]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_member_raises_at_its_next_call(pool, some, num_ranks, device):
    for following in FOLLOWING if device == "cuda" or num_ranks == 2 else some(FOLLOWING, 7):  # all_reduce
        for said, again, sums in pool.run(jobs.gives_up, num_ranks, device, following):
            assert said in [("DeviceTimeoutError", rank, 1, "all_reduce") for rank in (0, 2)[: num_ranks - 1]]
            assert (again, sums) == (None, [float(num_ranks)]), following


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("following", ["all_reduce", None])
def test_after_a_barrier_every_member_raises_or_resets(pool, num_ranks, device, following):
    wanted = ("DeviceTimeoutError", 0, 1, "device_barrier") if following else None  # a reset drops what was not raised
    found = pool.run(jobs.gives_up, num_ranks, device, following, "device_barrier" if following else "all_reduce")
    assert found == [(wanted, None, [2.0])] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_member_hears_of_a_different_call(pool, num_ranks, device):
    for (kind, rank, peer, op), (text,), *again in pool.run(jobs.goes_wrong, num_ranks, device, "another call"):
        assert (kind, op) == ("DeviceError", "all_reduce")
        assert 1 in (rank, peer)
        assert rank != peer
        for who in (rank, peer):
            elements = 8 if who == 1 else 4
            assert f"on rank {who}, operation all_reduce, dtype float32, elements {elements}," in text
        assert again == [None, None, [float(num_ranks)]]


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages_at_the_same_time_are_reported(pool, op):
    """Two graphs on two streams do the same on GPUs."""
    for said, after in pool.run(jobs.messages_at_the_same_time, 2, "cpu", op):
        assert (said[:3], after) == (("DeviceError", 0, 0), None)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_rank_hears_of_a_wait_of_a_users_kernel(pool, num_ranks, device):
    for said, _, *after in pool.run(jobs.goes_wrong, num_ranks, device, "own kernel"):
        assert said == ("DeviceTimeoutError", 1, None, "")
        assert after == [None, None, [float(num_ranks)]]


@pytest.mark.parametrize("num_ranks", [4])
def test_other_groups_go_on(pool, num_ranks, device):
    results = pool.run(jobs.goes_wrong, num_ranks, device, "group")
    assert [said for said, *_ in results] == [("DeviceTimeoutError", 0, 1, "all_reduce")] * 2 + [None] * 2
    assert [after for _, _, *after in results] == [[None, None, [2.0]]] * 4


@pytest.mark.parametrize("num_ranks", [3])
def test_other_ranks_hear_nothing_of_messages(pool, num_ranks, device):
    results = pool.run(jobs.goes_wrong, num_ranks, device, "message")
    assert [said for said, *_ in results] == [("DeviceError", 1, 0, "recv")] * 2 + [None]
    assert [after for _, _, *after in results] == [[None, None, [3.0]]] * 3


@pytest.mark.multigpu(2)
def test_replays_of_graphs(pool):
    for captured, said, after, sums in pool.run(jobs.in_graphs, 2, "cuda", 20):
        assert captured == "captured"
        assert said == ("DeviceTimeoutError", 0, 1, "all_reduce")
        assert (after, sums) == (None, [2.0])


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_a_long_wait_is_warned_about(pool, num_ranks, device, tmp_path):
    for rank, (before, records, running, left) in enumerate(pool.run(jobs.late, num_ranks, device, str(tmp_path))):
        assert before == []
        assert (running, left) == (["iris-watchdog"], [])
        if rank != 1:  # whose machine may be slow, too
            said = f"rank {rank} has waited for rank 1 in all_reduce 8192 x bfloat16 ("
            waited = [text for text in records if text.startswith(said)]
            assert waited
            assert all(int(re.search(r" for (\d+) s; ", text)[1]) < 120 for text in waited)  # and no time of day
            assert any(text.startswith(f"rank {rank} no longer waits for rank 1") for text in records)


@pytest.mark.parametrize("num_ranks", [2])
def test_a_child_has_no_watchdog(pool, num_ranks):
    for rank, found in enumerate(pool.run(jobs.forked, num_ranks, "cpu")):
        assert found == (0, ["iris-watchdog"], [], rank)


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


def test_a_report_that_is_not_raised_is_logged(monkeypatch):
    """As it is where a program replays graphs, and calls nothing else."""
    monkeypatch.setenv("IRIS_WATCHDOG", "0.1")
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")
    word = stamp(1, 0, Status.CODE, STATUS_WAIT_TIMEOUT)
    with jobs.recorded() as records, Iris("1MiB", device="cpu") as ctx:
        ctx.get_device_context()
        words, first = ctx._reports._page.words, ctx._reports._page.first(0)
        for place, value in enumerate([0, 3, 0x1000, 42, 7, 3, 0], first + 1):
            words[place] = value
        words[first + Status.CODE] = words[0] = word
        while not records:
            pass  # ends by pytest's own bound if it fails
        assert "program 3" in records[0]
        with pytest.raises(DeviceTimeoutError, match="program 3") as caught:
            ctx.ccl.all_reduce(torch.zeros(1), torch.zeros(1))
        assert (caught.value.rank, caught.value.peer, caught.value.op) == (0, None, "")
        ctx.ccl.all_reduce(torch.zeros(1), torch.zeros(1))
    assert len(records) == 1


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
