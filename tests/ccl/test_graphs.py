"""Collectives in CUDA graphs."""

import pytest
from ccl_cases import OPS, Case
from jobs_sequences import captured
from variant_cases import labels

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [Case(op, "bfloat16", shape=(4099,), place=place) for op in OPS for place in ("heap", "ordinary", "skewed")]
    for algorithm in ("one_shot", "two_shot"):
        cases.append(Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": algorithm}))
    cases += [Case(op, "bfloat16", shape=(4099,), config={"algorithm": name}) for op, name in labels()]
    for said, wrong in pool.run(captured, num_ranks, "cuda", cases, 50, timeout_s=300.0):
        assert len(said) == 1
        assert "call it once before the capture" in said[0]
        assert wrong == []
