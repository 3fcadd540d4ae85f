"""Sinks for the finished tiles of `iris_gluon.gemm.multiply_tiles`, and scales of its operands.

A sink is any aggregate with two methods.  `store(part, row, column)` starts to copy a part of a tile from shared memory
by TMA; `part` is reused as soon as the copies have read it.  `finish(acc, row, column)` is the epilogue: it returns a
tile's sums (float32), for example with a bias, before they are rounded.  `row` and `column` are the first row and
column of the part, or of the tile, in C.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import base_value

from iris_core.dispatch.products import SCALED_BLOCK
from iris_gluon._compat import aggregate, tma_store
from iris_gluon.layouts import default_layout

_SCALED_BLOCK = gl.constexpr(SCALED_BLOCK)


@aggregate
class StoreTile:
    """Store tiles in one matrix, as in a plain GEMM, or at the same offset in several."""

    matrices: gl.tuple  #: tuple of tensor descriptors, whose blocks are parts; a descriptor alone is a tuple of one

    @gluon.constexpr_function
    def __init__(self, matrices):
        several = isinstance(matrices, (tuple, gl.tuple))  # on the CPU a tuple is Python's own
        self.matrices = gl.tuple(matrices if several else [matrices])

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to its place."""
        for i in gl.static_range(len(self.matrices)):
            tma_store(self.matrices[i], [row, column], part)

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc


@aggregate
class AddBias:
    """Add a bias to every tile before it goes to another sink."""

    sink: base_value  #: where the tiles go
    bias: gl.tensor  #: pointer to the bias, of any float type
    step: gl.tensor  #: elements from one value of the bias to the next (int64)
    limit: gl.tensor  #: rows, or columns, of C: what lies beyond them is not loaded (int32)
    along: gl.constexpr  #: "columns" if the bias has a value for each column, "rows" for each row (constexpr)

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


@aggregate
class OwnersSlot:
    """This member's slot in the memory of the owner of a tile."""

    matrices: gl.tuple  #: tuple of tensor descriptors, one for each owner: the rows that it owns
    rows_each: gl.tensor  #: rows of an owner (int32)

    @gluon.constexpr_function
    def __init__(self, matrices, rows_each):
        self.matrices = gl.tuple(matrices)
        self.rows_each = rows_each

    @gluon.jit
    def store(self, part, row, column):
        owner = row // self.rows_each
        for i in gl.static_range(len(self.matrices)):
            if owner == i:
                tma_store(self.matrices[i], [row - owner * self.rows_each, column], part)

    @gluon.jit
    def finish(self, acc, row, column):
        return acc


@aggregate
class Scales:
    """Scales of A and B."""

    a: gl.tensor  #: a, b: pointers to float32
    b: gl.tensor
    #: a_down, a_right, b_down, b_right: elements to the next row or block down, and to the right (int64)
    a_down: gl.tensor
    a_right: gl.tensor
    b_down: gl.tensor
    b_right: gl.tensor
    m: gl.tensor  #: m, n: how many rows and columns there are: beyond them nothing is loaded (int32)
    n: gl.tensor
    kind: gl.constexpr  #: "rows": of A's rows and B's columns; "blocks": of 1 x 128 of A and 128 x 128 of B (constexpr)

    @gluon.jit
    def of_rows(self, acc, row, column):
        """Return the sums of a tile that begins there, scaled."""
        i = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        j = column + gl.arange(0, acc.shape[1], layout=default_layout([acc.shape[1]]))  # a thread needs many of them
        down = gl.load(self.a + i.to(gl.int64) * self.a_down, mask=i < self.m, other=0.0)
        right = gl.load(self.b + j.to(gl.int64) * self.b_right, mask=j < self.n, other=0.0)
        return acc * down[:, None] * gl.convert_layout(right, gl.SliceLayout(0, acc.type.layout))[None, :]

    @gluon.jit
    def down(self, acc, row, k):
        """Return the factors of a tile's rows for the sums of one step."""
        i = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        return gl.load(self.a + i.to(gl.int64) * self.a_down + k * self.a_right, mask=i < self.m, other=0.0)

    @gluon.jit
    def across(self, column, k):
        """Return the factor of a block of B."""
        at = self.b + k * self.b_down + column // _SCALED_BLOCK * self.b_right
        return gl.load(at, mask=column < self.n, other=0.0)
