"""Copy and reduce elements, dense or strided, with the widest accesses that their addresses allow."""

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import members_of, sent, sent_second

ANEW = tl.constexpr(tl.pointer_type(tl.int1))
"""A cast to this type and back makes a pointer of which nothing is known; Triton 3.8 sees through one to numbers."""


@triton.constexpr_function
def _word_type(element):
    return {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}[element.primitive_bitwidth]


@triton.jit
def as_words(pointer):
    """Cast to a pointer to integers of the same width: NaNs copied as floats might change."""
    return pointer.to(tl.pointer_type(_word_type(pointer.dtype.element_ty)), bitcast=True)


@triton.constexpr_function
def item_nbytes(pointer_type):
    """Return the size of an element in bytes."""
    return pointer_type.element_ty.primitive_bitwidth // 8


@triton.jit
def are_aligned(addresses):
    """Return whether all addresses of a block are multiples of 16."""
    return tl.max(addresses % 16, axis=0) == 0


@triton.jit
def strided(index, sizes, strides, DIMS: tl.constexpr):
    """Convert linear indices (a block) to offsets in a tensor with these sizes and strides; DIMS 0: it is dense."""
    if DIMS == 0:
        return index
    else:
        offset = index * 0
        for d in tl.static_range(DIMS):
            size = sizes[DIMS - 1 - d]
            offset += index % size * strides[DIMS - 1 - d]
            index = index // size
        return offset


@triton.jit
def copy_dense(dst, src, count, part, parts, BLOCK: tl.constexpr):
    """Copy every `parts`-th block of `count` elements, from number `part` on; see `copy_part`."""
    first = part * BLOCK
    step = parts * BLOCK
    lanes = tl.arange(0, BLOCK)
    if (dst.to(tl.int64) | src.to(tl.int64)) % 16 == 0:
        whole = count // BLOCK * BLOCK
        wide_to = tl.multiple_of(dst.to(ANEW).to(dst.dtype), 16)  # inlining drops the hints of an argument
        wide_origin = tl.multiple_of(src.to(ANEW).to(src.dtype), 16)
        for at in range(first, whole, step):
            tl.store(wide_to + at + lanes, tl.load(wide_origin + at + lanes))
        if (whole // BLOCK) % parts == part:
            mask = lanes < count - whole
            tl.store(dst + whole + lanes, tl.load(src + whole + lanes, mask=mask), mask=mask)
    else:
        for at in range(first, count, step):
            mask = at + lanes < count
            tl.store(dst + at + lanes, tl.load(src + at + lanes, mask=mask), mask=mask)


@triton.jit
def _has_units(at, sizes, strides, DIMS: tl.constexpr, UNIT: tl.constexpr):
    """Return whether a tensor, from a linear index on, consists of contiguous units aligned to UNIT elements."""
    off = at % UNIT
    if DIMS > 0:
        off = off | (strides[DIMS - 1] - 1) | sizes[DIMS - 1] % UNIT
        for d in tl.static_range(DIMS - 1):
            off = off | strides[d] % UNIT
    return off == 0


@triton.jit
def _copy_units(
    dst, dst_at, src, src_at, sizes, strides, count, part, parts,
    DST_DIMS: tl.constexpr, SRC_DIMS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Copy like `copy_part`, by 16 bytes: one offset and one access for UNIT elements."""
    lanes = tl.arange(0, BLOCK // UNIT) * UNIT
    within = tl.arange(0, UNIT)[None, :]
    wide_to = tl.multiple_of(dst.to(ANEW).to(dst.dtype), 16)
    wide_origin = tl.multiple_of(src.to(ANEW).to(src.dtype), 16)
    for at in range(part * BLOCK, count, parts * BLOCK):
        to = strided(dst_at + at + lanes, sizes, strides, DST_DIMS)
        origin = strided(src_at + at + lanes, sizes, strides, SRC_DIMS)
        mask = (at + lanes < count)[:, None]
        # // UNIT * UNIT changes no value, but lets the compiler prove alignment
        value = tl.load(wide_origin + ((origin // UNIT * UNIT)[:, None] + within), mask=mask)
        tl.store(wide_to + ((to // UNIT * UNIT)[:, None] + within), value, mask=mask)


@triton.jit
def copy_part(
    dst, dst_at, src, src_at, sizes, strides, count, part, parts,
    DST_DIMS: tl.constexpr, SRC_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy elements from the linear index `src_at` of one tensor to `dst_at` of another; one of them is dense.

    Args:
        sizes, strides: of the one that is not dense; tuples of DST_DIMS or SRC_DIMS numbers, the other is 0.
        count: number of elements (int64); nothing is done if it is negative.
        part, parts: this program, and how many programs share the work (int64).
    """
    tl.static_assert(DST_DIMS == 0 or SRC_DIMS == 0, "one of the tensors is dense")
    UNIT: tl.constexpr = 16 // item_nbytes(dst.dtype)
    in_units = count < 0
    if BLOCK >= UNIT and (DST_DIMS > 0 or SRC_DIMS > 0):
        in_units = (
            ((dst.to(tl.int64) | src.to(tl.int64)) % 16 == 0)
            & (count % UNIT == 0)
            & _has_units(dst_at, sizes, strides, DST_DIMS, UNIT)
            & _has_units(src_at, sizes, strides, SRC_DIMS, UNIT)
        )
    if DST_DIMS == 0 and SRC_DIMS == 0:
        copy_dense(dst + dst_at, src + src_at, count, part, parts, BLOCK)
    elif in_units:
        if BLOCK >= UNIT:
            _copy_units(dst, dst_at, src, src_at, sizes, strides, count, part, parts, DST_DIMS, SRC_DIMS, BLOCK, UNIT)
    else:
        lanes = tl.arange(0, BLOCK)
        for at in range(part * BLOCK, count, parts * BLOCK):
            to = strided(dst_at + at + lanes, sizes, strides, DST_DIMS)
            origin = strided(src_at + at + lanes, sizes, strides, SRC_DIMS)
            mask = at + lanes < count
            tl.store(dst + to, tl.load(src + origin, mask=mask), mask=mask)


@triton.jit
def copy(
    dst, dst_at, src, src_at, sizes, strides, count,
    DST_DIMS: tl.constexpr, SRC_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Run `copy_part` with all programs of the launch."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    copy_part(dst, dst_at, src, src_at, sizes, strides, count, part, parts, DST_DIMS, SRC_DIMS, BLOCK)


@triton.constexpr_function
def wide_type(element):
    """Return the type in which elements are accumulated."""
    return tl.float32 if element.is_floating() and element.primitive_bitwidth < 32 else element


@triton.jit
def widened(value):
    """Convert 16-bit floats to float32; other types are unchanged."""
    return value.to(wide_type(value.dtype))


@triton.jit
def combine(a, b, OP: tl.constexpr):
    """Combine two values of a reduction; NaNs of any rank propagate."""
    if OP == "sum" or OP == "avg":
        return a + b
    elif OP == "product":
        return a * b
    elif OP == "min":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "band":
        return a & b
    elif OP == "bor":
        return a | b
    else:
        tl.static_assert(OP == "bxor", "unknown reduction")
        return a ^ b


@triton.jit
def finished(value, OP: tl.constexpr, SIZE: tl.constexpr):
    """Finish a reduction: divide an average by SIZE, rounded to nearest, for integers towards zero."""
    if OP == "avg":
        divisor = tl.cast(SIZE, value.dtype)
        if value.dtype.is_fp32():
            return tl.div_rn(value, divisor)
        else:
            return value / divisor if value.dtype.is_floating() else value // divisor
    else:
        return value


@triton.jit
def reduced(row, bases, shift, like, index, mask, ALIGNED: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr):
    """Read a block of elements of every member and reduce them.

    Args:
        row, bases, shift: a member's elements begin `shift` bytes after the heap offset that it published.
        like: a pointer of the elements' type.
        index, mask: offsets of the block's elements from there, in elements, and which of them exist (blocks).
        ALIGNED: they begin at multiples of 16 bytes.
    """
    for i in tl.static_range(SIZE):
        src = (tl.load(bases + i) + sent(row, i, SIZE) + shift).to(like.dtype)
        if ALIGNED:
            src = tl.multiple_of(src, 16)
        value = widened(tl.load(src + index, mask=mask))
        if i == 0:
            total = value
        else:
            total = combine(total, value, OP)
    return finished(total, OP, SIZE).to(like.dtype.element_ty)


@triton.jit
def _owner(index, tiles, STRIDING: tl.constexpr, SIZE: tl.constexpr):
    """Return the member that owns the elements of a matrix with these linear indices, if each member owns some tiles.

    Tiles are numbered down `swizzle` rows of them, then to the right, then the next rows.

    Args:
        index: linear indices (block).
        tiles: (columns, rows of a tile, columns of a tile, tiles below each other, tiles beside each other, swizzle).
        STRIDING: whether a member gets every SIZE-th tile; else it gets as many in a row.
    """
    down = index // tiles[0] // tiles[1]
    right = index % tiles[0] // tiles[2]
    first = down // tiles[5] * tiles[5]
    height = tl.minimum(tiles[3] - first, tiles[5])
    number = first * tiles[4] + right * height + (down - first)
    return number % SIZE if STRIDING else number // ((tiles[3] * tiles[4] + SIZE - 1) // SIZE)


@triton.jit
def _store_to_all(row, bases, shift, like, index, value, mask, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Store a block of elements at the heap offset in each member's second published word; see `reduced`."""
    for i in tl.static_range(SIZE):
        to = (tl.load(bases + i) + sent_second(row, i, SIZE) + shift).to(like.dtype)
        if ALIGNED:
            to = tl.multiple_of(to, 16)
        tl.store(to + index, value, mask=mask)


@triton.jit
def reduce_to(
    out, begin, row, bases, shift, count, sizes, strides,
    DIMS: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    tiles=None, me=0, STRIDING: tl.constexpr = False, PUSH: tl.constexpr = False
):  # fmt: skip
    """Reduce `count` elements into this rank's tensor `out`, from linear index `begin` on; see `reduced`.

    With `tiles`, only those of the member `me`; see `_owner`.  With PUSH, to all members; see `_store_to_all`.
    """
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    members = members_of(SIZE)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if DIMS == 0:
        out += begin
    if DIMS == 0 and tiles is None:
        heaps = tl.load(bases + members) + shift
        targets = out.to(tl.int64)
        if PUSH:
            targets = heaps + sent_second(row, members, SIZE)
        if are_aligned(heaps + sent(row, members, SIZE) | targets):
            wide = tl.multiple_of(out.to(ANEW).to(out.dtype), 16)
            while at + BLOCK <= count:
                total = reduced(row, bases, shift, out, at + lanes, None, True, OP, SIZE)
                if PUSH:
                    _store_to_all(row, bases, shift, out, at + lanes, total, None, True, SIZE)
                else:
                    tl.store(wide + at + lanes, total)
                at += step
    while at < count:
        mask = at + lanes < count
        if tiles is not None:
            mask = mask & (_owner(begin + at + lanes, tiles, STRIDING, SIZE) == me)
        total = reduced(row, bases, shift, out, at + lanes, mask, False, OP, SIZE)
        if PUSH:
            _store_to_all(row, bases, shift, out, at + lanes, total, mask, False, SIZE)
        else:
            to = at + lanes if DIMS == 0 else strided(begin + at + lanes, sizes, strides, DIMS)
            tl.store(out + to, total, mask=mask)
        at += step
