"""Divided layers train like those of torch.distributed."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from jobs_ccl import on_heap
from jobs_common import kind_of
from tables import raises, table
from torch.nn.functional import gelu

from iris_core import Iris, nn
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.nn import ColumnParallelLinear, RowParallelLinear
from iris_core.ops import FusedConfig

FEATURES, HIDDEN, OUT, ROWS, BATCH = 12, 24, 10, 8, 3


def train(device, form, dtype, steps, algorithms=None, members=None):
    """Steps of gradient descent by both, of these ranks or all; returns the largest relative deviations."""
    torch.manual_seed(3)
    whole = [torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, OUT)]
    xs, targets = torch.randn(steps, ROWS, BATCH, FEATURES), torch.randn(steps, ROWS, BATCH, OUT)
    worst, everyone = {}, members or list(range(dist.get_world_size()))
    group = dist.new_group(members) if members else None

    def part(x, dim):
        return x if dim is None else x.chunk(len(everyone), dim)[everyone.index(dist.get_rank())]

    def compare(what, got, want, dim):
        error = (got.detach().cpu().float() - part(want, dim)).abs().max()
        worst[what] = max(worst.get(what, 0.0), float(error) / (float(part(want, dim).abs().max()) + 1e-6))

    configs = [None if name is None else FusedConfig(algorithm=name) for name in algorithms or (None, None)]
    with Iris("8MiB", device=device) as ctx:
        if ctx.cur_rank not in everyone:
            ctx.barrier()
            return None
        rows = 0 if form == "sequence" else None  # what is divided of x and of results
        kwargs = {"dtype": dtype, "sequence_parallel": form == "sequence", "group": group}
        first = ColumnParallelLinear(ctx, FEATURES, HIDDEN, gather_output=form == "whole", config=configs[0], **kwargs)
        second = RowParallelLinear(ctx, HIDDEN, OUT, input_is_parallel=form != "whole", config=configs[1], **kwargs)
        for ours, theirs in zip((first, second), whole, strict=True):
            ours.load_whole(theirs.weight, theirs.bias)
        layers = {
            "first weight": (first.weight, whole[0].weight, 0), "first bias": (first.bias, whole[0].bias, 0),
            "second weight": (second.weight, whole[1].weight, 1), "second bias": (second.bias, whole[1].bias, None),
        }  # fmt: skip
        for x, target in zip(xs, targets, strict=True):
            alone, mine = x.clone().requires_grad_(), part(x, rows).to(ctx.device, dtype, copy=True).requires_grad_()
            want, got = whole[1](gelu(whole[0](alone))), second(gelu(first(mine)))
            assert got.shape == part(want, rows).shape
            compare("result", got, want, rows)
            ((want - target) ** 2).sum().backward()
            ((got - part(target, rows).to(ctx.device, dtype)) ** 2).sum().backward()
            compare("gradient of x", mine.grad, alone.grad, rows)
            with torch.no_grad():
                for name, (ours, theirs, dim) in layers.items():
                    compare(f"gradient of {name}", ours.grad, theirs.grad, dim)
                    for each in (ours, theirs):
                        each -= 0.002 * each.grad
                        each.grad = None
        ctx.barrier()
    return worst


@on_heap("8MiB", IRIS_BARRIER_TIMEOUT="30", IRIS_DEVICE_TIMEOUT="30")
def needed_by_some(ctx):
    """Members get the same gradients where others need other ones, or none, as where all need all."""
    size = ctx.num_ranks
    of_linear = (2 * size, 4), (2 * size, 4), (2 * size,)
    functions = nn.linear, nn.linear_all_gather, nn.linear_all_reduce, nn.all_gather_linear, nn.linear_reduce_scatter
    cases = {each.__name__: (functools.partial(each, ctx), of_linear) for each in functions}
    layer = RowParallelLinear(ctx, 2 * size, 4, bias=False, input_is_parallel=False)
    cases["part"] = layer, [(3, 2 * size)]
    cases["ulysses"] = lambda x: nn.ulysses(ctx, x, 1, 0), [(2, size)]
    ring = ctx.ops.ring_attention(1, 1, 2 * size, 16, dtype=torch.float32, gradients=True)
    cases["ring"] = functools.partial(nn.ring_attention, ring), [(1, 2, 16)] * 3
    patterns = (True, True, True), (False, False, False), (True, False, False), (False, True, True)
    for name, (call, shapes) in cases.items():
        given = [torch.randn(shape, device=ctx.device) for shape in shapes]
        for turn in range(4):
            needs = patterns[turn and (turn + ctx.cur_rank) % 4]
            leaves = [each.clone().requires_grad_(need) for each, need in zip(given, needs, strict=False)]
            layer.weight.requires_grad_(needs[0])
            out = call(*leaves)
            if out.requires_grad:
                out.square().sum().backward()
            found = [each.grad for each in leaves]
            if turn == 0:
                wanted = found
            for got, want, need in zip(found, wanted, needs, strict=False):
                assert (got is not None) == need, (name, turn)
                assert not need or torch.allclose(got, want, atol=1e-5), (name, turn)


@on_heap("8MiB", IRIS_BARRIER_TIMEOUT="30")
def refused_by_one(ctx):
    """All refuse what has too few features on rank 1, then right ones are right; and layers that cannot be divided."""
    weight = torch.ones(4, 4, device=ctx.device)
    functions = (nn.linear_all_gather, nn.linear_all_reduce, nn.all_gather_linear, nn.linear_reduce_scatter)
    layers = [lambda x, each=each: each(ctx, x, weight=weight) for each in functions]
    given = (torch.ones(6, 4, device=ctx.device), None)[ctx.cur_rank]
    assert {kind_of(layer, given) for layer in layers} == {"TypeError"}
    kwargs = {"bias": False, "input_is_parallel": False}
    layers += [RowParallelLinear(ctx, 4, 4, sequence_parallel=each, **kwargs) for each in (False, True)]
    for layer in layers:
        assert kind_of(layer, torch.ones(6, 4 - ctx.cur_rank, device=ctx.device)) == "ArgumentError"
        layer(torch.ones(6, 4, device=ctx.device))
    impossible = (ColumnParallelLinear, 4, 5), (RowParallelLinear, 5, 4), (RowParallelLinear, 0, 4)
    assert {kind_of(layer, ctx, *features) for layer, *features in impossible} == {"ArgumentError"}


@on_heap("8MiB")
def of_a_layer(ctx):
    """What users of torch's modules expect: autocast, no rows, no gradients, copies, seeds."""
    size = ctx.num_ranks

    def layers():
        for sequence in (False, True):
            yield ColumnParallelLinear(ctx, 8, 4 * size, sequence_parallel=sequence)
            yield RowParallelLinear(ctx, 8 * size, 4, sequence_parallel=sequence)
        yield ColumnParallelLinear(ctx, 8, 4 * size, gather_output=True)

    for layer in layers():
        x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
        with torch.autocast(torch.device(ctx.device).type, torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        assert (y.dtype, layer.weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        layer.zero_grad()
        x = torch.randn(0, 8, device=ctx.device, requires_grad=True)
        layer(x).sum().backward()
        assert not layer.weight.grad.any()
        assert not x.grad.numel()
        with torch.no_grad():
            assert not layer(x).requires_grad
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight += 1
    assert torch.allclose(copied.weight - 1, layer.weight, atol=1e-6)
    assert copied._setting is layer._setting

    torch.manual_seed(5)
    column, row = ColumnParallelLinear(ctx, 2, 3 * size), RowParallelLinear(ctx, 2 * size, 3)
    drawn = column.weight.tolist(), column.bias.tolist(), torch.rand(()).item()
    torch.manual_seed(5)
    assert ColumnParallelLinear(ctx, 2, 3 * size).weight.tolist() == drawn[0]
    assert row.bias.tolist() == [0.0] * 3  # which all have
    weights, biases, following = zip(*ctx._world.all_gather_object(drawn), strict=True)
    assert len({*following}) == 1  # torch's generators stay in step
    assert weights[0] != weights[1]
    assert len({each for bias in biases for each in bias}) == 3 * size


@pytest.mark.parametrize(("num_ranks", "form", "algorithms", "members"), [
    *((2, form, None, None) for form in ("plain", "sequence", "whole")),
    *(pytest.param(4, form, None, None, marks=pytest.mark.exhaustive(device="cpu"))
      for form in ("plain", "sequence", "whole")),
    (1, "sequence", None, None), (3, "sequence", None, [0, 2]), (2, "plain", (None, "two_shot"), None),
    (2, "sequence", ("fetch", "push"), None), (2, "whole", ("push", "two_shot"), None),
])  # fmt: skip
def test_training(pool, device, num_ranks, form, algorithms, members):
    """By fused kernels in bfloat16."""
    dtype, steps, tolerance = (torch.bfloat16, 2, 0.06) if algorithms else (torch.float32, 3, 1e-4)
    results = pool.run(train, num_ranks, device, form, dtype, steps, algorithms, members)
    assert [rank for rank, worst in enumerate(results) if worst is not None] == (members or list(range(num_ranks)))
    for worst in filter(None, results):
        layers = [f"gradient of {n} {what}" for n in ("first", "second") for what in ("weight", "bias")]
        assert set(worst) == {"result", "gradient of x", *layers}
        assert {what: error for what, error in worst.items() if not error <= tolerance} == {}


@pytest.mark.parametrize(("job", "num_ranks"), [(of_a_layer, 2), (refused_by_one, 2), (needed_by_some, 3)])
def test_layers_are_modules_like_others(pool, num_ranks, device, job):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


ONES, FIVE = torch.ones, torch.ones(5, 4)


@table(("call", "key"), [
    (lambda ctx: nn.linear(ctx, ONES(2, 3), FIVE), "features"),
    (lambda ctx: nn.linear(ctx, ONES(2, 4), FIVE, ONES(4)), "bias"),
    *((lambda ctx, w=w: nn.linear(ctx, ONES(2, 4), w), "matrix") for w in (ONES(4), ONES(0, 4))),
    (lambda ctx: nn.linear_reduce_scatter(ctx, ONES(4), FIVE), "divided"),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 4, gather_output=True, sequence_parallel=True), "gather"),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 4, config=FusedConfig(algorithm="unfused")), "nothing fused"),
    (lambda ctx: RowParallelLinear(ctx, 4, 4, input_is_parallel=False)(ONES(2, 3)), "features"),
    (lambda ctx: RowParallelLinear(ctx, 4, 4, input_is_parallel=False)(ONES(())), "features"),
    (lambda ctx: nn.linear(ctx, ONES(2, 4), FIVE.bfloat16()), "dtype"),
    (lambda ctx: nn.linear(ctx, ONES(2, 4).double(), FIVE.double()), ""),
    (lambda ctx: RowParallelLinear(ctx, 4, 5).load_whole(ONES(1, 4)), "whole"),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 6).load_whole(ONES(6, 4), ONES(1)), "whole"),
])  # fmt: skip
def test_wrong_shapes(call, key):
    wanted = ArgumentError if key else UnsupportedError
    with Iris("1MiB", device="cpu") as ctx, raises(wanted, f"nn.{key}" if key else "any"):
        call(ctx)
