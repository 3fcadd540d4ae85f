"""Every operation by every algorithm, with every dtype, shape and place, against torch in float64."""

import pytest
from jobs_ops import float32_precisions, rare_kinds, run_cases
from ops_cases import all_cases, die_cases, dtype_cases, layout_cases, piece_cases, place_cases, shape_cases, thinned
from rank_counts import rank_counts


def check(pool, num_ranks, device, cases, turns=2):
    """Call all of them, with data that is exact, and again with any data."""
    cases = list(cases)
    if device == "cpu" and num_ranks > 2:  # more ranks than processors, here and there
        cases = thinned(cases, num_ranks)
    for wrong in pool.run(run_cases, num_ranks, device, cases, turns, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[8]))
def test_everything_on_many_ranks(pool, some, num_ranks, device):
    cases = list(all_cases(num_ranks))
    if device == "cpu":
        cases = some(thinned(cases, num_ranks), 2)
    check(pool, num_ranks, device, cases, 1 if device == "cpu" else 2)


@pytest.mark.parametrize("num_ranks", [2])
def test_kinds_that_some_members_have_forgotten(pool, num_ranks, device):
    for most, wrong in pool.run(rare_kinds, num_ranks, device):
        assert most <= 8
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, seldom=[2]))
def test_shapes(pool, num_ranks, device):
    check(pool, num_ranks, device, shape_cases(num_ranks), 1 if device == "cpu" else 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dtypes(pool, some, num_ranks, device):
    cases = list(dtype_cases(num_ranks))
    check(pool, num_ranks, device, some(cases, 2) if device == "cpu" else cases)


@pytest.mark.parametrize("num_ranks", [2])
def test_places(pool, some, num_ranks, device):
    cases = list(place_cases(num_ranks))
    check(pool, num_ranks, device, some(cases, 2) if device == "cpu" else cases, 1 if device == "cpu" else 2)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_layout_of_tiles(pool, num_ranks, device):
    check(pool, num_ranks, device, layout_cases(num_ranks))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_products_in_pieces(pool, num_ranks, device):
    check(pool, num_ranks, device, piece_cases(num_ranks))


@pytest.mark.parametrize("num_ranks", [2])
def test_tiles_of_several_dies(pool, num_ranks, device):
    check(pool, num_ranks, device, die_cases(num_ranks), 1 if device == "cpu" else 2)


@pytest.mark.parametrize("num_ranks", [2])
def test_float32_is_multiplied_as_torch_does_it(pool, num_ranks, device):
    for errors in pool.run(float32_precisions, num_ranks, device, ("unfused", "two_shot")):
        assert len(errors) == 18
        for (default, wish, name), (error, setting) in errors.items():
            assert setting == default  # as it was
            tf32 = device == "cuda" and (wish or (wish is None and default == "tf32"))
            assert (1e-5 < error < 1e-2) if tf32 else error < 2e-6, (default, wish, name)
