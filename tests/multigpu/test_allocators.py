"""Both allocators on GPUs: the kit, streams and freed blocks, 100,000 cycles, existing tensors, memory pools.

The kit of stacks (tests/gpu) has the device functions on each of them, tests/multirank all types on the default one.
"""

import pytest
from jobs_allocators import (
    EXPANDABLE,
    MIB,
    capture,
    come_and_go,
    exhausted,
    existing_tensors,
    many_cycles,
    memory_pool,
    open_and_close,
    pressure_among_ranks,
    reuse_alone,
    reuse_among_ranks,
    share_a_gpu,
    with_expandable_segments,
)

from iris_core.testing import AllocatorConformance, RankPool

BOTH = pytest.mark.parametrize("allocator", ["torch", "vmem"])
SLACK = 300 * MIB  # granules of up to 64 MiB, code that the driver loads late, torch's own small segments


def flat(results):
    return [line for lines in results for line in lines]


@pytest.mark.gpu
class TestTorchAllocator(AllocatorConformance):
    """The kit; a process cannot open an IPC handle of its own, so only other processes can be peers."""

    name = "torch"
    same_process_peers = False
    num_cycles = 20


@pytest.mark.gpu
class TestVmemAllocator(AllocatorConformance):
    """The kit."""

    name = "vmem"
    num_cycles = 20


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


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@BOTH
def test_nothing_is_left_of_100000_cycles(pool, allocator, num_ranks):
    for before, after, taken, descriptors in pool.run(many_cycles, num_ranks, allocator, 100_000):
        assert after == before
        assert after[:3] == (0, 0, 0)
        assert taken <= 4 * MIB
        assert descriptors <= 0


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@BOTH
def test_nothing_is_left_of_closed_contexts(pool, allocator, num_ranks):
    for problems, descriptors, taken in pool.run(open_and_close, num_ranks, allocator, 20):
        assert problems == []
        assert descriptors <= 0
        assert taken <= 32 * MIB


@pytest.mark.alone
@pytest.mark.multigpu(shared=False)  # a rank would see what the others take
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_memory_comes_with_use_and_goes_when_free(pool, num_ranks):
    nbytes = 2 << 30
    for problems, taken in pool.run(come_and_go, num_ranks, nbytes):
        assert problems == []
        used, freed, used_again, freed_again = taken
        assert nbytes - SLACK <= used <= nbytes + SLACK
        assert nbytes - SLACK <= used_again <= nbytes + SLACK
        assert freed <= SLACK
        assert freed_again <= SLACK


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_full_gpu_on_one_rank_is_the_same_error_everywhere(pool, num_ranks):
    results = pool.run(exhausted, num_ranks)
    for error, problems in results:
        assert problems == []
        assert f"rank {num_ranks - 1}: cuda:" in error
        assert "has no room for" in error


@pytest.mark.gpu
@BOTH
def test_ranks_may_share_a_gpu(pool, allocator):
    assert flat(pool.run(share_a_gpu, 2, allocator)) == []


# -- existing tensors, memory pools, torch's expandable segments ------------------------------------------------------
@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@BOTH
def test_results_of_torch_operators_on_the_heap(pool, allocator, num_ranks):
    for problems, taken in pool.run(memory_pool, num_ranks, allocator):
        assert problems == []
        assert taken <= 64 * MIB


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(("job", "args"), [(existing_tensors, ()), (with_expandable_segments, (True,))])
def test_expandable_segments_switched_on_by_the_program(num_ranks, job, args):
    """Tensors in them may be put on the heap of "vmem"; that of "torch" is in no such segment."""
    # new processes: torch would use what is left of segments that others have made
    with RankPool(timeout_s=120.0, environ={"IRIS_DEVICE_TIMEOUT": "30"}) as pool:
        assert flat(pool.run(job, num_ranks, *args)) == []


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_switched_on_by_the_environment(variable):
    with RankPool(timeout_s=120.0, environ={variable: EXPANDABLE, "IRIS_DEVICE_TIMEOUT": "30"}) as pool:
        assert flat(pool.run(with_expandable_segments, 2, False)) == []
