"""The device functions for multicast addresses, as CPU ranks emulate them; tests/compile has their assembly."""

import jobs_multimem
import pytest
import torch


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_gets_what_all_have_added_up(pool, num_ranks):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert pool.run(jobs_multimem.sums, num_ranks, dtype) == [[True] * num_ranks] * num_ranks
