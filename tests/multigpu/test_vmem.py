"""The "vmem" allocator on GPUs: the device API on it, memory that comes and goes, existing tensors, memory pools."""

import pytest
from jobs_atomics import run_atomic
from jobs_rma import run_rma
from jobs_sync import run_barrier, run_ring
from jobs_vmem import (
    MIB,
    allocate_and_free,
    come_and_go,
    exhausted,
    existing_tensors,
    memory_pool,
    on_allocator,
    open_and_close,
    opening,
    outlive,
)

from iris_allocators._plugin import vmem
from iris_core.testing import AllocatorConformance, RankPool

RANKS = [2, 4, 8]
SLACK = 300 * MIB  # granules of up to 64 MiB, code that the driver loads late, torch's own small segments


def flat(results):
    return [line for lines in results for line in lines]


@pytest.mark.gpu
class TestVmemAllocator(AllocatorConformance):
    """The kit."""

    num_cycles = 20

    @pytest.fixture
    def plugin(self):
        return vmem


# -- the device API ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", RANKS)
def test_rma(pool, num_ranks):
    for op in ["load", "store", "get", "put", "copy"]:
        assert flat(pool.run(on_allocator, num_ranks, "vmem", run_rma, op, False, "cuda")) == []


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", RANKS)
def test_atomics(pool, num_ranks):
    for op in ["add", "cas", "xchg"]:
        assert flat(pool.run(on_allocator, num_ranks, "vmem", run_atomic, op, "cuda", False)) == []


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", RANKS)
def test_signals(pool, num_ranks):
    assert pool.run(on_allocator, num_ranks, "vmem", run_ring, "put_signal", 100, "cuda")[-1] == [99 + num_ranks]
    assert pool.run(on_allocator, num_ranks, "vmem", run_barrier, 0, 1, num_ranks, 50, 3, "cuda") == [0] * num_ranks


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.alone
@pytest.mark.multigpu(shared=False)  # a rank would see what the others take
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_heap_of_a_tebibyte_takes_nothing(pool, num_ranks):
    for problems, taken, reserved, committed in pool.run(opening, num_ranks):
        assert problems == []
        assert taken <= 80 * MIB
        assert reserved == 1 << 40
        assert committed == 64 * MIB, "the granule with Iris' system area"


@pytest.mark.alone
@pytest.mark.multigpu(shared=False)  # a rank would see what the others take
@pytest.mark.parametrize("num_ranks", RANKS)
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


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_nothing_is_left_of_closed_contexts(pool, num_ranks):
    for problems, descriptors, taken in pool.run(open_and_close, num_ranks, "vmem", 20):
        assert problems == []
        assert descriptors <= 0
        assert taken <= 32 * MIB


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_allocating_and_freeing_leaves_nothing(pool, num_ranks):
    for problems, allocated, pending, committed in pool.run(allocate_and_free, num_ranks, 1000):
        assert problems == []
        assert (allocated, pending, committed) == (0, 0, 0)


@pytest.mark.multigpu
def test_a_tensor_outlives_its_context(pool):
    assert pool.run(outlive, 2, "vmem") == [[6], [6]]


# -- existing tensors, memory pools -----------------------------------------------------------------------------------
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", RANKS)
def test_existing_tensors_are_shared(num_ranks):
    # new processes: torch would use what is left of segments that others have made
    with RankPool(timeout_s=120.0, environ={"IRIS_DEVICE_TIMEOUT": "30"}) as pool:
        assert flat(pool.run(existing_tensors, num_ranks)) == []


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", RANKS)
def test_results_of_torch_operators_on_the_heap(pool, num_ranks):
    for problems, taken in pool.run(memory_pool, num_ranks, "vmem"):
        assert problems == []
        assert taken <= 64 * MIB
