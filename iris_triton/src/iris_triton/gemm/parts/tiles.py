"""Tiles of a product: their order, computation and stores.  Plain Triton, for every target.

Arguments that kernels have in common, in both languages:

    out, a, b, bias               the tensors; bias may be None
    control, bases, SIZE          the team's control region (int64), int64[SIZE], the members' heaps, and their number
    me, rank                      the caller's index in the team, and in the world
    m, n, k                       the product that a member computes
    a_down ... bias_step          strides in elements: to the next row (down), to the next column (right)
    a_scales ... b_scale_right    scales, float32, and their strides, as in a request
    SCALES                        what they belong to: "rows", "blocks" or "none"
    tiles_m, tiles_n              tiles below each other and beside each other
    timeout_ns, status            bound of waits, and where they report
    BIAS                          what the bias lies along: "columns", "rows" or "none"
    A_ALIGNED and the like        a tensor begins at a multiple of 16 bytes
    BM, BN, BK, GROUP             a tile, a step of the inner dimension, row tiles that are taken together
    EVEN_K, PRECISION, STAGES     BK divides the inner dimension; of float32, and of the pipeline, as Triton takes them
    A_CACHE, B_CACHE              cache modifiers of loads
    XCDS, CHUNK                   see `own_program`
"""

import triton
import triton.language as tl

from iris_core.dispatch.products import SCALED_BLOCK
from iris_triton.collectives.parts.barrier import barrier, last_epoch, row_of, send, sent, sent_second
from iris_triton.collectives.parts.elements import ANEW, item_nbytes
from iris_triton.tiles.views import chiplet_transform_chunked

_SCALED_BLOCK = tl.constexpr(SCALED_BLOCK)


@triton.jit
def wide(pointer, ALIGNED: tl.constexpr):
    """Return the pointer with the hint that it is a multiple of 16 bytes, if it is one."""
    if ALIGNED:  # made anew, for inlining drops what is promised of an argument
        return tl.multiple_of(pointer.to(ANEW).to(pointer.dtype), 16)
    else:
        return pointer


@triton.jit
def whole_rows(stride, like):
    """Return a stride of rows that begin at multiples of 16 bytes, as a multiple that the compiler knows."""
    # Arithmetic: what is promised of the result of a call is dropped when the call is inlined.
    UNIT: tl.constexpr = 16 // item_nbytes(like.dtype)
    return stride // UNIT * UNIT


@triton.jit
def own_program(first, XCDS: tl.constexpr, CHUNK: tl.constexpr):
    """Return this program's number among those from `first` on, remapped for the dies, counted from 0.

    With XCDS dies, CHUNK neighbouring tiles go to programs of the same die.
    """
    number = tl.program_id(0) - first
    if XCDS > 1:
        number = chiplet_transform_chunked(number, tl.num_programs(0) - first, XCDS, CHUNK)
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
    a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr,
    TURNED: tl.constexpr = False
):  # fmt: skip
    """Add the tile of A @ B that begins at (row, column) to `acc`, float32[BM, BN]; of scaled rows, to zeros only.

    A has rows x inner elements, B inner x columns; what lies beyond them counts as 0.  Scaled blocks are summed apart,
    as in DeepGEMM (DeepSeek, 2025): BN and BK divide them.  With TURNED, which takes no scales, `acc` is transposed:
    matrix units of Hopper take 64 rows at least, which B has where A has few.
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
        if SCALES == "blocks":
            block = k // _SCALED_BLOCK
            down = tl.load(a_scales + i.to(tl.int64) * a_scale_down + block * a_scale_right, mask=i < rows, other=0.0)
            factors = down * tl.load(b_scales + column // _SCALED_BLOCK * b_scale_right + block * b_scale_down)
            acc += tl.dot(left, right, input_precision=PRECISION) * factors[:, None]
        elif TURNED:
            acc = tl.dot(right.trans(), left.trans(), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        a_at += a_step
        b_at += b_step
    if SCALES == "rows":
        acc *= tl.load(a_scales + i.to(tl.int64) * a_scale_down, mask=i < rows, other=0.0)[:, None]
        acc *= tl.load(b_scales + j.to(tl.int64) * b_scale_right, mask=j < columns, other=0.0)[None, :]
    return acc


@triton.jit
def with_bias(
    acc, bias, row, column, rows, columns, step, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add the bias, with values `step` elements apart, to a tile that begins at (row, column)."""
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


PER_CALL = ("out", "a", "b", "bias", "a_scales", "b_scales")  # arguments that may lie anywhere
RUNTIME = ("me", "rank", "per_owner", "timeout_ns", "status")  # for whose values kernels are not compiled anew


@triton.jit
def begin_call(control, bases, me, matrix, down, timeout_ns, status, rank, SIZE: tl.constexpr):
    """Begin a call with a barrier; return this program's row and the epoch of the barrier.

    Publishes the heap offset and the row stride of `matrix`, if there is one.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    if matrix is not None:
        send(row, bases, me, matrix.to(tl.int64) - tl.load(bases + me), down, SIZE)
    barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    return row, epoch


@triton.jit
def announced(row, bases, peer, like, SIZE: tl.constexpr):
    """Return (pointer, row stride) of the matrix that a member published."""
    theirs = (tl.load(bases + peer) + sent(row, peer, SIZE)).to(like.dtype)
    return tl.multiple_of(theirs, 16), whole_rows(sent_second(row, peer, SIZE), like)


@triton.jit
def store_to_all(
    row, bases, me, like, values, first, column, rows, columns, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store a tile to the matrices that all members published, this rank's last; see `store_tile`."""
    for i in range(SIZE):
        theirs, stride = announced(row, bases, (me + 1 + i) % SIZE, like, SIZE)
        store_tile(theirs, values, first, column, rows, columns, stride, 1, BM, BN)
