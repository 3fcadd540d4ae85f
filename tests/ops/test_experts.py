"""`ctx.ops.experts`: tokens to the ranks of their experts, and back."""

import jobs_experts as jobs
import pytest
from jobs_ccl import late_inside

exhaustive = pytest.mark.exhaustive
# experts of a rank on average, choices, elements, most tokens, dtype, scales
ONE, MANY, FP8 = (1, 1, 32, 5, "float32", 0), (2, 4, 1200, 9, "bfloat16", 0), (3, 2, 48, 30, "float8_e4m3fn", 3)
UNEVEN = (1.5, 3, 48, 7, "float32", 3)  # of 2 ranks one has 2 and one has 1; of 3 ranks two have 2


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    (jobs.passes, 2, (None, ONE, 3)), (jobs.passes, 4, ([3, 1, 0], MANY, 3)), (jobs.passes, 3, (None, FP8, 3)),
    (jobs.differentiates, 3, (None, ONE, 2)), (jobs.differentiates, 4, ([3, 1, 0], MANY, 2)),
    (jobs.passes, 4, ([2, 0, 3, 1], MANY, 4, (0, 3))),  # two are gone half-way
    *((jobs.passes, n, (None, UNEVEN, 3)) for n in (2, 3)), (jobs.differentiates, 3, (None, UNEVEN, 2)),
    (jobs.keeps, 3, ()), pytest.param(jobs.keeps, 2, (), marks=exhaustive(device="cpu")),
])  # fmt: skip
def test_tokens_reach_their_experts_and_come_back(pool, device, job, num_ranks, args):
    assert pool.run(job, num_ranks, device, *args) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=exhaustive)])
def test_programs_that_are_late(pool, tmp_path, num_ranks):
    case = 2, 2, 16, 3, "float32", 0
    args = str(tmp_path / "changes"), 0.05, jobs.all_jobs, case
    assert pool.run(late_inside, num_ranks, *args) == [[]] * num_ranks


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [[]] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool, num_ranks):
    assert pool.run(jobs.replays, num_ranks, 200) == [[]] * num_ranks
