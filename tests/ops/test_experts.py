"""`ctx.ops.experts`: tokens to the ranks of their experts, and back."""

import jobs_experts as jobs
import pytest
from rank_counts import rank_counts

exhaustive = pytest.mark.exhaustive
# experts of a rank, choices, elements, most tokens, dtype, scales
ONE, MANY, FP8 = (1, 1, 32, 5, "float32", 0), (2, 4, 1200, 9, "bfloat16", 0), (3, 2, 48, 30, "float8_e4m3fn", 3)


@pytest.mark.parametrize(("case", "num_ranks", "group"), [(ONE, 2, None), (MANY, 4, [3, 1, 0]), (FP8, 3, None)])
def test_tokens_reach_their_experts_and_come_back(pool, device, case, num_ranks, group):
    turns = 3 if device == "cpu" else 4
    assert pool.run(jobs.passes, num_ranks, device, group, case, turns) == [[]] * num_ranks


@pytest.mark.parametrize(("case", "num_ranks", "group"), [(ONE, 3, None), (MANY, 4, [3, 1, 0])])
def test_gradients(pool, device, case, num_ranks, group):
    turns = 2 if device == "cpu" else 3
    assert pool.run(jobs.differentiates, num_ranks, device, group, case, turns) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [4])
def test_members_that_are_gone(pool, device, num_ranks):
    turns = 4 if device == "cpu" else 6
    assert pool.run(jobs.passes, num_ranks, device, [2, 0, 3, 1], MANY, turns, (0, 3)) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_turns_that_are_kept(pool, device, num_ranks):
    assert pool.run(jobs.keeps, num_ranks, device) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=exhaustive)])
def test_programs_that_are_late(pool, tmp_path, num_ranks):
    case = 2, 2, 16, 3, "float32", 0
    assert pool.run(jobs.late_inside, num_ranks, str(tmp_path / "changes"), case) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=exhaustive)])
def test_a_layer_is_that_of_one_process(pool, device, num_ranks):
    for errors, text in pool.run(jobs.of_one_process, num_ranks, device):
        assert len(errors) == 4
        assert max(errors) < 1e-4
        assert f"experts={2 * num_ranks}, hidden=16, top_k=2" in text


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [[]] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool, num_ranks):
    assert pool.run(jobs.replays, num_ranks, 300) == [[]] * num_ranks
    assert pool.run(jobs.replays_training, num_ranks, 50) == [[]] * num_ranks
