"""Backend "iris" of torch.distributed, and `torch.ops.iris`: as gloo (on GPUs NCCL), and as one process alone."""

import copy
import functools
import os
import pathlib
import pickle
import re
import subprocess
import sys

import jobs_communicator
import jobs_fuse
import jobs_groups as groups
import jobs_programs
import jobs_torch_backend as jobs
import pytest
import torch
import torch.distributed as dist
from jobs_common import unlike
from jobs_examples import free_port

from iris_core.dispatch.products import GATHERING
from iris_core.errors import PeerLostError
from iris_core.testing import RankPool
from iris_core.torch_backend import Options, context_of, explain
from iris_core.torch_backend.adapters import IS_BACKEND, create

ROOT = pathlib.Path(__file__).parents[2]
PAGE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL)
apart = functools.partial(pytest.mark.multigpu, shared=False)  # NCCL inside wants a GPU for each rank
ON_HEAP = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
RUN = """
import iris_core, iris_core.torch_backend, os, time, torch, torch.distributed as dist
def sizes():
    before = iris_core.Iris("1MiB", device="cpu").num_ranks
    for _ in range(2):
        dist.init_process_group("iris")
        total = torch.ops.iris.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)
        dist.destroy_process_group()
        time.sleep(int(os.environ["RANK"]))  # the other one is first
    return before, total.item()
print(iris_core.run(sizes, 2))
"""
MIXED = pytest.mark.skipif(not IS_BACKEND, reason="before torch 2.14 a group in Python takes the place of a mixed one")


@pytest.fixture(scope="package")
def ranks():
    """Rank processes for which torch.distributed is not initialised; most have imported torch.compile."""
    environ = {"IRIS_HEAP_SIZE": "32MiB", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else ranks start compilers, too
    with RankPool(timeout_s=600.0, environ=environ) as pool:
        yield pool


@pytest.fixture
def on_ranks(ranks, tmp_path):
    return lambda job, num_ranks, *args: ranks.run(jobs.in_group, num_ranks, str(tmp_path / "store"), job, *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num_ranks", "nodes"),
    [
        ("cpu", 3, ""), ("cpu", 4, "3+1"), *(pytest.param("cuda", each, "", marks=apart(each)) for each in (2, 4)),
        pytest.param("cuda", 4, "2x2", marks=apart(4)),
    ],
)  # fmt: skip
def test_every_collective_is_as_the_peers(on_ranks, request, device, num_ranks, nodes):
    groups = [list(range(num_ranks)), [num_ranks - 1, 0]]
    every = 1 if device == "cuda" or request.config.getoption("exhaustive") else 2
    on_ranks(jobs.on_nodes, num_ranks, nodes, jobs.equal_to_peer, groups, device, every)


@pytest.mark.parametrize(("job", "num_ranks", "args", "answer"), [
    (jobs.lying_differently, 3, (), ON_HEAP), (jobs.beside_a_compiler, 2, (), [[2.0] * 4] * 2),
    (jobs.operators_lying_differently, 3, (), {"all_reduce", "all_reduce_rms_norm", *GATHERING}),
    (jobs.gradients, 2, (), None), (jobs.promising_bits, 3, (), None), (jobs.fsdp_on_the_heap, 3, (), None),
    (jobs.calls, 3, (), None), (groups.objects, 3, (), None), (groups.memory_of_the_group, 4, (), None),
    (groups.groups_of_all_kinds, 4, (False,), None), (groups.groups_of_all_kinds, 4, (True,), None),
    (jobs.where_a_graph_breaks, 2, (), None), pytest.param(groups.beside_another_backend, 3, (), None, marks=MIXED),
    (groups.different_calls, 3, (), [["rank 0: barrier", f"ranks 1, 2: {op}"] for op in ("all_gather", "all_to_all")]),
    (groups.what_a_group_refuses, 3, (), None), *((groups.refused_by_all, 3, (each,), {}) for each in (False, True)),
    (groups.several_at_a_time, 3, (("cpu",),), None),
    (groups.several_at_a_time, 3, (("cuda",),), None),  # all of it goes to gloo inside
    *((groups.events, 2, (each,), []) for each in (torch.profiler.profile, torch.autograd.profiler.profile)),
])  # fmt: skip
def test_every_rank_says(on_ranks, job, num_ranks, args, answer):
    assert on_ranks(job, num_ranks, *args) == [answer] * num_ranks


@pytest.mark.parametrize("number", range(4))
def test_the_programs_of_the_page_run(ranks, number):
    (values, gradient, is_open), other = answers = ranks.run(jobs.program, 2, PAGE[number], free_port())
    assert not is_open
    assert answers == [other] * 2
    if number == 2:  # with fused products
        assert len({tuple(row) for row in gradient}) == 1  # as the rows of x are equal
        assert any(gradient[0])
    else:
        assert (values, gradient) == {0: ([1.0] * 4, None), 1: ([1.0] * 4, [4.0] * 4), 3: ([2.0] * 4, None)}[number]


@pytest.mark.parametrize(
    ("device", "num_ranks", "by"),
    [
        *(("cpu", n, each) for n, each in ((3, "sum"), (3, "DDP"), (3, "messages"), (2, "barrier"))),
        *(pytest.param("cuda", n, each, marks=apart(n)) for n in (2, 4) for each in ("sum", "DDP")),
    ],
)
def test_a_rank_that_dies_within_a_step_is_named_on_all_others(tmp_path, device, num_ranks, by):
    with RankPool(timeout_s=120.0, environ={"IRIS_HEAP_SIZE": "32MiB"}) as pool, pytest.raises(PeerLostError):
        pool.run(jobs.die, num_ranks, str(tmp_path / "store"), tmp_path, device, by)
    for rank in {*range(num_ranks)} - {1}:
        assert re.search(r"PeerLostError: .*rank 1 ", (tmp_path / f"rank {rank}").read_text())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_is_late_fails_the_call_itself(tmp_path, is_async):
    with RankPool(timeout_s=120.0, environ={"IRIS_HEAP_SIZE": "32MiB"}) as pool:
        first, second = pool.run(jobs.late, 2, str(tmp_path / "store"), is_async)
    assert re.match(r"DeviceTimeoutError: rank 0, program 0: .*RuntimeError: recv from rank 1: ", first, re.DOTALL)
    assert second.startswith("DeviceTimeoutError: rank 0 has reported")


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("num_ranks", [pytest.param(each, marks=apart(each)) for each in (2, 4)])
def test_large_layers_go_through_nccl_in_the_order_of_our_calls(on_ranks, num_ranks, is_deterministic):
    on_ranks(jobs.large_beside_small, num_ranks, is_deterministic)


@apart(2)
def test_torch_allocates_on_the_heap(on_ranks):
    on_ranks(groups.pool_of_torch, 2)


def test_options():
    """They are copied with all that they say, and others are refused."""
    options = Options(heap_size="8MiB", devices=("cpu",), deterministic=True)
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options != Options()
    with pytest.raises(TypeError):
        create(dist.distributed_c10d._DistributedBackendOptions(), dist.ProcessGroupGloo.create_default_device)
    devices = [functools.partial(Options, devices=each) for each in ("cpu", ("cpuu",))]
    for name, calls in (("devices", devices), ("init_process_group", [context_of, explain])):  # before there are groups
        assert unlike(*((f"ArgumentError: .*{name}", each) for each in calls)) == []


def test_a_function_of_run_has_the_backend_and_its_operators():
    done = subprocess.run([sys.executable, "-c", RUN], check=True, timeout=600, capture_output=True, text=True)
    assert done.stdout == "[(2, 2.0), (2, 2.0)]\n"


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("max_nbytes", [None, 0], ids=["Iris", "the group of the device"])
def test_every_method(pool, num_ranks, max_nbytes):
    for ranks in ([0, 1, 2], [0, 2]):
        assert pool.run(jobs_communicator.every_method, num_ranks, ranks, max_nbytes) == [[]] * num_ranks


@pytest.mark.multigpu(2)
def test_graphs_of_the_communicator(pool):
    assert pool.run(jobs_communicator.captured, 2, 5) == [[], []]


PROGRAMS = jobs_programs.PROGRAMS
TRANSFORMERS = [each for each in PROGRAMS if "transformer" in each]


@pytest.mark.parametrize(("device", "num_ranks", "name"), [
    *(pytest.param("cpu", 2, each, marks=[pytest.mark.exhaustive] * (each in TRANSFORMERS[:3])) for each in PROGRAMS),
    *(pytest.param("cuda", 2, each, marks=apart(2)) for each in PROGRAMS if "ring" not in each),
    *(pytest.param("cuda", 4, each, marks=apart(4)) for each in TRANSFORMERS),
])  # fmt: skip
def test_programs_run_unchanged(on_ranks, device, num_ranks, name):
    """They compute what they compute on gloo, or NCCL.  On CPUs, tests/examples trains other transformers."""
    for is_equal, num_tensors in on_ranks(jobs_programs.as_on_the_peer, num_ranks, name, device):
        assert is_equal
        assert num_tensors >= 3


def test_calls_of_contexts_are_in_one_graph_or_refused(ranks):
    ranks.run(jobs_fuse.in_one_graph, 3)
    ranks.run(jobs_fuse.refusals, 2)


@apart(2)
def test_graphs_of_the_compiler(ranks):
    assert ranks.run(jobs_fuse.reduce_overhead, 2, timeout_s=400.0) == [([], 0)] * 2


GATHER, SCATTER, SUM = "iris.all_gather_matmul", "iris.matmul_reduce_scatter", "iris.matmul_all_reduce"
C10D = "_c10d_functional."
LEFT = {
    "scatter columns, bias": "reduce_scatter_tensor", "maximum": "all_reduce", "average": "reduce_scatter_tensor",
    "the product as well": "all_reduce", "twice": "all_gather_into_tensor", "float64": "all_reduce",
    "another group": "all_reduce", "alone": "all_gather_into_tensor",
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_what_is_fused_and_what_is_left(on_ranks, num_ranks):
    found, *others = on_ranks(jobs_fuse.shapes, num_ranks)
    assert others == [found] * (num_ranks - 1)
    for name, (operators, is_equal) in found.items():
        fused = {"gather": GATHER, "scatter": SCATTER, "sum": SUM}.get(name.split()[0].strip(","))
        also = ["iris.all_reduce"] * (fused != GATHER and name.endswith("bias"))
        assert (name, operators) == (name, [C10D + LEFT[name]] if name in LEFT else [fused, *also])
        assert is_equal, name


@pytest.mark.parametrize("regather", [False, True])
def test_transformer_forward_and_backward(on_ranks, regather):
    """q, k and v share what is gathered, and each gradient of a part is gathered for two products: these stay."""
    kept = {C10D + "all_gather_into_tensor": 1}
    sums = {"iris.all_reduce": 2, SCATTER: 2}
    for *alone, forward, backward in on_ranks(jobs_fuse.transformer, 2, regather):
        assert alone == [{**kept, **sums, GATHER: 1}] * (not regather)
        assert forward == ({**kept, **sums, GATHER: 1} if regather else {C10D + "all_gather_into_tensor": 2, **sums})
        gradients = {C10D + "all_gather_into_tensor": 2, SCATTER: 1, C10D + "reduce_scatter_tensor": 1}
        assert backward == gradients | ({GATHER: 1} if regather else {})


def suite_of_torch(folder, **environ):
    """Run the suite of torch's wheel; return names of what did not pass, how many tests passed, and what was said."""
    pytest.importorskip("expecttest")  # which that suite imports
    folder.mkdir()
    program = pathlib.Path(__file__).with_name("distributed_test_of_torch.py")
    environ |= {"TEMP_DIR": str(folder), "IRIS_HEAP_SIZE": "64MiB", "OMP_NUM_THREADS": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    how = {"env": os.environ | environ, "cwd": folder, "capture_output": True, "text": True, "timeout": 3600}
    done = subprocess.run([sys.executable, str(program)], check=False, **how)
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


@pytest.mark.slow
@apart(2)
def test_torchs_own_tests_on_gpus(tmp_path):
    """In NCCL's place, what NCCL passes."""
    of_nccl, passed_by_nccl, _ = suite_of_torch(tmp_path / "nccl", WORLD_SIZE="2", BACKEND="nccl", BY="nccl")
    wrong, passed, text = suite_of_torch(tmp_path / "ours", WORLD_SIZE="2", BACKEND="nccl")
    assert wrong <= of_nccl, text
    assert passed >= passed_by_nccl
