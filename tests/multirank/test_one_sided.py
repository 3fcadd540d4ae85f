"""ctx.put, ctx.get, ctx.signal and ctx.signal_wait, on CPU ranks and on GPUs."""

import jobs_one_sided as jobs
import pytest
import torch


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_puts_and_signals_arrive_in_order(pool, device, num_ranks):
    for dtype in (torch.int64, torch.int32):
        assert pool.run(jobs.rounds_of_puts, num_ranks, device, 10, dtype) == [[]] * num_ranks


def test_wrong_calls_are_refused(pool, device):
    num_ranks = 2
    first, *_, nothing = said = pool.run(jobs.refused, num_ranks, device)[0]
    assert len(said) == 9
    assert first == "ArgumentError: as_remote: rank 2 is out of range in a world of 2"
    assert said[1].startswith("NotOnHeapError: as_remote: the tensor of shape (4,)")
    assert [each.partition(":")[0] for each in said[2:7]] == ["ArgumentError"] * 5
    assert said[7].startswith("TypeError: stream must be a torch stream")
    assert nothing == "[0.0, 0.0, 0.0, 0.0] [0]"


def test_a_wait_has_a_bound(pool, device):
    num_ranks = 1
    (said,) = pool.run(jobs.waits_in_vain, num_ranks, device)
    assert said.startswith("DeviceTimeoutError: ")
    assert "IRIS_DEVICE_TIMEOUT" in said
