"""What kernels report reaches the next call of every rank that it concerns; and long waits are warned about."""

import operator

import jobs_reports as jobs
import pytest
import torch
from rank_counts import rank_counts

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
    for following in FOLLOWING if device == "cuda" or num_ranks == 2 else some(FOLLOWING, 6):  # all_reduce and barrier
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
    for (kind, rank, peer, op), text, again, sums in pool.run(jobs.differs, num_ranks, device):
        assert (kind, op) == ("DeviceError", "all_reduce")
        assert 1 in (rank, peer)
        assert rank != peer
        for who in (rank, peer):
            elements = 8 if who == 1 else 4
            assert f"on rank {who}, operation all_reduce, dtype float32, elements {elements}," in text
        assert (again, sums) == (None, [float(num_ranks)])


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages_at_the_same_time_are_reported(pool, op):
    """Two graphs on two streams do the same on GPUs."""
    for said, after in pool.run(jobs.messages_at_the_same_time, 2, "cpu", op):
        assert (said[:3], after) == (("DeviceError", 0, 0), None)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_rank_hears_of_a_wait_of_a_users_kernel(pool, num_ranks, device):
    for said, *after, sums in pool.run(jobs.own_kernel, num_ranks, device):
        assert said == ("DeviceTimeoutError", 1, None, "")
        assert (after, sums) == ([None, None], [float(num_ranks)])


@pytest.mark.parametrize("num_ranks", [4])
def test_other_groups_go_on(pool, num_ranks, device):
    results = pool.run(jobs.of_a_group, num_ranks, device)
    assert [said for said, *_ in results] == [("DeviceTimeoutError", 0, 1, "all_reduce")] * 2 + [None] * 2
    assert [after for _, *after in results] == [[None, None]] * 4


@pytest.mark.parametrize("num_ranks", [3])
def test_other_ranks_hear_nothing_of_messages(pool, num_ranks, device):
    results = pool.run(jobs.of_two, num_ranks, device)
    assert results == [(("DeviceError", 1, 0, "recv"), None)] * 2 + [(None, None)]


@pytest.mark.multigpu(2)
def test_replays_of_graphs(pool):
    for captured, said, after, sums in pool.run(jobs.in_graphs, 2, 20):
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
            assert any(text.startswith(said) for text in records)
            assert any(text.startswith(f"rank {rank} no longer waits for rank 1") for text in records)


@pytest.mark.parametrize("num_ranks", [2])
def test_a_child_has_no_watchdog(pool, num_ranks):
    for rank, found in enumerate(pool.run(jobs.forked, num_ranks, "cpu")):
        assert found == (0, ["iris-watchdog"], [], rank)


# -- one rank ---------------------------------------------------------------------------------------------------------
def test_no_watchdog_where_it_is_switched_off(monkeypatch):
    monkeypatch.setenv("IRIS_WATCHDOG", "0")
    monkeypatch.delenv("IRIS_DEVICE_TIMEOUT", raising=False)
    with Iris("1MiB", device="cpu") as ctx:
        assert ctx._reports.timeout_ns == 0
        ctx.get_device_context()
        assert jobs.threads() == []


@pytest.mark.parametrize("begin", ["get_device_context", "device_barrier", "ccl.barrier", "ccl.all_reduce"])
def test_the_watchdog_begins_with_the_first_kernel(monkeypatch, begin):
    monkeypatch.delenv("IRIS_DEVICE_TIMEOUT", raising=False)
    with Iris("1MiB", device="cpu") as ctx:
        tensors = [torch.zeros(1)] * 2 if begin == "ccl.all_reduce" else []
        assert jobs.threads() == []
        operator.attrgetter(begin)(ctx)(*tensors)
        assert jobs.threads() == ["iris-watchdog"]


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


def test_a_page_that_stays_registered_keeps_its_address(driver):
    """Kernels of a context that was dropped may still write there: else the next context could not register its own."""
    gpu = DeviceTarget(DeviceType.CUDA)
    for _ in range(4):
        page = StatusPage(SingleWorld())
        assert page.register(gpu) == page.address
        del page
    assert len(driver.registered) == 4


def test_a_page_is_taken_away_from_the_device(driver):
    page = StatusPage(SingleWorld())
    page.register(DeviceTarget(DeviceType.CUDA))
    page.close()
    page.close()
    assert (driver.registered, status._registered) == (set(), {})


def test_a_device_that_cannot_write_to_the_page_is_an_error(driver):
    driver.code = 801
    with pytest.raises(DeviceError, match="register failed with code 801"):
        StatusPage(SingleWorld()).register(DeviceTarget(DeviceType.CUDA))


def test_a_report_that_is_being_written_is_not_read():
    with Iris("1MiB", device="cpu") as ctx:
        page = ctx._reports._page
        page.words[page.first(0) + Status.CODE] = 1  # claimed
        assert not any(page.read(0, Status.CODE))
        ctx.barrier()
