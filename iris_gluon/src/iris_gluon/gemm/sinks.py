"""Where the finished tiles of `iris_gluon.gemm.multiply_tiles` go.

A sink is any aggregate with a method `store(part, row, column)`, which begins to copy a part of a tile from shared
memory by TMA.  `part` is reused as soon as the copies that were begun have read it.  `row` and `column` are where the
part begins in C, in elements.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris_gluon._compat import aggregate, tma_store
from iris_gluon.bulk import peer_descriptor


@aggregate
class StoreTile:
    """One matrix, as in a plain GEMM.

    Attributes:
        matrix: tensor descriptor of C, whose block is a part.
    """

    matrix: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, matrix):
        self.matrix = matrix

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to its place."""
        tma_store(self.matrix, [row, column], part)


@aggregate
class ScatterTile:
    """The same place in the heap of every rank; made by `scatter_tile`.

    Attributes:
        matrices: tuple of tensor descriptors, one for each rank.
    """

    matrices: gl.tuple

    @gluon.constexpr_function
    def __init__(self, matrices):
        self.matrices = gl.tuple(matrices)  # on the CPU a tuple is Python's own

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to every rank."""
        for i in gl.static_range(len(self.matrices)):
            tma_store(self.matrices[i], [row, column], part)


@gluon.jit
def scatter_tile(
    ctx, matrix, shape, strides, PART_M: gl.constexpr, PART_N: gl.constexpr, WORLD: gl.constexpr
):  # fmt: skip
    """Make the sink that stores every tile to all ranks, the next rank first, the caller last.

    Args:
        ctx: the `IrisDeviceCtx`.
        matrix: the matrix in the caller's heap (scalar pointer, a multiple of 16 bytes).
        shape: its rows and columns; tiles are cut off at them.
        strides: in elements: a multiple of 16 bytes, and 1.
        PART_M, PART_N: rows and columns of a part.
        WORLD: number of ranks.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_M, PART_N], matrix.dtype.element_ty)
    matrices = ()
    for step in gl.static_range(WORLD):
        peer = (ctx.cur_rank + 1 + step) % WORLD
        theirs = peer_descriptor(matrix, ctx.cur_rank, peer, ctx.heap_bases, shape, strides, [PART_M, PART_N], layout)
        matrices = matrices + (theirs,)  # noqa: RUF005 - kernels have no unpacking
    return ScatterTile(matrices)
