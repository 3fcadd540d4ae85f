"""Every operation by every algorithm, with every dtype, shape and place, against torch in float64."""

from functools import partial

import pytest
import torch
from jobs_ccl import late_inside
from jobs_ops import float32_errors, run_cases
from ops_cases import all_cases, packet_cases, thinned
from rank_counts import rank_counts

from iris_core.providers import baseline


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(1, 2, 3, seldom=[4, 8]))
def test_results(pool, some, num_ranks, device):
    """With data that is exact, and again with any data."""
    cases = list(all_cases(num_ranks))
    if device == "cpu":  # alone and on more ranks than processors, here and there
        cases = thinned(cases, num_ranks) if num_ranks > 2 else some(cases, 4)
    for wrong in pool.run(run_cases, num_ranks, device, cases, 2, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(2, 3, seldom=[4]))
def test_packets(pool, tmp_path, num_ranks, device):
    """On CPU ranks, of which 3 and more are late at random between two stores, a part of the cases."""
    late = partial(late_inside, str(tmp_path / "changes"), 0.02, run_cases)
    cases, job = list(packet_cases(num_ranks)), late if device == "cpu" and num_ranks > 2 else run_cases
    cases = thinned(cases, num_ranks) if device == "cpu" else cases
    for wrong in pool.run(job, num_ranks, device, cases, 2, None, "", True, timeout_s=200.0):
        assert wrong == []


def test_float32_is_multiplied_as_the_config_says(pool, device):
    for errors in pool.run(float32_errors, 2, device, ("unfused", "two_shot")):
        assert len(errors) == 6
        for (wish, name), error in errors.items():
            assert (1e-5 < error < 1e-2) if device == "cuda" and wish else error < 2e-6, (wish, name)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("of_rows", [True, False])
def test_scales_by_torch(monkeypatch, dense, has_bias, of_rows):
    """torch._scaled_mm is called as it wants to be; on the CPU it is asked only here, and knows no blocks."""

    def by_blocks(a, b, left, right, *, use_fast_accum, out, **_):
        assert left.stride() == (1, 32)
        assert right.stride() == (1, 4)
        assert not use_fast_accum
        right = right.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :160]
        return out.copy_(a.float() * left.repeat_interleave(128, 1) @ (b.float() * right))

    monkeypatch.setattr(baseline, "_is_for_torch", lambda *_: True)
    if of_rows and torch.__version__ < "2.13":
        pytest.skip("this torch scales whole tensors only")
    if not of_rows:
        monkeypatch.setattr(torch, "_scaled_mm", by_blocks)
    drawn = torch.Generator().manual_seed(5)
    a, b = (torch.randn(lines, 512, generator=drawn).to(torch.float8_e4m3fn) for lines in (32, 160))
    left = torch.rand(32, 1 if of_rows else 4, generator=drawn)
    right = torch.rand(*((1, 160) if of_rows else (4, 2)), generator=drawn)
    bias = torch.randn(160, generator=drawn).bfloat16() if has_bias else None
    out = torch.zeros(32, 160 if dense else 168, dtype=torch.bfloat16)[:, :160]
    baseline.multiply(a, b.t(), bias, out, True, left, right)
    if not of_rows:
        left, right = left.repeat_interleave(128, 1), right.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :160]
    want = (a.double() * left.double()) @ (b.t().double() * right.double())
    want = want if bias is None else want + bias.double()
    assert (out.double() - want).abs().max() < 2**-7 * want.abs().max()
