"""The heap on GPUs: freed blocks and streams, 100,000 cycles; both allocators, on one GPU and on several."""

import pytest
from jobs_heap_gpu import (
    capture,
    foreign_tensors,
    many_cycles,
    pressure_among_ranks,
    reuse_alone,
    reuse_among_ranks,
    reuse_on_another_stream,
)

MIB = 1 << 20
BOTH = pytest.mark.parametrize("allocator", ["torch", "vmem"])


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@BOTH
def test_tensors_on_another_device_are_refused_by_every_allocator(pool, allocator, num_ranks):
    for said, allocated in pool.run(foreign_tensors, num_ranks, allocator):
        on_host, nowhere = said
        assert "as_symmetric: the tensor is on cpu, but this rank's heap is on cuda:" in on_host
        assert "as_symmetric: the tensor is on meta, but this rank's heap is on cuda:" in nowhere
        assert allocated == 0


# -- streams ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@BOTH
def test_a_block_is_not_overwritten_by_a_stream_that_had_it(pool, allocator):
    ((same, whole, at_once),) = pool.run(reuse_alone, 1, allocator, True)
    assert same, "the block is handed out at once"
    assert whole
    assert at_once, "the host does not wait"


@pytest.mark.gpu
def test_without_being_told_of_the_stream_the_heap_cannot_know(pool):
    ((same, whole, at_once),) = pool.run(reuse_alone, 1, "torch", False)
    assert same
    assert at_once
    assert not whole, "the test above proves nothing if this write comes in time"


@pytest.mark.gpu
@BOTH
def test_a_dropped_block_goes_to_another_stream_in_order(pool, allocator):
    ((same, whole, at_once),) = pool.run(reuse_on_another_stream, 1, allocator)
    assert same
    assert whole
    assert at_once


@pytest.mark.multigpu(shared=False)  # turns on a GPU take longer than the late write
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dropped", [False, True])
@BOTH
def test_no_rank_gets_a_block_that_a_stream_of_another_still_writes_to(pool, allocator, dropped, num_ranks):
    results = pool.run(reuse_among_ranks, num_ranks, allocator, dropped)
    assert len({tuple(offsets) for offsets, _, _ in results}) == 1, "equal on all ranks"
    for (first, second, third), at_once, problems in results:
        assert second != first, "still in use on one rank"
        assert third == first
        assert at_once, "the barrier of a stream does not wait for another one"
        assert problems == []


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
@BOTH
def test_under_pressure_the_ranks_wait_for_each_others_streams(pool, allocator, num_ranks):
    for (first, second), problems in pool.run(pressure_among_ranks, num_ranks, allocator):
        assert second == first
        assert problems == []


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@BOTH
def test_allocating_and_freeing_are_refused_in_a_capture(pool, allocator, num_ranks):
    for errors, content in pool.run(capture, num_ranks, allocator):
        assert [e.split(":")[0] for e in errors] == ["zeros", "free"]
        assert content == [6]


# -- many cycles ------------------------------------------------------------------------------------------------------
@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@BOTH
def test_nothing_is_left_of_100000_cycles(pool, allocator, num_ranks, record_property):
    results = pool.run(many_cycles, num_ranks, allocator, 100_000)
    for before, after, taken, descriptors, _ in results:
        assert after == before
        assert after[:3] == (0, 0, 0)
        assert taken <= 4 * MIB
        assert descriptors <= 0
    slowest = max(per_cycle for *_, per_cycle in results)
    record_property("us_per_cycle", round(1e6 * slowest, 1))
    print(f"allocate and free, {allocator}, {num_ranks} ranks: {1e6 * slowest:.1f} us per cycle on the slowest rank")
