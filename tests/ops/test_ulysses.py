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
    for said, right in pool.run(jobs.refused, 2):
        assert [kind for kind, _, _ in said] == ["ArgumentError"] * 4
        texts = [text for _, _, text in said]
        assert "must be two" in texts[0]
        assert "2 ranks must divide" in texts[1]
        assert "the output must be (2, 8, 3)" in texts[2]
        assert "the output must be (4, 4, 3)" in texts[3]
        assert right
