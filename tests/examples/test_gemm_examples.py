"""The GEMM examples in odd sizes and transposed, again and again without a barrier, and with ranks that are late."""

import jobs_examples
import pytest
from jobs_gemm_examples import run_in_turns
from tables import table

GEMMS = sorted(path for path in jobs_examples.EXAMPLES.glob("*.py") if "gemm_options(ctx)\n" in path.read_text())
SIZES = [(129, 65, 33), (1, 200, 1), (70, 1, 40)]  # M, N and K of each rank
TURNS = 6

UNSAFE = [
    ("20_gemm_all_scatter.py", "ctx.device_barrier()  # all ranks have used their last C", "pass"),
    ("27_gemm_all_reduce_one_shot.py", "(turn % 2)", "(turn * 0)"),
    ("29_all_gather_gemm_pull.py", 'ctx.device_barrier(sem="relaxed")', "pass"),
    ("30_all_gather_gemm_push.py", "ctx.wait(arrived + owner * tiles_m + row, turn)", "pass"),
]
"""Examples without what keeps their calls, or ranks, apart."""


@pytest.mark.parametrize("path", GEMMS, ids=lambda path: path.name)
@table("sizes", [SIZES[0], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SIZES[1:])])
def test_turns(pool, path, sizes):
    assert pool.run(run_in_turns, 3, str(path), sizes, TURNS, 1, "cpu") == [[]] * 3


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize("path", GEMMS, ids=lambda path: path.name)
def test_turns_on_gpus(pool, path, num_ranks):
    for seed, sizes in enumerate([(1025, 257, 129), *SIZES]):
        assert pool.run(run_in_turns, num_ranks, str(path), sizes, 20, seed, "cuda") == [[]] * num_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "right", "wrong"), UNSAFE, ids=[name for name, *_ in UNSAFE])
def test_the_turns_find_what_is_missing(pool, tmp_path, name, right, wrong):
    """Else the tests above would say nothing.  It goes wrong at some time only, so it is tried often."""
    text = (jobs_examples.EXAMPLES / name).read_text()
    assert right in text
    path = tmp_path / name
    path.write_text(text.replace(right, wrong))
    found = (pool.run(run_in_turns, 3, str(path), SIZES[0], 2 * TURNS, seed, "cpu") for seed in range(5))
    assert any(turns for wrong_turns in found for turns in wrong_turns)
