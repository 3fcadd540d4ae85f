"""The "torch" allocator on GPUs: the kit, the device API, small heaps, expandable segments, memory pools, who fits."""

import pytest
from jobs_atomics import run_atomic
from jobs_heap_gpu import EXPANDABLE, mixed_devices, share_a_gpu, small_heap, with_expandable_segments
from jobs_rma import run_rma
from jobs_vmem import MIB, memory_pool, on_allocator, open_and_close, outlive

from iris_allocators._plugin import torch_pool
from iris_core.testing import AllocatorConformance, RankPool


def flat(results):
    return [line for lines in results for line in lines]


@pytest.mark.gpu
class TestTorchAllocator(AllocatorConformance):
    """The kit; a process cannot open an IPC handle of its own, so only other processes can be peers."""

    same_process_peers = False
    num_cycles = 20

    @pytest.fixture
    def plugin(self):
        return torch_pool


# -- the device API ---------------------------------------------------------------------------------------------------
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rma(pool, num_ranks):
    for op in ["load", "store"]:
        assert flat(pool.run(on_allocator, num_ranks, "torch", run_rma, op, False, "cuda")) == []


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_atomics(pool, num_ranks):
    assert flat(pool.run(on_allocator, num_ranks, "torch", run_atomic, "add", "cuda", False)) == []


# -- heaps ------------------------------------------------------------------------------------------------------------
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_small_heap_holds_many_tensors(pool, num_ranks):
    for count, full, bad in pool.run(small_heap, num_ranks):
        assert count == 4096
        assert full
        assert bad == []


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_nothing_is_left_of_closed_contexts(pool, num_ranks):
    for problems, descriptors, taken in pool.run(open_and_close, num_ranks, "torch", 20):
        assert problems == []
        assert descriptors <= 0
        assert taken <= 32 * MIB


@pytest.mark.multigpu
def test_a_tensor_outlives_its_context(pool):
    assert pool.run(outlive, 2, "torch") == [[6], [6]]


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_results_of_torch_operators_on_the_heap(pool, num_ranks):
    for problems, taken in pool.run(memory_pool, num_ranks, "torch"):
        assert problems == []
        assert taken <= 64 * MIB


# -- expandable segments ----------------------------------------------------------------------------------------------
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_expandable_segments_switched_on_by_the_program(num_ranks):
    # new processes: torch would use what is left of segments that others have made
    with RankPool(timeout_s=120.0, environ={"IRIS_DEVICE_TIMEOUT": "30"}) as pool:
        assert flat(pool.run(with_expandable_segments, num_ranks, True)) == []


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_switched_on_by_the_environment(variable):
    with RankPool(timeout_s=120.0, environ={variable: EXPANDABLE, "IRIS_DEVICE_TIMEOUT": "30"}) as pool:
        assert flat(pool.run(with_expandable_segments, 2, False)) == []


# -- who fits together ------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_cpu_and_gpu_do_not_make_one_world(pool):
    for kind, text in pool.run(mixed_devices, 2):
        assert kind == "RankMismatchError"
        assert any(f"device type: cpu on rank 0; {gpu} on rank 1" in text for gpu in ("cuda", "hip"))


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["torch", "vmem"])
def test_ranks_may_share_a_gpu(pool, allocator):
    assert flat(pool.run(share_a_gpu, 2, allocator)) == []
