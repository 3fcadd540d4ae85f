"""A tile of a product on any target: multiplications and additions of float32, without matrix instructions."""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.layouts import blocked_layout, default_layout
from iris_triton._compat import SemanticFunction


@gluon.jit
def _block(
    pointer, first_row, first_column, rows, columns, stride_row, stride_column, M: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """Load M x N elements as float32; 0 beyond the matrix."""
    layout: gl.constexpr = default_layout([M, N])
    i = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    j = first_column + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    place = i[:, None].to(gl.int64) * stride_row + j[None, :].to(gl.int64) * stride_column
    return gl.load(pointer + place, mask=(i[:, None] < rows) & (j[None, :] < columns), other=0.0).to(gl.float32)


@SemanticFunction
def tile_layout(caller, shape):
    """Layout of what `multiply_tile` returns, for a tile of this shape.  In kernels only."""
    return blocked_layout(shape, caller.num_warps, caller.warp_size, vector=4)


@gluon.jit
def multiply_tile(
    a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Return the tile of A @ B that begins at (row, column), float32[BLOCK_M, BLOCK_N] of `tile_layout`.

    Args:
        a, b: pointers to A (m x k) and B (k x n), of any float type and any strides.
        row, column: where the tile begins, in elements.
        m, n, k: sizes; what lies beyond them counts as 0.
        stride_am, stride_ak, stride_bk, stride_bn: in elements.
        BLOCK_M, BLOCK_N, BLOCK_K: shape of the tile, and of a step of the inner dimension.
    """
    layout: gl.constexpr = tile_layout([BLOCK_M, BLOCK_N])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for first in range(0, k, BLOCK_K):
        left = _block(a, row, first, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K)
        right = _block(b, first, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N)
        left = gl.convert_layout(left, gl.DotOperandLayout(0, layout, 0))
        right = gl.convert_layout(right, gl.DotOperandLayout(1, layout, 0))
        acc = gl.dot_fma(left, right, acc)
    return acc
