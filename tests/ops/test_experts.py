"""`ctx.ops.experts`: tokens to the ranks of their experts, and back."""

import jobs_experts as jobs
import pytest

# experts of a rank, choices, elements, most tokens, dtype, scales
CASES = {
    "one expert each": (1, 1, 32, 5, "float32", 0),
    "more choices than experts of a rank": (2, 4, 1200, 9, "bfloat16", 0),
    "8-bit floats with scales": (3, 2, 48, 30, "float8_e4m3fn", 3),
}


@pytest.mark.parametrize(
    ("case", "num_ranks", "group"),
    [
        ("one expert each", 2, None),
        ("more choices than experts of a rank", 4, [3, 1, 0]),
        ("8-bit floats with scales", 3, None),
        *(pytest.param(case, 2, None, marks=pytest.mark.exhaustive) for case in list(CASES)[1:]),
    ],
)
def test_tokens_reach_their_experts_and_come_back(pool, device, case, num_ranks, group):
    assert pool.run(jobs.passes, num_ranks, device, group, CASES[case], 4) == [[]] * num_ranks


@pytest.mark.parametrize(
    ("case", "num_ranks", "group"),
    [
        ("more choices than experts of a rank", 2, None),
        ("one expert each", 3, None),
        ("more choices than experts of a rank", 4, [3, 1, 0]),
        pytest.param("more choices than experts of a rank", 4, None, marks=pytest.mark.exhaustive),
    ],
)
def test_gradients(pool, device, case, num_ranks, group):
    assert pool.run(jobs.differentiates, num_ranks, device, group, CASES[case], 3) == [[]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "group", "gone"), [(3, None, (1,)), (4, [2, 0, 3, 1], (0, 3))])
def test_members_that_are_gone(pool, device, num_ranks, group, gone):
    case = CASES["more choices than experts of a rank"]
    assert pool.run(jobs.passes, num_ranks, device, group, case, 6, gone) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_turns_that_are_kept(pool, device, num_ranks):
    assert pool.run(jobs.keeps, num_ranks, device) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_programs_that_are_late(pool, tmp_path, num_ranks):
    case = 2, 2, 16, 5, "float32", 0
    assert pool.run(jobs.late_inside, num_ranks, str(tmp_path / "changes"), case) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_training_is_that_of_one_process(pool, device, num_ranks):
    for losses, error, text in pool.run(jobs.trains, num_ranks, device, 6):
        for ours, theirs in losses:
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert losses[-1][1] < 0.7 * losses[0][1]
        assert error < 1e-4
        assert f"experts={2 * num_ranks}, hidden=16, top_k=2" in text


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [[]] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool, num_ranks):
    assert pool.run(jobs.replays, num_ranks, 300) == [[]] * num_ranks
    assert pool.run(jobs.replays_training, num_ranks, 50) == [[]] * num_ranks
