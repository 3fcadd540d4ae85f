"""The world of ranks: agreement, failures, lifetime."""

import jobs_world as jobs
import pytest
from rank_counts import rank_counts

from iris_core.errors import PeerLostError
from iris_core.world.launch import RankError


@pytest.mark.parametrize("num_ranks", [3])
def test_different_heap_sizes_are_shown_rank_by_rank(pool, num_ranks, device):
    for text in pool.run(jobs.different_heap_sizes, num_ranks, device):
        assert text.startswith("RankMismatchError: ")
        assert "heap_size: 1048576 on rank 0; 2097152 on ranks 1, 2" in text


@pytest.mark.parametrize("num_ranks", [2])
def test_a_failure_on_one_rank_is_told_to_the_others(pool, num_ranks, device):
    first, second = pool.run(jobs.different_allocators, num_ranks, device)
    assert first.startswith("PluginNotFoundError")
    assert "host" in first
    assert "rank 0" in second
    assert "PluginNotFoundError" in second


@pytest.mark.parametrize("num_ranks", [3])
def test_diverging_allocations_are_named_on_every_rank(pool, num_ranks, device):
    for text in pool.run(jobs.diverging_allocations, num_ranks, device):
        assert text.startswith("SymmetryError: ")
        assert "rank 1" in text
        assert "9999" in text


@pytest.mark.parametrize("num_ranks", [3])
def test_the_others_raise_when_a_rank_dies(pool, num_ranks, device):
    with pytest.raises(PeerLostError, match="rank 1 ended with exit code 3"):
        pool.run(jobs.a_rank_dies, num_ranks, device)
    assert pool.run(jobs.use_after_close, num_ranks, device)  # the pool recovers


@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_does_not_arrive_is_named(pool, num_ranks, device):
    text, late = pool.run(jobs.a_rank_stays_away, num_ranks, device)
    assert late == "late"
    assert text.startswith("(1,)")
    assert "rank 1 did not arrive" in text


def test_a_heap_of_64_gib_touches_nothing(pool):
    for nbytes in pool.run(jobs.heap_of_64_gib, 2):
        assert nbytes < 4 << 20


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_outlive_their_context(pool, num_ranks, device):
    assert pool.run(jobs.use_after_close, num_ranks, device) == [[2.0] * 10] * num_ranks


@pytest.mark.parametrize("num_ranks", [4])
def test_worlds_of_subgroups(pool, num_ranks, device):
    assert pool.run(jobs.subgroups, num_ranks, device) == [(0, 2, 1.0), (1, 2, 1.0), (0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.parametrize("num_ranks", [3])
def test_broadcast(pool, num_ranks, device):
    expected = [
        "ndarray [0 1 2]", "ndarray [1 2 3]", "dict {'a': 1}", "str text", "NoneType None", "bool True", "float 2.5",
        "ndarray [1. 1.]", "int 0",
    ]  # fmt: skip
    assert pool.run(jobs.broadcasts, num_ranks, device) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(8, seldom=[1, 2, 4]))
def test_translated_addresses(pool, num_ranks, device):
    assert pool.run(jobs.translated_addresses, num_ranks, device) == [True] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_raises_is_quoted(pool, num_ranks, device):
    with pytest.raises(RankError, match="there is no rank 5"):
        pool.run(jobs.broadcast_from_nowhere, num_ranks, device)


@pytest.mark.parametrize("num_ranks", [2])
def test_the_default_device_of_torch_does_not_matter(pool, num_ranks, device):
    assert pool.run(jobs.another_default_device, num_ranks, device) == [[0.0, 0.0], [1.0, 1.0]]


def test_a_tensor_off_the_heap_is_no_remote_address(pool):
    for text in pool.run(jobs.store_through_an_ordinary_tensor, 2):
        assert "store_to" in text
        assert "not on the heap of the rank that it was translated from" in text
