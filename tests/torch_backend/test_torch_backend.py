"""Backend "iris" of torch.distributed, and `torch.ops.iris`: as gloo (on GPUs NCCL), and as one process alone."""

import os
import pathlib
import re
import subprocess
import sys

import jobs_torch_backend as jobs
import pytest
from jobs_examples import free_port

from iris_core.errors import PeerLostError
from iris_core.testing import RankPool

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [("cpu", 3), *(pytest.param("cuda", each, marks=pytest.mark.multigpu(each)) for each in (2, 4))],
)
def test_every_collective_is_as_the_peers(on_ranks, device, num_ranks):
    groups = [list(range(num_ranks)), [num_ranks - 1, 0]]
    assert on_ranks(jobs.equal_to_peer, num_ranks, groups, device) == [[]] * num_ranks


def test_parts_of_different_sizes(on_ranks):
    assert on_ranks(jobs.uneven, 3) == [True] * 3


def test_messages(on_ranks):
    assert all("gloo" in text for text in on_ranks(jobs.messages, 3))


def test_forms_of_calls(on_ranks):
    assert on_ranks(jobs.forms, 2) == [[1.5, 1.5]] * 2


def test_groups_that_promise_bits_refuse_what_goes_to_others(on_ranks):
    for promises, said, flags, is_equal in on_ranks(jobs.promising_bits, 3):
        assert promises == [True, True, False, False]
        assert [bool(each) for each in said] == promises
        assert all("SUM of torch.complex64 on cpu goes to gloo or NCCL" in each for each in said[:2])
        assert flags
        assert is_equal


@pytest.mark.parametrize(
    ("number", "expected"), [(0, ([1.0] * 4, None)), (1, ([1.0] * 4, [4.0] * 4)), (3, ([2.0] * 4, None))]
)
def test_the_programs_of_the_page_run(ranks, number, expected):
    assert ranks.run(jobs.program, 2, PROGRAMS[number], free_port()) == [(*expected, False)] * 2


def test_the_program_with_fused_products_runs(ranks):
    answers = ranks.run(jobs.program, 2, PROGRAMS[2], free_port())
    (_, gradient, is_open), other = answers
    assert not is_open
    assert answers == [other] * 2
    assert len({tuple(row) for row in gradient}) == 1  # as the rows of x are equal
    assert any(gradient[0])


def test_a_rank_that_dies_within_a_step_is_named_on_all_others(tmp_path):
    with RankPool(timeout_s=120.0, environ={"IRIS_HEAP_SIZE": "32MiB"}) as pool, pytest.raises(PeerLostError):
        pool.run(jobs.die, 3, str(tmp_path / "store"), tmp_path)
    for rank in (0, 2):
        assert re.match(r"PeerLostError: .*rank 1 ", (tmp_path / f"rank {rank}").read_text())


def test_fsdp_with_buffers_on_the_heap(on_ranks):
    for is_equal, blocks in on_ranks(jobs.fsdp_on_the_heap, 3):
        assert is_equal
        assert blocks[:4] == [blocks[0]] * 4
        assert blocks[5:] == [blocks[5]] * 3 > [blocks[0]] * 3  # what the first step has made is used again


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("num_ranks", [pytest.param(each, marks=pytest.mark.multigpu(each)) for each in (2, 4)])
def test_large_layers_go_through_nccl_in_the_order_of_our_calls(on_ranks, num_ranks, is_deterministic):
    answers = on_ranks(jobs.large_beside_small, num_ranks, is_deterministic)
    assert answers == [(True, not is_deterministic)] * num_ranks


def test_gradients_are_those_of_the_sum_of_all_losses(on_ranks):
    assert on_ranks(jobs.gradients, 2) == [{}, {}]


def test_other_options_are_refused():
    import torch.distributed as dist

    from iris_core.torch_backend.adapters import create

    with pytest.raises(TypeError, match="Options"):
        create(dist.distributed_c10d._DistributedBackendOptions(), dist.ProcessGroupGloo.create_default_device)


def suite_of_torch(folder, **environ):
    """Run the suite of torch's wheel; return names of what did not pass, how many tests passed, and what was said."""
    pytest.importorskip("expecttest")  # which that suite imports
    folder.mkdir()
    program = pathlib.Path(__file__).with_name("distributed_test_of_torch.py")
    environ |= {"TEMP_DIR": str(folder), "IRIS_HEAP_SIZE": "64MiB"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], env=os.environ | environ, cwd=folder, capture_output=True, text=True,
        timeout=3600, check=False,
    )  # fmt: skip
    wrong = set(re.findall(r"(?m)^(?:ERROR|FAIL): (test_\w+)", done.stderr))
    ran, skipped = re.search(r"(?s)Ran (\d+) tests.*skipped=(\d+)", done.stderr).groups()
    return wrong, int(ran) - int(skipped) - len(wrong), done.stderr[-5000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "passing"), [("iris", 65), ("gloo", 91)])
def test_torchs_own_tests(tmp_path, backend, passing):
    """As "gloo" in gloo's place, where it leaves out less: gloo itself passes 91."""
    wrong, passed, text = suite_of_torch(tmp_path / "ours", WORLD_SIZE="3", BACKEND=backend)
    assert wrong == set(), text
    assert passed >= passing


@pytest.mark.exhaustive
@pytest.mark.multigpu(2)
def test_torchs_own_tests_on_gpus(tmp_path):
    """In NCCL's place, what NCCL passes."""
    of_nccl, passed_by_nccl, _ = suite_of_torch(tmp_path / "nccl", WORLD_SIZE="2", BACKEND="nccl", BY="nccl")
    wrong, passed, text = suite_of_torch(tmp_path / "ours", WORLD_SIZE="2", BACKEND="nccl")
    assert wrong <= of_nccl, text
    assert passed >= passed_by_nccl
