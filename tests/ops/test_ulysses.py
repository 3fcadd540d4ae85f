"""`ctx.ops.ulysses`: one dimension divided among ranks instead of another one."""

import jobs_ulysses as jobs
import pytest


@pytest.mark.parametrize(("num_ranks", "group", "dims", "dtype"), [
    (1, None, (1, 2), "float32"), (2, None, (1, 2), "bfloat16"), (3, None, (1, 2), "float32"),
    (4, [3, 1, 0], (1, -2), "int32"), (2, None, (2, 1), "float32"), (2, None, (1, 0), "float32"),
    pytest.param(4, None, (1, 2), "float32", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_there_and_back(pool, device, num_ranks, group, dims, dtype):
    assert pool.run(jobs.there_and_back, num_ranks, device, group, dims, dtype) == [[]] * num_ranks


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [([], True)] * 2
