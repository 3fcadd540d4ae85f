"""Programs of torch's own on backend "iris", on CPU ranks: they compute what they compute on gloo."""

import jobs_programs as jobs
import pytest


@pytest.mark.parametrize("name", jobs.PROGRAMS)
def test_programs_run_unchanged(ranks, tmp_path, name):
    for is_equal, num_tensors in ranks.run(jobs.as_on_gloo, 2, str(tmp_path / "store"), name):
        assert is_equal
        assert num_tensors >= 5
