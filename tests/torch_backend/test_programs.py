"""Programs of torch's own on backend "iris": they compute what they compute on gloo, or on GPUs NCCL.

On CPUs, tests/examples trains the transformers.
"""

import jobs_programs as jobs
import pytest

SELDOM = [each for each in jobs.PROGRAMS if "transformer" in each] + ["DDP, allreduce", "DDP, post-local SGD"]
ON_GPUS = {2: [each for each in jobs.PROGRAMS if "ring" not in each]}
ON_GPUS[4] = [each for each in ON_GPUS[2] if "transformer" in each]


@pytest.mark.parametrize(
    ("device", "num_ranks", "name"),
    [pytest.param("cpu", 2, name, marks=[pytest.mark.exhaustive] * (name in SELDOM)) for name in jobs.PROGRAMS]
    + [pytest.param("cuda", n, name, marks=pytest.mark.multigpu(n)) for n, names in ON_GPUS.items() for name in names],
)
def test_programs_run_unchanged(ranks, tmp_path, device, num_ranks, name):
    for is_equal, num_tensors in ranks.run(jobs.as_on_the_peer, num_ranks, str(tmp_path / "store"), name, device):
        assert is_equal
        assert num_tensors >= 3
