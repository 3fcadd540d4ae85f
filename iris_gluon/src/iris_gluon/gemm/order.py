"""Tile orders of persistent kernels: the usual one, and those of fused products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon._compat import aggregate
from iris_gluon.bulk import fence_async_global
from iris_triton.gemm.parts.tiles import place
from iris_triton.language.flags import await_own_flag


@aggregate
class RowGroups:
    """Groups of row tiles, one after the other; within a group the rows run fastest, then the columns.

    Concurrent programs then share few rows of A and few columns of B, which stay in the cache.

    An order is any aggregate with these two methods; fused kernels define their own.
    """

    tiles_m: gl.tensor  #: tiles_m, tiles_n: rows and columns of tiles (int32)
    tiles_n: gl.tensor
    group: gl.constexpr  #: row tiles of a group (constexpr)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles; tiles have numbers below tiles_m * tiles_n."""
        return place(tile, self.tiles_m, self.tiles_n, self.group)

    @gluon.jit
    def await_operands(self, row, column):
        """Wait for the tile's operands: return at once.  Called by the loading warp, tile by tile."""


@aggregate
class OwnersInTurn:
    """`chunk` tiles of one owner, then of the next, beginning with the member after this one.

    With all tiles of an owner in one chunk, owners follow each other, this rank last: few rows of A are in use at a
    time.  With smaller chunks, all links are busy all the time.
    """

    tiles_each: gl.tensor  #: rows of tiles that a member owns (int32)
    tiles_n: gl.tensor  #: columns of tiles (int32)
    me: gl.tensor  #: this member (int32)
    chunk: gl.tensor  #: tiles in a row of an owner, at most all that it has (int32)
    group: gl.constexpr  #: row tiles of a group (constexpr)
    size: gl.constexpr  #: number of members (constexpr)

    @gluon.jit
    def place(self, tile):
        per_owner = self.tiles_each * self.tiles_n
        whole = per_owner // self.chunk * self.chunk  # the rest after whole chunks goes owner by owner
        in_chunks = tile < whole * self.size
        left, rest = tile - whole * self.size, gl.maximum(per_owner - whole, 1)
        step = gl.where(in_chunks, tile // self.chunk % self.size, left // rest)
        number = tile // (self.chunk * self.size) * self.chunk + tile % self.chunk
        number = gl.where(in_chunks, number, whole + left % rest)
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(number)
        return (self.me + 1 + step) % self.size * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Return at once: all operands are local."""


@aggregate
class ShardsInTurn:
    """Rows of one member after the other, beginning with this rank's; peers' rows after they have been copied.

    Attributes (beside those of `OwnersInTurn`):
        flags: pointer to int32, one for each member, 1 when its rows are there.
        timeout_ns, status, rank: bound of the waits, and where they report.
    """

    tiles_each: gl.tensor
    tiles_n: gl.tensor
    me: gl.tensor
    flags: gl.tensor
    timeout_ns: gl.tensor
    status: gl.tensor
    rank: gl.tensor
    group: gl.constexpr
    size: gl.constexpr

    @gluon.jit
    def place(self, tile):
        per_shard = self.tiles_each * self.tiles_n
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(tile % per_shard)
        return (self.me + tile // per_shard) % self.size * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Wait for the rows of A.  Called by the loading warp, tile by tile."""
        if row // self.tiles_each != self.me:
            flag, one = self.flags + row // self.tiles_each, gl.cast(1, gl.int32)
            await_own_flag(flag, one, "reached", "acquire", "sys", self.timeout_ns, self.status, self.rank)
            fence_async_global(False)

    @gluon.jit
    def own_row(self, row):
        """Return which of the own rows of tiles this is, or -1 if it is another member's."""
        first = self.me * self.tiles_each
        return gl.where((row >= first) & (row < first + self.tiles_each), row - first, -1)
