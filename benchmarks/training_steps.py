"""Training steps for benchmarks/torch_backend.py: the examples' transformer by tensor parallelism, FSDP2 or DDP.

What a step leaves is compared with the gradients that one process alone computes.
"""

from __future__ import annotations

import pathlib
import re
import runpy
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from torch_training import Block  # noqa: E402 - an example's

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

DTYPE = torch.bfloat16
HEAD_DIM, FEWEST_HEADS = 128, 8
TOLERANCE = 0.1  # sums in another order make a few hundredths in bf16, and a rank's part that is missing makes more
LEARNING_RATE = 1.0  # so that a step changes parameters in bf16

divide: Callable[[nn.Module, DeviceMesh], nn.Module] = runpy.run_path(str(EXAMPLES / "52_tensor_parallel.py"))["divide"]
"""Give each rank its columns and rows of the layers, and its tokens between them."""


class Task(NamedTuple):
    """A transformer and a batch, the same on all ranks.

    Attributes:
        layers, width: of the transformer; heads have 128 elements.
        batch, tokens: sequences, and how many tokens each has.
        device: where.
    """

    layers: int
    width: int
    batch: int
    tokens: int
    device: torch.device

    @property
    def flops(self) -> float:
        """Of the products with weights, forward and backward."""
        return 6.0 * self.batch * self.tokens * self.layers * 12 * self.width**2

    def net(self) -> nn.Module:
        """Return the transformer, with the same parameters each time."""
        torch.manual_seed(0)
        heads = max(FEWEST_HEADS, self.width // HEAD_DIM)
        with self.device:  # without biases: torch fuses plain products only
            return nn.Sequential(*(Block(self.width, heads, bias=False) for _ in range(self.layers))).to(DTYPE)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, wanted output), each (batch, tokens, width)."""
        drawn = torch.Generator(self.device).manual_seed(1)
        shape = self.batch, self.tokens, self.width
        x, y = (torch.randn(shape, generator=drawn, device=self.device, dtype=DTYPE) for _ in range(2))
        return x, y

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter by name, as one process alone computes it."""
        step = Step(self.net(), *self.data())
        step()
        return step.gradients


class Step:
    """Forward and backward of the mean square error, again and again with the same data.

    Each provider has its own: the gradients of a graph stay where it writes them.

    Args:
        net: the part of the net that is this rank's.
        x, y: this rank's part of the data.
        scale: of the loss.
    """

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None:
        self._net, self._x, self._y, self._scale = net, x.requires_grad_(), y, scale  # as if layers came before
        self.gradients: dict[str, torch.Tensor] = {}

    def __call__(self) -> None:
        self.gradients = {}
        self._net.zero_grad()
        self._x.grad = None
        ((self._net(self._x) - self._y).square().mean() * self._scale).backward()
        named = ((name.removeprefix("module."), each.grad) for name, each in self._net.named_parameters())  # DDP's
        self.gradients = {name: grad for name, grad in named if grad is not None}

    def spoil(self) -> None:
        """Make the gradients wrong."""
        for each in self.gradients.values():
            _local(each).fill_(float("nan"))

    def check(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Compare the gradients with those of one process; AssertionError if they differ.  Collective."""
        assert self.gradients.keys() == wanted.keys()
        errors = {name: _error(_whole(found), wanted[name]) for name, found in self.gradients.items()}
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}  # NaN is wrong as well
        assert not wrong, f"relative errors of gradients: {wrong}"


class TrainingStep(Step):
    """As `Step`, and a step of SGD."""

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(net, x, y)
        self._parameters = [*net.parameters()]
        self._first = [_local(each.detach()).clone() for each in self._parameters]
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)

    def __call__(self) -> None:
        super().__call__()
        self._optimizer.step()

    def spoil(self) -> None:
        """Give the parameters their first values again, and make the gradients wrong."""
        super().spoil()
        for each, first in zip(self._parameters, self._first, strict=True):
            _local(each.detach()).copy_(first)

    def check(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Do a step with the first parameters, as it is timed, and compare its gradients.  Collective."""
        self.spoil()
        self()
        super().check(wanted)
        pairs = zip(self._parameters, self._first, strict=True)
        assert not all(torch.equal(_local(each.detach()), first) for each, first in pairs), "no parameter has changed"


def tensor_parallel(task: Task, mesh: DeviceMesh, options: Mapping[str, Any] | None = None) -> Callable[[], Step]:
    """Return what makes steps of a net that is divided among a mesh, each block compiled.  Collective.

    Args:
        task: the whole.
        mesh: of one dimension, with a name of its own: torch takes two of the same ranks and name for one.
        options: of torch.compile, which uses Inductor on GPUs.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    backend = "inductor" if task.device.type == "cuda" else "aot_eager"
    net = divide(task.net(), mesh)
    for block in net.children():
        block.compile(backend=backend, options=dict(options or {}) or None, fullgraph=True, dynamic=False)
    x, y = (each.chunk(size, dim=1)[rank].contiguous() for each in task.data())
    # gradients are those of the sum of all ranks' losses, and the loss of one process is their average
    return lambda: Step(net, x, y, 1 / size)


def sharded(task: Task, mesh: DeviceMesh, prepare: Callable[[nn.Module], object] | None = None) -> TrainingStep:
    """Return a training step by FSDP2, whose batch is divided among a mesh.  Collective.

    Args:
        task, mesh: as of `tensor_parallel`.
        prepare: called with the net once it is sharded.
    """
    net = task.net()
    for block in net.children():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if prepare is not None:
        prepare(net)
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()].contiguous() for each in task.data())
    return TrainingStep(net, x, y)


def replicated(task: Task, group: Any) -> TrainingStep:
    """Return a training step by DDP on a process group, among whose ranks the batch is divided.  Collective."""
    size, rank = group.size(), group.rank()
    net = nn.parallel.DistributedDataParallel(task.net(), process_group=group, gradient_as_bucket_view=True)
    x, y = (each.chunk(size)[rank].contiguous() for each in task.data())
    return TrainingStep(net, x, y)


def operators(step: Callable[[], object], names: str) -> int:
    """Return how many operators a step calls whose names match a regular expression.  Collective, as the step is."""
    step()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(bool(re.match(names, event.name)) for event in profile.events())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
