"""signal, wait and put_signal between ranks, in each language, with what the kit has not: every order, many rounds.

The kit compares, adds, meets, and gives up, on ranks of tests/kit, tests/gluon and tests/gpu.
"""

import pytest
from jobs_common import in_language
from jobs_sync import backend_name, check_served, run_handshake, run_ring, run_serve, tokens, wait_for_a_dead_peer
from rank_counts import languages, rank_counts

from iris_core.errors import PeerLostError


@pytest.mark.parametrize(*languages(rank_counts(4, seldom=[2, 8])))
def test_ring(pool, language, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    results = pool.run(in_language, num_ranks, language, run_ring, rounds, device)
    assert results[-1] == [rounds - 1 + num_ranks]


@pytest.mark.parametrize(*languages(rank_counts(2, seldom=[1, 4]), gluon=rank_counts(2, seldom=[1])))
def test_every_op_sem_and_scope_of_signals_and_waits(pool, language, num_ranks, device):
    assert pool.run(in_language, 1, language, backend_name) == [language]
    assert pool.run(in_language, num_ranks, language, run_handshake, device) == [[]] * num_ranks


@pytest.mark.parametrize(*languages(rank_counts(3, seldom=[2, 4])))
def test_whoever_comes_is_served(pool, language, num_ranks, device, tmp_path):
    """With ranks that are late at random: what was signalled is there behind wait_any, load_acquire and test."""
    rounds = 10 if device == "cpu" else 200
    args = language, run_serve, rounds, str(tmp_path / "changes"), device
    served, *_ = pool.run(in_language, num_ranks, *args)
    check_served(served, num_ranks, rounds)


@pytest.mark.parametrize("num_ranks", [2])
def test_a_kernel_that_waits_for_a_dead_rank_raises(pool, num_ranks, device):
    with pytest.raises(PeerLostError, match=r"(?s)rank 1 ended with.*as it should be: rank 0: rank 1 ended"):
        pool.run(wait_for_a_dead_peer, num_ranks, device)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))])
def test_a_deadlock_of_all_ranks(pool, num_ranks):
    """It is an error of all of them at once; a slow rank is none."""
    results = pool.run(tokens, num_ranks, num_ranks, 3, 2)
    assert results == [((2, rank, 1, True), 3) for rank in range(num_ranks)]
