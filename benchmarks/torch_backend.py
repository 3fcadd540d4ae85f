"""The backend "iris" of torch.distributed against NCCL's: all_reduce, and steps by tensor parallelism, FSDP2 and DDP.

    python benchmarks/torch_backend.py [--ranks N] [--quick] [--only fsdp2] [--axis tokens=2048] [--limit 600]

One process per GPU, which has a group of each backend; bf16.

`all_reduce`: "iris" and "nccl" are `dist.all_reduce` on a group of that backend, in place; "ctx.ccl" is the same on the
context of the group.  Each is measured in CUDA graphs and, "eager", with the launches by the host.  Place "ordinary":
our tensor is torch's, as NCCL's always is; "heap": on the symmetric heap of the group.  Some elements of the timed
tensor are infinite on one rank, and the others add up to zero, so that further sums leave the result as it is and every
element of it is compared in the timed configuration; sums of integers are compared after one more call.

`tensor_parallel`: forward and backward of the examples' transformer without biases, divided by columns, rows and
tokens, each block compiled; `batch` sequences in all.  "nccl async-tp" is torch's micro-pipelining on symmetric memory,
which is only given numbers if its fused operators were called; "iris fused" is `iris_core.torch_backend.fuse`.
The counters say how many fused products a step calls.

`fsdp2`: a training step (forward, backward, SGD) of a billion parameters, eager, each block sharded; `batch` sequences
of each rank.  The host bounds 20 blocks of width 2048, communication 5 of width 4096 with few tokens.  "heap" is
`iris_core.torch_backend.fsdp.use_heap`, on a group of the backend that is named before it.  The gradients of both steps
are compared with those that one process computes alone.  `ddp`: the same step of a net that each rank has whole.

Targets: all_reduce, eager: 1.5 times as fast as NCCL up to 256 KiB and never slower; in graphs the speed of ctx.ccl.
Tensor parallelism: faster than both peers.  FSDP2: not slower than NCCL, and faster with buffers on the heap.  DDP: not
slower than NCCL.

On CPU ranks (--device cpu) the same code runs with gloo in NCCL's place and tiny sizes, so that it is tested.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ccl import HEAP, KIB, MIB, ORDINARY
from ccl_peers import OFF
from torch.distributed.device_mesh import DeviceMesh
from training_steps import DTYPE, Task, operators, replicated, sharded
from training_steps import tensor_parallel as divided

from iris_core import bench, torch_backend
from iris_core.torch_backend import fsdp, fuse
from iris_core.tuning.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

SMALL, SMALL_BOUND = 256 * KIB, 1.5  # eagerly, up to so many bytes, so many times as fast as NCCL
NEVER_SLOWER = 0.98  # a repeated run differs by two percent
ROUNDS = 61  # of steps that the host bounds, which differ by a fifth from one to the next
LIKE_CCL = 0.95
LAYERS = {64: 2, 2048: 20, 4096: 5}  # by width: those for GPUs have a billion parameters
FUSED, ASYNC_TP = "iris fused", "nccl async-tp"
PEERS = ("nccl", "gloo", ASYNC_TP)

_groups: dict[str, Any] = {}


def iris_group(ctx: Iris, place: str = ORDINARY) -> Any:
    """Return a process group of backend "iris" whose contexts are as `ctx`.  Collective, the first time.

    Tensors on the heap have another one: a group whose first call of a kind had ordinary tensors uses no heap for it.
    """
    if place not in _groups:
        kind = torch.device(ctx.device).type
        options = torch_backend.Options(ctx.heap_size, devices=(kind,), **ctx.plugin_names)
        _groups[place] = dist.new_group(backend="iris", pg_options=options)
    return _groups[place]


def mesh_of(group: Any, name: str, ctx: Iris) -> DeviceMesh:
    """Return a mesh of all ranks that communicates by a group."""
    return DeviceMesh.from_group(group, torch.device(ctx.device).type, mesh_dim_names=(name.replace(" ", "_"),))


def peer_name(state: State) -> str:
    """The backend of the default group."""
    return "nccl" if state.on_gpu else "gloo"


def timers(state: State) -> dict[str, str]:
    """Suffixes of providers' names, by timer."""
    return {"graph": "", "events": " eager"} if state.on_gpu else {"cpu": ""}


# -- all_reduce -------------------------------------------------------------------------------------------------------
class InPlace:
    """A tensor that is summed over all ranks in place, again and again.

    Args:
        sample: its size, and whole numbers.
        x: the tensor.
        integers: the sample's input.
        call: sums it.
    """

    def __init__(self, sample: Sample, x: torch.Tensor, integers: torch.Tensor, call: Callable[[], object]) -> None:
        self.call, self._sample, self._x, self._integers = call, sample, x, integers
        rank, size = sample.rank, sample.size
        index = torch.arange(x.numel(), device=x.device)
        self._result = torch.tensor([0, float("inf"), float("-inf")], dtype=x.dtype, device=x.device)[index // size % 3]
        is_finite = (self._result == 0) | (index % size != rank)  # infinite on one rank; the others' sum is 0
        self._input = torch.where(is_finite, 2 * rank - (size - 1), self._result)

    def prepare(self) -> None:
        """Put this rank's input there."""
        self._x.copy_(self._input)

    def is_right(self) -> bool:
        """Whether timed calls have left their sum, and one more call adds up whole numbers.  Collective."""
        is_right = torch.equal(self._x, self._result)
        self._x.copy_(self._integers)
        self.call()
        return self._sample.is_right(self._x) and is_right


def sizes(options: RunOptions) -> list[int]:
    """Bytes of the tensor."""
    if options.device == "cpu":
        return [KIB]
    return [KIB, 16 * KIB, SMALL, 4 * MIB, 64 * MIB] if options.quick else bench.power_of_two(KIB, 64 * MIB)


@bench.register
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("nbytes", sizes)
def all_reduce(state: State, ctx: Iris) -> None:
    """The sum of all ranks' tensors, in place."""
    group = iris_group(ctx, state["place"])
    own, nccl = torch_backend.context_of(group), peer_name(state)
    sample = Sample.of_bytes("all_reduce", DTYPE, ctx.cur_rank, ctx.num_ranks, state["nbytes"])
    state.resources.enter_context(own.scope())
    ours, integers = sample.tensors(own)
    assert ours is not None
    assert integers is not None
    theirs = torch.empty(ours.shape, dtype=DTYPE, device=ours.device)
    if state["place"] == ORDINARY:
        ours = torch.empty_like(theirs)
    state.set_bytes(sample.nbytes, bus_factor=2 * (ctx.num_ranks - 1) / ctx.num_ranks)
    calls: dict[str, tuple[torch.Tensor, Callable[[], object], str]] = {
        "iris": (ours, lambda: dist.all_reduce(ours, group=group), "ctx.ccl"),
        "ctx.ccl": (ours, lambda: own.ccl.all_reduce(ours, ours), nccl),
        nccl: (theirs, lambda: dist.all_reduce(theirs), ""),
    }
    for timer, suffix in timers(state).items():
        state.set_timer(timer)
        for name, (tensor, call, beside) in calls.items():
            run = InPlace(sample, tensor, integers, call)
            if suffix and name == "iris":
                beside = nccl
            state.provider(
                f"{name}{suffix}", call, check=run.is_right, prepare=run.prepare, peer=name == nccl and not suffix,
                baseline=beside and f"{beside}{suffix}",
            )  # fmt: skip
        if timer == "graph":
            state.target("iris", "ratio", at_least=LIKE_CCL)
        elif timer == "events":
            bound = SMALL_BOUND if state["nbytes"] <= SMALL else NEVER_SLOWER
            state.target("iris eager", "ratio", at_least=bound)


# -- training steps ---------------------------------------------------------------------------------------------------
def on(*gpu: int, cpu: int) -> Callable[[RunOptions], list[int]]:
    """Values of an axis: those for GPUs, and a small one."""
    return lambda options: [cpu] if options.device == "cpu" else list(gpu)


def task_of(state: State, ctx: Iris, layers: int, batch: int) -> Task:
    """The task of a point; says how much work it is for each rank."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    task = Task(layers, state["width"], batch, state["tokens"], torch.device(ctx.device))
    state.set_flops(task.flops / ctx.num_ranks)
    return task


def fusing(state: State) -> dict[str, dict[str, Any]]:
    """Options of torch.compile by our providers' names; products are fused on GPUs only, as Inductor runs there."""
    if not state.on_gpu:
        return {"iris": {}}
    return {"iris": {}, FUSED: fuse.options(), f"{FUSED}, regathered": fuse.options(regather=True)}


def symmetric_memory() -> Any:
    """Let torch's products use symmetric memory among all ranks; return their group."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return dist.group.WORLD


@bench.register
@bench.axis("layers", on(4, cpu=2))
@bench.axis("width", on(4096, cpu=64))
@bench.axis("batch", on(8, cpu=2))
@bench.axis("tokens", on(512, cpu=8))
def tensor_parallel(state: State, ctx: Iris) -> None:
    """Forward and backward of a compiled transformer, by tensor and sequence parallelism."""
    task, nccl = task_of(state, ctx, state["layers"], state["batch"]), peer_name(state)
    wanted = task.gradients()
    iris, world = mesh_of(iris_group(ctx), "iris", ctx), mesh_of(dist.group.WORLD, nccl, ctx)
    makers = {name: divided(task, iris, options) for name, options in fusing(state).items()}
    makers[nccl] = divided(task, world)
    reason = "it needs GPUs"
    if state.on_gpu:
        for name in [name for name in makers if name.startswith(FUSED)]:
            state.add_counter(f"products, {name}", operators(makers[name](), "iris::.*matmul"))
        try:
            peer = divided(task, mesh_of(symmetric_memory(), ASYNC_TP, ctx), {"_micro_pipeline_tp": True})
            fused = operators(peer(), "symm_mem::fused_")
            reason = "" if fused else "torch fused no product"
        except (AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
    if not reason:
        makers[ASYNC_TP] = peer
        state.add_counter(f"products, {ASYNC_TP}", fused)
    for timer, suffix in timers(state).items():
        state.set_timer(timer)
        for name, make in makers.items():
            step = make()
            step()  # compiles, the first time
            state.provider(
                f"{name}{suffix}", step, check=partial(step.check, wanted), prepare=step.spoil,
                baseline=f"{nccl}{suffix}" if name != nccl else "", peer=name in PEERS and not suffix,
            )  # fmt: skip
        if reason:
            state.skip_provider(f"{ASYNC_TP}{suffix}", reason)
        if state.on_gpu:
            target = FUSED if FUSED in makers else "iris"
            state.target(f"{target}{suffix}", "ratio" if suffix else "ratio_to_best_peer", at_least=1.0)


def measure_often(state: State) -> None:
    """Take more rounds, on GPUs and where all is measured."""
    if state.on_gpu and not state.options.quick:
        state.set_rounds(ROUNDS)


@bench.register
@bench.axis("width", on(2048, 4096, cpu=64))
@bench.axis("batch", on(4, cpu=1))
@bench.axis("tokens", on(512, 2048, cpu=8))
def fsdp2(state: State, ctx: Iris) -> None:
    """A training step of a sharded transformer."""
    task, nccl = task_of(state, ctx, LAYERS[state["width"]], state["batch"] * ctx.num_ranks), peer_name(state)
    group = iris_group(ctx)
    use_heap = partial(fsdp.use_heap, ctx=torch_backend.context_of(group))
    wanted = task.gradients()
    measure_often(state)
    for name, members in {nccl: dist.group.WORLD, "iris": group}.items():
        mesh = mesh_of(members, name, ctx)
        for suffix, prepare in {"": None, " heap": use_heap}.items():
            step = sharded(task, mesh, prepare)
            baseline = nccl if name + suffix != nccl else ""
            check = partial(step.check, wanted)
            state.provider(f"{name}{suffix}", step, check=check, prepare=step.spoil, baseline=baseline)
            if state.on_gpu and baseline:
                state.target(f"{name}{suffix}", "ratio", at_least=1.0 if suffix else NEVER_SLOWER)


@bench.register
@bench.axis("width", on(2048, 4096, cpu=64))
@bench.axis("batch", on(4, cpu=1))
@bench.axis("tokens", on(512, cpu=8))
def ddp(state: State, ctx: Iris) -> None:
    """A training step of a transformer that each rank has whole."""
    task, nccl = task_of(state, ctx, LAYERS[state["width"]], state["batch"] * ctx.num_ranks), peer_name(state)
    wanted = task.gradients()
    measure_often(state)
    for name, group in {nccl: dist.group.WORLD, "iris": iris_group(ctx)}.items():
        step = replicated(task, group)
        check = partial(step.check, wanted)
        state.provider(name, step, check=check, prepare=step.spoil, baseline=nccl if name != nccl else "")
    if state.on_gpu:
        state.target("iris", "ratio", at_least=NEVER_SLOWER)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="gluon",
    heap_size="16GiB",
    environ=OFF | {"IRIS_DEVICE_TIMEOUT": "60"},  # one rank may compile for longer than another
    on_cpu={"heap_size": "16MiB"},
    results="results/torch_backend-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
