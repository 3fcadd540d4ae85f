"""Where the finished tiles of `iris_gluon.gemm.multiply_tiles` go.

A sink is any aggregate with two methods.  `store(part, row, column)` begins to copy a part of a tile from shared memory
by TMA; `part` is reused as soon as the copies that were begun have read it.  `finish(acc, row, column)` returns what a
tile's sums (float32) become before they are rounded: the sums themselves, unless something is added.  `row` and
`column` are where the part, or the tile, begins in C, in elements.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import base_value

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

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc


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
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc


@aggregate
class AddBias:
    """Another sink, with a bias added to every tile.

    Attributes:
        sink: where the tiles go.
        bias: pointer to the bias, of any float type.
        step: elements from one value of the bias to the next (int64).
        limit: rows, or columns, of C: what lies beyond them is not loaded (int32).
        along: "columns" if the bias has a value for each column, "rows" for each row (constexpr).
    """

    sink: base_value
    bias: gl.tensor
    step: gl.tensor
    limit: gl.tensor
    along: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sink, bias, step, limit, along):
        self.sink = sink
        self.bias = bias
        self.step = step
        self.limit = limit
        self.along = gl.constexpr(along)

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part."""
        self.sink.store(part, row, column)

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums with the bias."""
        gl.static_assert(self.along == "columns" or self.along == "rows", "a bias lies along rows or columns")
        if self.along == "columns":
            j = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
            values = gl.load(self.bias + j.to(gl.int64) * self.step, mask=j < self.limit, other=0.0)
            return acc + values.to(gl.float32)[None, :]
        else:
            i = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
            values = gl.load(self.bias + i.to(gl.int64) * self.step, mask=i < self.limit, other=0.0)
            return acc + values.to(gl.float32)[:, None]


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


@aggregate
class OwnersSlot:
    """This member's slot in the memory of the owner of a tile.

    Attributes:
        matrices: tuple of tensor descriptors, one for each owner: the rows that it owns.
        rows_each: rows of an owner (int32).
    """

    matrices: gl.tuple
    rows_each: gl.tensor

    @gluon.constexpr_function
    def __init__(self, matrices, rows_each):
        self.matrices = gl.tuple(matrices)
        self.rows_each = rows_each

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to its owner."""
        owner = row // self.rows_each
        for i in gl.static_range(len(self.matrices)):
            if owner == i:
                tma_store(self.matrices[i], [row - owner * self.rows_each, column], part)

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc
