"""What the tests of fused operations compare with: no result with one of the usual mistakes is taken for right."""

import jobs_hopper
import ops_cases
import pytest
import torch
from ops_cases import all_cases, expected, operand, owned_tiles, thinned, wrong_elements
from tables import table

CASES = {
    "portable": lambda: thinned(all_cases(2), 2),
    "hopper on CPU ranks": lambda: jobs_hopper.cases(True),
    "hopper": lambda: [case for case in jobs_hopper.cases(False) if case.bias == "columns"][:2],
}
SOME = [pytest.param(each, marks=pytest.mark.exhaustive) if each == "hopper" else each for each in CASES]
RANK, SIZE = 1, 2


def output(case, turn):
    """The right output in the output's type, as it lies in memory after a call."""
    want, _ = expected(case, RANK, SIZE, turn)
    got = want.to(getattr(torch, case.out_dtype or case.dtype)).double()
    if case.layout == "tiles":
        got[~owned_tiles(case, RANK, SIZE)] = ops_cases.UNTOUCHED
    return got


def without_bias(case, rank, size, which, turn):
    values = operand(case, rank, size, which, turn)
    return values if values is None or which != 2 else torch.zeros_like(values)


def without_a_block_of_columns(case, rank, size, which, turn):
    values = operand(case, rank, size, which, turn)
    if which == 0 and rank == RANK:
        values = values.double()
        values[:, -16:] = 0
    return values


def with_swapped_rows(case, rank, size, which, turn):
    values = operand(case, rank, size, which, turn)
    if which == 0 and rank == RANK and values.shape[0] > 1:
        values = values.double()
        values[-2:] = values[-2:].flip(0)
    return values


@pytest.mark.parametrize("which", SOME)
def test_right_results_are_right(which):
    for case in CASES[which]():
        for turn in range(2):
            assert wrong_elements(case, output(case, turn), RANK, SIZE, turn) == [], case


@table("mistake", [without_bias, without_a_block_of_columns, with_swapped_rows])
@table("which", SOME)
def test_mistakes_are_seen(monkeypatch, which, mistake):
    seen = 0
    for case in CASES[which]():
        if (mistake is without_bias and not case.bias) or case.shape[0] == 1 or min(case.shape) < 3:
            continue
        right = output(case, 0)
        with monkeypatch.context() as patch:
            patch.setattr(ops_cases, "operand", mistake)
            got = output(case, 0)
        if case.layout != "tiles" or not torch.equal(got, right):  # of the tiles, others may be this rank's
            assert wrong_elements(case, got, RANK, SIZE, 0) != [], case
            seen += 1
    assert seen
