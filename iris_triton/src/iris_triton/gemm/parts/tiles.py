"""Tiles of a product: where they are, computing them, what is done with them.  Plain Triton, for every target."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import last_epoch, meet, row_of, tell_all, told, told_second
from iris_triton.collectives.parts.elements import item_nbytes


@triton.jit
def wide(pointer, ALIGNED: tl.constexpr):
    """A pointer that the compiler knows to be a multiple of 16 bytes, if it is one."""
    if ALIGNED:  # made anew from numbers, for inlining drops what is promised of an argument
        return tl.multiple_of(pointer.to(tl.int64).to(pointer.dtype), 16)
    else:
        return pointer


@triton.jit
def whole_rows(stride, like):
    """A stride of rows that begin at multiples of 16 bytes, as a number that the compiler knows to be a multiple."""
    # Arithmetic: what is promised of the result of a call is dropped when the call is inlined.
    UNIT: tl.constexpr = 16 // item_nbytes(like.dtype)
    return stride // UNIT * UNIT


@triton.jit
def own_program(first, XCDS: tl.constexpr, CHUNK: tl.constexpr):
    """Which program's tiles this one takes, among those from number `first` on, counted from 0.

    GPUs made of dies, each with a cache, deal programs out to the dies in turn.  With XCDS dies, CHUNK neighbouring
    tiles go to programs of the same die; see `iris_triton.tiles.chiplet_transform_chunked`.
    """
    number = tl.program_id(0) - first
    if XCDS > 1:
        whole = (tl.num_programs(0) - first) // (XCDS * CHUNK) * (XCDS * CHUNK)
        turn = number // XCDS  # of this die
        chunk = turn // CHUNK * XCDS + number % XCDS
        number = tl.where(number < whole, chunk * CHUNK + turn % CHUNK, number)
    return number


@triton.jit
def place(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile, counted in tiles: down GROUP rows of tiles, then to the right, then the next rows."""
    per_group = GROUP * tiles_n
    first = number // per_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = number % per_group
    return first + within % height, within // height


@triton.jit
def add_product(
    acc, a, b, row, column, rows, columns, inner, a_down, a_right, b_down, b_right,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Add a tile of A @ B to `acc`, float32[BM, BN].

    Args:
        acc: what is added to.
        a, b: pointers to A (rows x inner) and B (inner x columns).
        row, column: where the tile begins.
        rows, columns, inner: sizes; what lies beyond them counts as 0.
        a_down, a_right, b_down, b_right: strides in elements.
        BM, BN, BK: shape of the tile, and the step of the inner dimension.
        EVEN_K: BK divides `inner`.
        PRECISION: of float32, as tl.dot takes it.
        A_CACHE, B_CACHE: cache modifiers of the loads.
        STAGES: of the software pipeline.
    """
    i = row + tl.arange(0, BM)
    j = column + tl.arange(0, BN)
    step = tl.arange(0, BK)
    a_at = a + i.to(tl.int64)[:, None] * a_down + step[None, :] * tl.cast(a_right, tl.int64)
    b_at = b + step.to(tl.int64)[:, None] * b_down + j[None, :] * tl.cast(b_right, tl.int64)
    a_step = tl.cast(a_right, tl.int64) * BK
    b_step = tl.cast(b_down, tl.int64) * BK
    for k in tl.range(0, inner, BK, num_stages=STAGES):
        a_mask = i[:, None] < rows
        b_mask = j[None, :] < columns
        if not EVEN_K:
            a_mask = a_mask & (step[None, :] < inner - k)
            b_mask = b_mask & (step[:, None] < inner - k)
        left = tl.load(a_at, mask=a_mask, other=0.0, cache_modifier=A_CACHE)
        right = tl.load(b_at, mask=b_mask, other=0.0, cache_modifier=B_CACHE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        a_at += a_step
        b_at += b_step
    return acc


@triton.jit
def with_bias(
    acc, bias, row, column, rows, columns, step, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add the bias to a tile that begins at (row, column).

    Args:
        acc: the tile.
        bias: pointer; None if there is none.
        row, column, rows, columns: where the tile begins, and where it ends at the latest.
        step: elements of the bias from column to column, or from row to row.
        BIAS: "columns" if it lies along them, "rows", or "none".
        BM, BN: shape of the tile.
    """
    if BIAS == "columns":
        j = column + tl.arange(0, BN)
        acc += tl.load(bias + j.to(tl.int64) * step, mask=j < columns, other=0.0).to(tl.float32)[None, :]
    elif BIAS == "rows":
        i = row + tl.arange(0, BM)
        acc += tl.load(bias + i.to(tl.int64) * step, mask=i < rows, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def store_tile(
    matrix, values, row, column, rows, columns, down, right, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store a tile to its place in a matrix, cut off at `rows` and `columns`."""
    i = row + tl.arange(0, BM)
    j = column + tl.arange(0, BN)
    at = i.to(tl.int64)[:, None] * down + j.to(tl.int64)[None, :] * right
    tl.store(matrix + at, values.to(matrix.dtype.element_ty), mask=(i[:, None] < rows) & (j[None, :] < columns))


@triton.jit
def dense_tile(BM: tl.constexpr, BN: tl.constexpr):
    """Where the elements of a tile lie that is stored whole, row by row."""
    return tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]


PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere."""

RUNTIME = ("me", "rank", "per_owner", "timeout_ns", "status")
"""Arguments for whose values kernels are not compiled anew."""


@triton.jit
def announce(row, bases, me, matrix, down, SIZE: tl.constexpr):
    """Tell the members where a matrix of this rank lies, and how far its rows are apart."""
    tell_all(row, bases, me, matrix.to(tl.int64) - tl.load(bases + me), down, SIZE)


@triton.jit
def announce_and_meet(control, bases, me, matrix, down, timeout_ns, status, rank, SIZE: tl.constexpr):
    """Begin a call: as `announce`, and meet; returns this program's row, and the epoch of the meeting."""
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    announce(row, bases, me, matrix, down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    return row, epoch


@triton.jit
def announced(row, bases, peer, like, SIZE: tl.constexpr):
    """(pointer, stride of rows) of what a member has announced."""
    theirs = (tl.load(bases + peer) + told(row, peer, SIZE)).to(like.dtype)
    return tl.multiple_of(theirs, 16), whole_rows(told_second(row, peer, SIZE), like)


@triton.jit
def store_to_all(
    row, bases, me, like, values, first, column, rows, columns, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store a tile to its place in the matrices that all members have announced, the own one last; see `store_tile`."""
    for i in range(SIZE):
        theirs, stride = announced(row, bases, (me + 1 + i) % SIZE, like, SIZE)
        store_tile(theirs, values, first, column, rows, columns, stride, 1, BM, BN)
