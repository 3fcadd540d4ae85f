"""Numbers from pretended ranks: the slowest rank, skew, ratios."""

import pytest

from iris_core.bench import RunOptions
from iris_core.bench.runner import summarize
from iris_core.bench.state import State
from iris_core.errors import BenchmarkError

IDLE = []


def summary(*times):
    """The result of one provider."""
    state = State("copy", {"a": 1.5, "b": None, "c": (1, 2)}, RunOptions(), False, lambda: None)
    state.provider("ours", None, check=None)
    state.providers["ours"].times = list(times)
    (result,) = summarize(state, len(times))
    return result


def test_the_slowest_rank_counts_in_every_round():
    assert summary([1.0, 5.0], [4.0, 2.0], IDLE).rounds_us == (4e6, 5e6)
    with pytest.raises(BenchmarkError, match="no rank took part"):
        summary(IDLE, IDLE)


def test_skew_compares_medians_of_ranks_that_took_part():
    assert summary([3.0, 4.0, 9.0], [5.0, 5.0, 1.0], IDLE).skew_pct == pytest.approx(20)
    assert summary([3.0], IDLE).skew_pct is None


def test_only_what_json_knows_is_kept_as_it_is():
    assert summary([1.0]).params == {"a": 1.5, "b": None, "c": "(1, 2)"}


def test_a_result_of_three_ranks():
    state = State("copy", {"dtype": complex, "nbytes": 8}, RunOptions(), False, lambda: None)
    state.set_bytes(6_000_000, bus_factor=4 / 3)
    state.provider("ours", None, check=None, baseline="theirs")
    state.provider("theirs", None, check=None, peer=True)
    state.provider("others", None, check=None, peer=True)
    state.add_counter("n", 1)
    state.providers["ours"].times = [[1e-3, 3e-3, 2e-3], [2e-3, 2e-3, 8e-3], IDLE]
    state.providers["theirs"].times = [[4e-3, 3e-3, 4e-3], [1e-3] * 3, IDLE]
    state.providers["others"].times = [[5e-3, 6e-3, 7e-3], IDLE, IDLE]
    results = summarize(state, 3)
    mine, baseline, last = results
    assert mine.rounds_us == (2000, 3000, 8000)
    assert mine.time_us == 3000
    assert mine.local_us == (2000, 2000, None)
    assert (mine.min_us, mine.skew_pct) == (2000, 0)
    assert (mine.gb_per_s, mine.bus_gb_per_s) == (2, pytest.approx(8 / 3, rel=1e-5))
    assert mine.ratio == 1  # median of 4/2, 3/3 and 4/8: round by round, not 4/3
    assert (mine.best_peer, mine.ratio_to_best_peer) == ("theirs", 1)
    assert baseline.best_peer == "others"
    assert (last.best_peer, last.ratio_to_best_peer) == ("theirs", pytest.approx(4 / 7, rel=1e-5))
    assert mine.params == {"dtype": "<class 'complex'>", "nbytes": 8}
    assert mine.counters == {"n": 1.0}
