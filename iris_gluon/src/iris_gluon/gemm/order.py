"""In which order a persistent kernel computes the tiles of C."""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon._compat import aggregate


@aggregate
class RowGroups:
    """Groups of row tiles, one after the other; within a group the rows run fastest, then the columns.

    Programs that run at the same time so share few rows of A and few columns of B, which stay in the cache.

    An order is any aggregate with these two methods; fused kernels bring their own.

    Attributes:
        tiles_m, tiles_n: rows and columns of tiles (int32).
        group: row tiles of a group (constexpr).
    """

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    group: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_m, tiles_n, group):
        self.tiles_m = tiles_m
        self.tiles_n = tiles_n
        self.group = gl.constexpr(group)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles.

        Args:
            tile: 0 <= tile < tiles_m * tiles_n.
        """
        per_group = self.group * self.tiles_n
        first = tile // per_group * self.group
        rows = gl.minimum(self.tiles_m - first, self.group)
        within = tile % per_group
        return first + within % rows, within // rows

    @gluon.jit
    def await_operands(self, row, column):
        """Return when the tile's operands may be loaded: at once.  Called by the loading warp, tile by tile."""
        pass
