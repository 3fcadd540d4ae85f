"""Tiles and the tensors that they are cut from: indices, addresses and masks.

A tensor is cut into tiles of block_m x block_n elements; tile (pid_m, pid_n) begins at row pid_m * block_m and column
pid_n * block_n.  Sizes need be no multiples of the tile's: what lies beyond the tensor is masked.  Offsets are 64 bits
wide.  Nothing is promised to the compiler that it cannot see: strides and sizes may be anything.

The functions serve Triton and Gluon.  In Gluon a `Tile` has the layout of its data; a `TileView` is given its layout.
"""

import triton
import triton.language as tl

from iris_triton._compat import AggregateMethods, aggregate
from iris_triton.language.blocks import axis_for, axis_of


@triton.constexpr_function
def _number(value):
    """Convert a Python number to a constexpr; leave values that the kernel computes unchanged."""
    return value if isinstance(value, tl.tensor) else tl.constexpr(getattr(value, "value", value))


@triton.jit
def tile_layout(
    pid_m, pid_n, M, N, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, layout: tl.constexpr = None
):
    """Return rows (int32[BLOCK_SIZE_M]), columns (int32[BLOCK_SIZE_N]) and mask of a tile.

    Args:
        pid_m, pid_n: which tile.
        M, N: rows and columns of the tensor.
        BLOCK_SIZE_M, BLOCK_SIZE_N: rows and columns of a tile, powers of 2.
        layout: of the tile; for Gluon, which needs it.
    """
    return TileView(pid_m, pid_n, BLOCK_SIZE_M, BLOCK_SIZE_N, layout).layout(M, N)


compute_tile_indices = tile_layout  # AMD's Iris has both names


@triton.jit
def _offsets(rm, rn, stride_m, stride_n):
    return rm.to(tl.int64)[:, None] * stride_m + rn.to(tl.int64)[None, :] * stride_n


@triton.jit
def compute_tile_offsets(rm, rn, stride_in_m, stride_in_n, stride_out_m, stride_out_n):
    """Return where rows and columns (`tile_layout`) lie in two tensors, in elements (int64 blocks), as strides are."""
    return _offsets(rm, rn, stride_in_m, stride_in_n), _offsets(rm, rn, stride_out_m, stride_out_n)


@triton.jit
def tile_ptr(
    ptr, M, N, stride_m, stride_n, pid_m, pid_n, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
    layout: tl.constexpr = None
):  # fmt: skip
    """Return the addresses of a tile's elements, and its mask.

    Args:
        ptr: the tensor.
        stride_m, stride_n: its strides, in elements.
        M, N, pid_m, pid_n, BLOCK_SIZE_M, BLOCK_SIZE_N, layout: as in `tile_layout`.
    """
    view = TensorView(ptr, M, N, stride_m, stride_n)
    return view.tile_ptr(TileView(pid_m, pid_n, BLOCK_SIZE_M, BLOCK_SIZE_N, layout))


@triton.jit
def offset_ptr(ptr, stride_m, stride_n, offset_m, offset_n):
    """Return `ptr` moved by `offset_m` rows and `offset_n` columns; strides are in elements."""
    return ptr + tl.cast(offset_m, tl.int64) * stride_m + tl.cast(offset_n, tl.int64) * stride_n


@triton.jit
def chiplet_transform_chunked(pid, num_workgroups, num_xcds: tl.constexpr, chunk_size: tl.constexpr):
    """Remap a program ID so that `chunk_size` consecutive work items run on the same die.

    GPUs with several dies (`num_xcds`), each with its own cache, assign programs to the dies round-robin.  Bijective on
    0 .. num_workgroups - 1; programs after the last whole round of chunks keep their ID.
    """
    whole = num_workgroups // (num_xcds * chunk_size) * (num_xcds * chunk_size)
    turn = pid // num_xcds  # of this die
    chunk = turn // chunk_size * num_xcds + pid % num_xcds
    return tl.where(pid < whole, chunk * chunk_size + turn % chunk_size, pid)


class _TileMethods(AggregateMethods):
    """Methods of tiles with and without data."""

    @triton.jit
    def layout(self, M, N):
        """Return rows, columns and mask within an M x N tensor."""
        rm, rn = self.indices()
        return rm, rn, (rm[:, None] < M) & (rn[None, :] < N)


@aggregate
class TileView(_TileMethods):
    """A tile without data: which one, and how large.

    Given to a collective that takes data, it means the data that lies in `src_view` already.

    Example:
        tile = TileView(pid // tiles_n, pid % tiles_n, BLOCK_M, BLOCK_N)
        data = ctx.gather(tile, view, source_rank)
    """

    pid_m: tl.tensor | tl.constexpr  #: pid_m, pid_n: which tile (scalars)
    pid_n: tl.tensor | tl.constexpr
    block_m: tl.constexpr  #: block_m, block_n: its rows and columns, powers of 2 (constexpr)
    block_n: tl.constexpr
    block_layout: tl.constexpr  #: layout of the tile, for Gluon; the last argument, None in Triton (constexpr)

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n, layout=None):
        self.pid_m = _number(pid_m)
        self.pid_n = _number(pid_n)
        self.block_m = _number(block_m)
        self.block_n = _number(block_n)
        self.block_layout = tl.constexpr(layout)

    @triton.jit
    def indices(self):
        """Return rows and columns, also those beyond the tensor."""
        rm = self.pid_m * self.block_m + axis_for((self.block_m, self.block_n), 0, self.block_layout)
        rn = self.pid_n * self.block_n + axis_for((self.block_m, self.block_n), 1, self.block_layout)
        return rm, rn

    @triton.jit
    def partial(self, view):
        """Return the data of this tile as elements of `view`, where it lies already."""
        ptr, mask = view.tile_ptr(self)
        return tl.load(ptr, mask=mask)

    @triton.jit
    def publish(self, view):
        """Nothing to do: the data lies in `view`."""


@aggregate
class Tile(_TileMethods):
    """A tile with its data, for example the accumulator of a GEMM.

    Example:
        tile = Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, accumulator)
        ctx.all_reduce_two_shot(tile, staging_view, output_view, locks)
    """

    pid_m: tl.tensor | tl.constexpr  #: pid_m, pid_n: which tile (scalars)
    pid_n: tl.tensor | tl.constexpr
    block_m: tl.constexpr  #: block_m, block_n: its rows and columns, powers of 2 (constexpr)
    block_n: tl.constexpr
    data: tl.tensor  #: block of block_m x block_n elements of any type and, in Gluon, any layout

    @triton.jit
    def indices(self):
        """Return rows and columns, also those beyond the tensor."""
        tl.static_assert(
            (self.data.shape[0] == self.block_m) and (self.data.shape[1] == self.block_n),
            "the data of a Tile must be a block of block_m x block_n elements",
        )
        rm = self.pid_m * self.block_m + axis_of(self.data, 0)
        rn = self.pid_n * self.block_n + axis_of(self.data, 1)
        return rm, rn

    @triton.jit
    def partial(self, view):
        """Return the data as elements of `view`: what `publish` stores."""
        return self.data.to(view.ptr.dtype.element_ty)

    @triton.jit
    def publish(self, view):
        """Store the data in the caller's own `view`."""
        ptr, mask = view.tile_ptr(self)
        tl.store(ptr, self.partial(view), mask=mask)


@aggregate
class TensorView:
    """A matrix in memory."""

    ptr: tl.tensor  #: its first element (pointer)
    M: tl.tensor | tl.constexpr  #: M, N: rows and columns; constexprs or run-time values
    N: tl.tensor | tl.constexpr
    #: stride_m, stride_n: in elements; constexprs or run-time values.  A stride of 1 is known to the compiler if the
    #: kernel got it as an argument, and then accesses are wide.
    stride_m: tl.tensor | tl.constexpr
    stride_n: tl.tensor | tl.constexpr

    @triton.jit
    def tile_ptr(self, tile):
        """Return the addresses of the elements of a `Tile` or `TileView`, and its mask."""
        rm, rn = tile.indices()
        return self.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)

    @triton.jit
    def tile_ptr_from_indices(self, rm, rn, block_m: tl.constexpr, block_n: tl.constexpr):
        """Return addresses and mask of given rows and columns.

        Args:
            rm, rn: rows and columns, integer blocks; in Gluon of layouts that are slices of the same layout.
            block_m, block_n: how many of them.
        """
        tl.static_assert(
            (rm.shape[0] == block_m) and (rn.shape[0] == block_n), "rm and rn must have block_m and block_n elements"
        )
        mask = (rm[:, None] < self.M) & (rn[None, :] < self.N)
        return self.ptr + _offsets(rm, rn, self.stride_m, self.stride_n), mask

    @triton.jit
    def offset_tile_ptr(self, tile, offset_m=0, offset_n=0, src_mask=None):
        """Return addresses and mask of a tile moved by rows and columns.

        Args:
            tile: `Tile` or `TileView`.
            offset_m, offset_n: how many rows and columns.
            src_mask: block that the mask is combined with.
        """
        rm, rn = tile.indices()
        ptr, mask = self.tile_ptr_from_indices(rm + offset_m, rn + offset_n, tile.block_m, tile.block_n)
        if src_mask is None:
            return ptr, mask
        else:
            return ptr, mask & src_mask

    @triton.jit
    def offset(self, offset_m=0, offset_n=0):
        """Return a view of the same sizes and strides that begins some rows and columns further on."""
        moved = offset_ptr(self.ptr, self.stride_m, self.stride_n, offset_m, offset_n)
        return TensorView(moved, self.M, self.N, self.stride_m, self.stride_n)

    @triton.jit
    def number_of_tiles(self, block_m, block_n):
        """Return the number of tiles that cover the matrix."""
        return tl.cdiv(self.M, block_m) * tl.cdiv(self.N, block_n)


@triton.jit
def make_tensor_view(ptr, M, N, stride_m, stride_n):
    """Return a `TensorView`; see there."""
    return TensorView(ptr, M, N, stride_m, stride_n)


@triton.jit
def number_of(tile, view, given=None):
    """Return the tile's number in `view`, row by row (scalar), or `given` if there is one."""
    if given is not None:
        return given
    else:
        tiles_n = tl.cdiv(view.N, tile.block_n)
        tl.device_assert(
            (tile.pid_m * tile.block_m < view.M) & (tile.pid_n < tiles_n), "the tile lies outside the tensor altogether"
        )
        return tile.pid_m * tiles_n + tile.pid_n
