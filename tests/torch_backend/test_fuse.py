"""Functional collectives in compiled code, and products that are fused with them, on CPU ranks."""

import jobs_fuse as jobs
import pytest

GATHER, SCATTER, SUM = "iris.all_gather_matmul", "iris.matmul_reduce_scatter", "iris.matmul_all_reduce"
C10D = "_c10d_functional."
RANKS = [pytest.param(2, marks=pytest.mark.exhaustive), 3]  # transformers run on 2


@pytest.mark.parametrize("num_ranks", RANKS)
def test_functional_collectives_are_as_gloos(on_ranks, num_ranks):
    assert on_ranks(jobs.functional_collectives, num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_what_is_fused_and_what_is_left(on_ranks, num_ranks):
    (found, *others) = on_ranks(jobs.shapes, num_ranks)
    assert others == [found] * (num_ranks - 1)
    left = {
        "scatter columns, bias": "reduce_scatter_tensor", "maximum": "all_reduce", "average": "reduce_scatter_tensor",
        "the product as well": "all_reduce", "twice": "all_gather_into_tensor", "float64": "all_reduce",
        "another group": "all_reduce", "alone": "all_gather_into_tensor",
    }  # fmt: skip
    for name, (operators, is_equal) in found.items():
        fused = {"gather": GATHER, "scatter": SCATTER, "sum": SUM}.get(name.split()[0].strip(","))
        also = ["iris.all_reduce"] * (fused != GATHER and name.endswith("bias"))
        assert (name, operators) == (name, [C10D + left[name]] if name in left else [fused, *also])
        assert is_equal, name


@pytest.mark.parametrize("regather", [False, True])
def test_transformer_forward_and_backward(on_ranks, regather):
    """q, k and v share what is gathered, and each gradient of a part is gathered for two products: these stay."""
    kept = {C10D + "all_gather_into_tensor": 1}
    sums = {"iris.all_reduce": 2, SCATTER: 2}
    for *alone, forward, backward in on_ranks(jobs.transformer, 2, regather):
        assert alone == [{**kept, **sums, GATHER: 1}] * (not regather)
        assert forward == ({**kept, **sums, GATHER: 1} if regather else {C10D + "all_gather_into_tensor": 2, **sums})
        gradients = {C10D + "all_gather_into_tensor": 2, SCATTER: 1, C10D + "reduce_scatter_tensor": 1}
        assert backward == gradients | ({GATHER: 1} if regather else {})
