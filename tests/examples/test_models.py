"""Examples 31 to 60: with other shapes than those they show, in a row without waits, traced, and trained."""

import json
import os
import re

import dies_once
import forked
import jobs_examples
import jobs_models
import pytest
from rank_counts import GPU_TIERS
from tables import raises, table

from iris_core.errors import IrisError
from iris_core.testing import RankPool

EXAMPLES = jobs_examples.EXAMPLES


@table(("name", "num_ranks", "args"), [
    ("32_ring_attention.py", 3, (2, 1, 16)),  # more ranks than tokens
    ("33_moe.py", 3, ((0, 50, 7), 1, 20, 33, 2, 3, [])),  # a rank without tokens, sizes that are multiples of nothing
    ("33_moe.py", 2, ((40, 11), 2, 16, 16, 2, 3, [0, 1])),  # a rank whose experts get nothing
    ("34_norm.py", 3, (1, 7, 3)),  # ranks without tokens
    ("38_jacobi.py", 4, ((1, 2), (2, 4), 20, 3e-2)),  # four ranks are a square
])  # fmt: skip
def test_other_shapes(pool, name, num_ranks, args):
    for rank, line in enumerate(pool.run(jobs_examples.call, num_ranks, str(EXAMPLES / name), "main", args, "cpu")):
        assert line.startswith(f"rank {rank} of {num_ranks} on cpu")


@pytest.mark.parametrize(
    ("device", "num_ranks"), [("cpu", 3), *(pytest.param("cuda", *tier.values, marks=tier.marks) for tier in GPU_TIERS)]
)
def test_tracing(pool, tmp_path, device, num_ranks):
    path = str(EXAMPLES / "37_gluon_tracing.py")
    lines = pool.run(jobs_examples.call, num_ranks, path, "main", (str(tmp_path),), device)
    events = 4 + 4 * 3 * (num_ranks - 1)
    assert all(f": {events} events" in line for line in lines)
    assert f"open {tmp_path}/trace.json" in lines[0]
    assert json.loads((tmp_path / "trace.json").read_text())["metadata"]["total_events"] == events * num_ranks


@pytest.mark.parametrize(("name", "num_ranks"), [
    pytest.param(name, num_ranks, marks=[pytest.mark.exhaustive] if num_ranks > 3 else [])
    for name in jobs_models.PREPARE
    for num_ranks in (3, 4)
])  # fmt: skip
def test_calls_in_a_row(pool, tmp_path, name, num_ranks):
    """From three ranks on, one can be a launch ahead of a second one while a third one still waits for the second."""
    calls, share = (6, 0.15) if "decode" in name else (6, 0.1)
    args = str(EXAMPLES / name), calls, "cpu", False, share, str(tmp_path / "delays")
    assert all(pool.run(jobs_models.in_a_row, num_ranks, *args))


@pytest.mark.parametrize("num_ranks", GPU_TIERS)
@pytest.mark.parametrize("name", jobs_models.PREPARE)
@pytest.mark.parametrize(("calls", "again"), [(50, False), (2000, True)])
def test_calls_in_a_row_on_gpus(pool, name, num_ranks, calls, again):
    """Eagerly, and as a graph that is replayed with changing data while each rank's device rests now and then."""
    path = str(EXAMPLES / name)
    assert all(pool.run(jobs_models.in_a_row, num_ranks, path, calls, "cuda", again, timeout_s=600.0))


TRAINED = {
    "50_ddp.py": "DDP",
    "51_fsdp2.py": "FSDP2",
    "52_tensor_parallel.py": "tensor and sequence parallel",
    "53_compile.py": "compiled",
}


@pytest.fixture(scope="module")
def ranks():
    """Rank processes for which torch.distributed is not initialised: the examples do that."""
    with RankPool(timeout_s=600.0, environ={"IRIS_HEAP_SIZE": "256MiB"}) as pool:
        yield pool


@pytest.mark.parametrize(("num_ranks", "steps"), [
    (2, 3), pytest.param(4, 20, marks=pytest.mark.exhaustive),
    pytest.param(2, 20, marks=pytest.mark.multigpu(2), id="cuda-2"),
    pytest.param(4, 20, marks=pytest.mark.multigpu(4), id="cuda-4"),
])  # fmt: skip
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_as_alone(ranks, name, num_ranks, steps):
    lines = ranks.run(jobs_examples.train, num_ranks, name, steps, jobs_examples.free_port())
    assert [line.partition(": ")[2] for line in lines] == [f"{TRAINED[name]}, {steps} losses as alone"] * num_ranks


@pytest.mark.parametrize(("num_ranks", "last"), [
    (4, 2), pytest.param(4, 20, marks=pytest.mark.multigpu(4), id="cuda-4"),
])  # fmt: skip
def test_training_on_two_nodes_goes_on_where_it_stopped(ranks, num_ranks, last, tmp_path):
    """Layers are divided within the nodes, and parameters between them."""

    def train(steps, nodes="2x2"):
        args = "60_two_nodes.py", steps, jobs_examples.free_port(), nodes, str(tmp_path)
        return [line.partition(": ")[2] for line in ranks.run(jobs_examples.train, num_ranks, *args)]

    done = "1 losses as alone", f"{last - 1} losses as alone", f"nothing is left of {last} steps"
    for steps, said in zip((1, last, last), done, strict=True):
        assert train(steps) == [f"2 nodes, {said}"] * num_ranks
    with raises(IrisError, "world.unlike nodes"):
        train(3, "3+1")


def test_torchrun_starts_again_where_a_lost_rank_had_stopped(tmp_path):
    """With the variable that the example names: without it, no second attempt can begin."""
    name, value = re.search(r"(TORCH_\w+)=(\w+) torchrun", (EXAMPLES / "60_two_nodes.py").read_text()).groups()
    environ = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
    options = "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"
    done = forked.run(dies_once.run, 2, str(tmp_path), "2x1", *options, environ=environ, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    assert sorted(path.parent.name for path in tmp_path.glob("*/.metadata")) == ["000001", "000002"]
    said = [f"rank {rank} of 2 on cpu: 2 nodes, 1 losses as alone" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == said
