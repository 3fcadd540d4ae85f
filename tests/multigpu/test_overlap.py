"""Streams, graphs, threads and groups at the same time: each job in processes of its own, which end if it hangs."""

import jobs_hopper
import pytest
from jobs_overlap import (
    barrier_in_capture,
    barriers_on_streams,
    groups_crossed,
    overlapping_replays,
    replays_beside_calls,
    threads_and_replays,
)

from iris_core.testing import RankPool

pytestmark = [pytest.mark.multigpu, pytest.mark.alone]
LIMIT_S = 100.0


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_barriers_on_two_streams(pool, num_ranks):
    for pairs in pool.run(barriers_on_streams, num_ranks, 200, timeout_s=LIMIT_S):
        assert all(total == expected for total, expected in pairs)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replays_of_barriers_beside_calls(pool, num_ranks):
    for pairs in pool.run(replays_beside_calls, num_ranks, 100, timeout_s=LIMIT_S):
        assert all(total == expected for total, expected in pairs)


def test_a_first_barrier_in_a_capture_is_refused(pool):
    assert all("call it once before the capture" in said for said in pool.run(barrier_in_capture, 2))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("algorithm", "count"),
    [("ll_one_shot", 256), ("sentinel_two_shot", 1 << 16), ("two_shot", 1 << 18)],
)
def test_replays_at_the_same_time_are_reported(pool, algorithm, count, num_ranks):
    results = pool.run(overlapping_replays, num_ranks, algorithm, count, timeout_s=LIMIT_S)
    assert "at the same time on the device of rank 0" in results[0][0]
    assert all(well for _, well in results)


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_two_groups_in_opposite_orders(pool, num_ranks, fills):
    assert pool.run(groups_crossed, num_ranks, 100, fills, timeout_s=LIMIT_S) == [True] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_threads_beside_replays(pool, num_ranks):
    for failures, well in pool.run(threads_and_replays, num_ranks, 100, timeout_s=LIMIT_S):
        assert failures == []
        assert well


def test_launches_that_return_when_their_kernel_is_done():
    """Fused operations, whose copies must be asked for before the products that wait for them."""
    with RankPool(environ={"CUDA_LAUNCH_BLOCKING": "1", "IRIS_DEVICE_TIMEOUT": "5"}, timeout_s=LIMIT_S) as blocking:
        assert blocking.run(jobs_hopper.run, 2, "cuda", 2) == [[], []]
