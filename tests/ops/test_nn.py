"""Divided layers train like those of torch.distributed."""

import pytest
import torch
from jobs_nn import frozen, of_a_layer, refused_by_one, train
from tables import table

from iris_core import Iris
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.nn import ColumnParallelLinear, RowParallelLinear, all_gather_linear, linear, linear_reduce_scatter
from iris_core.ops import FusedConfig


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


@pytest.mark.parametrize("num_ranks", [2])
def test_layers_are_modules_like_others(pool, num_ranks, device):
    results = pool.run(of_a_layer, num_ranks, device)
    for said in results:
        assert said["autocast"] == {(torch.bfloat16, torch.float32, torch.float32)}
        assert said["no rows"] == {0.0}
        assert said["copies are independent"]
    ours, theirs = (said["drawn"] for said in results)
    assert ours["shared bias"] == theirs["shared bias"] == [0.0] * 3
    assert ours["next"] == theirs["next"]  # torch's generators stay in step
    assert ours["again"] == ours["weight"] != theirs["weight"]
    assert len({*ours["own bias"], *theirs["own bias"]}) == 6


@pytest.mark.parametrize("num_ranks", [2])
def test_frozen(pool, num_ranks, device):
    for said in pool.run(frozen, num_ranks, device):
        assert said == [True] * len(said)


ONES = torch.ones
FIVE = ONES(5, 4)


@table(("call", "text"), [
    (lambda ctx: linear(ctx, ONES(2, 3), FIVE), "x must have 4 features"),
    (lambda ctx: linear(ctx, ONES(2, 4), FIVE, ONES(4)), r"bias must be \(5,\)"),
    (lambda ctx: linear(ctx, ONES(2, 4), ONES(4)), "weight must be a matrix"),
    (lambda ctx: linear_reduce_scatter(ctx, ONES(4), FIVE), "first dimension is divided"),
    (lambda ctx: all_gather_linear(ctx, ONES(4), FIVE), "first dimension is divided"),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 4, gather_output=True, sequence_parallel=True),
     "gather_output cannot be had"),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 4, config=FusedConfig(algorithm="unfused")), "nothing is fused"),
    (lambda ctx: RowParallelLinear(ctx, 4, 4, input_is_parallel=False)(ONES(2, 3)), "must have all 4 features"),
    (lambda ctx: linear(ctx, ONES(2, 4), FIVE.bfloat16()),
     "x has torch.float32, weight has torch.bfloat16; they must have one"),
    (lambda ctx: linear(ctx, ONES(2, 4).double(), FIVE.double()), "torch.float64 is not supported"),
    *((lambda ctx, whole=whole: RowParallelLinear(ctx, 4, 5).load_whole(ONES(whole)),
       r"the whole weight is \(5, 4\), not") for whole in ((1, 4), (6, 4), (4, 5))),
    (lambda ctx: ColumnParallelLinear(ctx, 4, 6).load_whole(ONES(6, 4), ONES(1)),
     r"the whole bias is \(6,\), not \(1,\)"),
])  # fmt: skip
def test_wrong_shapes(call, text):
    with Iris("1MiB", device="cpu") as ctx:
        with pytest.raises(UnsupportedError if "not supported" in text else ArgumentError, match=text):
            call(ctx)
        assert "in_features=4, out_features=6, bias=False" in repr(ColumnParallelLinear(ctx, 4, 6, bias=False))


@pytest.mark.parametrize("num_ranks", [2])
def test_what_a_layer_refuses_on_one_rank_it_refuses_on_all(pool, num_ranks, device):
    assert (
        pool.run(refused_by_one, num_ranks, device) == [["ArgumentError", ""] * 6 + ["ArgumentError"] * 2] * num_ranks
    )
