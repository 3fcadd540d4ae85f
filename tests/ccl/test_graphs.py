"""Collectives in CUDA graphs."""

import pytest
from ccl_cases import ENCODINGS, OPS, Case, kinds
from jobs_fast import SMALL, unprobed
from jobs_sequences import captured

pytestmark = pytest.mark.multigpu


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [Case(op, "bfloat16", shape=(4099,), place=place) for op in OPS for place in ("heap", "ordinary", "skewed")]
    for algorithm in ("one_shot", "two_shot"):
        cases.append(Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": algorithm}))
    cases += [Case(op, "bfloat16", shape=(4099,), config={"algorithm": name}) for op, name in kinds("portable")]
    for said, wrong in pool.run(captured, num_ranks, "cuda", cases, 50, timeout_s=300.0):
        assert len(said) == 1
        assert "call it once before the capture" in said[0]
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_replays_of_packets(pool, encoding, num_ranks):
    """Each algorithm of packets in one piece and in several, with a workspace in which few messages go at once."""
    if reason := unprobed("cuda", [encoding]):
        pytest.skip(reason)
    cases = [
        Case(op, "float32", shape=(count,), config={"algorithm": name, "comm_sms": 2, "num_warps": 4})
        for op, name in kinds(encoding)
        for count in (77, 9001)
    ]
    for said, wrong in pool.run(captured, num_ranks, "cuda", cases, 50, SMALL, timeout_s=300.0):
        assert len(said) == 1
        assert wrong == []
