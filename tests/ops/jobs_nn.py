"""Rank jobs: layers that are divided among ranks, against the same layers by torch.distributed on the CPU."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from jobs_common import environment
from torch.nn.functional import gelu, linear

from iris_core import Iris
from iris_core.errors import ArgumentError, IrisError
from iris_core.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_gather_linear,
    linear_all_gather,
    linear_all_reduce,
    linear_reduce_scatter,
)
from iris_core.ops import FusedConfig

FEATURES, HIDDEN, OUT, ROWS, BATCH = 12, 24, 10, 8, 3


_group = None  # of the reference; all ranks


def _gathered(x, dim):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(_group))]
    dist.all_gather(parts, x.contiguous(), group=_group)
    return torch.cat(parts, dim)


def _summed(x):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=_group)
    return x


def _own(x, dim):
    return x.chunk(dist.get_world_size(_group), dim)[dist.get_rank(_group)].contiguous()


def _function(name, forward, backward):
    """A differentiable function of torch.distributed."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    Function.__name__ = name
    return Function.apply


same = _function("same", lambda x: x.clone(), _summed)
add_up = _function("add_up", _summed, lambda grad: grad)
gather_rows = _function("gather_rows", lambda x: _gathered(x, 0), lambda grad: _own(_summed(grad), 0))
scatter_rows = _function("scatter_rows", lambda x: _own(_summed(x), 0), lambda grad: _gathered(grad, 0))
gather_columns = _function("gather_columns", lambda x: _gathered(x, -1), lambda grad: _own(grad, -1))
take_columns = _function("take_columns", lambda x: _own(x, -1), lambda grad: _gathered(grad, -1))


def reference(form, x, first, second):
    """Two layers with a GELU between them; parameters are this rank's parts."""
    if form == "sequence":
        hidden = gelu(linear(gather_rows(x), *first))
        bias = same(second[1])
        return scatter_rows(linear(hidden, second[0])) + bias
    hidden = gelu(linear(same(x), *first))
    if form == "whole":
        hidden = take_columns(gather_columns(hidden))
    return add_up(linear(hidden, second[0])) + second[1]


def in_a_group(device):
    """As `train`, by ranks 0 and 2 alone."""
    global _group
    group = dist.new_group([0, 2])
    _group = group if dist.get_rank() != 1 else None
    try:
        return train(device, "sequence", torch.float32, 2, group=_group, takes_part=dist.get_rank() != 1)
    finally:
        _group = None


def train(device, form, dtype, steps, algorithms=None, group=None, takes_part=True):
    """Steps of gradient descent by both; returns the largest relative deviations of what can deviate."""
    torch.manual_seed(3)
    whole_first, whole_second = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, OUT)
    xs, targets = torch.randn(steps, ROWS, BATCH, FEATURES), torch.randn(steps, ROWS, BATCH, OUT)
    worst = {}

    def compare(what, got, want):
        scale = float(want.abs().max()) + 1e-6
        worst[what] = max(worst.get(what, 0.0), float((got.detach().cpu().float() - want).abs().max()) / scale)

    configs = [None if name is None else FusedConfig(algorithm=name) for name in algorithms or (None, None)]
    with Iris("8MiB", device=device) as ctx:
        if not takes_part:
            ctx.barrier()
            return None
        kwargs = {"dtype": dtype, "sequence_parallel": form == "sequence", "group": group}
        first = ColumnParallelLinear(ctx, FEATURES, HIDDEN, gather_output=form == "whole", config=configs[0], **kwargs)
        second = RowParallelLinear(ctx, HIDDEN, OUT, input_is_parallel=form != "whole", config=configs[1], **kwargs)
        first.load_whole(whole_first.weight, whole_first.bias)
        second.load_whole(whole_second.weight, whole_second.bias)
        layers = [first.weight, first.bias, second.weight, second.bias]
        mirror = [each.detach().cpu().float().requires_grad_() for each in layers]
        names = ("first weight", "first bias", "second weight", "second bias")
        for x, target in zip(xs, targets, strict=True):
            if form == "sequence":
                x, target = _own(x, 0), _own(target, 0)
            inputs = [x.clone().requires_grad_(), x.to(ctx.device, dtype).requires_grad_()]
            want = reference(form, inputs[0], mirror[:2], mirror[2:])
            got = second(gelu(first(inputs[1])))
            assert got.shape == want.shape
            compare("result", got, want)
            ((want - target) ** 2).sum().backward()
            ((got - target.to(ctx.device, dtype)) ** 2).sum().backward()
            compare("gradient of x", inputs[1].grad, inputs[0].grad)
            with torch.no_grad():
                for name, ours, theirs in zip(names, layers, mirror, strict=True):
                    compare(f"gradient of {name}", ours.grad, theirs.grad)
                    ours -= 0.002 * ours.grad
                    theirs -= 0.002 * theirs.grad
                    ours.grad = theirs.grad = None
        ctx.barrier()
    return worst


def frozen(device):
    """What needs no gradient gets none; under no_grad nothing is recorded."""
    with Iris("4MiB", device=device) as ctx:
        layer = RowParallelLinear(ctx, 2 * ctx.num_ranks, 4, bias=False, sequence_parallel=True)
        x = torch.ones(2 * ctx.num_ranks, 2, device=ctx.device)
        layer(x).sum().backward()
        said = [x.grad is None, layer.weight.grad is not None, layer.bias is None]
        layer.weight.requires_grad_(False)
        said += [not layer(x).requires_grad]
        with torch.no_grad():
            said += [not layer(x.requires_grad_()).requires_grad]
        layer(x).sum().backward()
        said += [torch.allclose(x.grad.cpu(), layer.weight.detach().cpu().sum(0).expand(x.shape), atol=1e-6)]
        ctx.barrier()
    return said


def refused_by_one(device):
    """Layers whose x has too few features on rank 1, then right ones; what was raised."""
    with environment(IRIS_BARRIER_TIMEOUT="30"), Iris("8MiB", device=device) as ctx:
        weight = torch.ones(4, 4, device=ctx.device)
        layers = [
            partial(function, ctx, weight=weight)
            for function in (linear_all_gather, linear_all_reduce, all_gather_linear, linear_reduce_scatter)
        ]
        layers += [
            RowParallelLinear(ctx, 4, 4, bias=False, input_is_parallel=False, sequence_parallel=sequence)
            for sequence in (False, True)
        ]
        said = []
        for layer in layers:
            for features in (4 - ctx.cur_rank, 4):
                try:
                    layer(torch.ones(6, features, device=ctx.device))
                    said.append("")
                except (IrisError, ArgumentError) as error:
                    said.append(type(error).__name__)
        ctx.barrier()
    return said


def indivisible(device):
    """What is said of features that two ranks cannot divide."""
    with Iris("1MiB", device=device) as ctx:
        said = []
        for make in (lambda: ColumnParallelLinear(ctx, 4, 5), lambda: RowParallelLinear(ctx, 5, 4)):
            try:
                make()
            except ArgumentError as error:
                said.append(str(error))
        ctx.barrier()
    return said


def of_a_layer(device):
    """What users of torch's modules expect: autocast, no rows, copies, seeds."""
    with Iris("8MiB", device=device) as ctx:
        size = ctx.num_ranks

        def layers():
            for sequence in (False, True):
                yield ColumnParallelLinear(ctx, 8, 4 * size, sequence_parallel=sequence)
                yield RowParallelLinear(ctx, 8 * size, 4, sequence_parallel=sequence)
            yield ColumnParallelLinear(ctx, 8, 4 * size, gather_output=True)

        autocast, no_rows = set(), set()
        for layer in layers():
            x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
            with torch.autocast(torch.device(ctx.device).type, torch.bfloat16):
                y = layer(x)
            y.float().sum().backward()
            autocast.add((y.dtype, layer.weight.grad.dtype, x.grad.dtype))
            layer.zero_grad()
            x = torch.randn(0, 8, device=ctx.device, requires_grad=True)
            layer(x).sum().backward()
            no_rows.add(float(layer.weight.grad.abs().sum()) + x.grad.numel())
        copied = copy.deepcopy(layer)
        with torch.no_grad():
            copied.weight += 1
        independent = torch.allclose(copied.weight - 1, layer.weight, atol=1e-6) and copied._setting is layer._setting

        torch.manual_seed(5)
        column, row = ColumnParallelLinear(ctx, 2, 3 * size), RowParallelLinear(ctx, 2 * size, 3)
        drawn = {"weight": column.weight.tolist(), "own bias": column.bias.tolist(), "shared bias": row.bias.tolist()}
        drawn["next"] = torch.rand(()).item()
        torch.manual_seed(5)
        drawn["again"] = ColumnParallelLinear(ctx, 2, 3 * size).weight.tolist()
        ctx.barrier()
    return {"autocast": autocast, "no rows": no_rows, "copies are independent": independent, "drawn": drawn}
