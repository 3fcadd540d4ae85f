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
RANK, SIZE = 1, 2


def output(case, turn):
    """The right output in the output's type, as it lies in memory after a call."""
    want, _ = expected(case, RANK, SIZE, turn)
    got = want.to(getattr(torch, case.out_dtype or case.dtype)).double()
    if case.layout == "tiles":
        got[~owned_tiles(case, RANK, SIZE)] = ops_cases.UNTOUCHED
    return got


def mistaken(mistake):
    """What operands are where one thing is forgotten."""

    def changed(case, rank, size, which, turn):
        values = operand(case, rank, size, which, turn)
        if which == 2 and values is not None and mistake == "no bias":
            return torch.zeros_like(values)
        if which == 0 and rank == RANK:
            values = values.double()
            if mistake == "a block of columns":
                values[:, -16:] = 0
            elif mistake == "swapped rows":
                values[-2:] = values[-2:].flip(0)
        return values

    return changed


@table("which", [pytest.param(each, marks=pytest.mark.exhaustive) if each == "hopper" else each for each in CASES])
def test_right_results_are_right_and_mistakes_are_seen(monkeypatch, which):
    seen = set()
    for case in CASES[which]():
        rights = [output(case, turn) for turn in range(2)]
        for turn, right in enumerate(rights):
            assert wrong_elements(case, right, RANK, SIZE, turn) == [], case
        for mistake in ("no bias", "a block of columns", "swapped rows"):
            if (mistake == "no bias" and not case.bias) or case.shape[0] == 1 or min(case.shape) < 3:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(ops_cases, "operand", mistaken(mistake))
                got = output(case, 0)
            if case.layout != "tiles" or not torch.equal(got, rights[0]):  # of the tiles, others may be this rank's
                assert wrong_elements(case, got, RANK, SIZE, 0) != [], case
                seen.add(mistake)
    assert len(seen) == 3
