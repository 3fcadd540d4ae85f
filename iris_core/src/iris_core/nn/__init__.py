"""Linear layers that are divided among ranks, and the differentiable functions that they are made of.

Tensor parallelism in the manner of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053) and its sequence-parallel form
(Korthikanti et al., 2022, arXiv:2205.05198): a layer's weight is divided by columns (of its transpose: by output
features) or by rows (input features), and where the sequence is divided, too, activations are gathered before and
scattered after.  Every product that communicates, forwards or backwards, is one operation of `ctx.ops`.

| function | result | gradient of x | gradient of the weight |
|---|---|---|---|
| `linear` | x @ w.T | matmul_all_reduce | local |
| `linear_all_gather` | columns of all | matmul_all_reduce | local |
| `linear_all_reduce` | matmul_all_reduce | local | local |
| `all_gather_linear` | all_gather_matmul | matmul_reduce_scatter | all_gather_matmul (inner dimension) |
| `linear_reduce_scatter` | matmul_reduce_scatter | all_gather_matmul | all_gather_matmul (inner dimension) |

Collective: every member of the group calls a function, and later its backward pass, in the same order.  As torch runs
backward passes in an order that depends on the graph alone, that is so where the members' graphs are alike.

x is (..., features); where rows are gathered or scattered, it is the first dimension that is divided, and everything in
front of the features counts as rows.  Results are ordinary tensors, not on the symmetric heap.  x, weight and bias have
one dtype; where autocast is on (torch.autocast), they are taken in its dtype, as torch.nn.functional.linear takes them.
"""

from iris_core.nn.functional import (
    all_gather_linear,
    linear,
    linear_all_gather,
    linear_all_reduce,
    linear_reduce_scatter,
)
from iris_core.nn.layers import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "all_gather_linear",
    "linear",
    "linear_all_gather",
    "linear_all_reduce",
    "linear_reduce_scatter",
]
