"""Every operation by every algorithm, with every dtype, shape and place, against torch in float64."""

import itertools

import pytest
import torch
from jobs_ops import float32_precisions, run_cases
from ops_cases import UNTOUCHED, all_cases, expected, owned_tiles, thinned, wrong_elements
from rank_counts import rank_counts

from iris_core.providers import baseline


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(1, 2, 3, 4, seldom=[8]))
def test_results(pool, some, num_ranks, device):
    """With data that is exact, and again with any data."""
    cases = list(all_cases(num_ranks))
    if device == "cpu":  # on more ranks than processors, here and there
        cases = thinned(cases, num_ranks) if num_ranks > 2 else some(cases, 2)
    for wrong in pool.run(run_cases, num_ranks, device, cases, 2, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2])
def test_float32_is_multiplied_as_torch_does_it(pool, num_ranks, device):
    for errors in pool.run(float32_precisions, num_ranks, device, ("unfused", "two_shot")):
        assert len(errors) == 18
        for (default, wish, name), (error, setting) in errors.items():
            assert setting == default  # as it was
            tf32 = device == "cuda" and (wish or (wish is None and default == "tf32"))
            assert (1e-5 < error < 1e-2) if tf32 else error < 2e-6, (default, wish, name)


def test_a_wrong_element_is_seen():
    """In every kind of case, of data that is exact and of any."""
    for case, turn in itertools.product(thinned(all_cases(2), 2), range(2)):
        want, made_of = expected(case, 1, 2, turn)
        got = want.to(getattr(torch, case.out_dtype or case.dtype)).double()
        if case.layout == "tiles":
            got[~owned_tiles(case, 1, 2)] = UNTOUCHED
        assert wrong_elements(case, got, 1, 2, turn) == [], case
        got[-1, -1] += 1 + made_of[-1, -1] / 4  # the last tile is rank 1's
        assert wrong_elements(case, got, 1, 2, turn) != [], case


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
