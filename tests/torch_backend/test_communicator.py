"""The communicator in the shape of vLLM's and SGLang's."""

import jobs_communicator as jobs
import pytest


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("max_nbytes", [None, 0], ids=["Iris", "the group of the device"])
def test_every_method(pool, num_ranks, max_nbytes):
    for ranks in ([0, 1, 2], [0, 2]):
        assert pool.run(jobs.every_method, num_ranks, ranks, max_nbytes) == [[]] * num_ranks
