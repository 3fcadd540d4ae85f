"""Every operation by every algorithm, with every dtype, shape and place, against torch in float64."""

import pytest
import torch
from jobs_ops import float32_precisions, rare_kinds, run_cases
from ops_cases import (
    all_cases,
    die_cases,
    dtype_cases,
    layout_cases,
    piece_cases,
    place_cases,
    scaled_cases,
    shape_cases,
    thinned,
)
from rank_counts import rank_counts

from iris_core.providers import baseline

CALLS = {  # numbers of ranks, how many on the CPU, turns there
    "all": (rank_counts(4, seldom=[8]), 2, 1), "shapes": (rank_counts(1, 3, seldom=[2]), 1, 1),
    "dtypes": ([1, 2], 2, 2), "places": ([2], 2, 1), "layout": (rank_counts(3, seldom=[2]), 1, 2),
    "pieces": (rank_counts(3, seldom=[2]), 1, 2), "dies": ([2], 1, 1), "scales": ([2, 3, 4], 1, 2),
}  # fmt: skip
MAKE = {
    "all": all_cases, "shapes": shape_cases, "dtypes": dtype_cases, "places": place_cases, "layout": layout_cases,
    "pieces": piece_cases, "dies": die_cases, "scales": scaled_cases,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("what", "num_ranks"), [
    pytest.param(what, *getattr(count, "values", [count]), marks=getattr(count, "marks", ()))
    for what, (counts, *_) in CALLS.items() for count in counts
])  # fmt: skip
def test_results(pool, some, what, num_ranks, device):
    """With data that is exact, and again with any data."""
    cases, (_, every, turns) = list(MAKE[what](num_ranks)), CALLS[what]
    if device == "cpu":
        cases = thinned(cases, num_ranks) if num_ranks > 2 else cases  # more ranks than processors, here and there
        cases = some(cases, every)
    for wrong in pool.run(run_cases, num_ranks, device, cases, turns if device == "cpu" else 2, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2])
def test_kinds_that_some_members_have_forgotten(pool, num_ranks, device):
    for most, wrong in pool.run(rare_kinds, num_ranks, device):
        assert most <= 8
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2])
def test_float32_is_multiplied_as_torch_does_it(pool, num_ranks, device):
    for errors in pool.run(float32_precisions, num_ranks, device, ("unfused", "two_shot")):
        assert len(errors) == 18
        for (default, wish, name), (error, setting) in errors.items():
            assert setting == default  # as it was
            tf32 = device == "cuda" and (wish or (wish is None and default == "tf32"))
            assert (1e-5 < error < 1e-2) if tf32 else error < 2e-6, (default, wish, name)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_scaled_rows_by_torch(monkeypatch, dense, has_bias):
    """torch._scaled_mm is called as it wants to be; on the CPU it is asked only here."""
    monkeypatch.setattr(baseline, "_is_for_torch", lambda *_: True)
    drawn = torch.Generator().manual_seed(5)
    a, b = (torch.randn(32, 64, generator=drawn).to(torch.float8_e4m3fn) for _ in range(2))
    scales, bias = torch.rand(2, 32, generator=drawn), torch.randn(32, generator=drawn).bfloat16() if has_bias else None
    out = torch.zeros(32, 32 if dense else 40, dtype=torch.bfloat16)[:, :32]
    baseline.multiply(a, b.t(), bias, out, True, scales[0], scales[1, None])
    want = (a.double() * scales[0, :, None].double()) @ (b.double() * scales[1, :, None].double()).t()
    want = want if bias is None else want + bias.double()
    assert (out.double() - want).abs().max() < 2**-7 * want.abs().max()
