"""The pool of rank processes survives what happens on GPUs."""

import jobs_gpu_pool as jobs
import pytest

from iris_core.errors import CollectiveTimeoutError
from iris_core.world.launch import RankError

pytestmark = pytest.mark.gpu


def test_a_kernel_that_does_not_end_is_ended_with_its_process(pool):
    assert pool.run(jobs.add_on_gpu, 1) == [1000.0]
    with pytest.raises(CollectiveTimeoutError, match="job hang: rank 0 of 1 still ran after 3 s"):
        pool.run(jobs.hang, 1, timeout_s=3.0)
    assert pool.run(jobs.add_on_gpu, 1) == [1000.0]


def test_an_error_on_the_gpu_does_not_stay_for_the_next_job(pool):
    with pytest.raises(RankError, match=r"CUDA error|HIP error"):
        pool.run(jobs.index_out_of_range, 1)
    assert pool.run(jobs.add_on_gpu, 1) == [1000.0]
