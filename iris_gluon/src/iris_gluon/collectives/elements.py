"""Copying and reducing elements in Gluon: 16 bytes a thread and access where tensors are dense and addresses allow it.

A block of BLOCK elements is BLOCK // VEC *vectors* of VEC elements, 16 bytes each, in a layout in which a thread holds
whole vectors and neighbours hold neighbouring ones, for warps of 32 and of 64 lanes.  Where accesses cannot be that
wide, the same block is one of single elements.  Either way block number b belongs to the program whose `part` is
b % parts, so what one program has written in one way, another one can read in the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.target_info import is_cuda, is_hip

from iris_gluon.layouts import default_layout
from iris_triton.collectives.parts.elements import ANEW, combine, finished, item_nbytes, strided, widened

_NARROW_BLOCK = 1024  # elements of a program on a GPU where each is an access of its own: few registers suffice


@gluon.constexpr_function
def _narrow_block(block):
    """Elements of a block that are handled at a time, one by one; on the CPU, a large block costs no more."""
    return min(block, _NARROW_BLOCK) if is_cuda() or is_hip() else block


@gluon.jit
def _vector_lanes(VECTORS: gl.constexpr, VEC: gl.constexpr):
    """0 .. VECTORS - 1 and 0 .. VEC - 1, as the two sides of one block."""
    layout: gl.constexpr = default_layout([VECTORS, VEC], vector=VEC)
    vectors = gl.arange(0, VECTORS, layout=gl.SliceLayout(1, layout))
    return vectors, gl.arange(0, VEC, layout=gl.SliceLayout(0, layout))


@gluon.jit
def _as_vector_pointer(pointer):
    """Return the pointer, promised to be a multiple of 16 bytes.

    Made anew, so that nothing that was known of an argument stands in the way.
    """
    return gl.multiple_of(pointer.to(ANEW).to(pointer.dtype), 16)


@gluon.jit
def _narrow_start(vectors, part, parts, VEC: gl.constexpr, BLOCK: gl.constexpr):
    """Return the first element of this program's blocks after the vectors."""
    first = vectors * VEC // BLOCK
    return (first + (part + parts - first % parts) % parts) * BLOCK


@gluon.jit
def copy(
    dst, dst_at, dst_sizes, dst_strides, src, src_at, src_sizes, src_strides, count, part, parts,
    DST_DIMS: gl.constexpr, SRC_DIMS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Copy elements from the linear index `src_at` of one tensor to `dst_at` of another.

    Args:
        dst, src: pointers to the tensors, of the same integer type.
        dst_at, src_at: linear indices (int64).
        dst_sizes, dst_strides, src_sizes, src_strides: tuples of DST_DIMS and SRC_DIMS numbers; 0: the tensor is dense.
        count, part, parts: see `iris_triton.collectives.parts.elements.copy_part`.
        BLOCK: elements of a block; a power of two, and a vector or more.
    """
    VEC: gl.constexpr = 16 // item_nbytes(dst.dtype)
    VECTORS: gl.constexpr = BLOCK // VEC
    count = gl.maximum(count, 0)
    vectors = count * 0
    if DST_DIMS == 0 and SRC_DIMS == 0:
        dst += dst_at
        src += src_at
        if (dst.to(gl.int64) | src.to(gl.int64)) % 16 == 0:
            vectors = count // VEC
        lanes, within = _vector_lanes(VECTORS, VEC)
        wide_dst, wide_src = _as_vector_pointer(dst), _as_vector_pointer(src)
        for at in range(part * VECTORS, vectors, parts * VECTORS):
            vector = at + lanes
            mask = (vector < vectors)[:, None]
            place = (vector * VEC)[:, None] + within[None, :]
            gl.store(wide_dst + place, gl.load(wide_src + place, mask=mask), mask=mask)
        dst_at, src_at = dst_at * 0, src_at * 0
    NARROW: gl.constexpr = _narrow_block(BLOCK)
    each = gl.arange(0, NARROW, layout=default_layout([NARROW]))
    for block in range(_narrow_start(vectors, part, parts, VEC, BLOCK), count, parts * BLOCK):
        for at in range(block, gl.minimum(block + BLOCK, count), NARROW):
            index = at + each
            mask = (index >= vectors * VEC) & (index < count)
            to = strided(dst_at + index, dst_sizes, dst_strides, DST_DIMS)
            origin = strided(src_at + index, src_sizes, src_strides, SRC_DIMS)
            gl.store(dst + to, gl.load(src + origin, mask=mask), mask=mask)


@gluon.jit
def _reduced(sources, like, offset, mask, WIDE: gl.constexpr, OP: gl.constexpr, SIZE: gl.constexpr):
    """Read a block of elements at each of SIZE addresses, and reduce them in that order."""
    for i in gl.static_range(SIZE):
        src = sources[i].to(like.dtype)
        if WIDE:
            src = gl.multiple_of(src, 16)
        value = widened(gl.load(src + offset, mask=mask))
        if i == 0:
            total = value
        else:
            total = combine(total, value, OP)
    return finished(total, OP, SIZE).to(like.dtype.element_ty)


@gluon.jit
def _all_of(addresses, SIZE: gl.constexpr):
    """Return the bits that any of the addresses has."""
    bits = addresses[0]
    for i in gl.static_range(1, SIZE):
        bits = bits | addresses[i]
    return bits


@gluon.jit
def reduce_to(targets, sources, like, count, part, parts, OP: gl.constexpr, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Reduce `count` dense elements at each of SIZE addresses, in that order, and store the result at all targets.

    16-bit floats are added up in float32.

    Args:
        targets, sources: tuples of SIZE addresses (int64).
        like: a pointer of the elements' type.
        count, part, parts, BLOCK: as in `copy`.
    """
    VEC: gl.constexpr = 16 // item_nbytes(like.dtype)
    VECTORS: gl.constexpr = BLOCK // VEC
    count = gl.maximum(count, 0)
    vectors = count // VEC
    if (_all_of(targets, SIZE) | _all_of(sources, SIZE)) % 16 != 0:
        vectors = vectors * 0
    lanes, within = _vector_lanes(VECTORS, VEC)
    for start in range(part * VECTORS, vectors, parts * VECTORS):
        vector = start + lanes
        mask = (vector < vectors)[:, None]
        place = (vector * VEC)[:, None] + within[None, :]
        total = _reduced(sources, like, place, mask, True, OP, SIZE)
        for i in gl.static_range(SIZE):
            gl.store(gl.multiple_of(targets[i].to(like.dtype), 16) + place, total, mask=mask)
    NARROW: gl.constexpr = _narrow_block(BLOCK)
    each = gl.arange(0, NARROW, layout=default_layout([NARROW]))
    for block in range(_narrow_start(vectors, part, parts, VEC, BLOCK), count, parts * BLOCK):
        for start in range(block, gl.minimum(block + BLOCK, count), NARROW):
            index = start + each
            mask = (index >= vectors * VEC) & (index < count)
            total = _reduced(sources, like, index, mask, False, OP, SIZE)
            for i in gl.static_range(SIZE):
                gl.store(targets[i].to(like.dtype) + index, total, mask=mask)
