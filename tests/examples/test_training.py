"""The examples that torchrun starts train as one process alone does."""

import jobs_examples
import pytest

from iris_core.testing import RankPool

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


@pytest.mark.parametrize("num_ranks", [4, pytest.param(4, marks=pytest.mark.multigpu(4), id="cuda-4")])
def test_training_on_two_nodes_goes_on_where_it_stopped(ranks, num_ranks, tmp_path):
    """Layers are divided within the nodes, and parameters between them."""
    for steps in (1, 2):
        train = (
            jobs_examples.train, num_ranks, "60_two_nodes.py", steps, jobs_examples.free_port(), "2x2", str(tmp_path),
        )  # fmt: skip
        lines = ranks.run(*train)
        assert [line.partition(": ")[2] for line in lines] == ["2 nodes, 1 losses as alone"] * num_ranks
