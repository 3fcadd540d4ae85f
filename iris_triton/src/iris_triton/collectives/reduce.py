"""Reductions by reading: every rank reads the inputs of all members and reduces what it needs, in the group's order.

`pull_reduce` serves reduce, reduce_scatter, and all_reduce in one step: each element is reduced by every rank that
wants it.  `two_shot_*` serve all_reduce in two: each rank reduces its shard, and the results go to everybody.  Either
way all members get the same bits.

Direct and staged as in `iris_triton.collectives.pull`.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import (
    compare_kinds,
    last_epoch,
    leave,
    meet,
    members_of,
    row_of,
    tell,
    tell_kind,
    told,
    told_second,
)
from iris_triton.collectives.parts.elements import are_aligned, combine, copy, finished, item_nbytes, strided, widened
from iris_triton.collectives.pull import PER_CALL, RUNTIME

_RUNTIME = (*RUNTIME, "count", "wanted", "apart", "shard", "tiles")


@triton.jit
def _reduced(row, bases, shift, like, index, mask, ALIGNED: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr):
    """Read a block of elements of every member and reduce them.

    Args:
        row, bases: each member's elements begin where it has told, in its heap;
        shift: and so many bytes behind that.
        like: a pointer of the elements' type.
        index: elements between there and the block (block).
        mask: which of them there are (block).
        ALIGNED: they begin at multiples of 16 bytes.
    """
    for i in tl.static_range(SIZE):
        src = (tl.load(bases + i) + told(row, i, SIZE) + shift).to(like.dtype)
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
    """The member that gets the elements of a matrix with these linear indices, where each one gets some tiles.

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
    if STRIDING:
        return number % SIZE
    else:
        return number // ((tiles[3] * tiles[4] + SIZE - 1) // SIZE)


@triton.jit
def _reduce_to(
    out, begin, row, bases, shift, count, sizes, strides,
    DIMS: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    tiles=None, me=0, STRIDING: tl.constexpr = False
):  # fmt: skip
    """Reduce `count` elements to the linear index `begin` of the own tensor `out`; see `_reduced`.

    With `tiles`, only those that belong to the member `me`; see `_owner`.
    """
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    members = members_of(SIZE)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if DIMS == 0:
        out += begin
    if DIMS == 0 and tiles is None:  # noqa: SIM102 - decided at compile time
        if are_aligned(tl.load(bases + members) + told(row, members, SIZE) + shift | out.to(tl.int64)):
            wide = tl.multiple_of(out.to(tl.int64).to(out.dtype), 16)
            while at + BLOCK <= count:
                total = _reduced(row, bases, shift, out, at + lanes, None, True, OP, SIZE)
                tl.store(wide + at + lanes, total)
                at += step
    while at < count:
        mask = at + lanes < count
        if tiles is not None:
            mask = mask & (_owner(begin + at + lanes, tiles, STRIDING, SIZE) == me)
        total = _reduced(row, bases, shift, out, at + lanes, mask, False, OP, SIZE)
        if DIMS == 0:
            to = at + lanes
        else:
            to = strided(begin + at + lanes, sizes, strides, DIMS)
        tl.store(out + to, total, mask=mask)
        at += step


@triton.jit
def _reduced_slots(slots, apart, index, mask, ALIGNED: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr):
    """Read a block of elements of every slot and reduce them; see `reduce_slots`."""
    for i in tl.static_range(SIZE):
        src = slots + i * apart
        if ALIGNED:
            src = tl.multiple_of(src.to(tl.int64).to(slots.dtype), 16)
        value = widened(tl.load(src + index, mask=mask))
        if i == 0:
            total = value
        else:
            total = combine(total, value, OP)
    return finished(total, OP, SIZE).to(slots.dtype.element_ty)


@triton.jit
def reduce_slots(
    out, begin, slots, apart, count, sizes, strides,
    DIMS: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce what came from SIZE members to the linear index `begin` of the own tensor `out`.

    Args:
        out, begin: the tensor, and where in it.
        slots: pointer to what came from member 0.
        apart: elements from one member's to the next one's.
        count: number of elements.
        sizes, strides: of `out`, DIMS of them; none if it is dense.
    """
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if DIMS == 0:
        out += begin
        if (out.to(tl.int64) | slots.to(tl.int64) | apart * item_nbytes(slots.dtype)) % 16 == 0:
            wide = tl.multiple_of(out.to(tl.int64).to(out.dtype), 16)
            while at + BLOCK <= count:
                tl.store(wide + at + lanes, _reduced_slots(slots, apart, at + lanes, None, True, OP, SIZE))
                at += step
    while at < count:
        mask = at + lanes < count
        total = _reduced_slots(slots, apart, at + lanes, mask, False, OP, SIZE)
        if DIMS == 0:
            to = at + lanes
        else:
            to = strided(begin + at + lanes, sizes, strides, DIMS)
        tl.store(out + to, total, mask=mask)
        at += step


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def pull_reduce(
    out, inp, control, stage, bases, me, rank, kind, count, wanted, apart, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    tiles,
    SIZE: tl.constexpr, OP: tl.constexpr, STAGED: tl.constexpr, SHARED: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, STRIDING: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce a part of all members' inputs.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        kind: number of the kind of call; the same on all members.
        count: elements of a part.
        wanted: the same on a rank that gets one, 0 on others.
        apart: elements between two members' parts in an input; 0 where all get the same.
        tiles, STRIDING: which elements this rank gets, see `_owner`; None for all.
        OP: the reduction's name.
        SHARED: whether `apart` is 0.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    PIECES: tl.constexpr = 1 if SHARED else SIZE
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE)
    tell_kind(row, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    count = tl.cast(count, tl.int64)
    apart = tl.cast(apart, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    done = capacity * 0
    shift = done
    while done < count:
        piece = tl.minimum(count - done, capacity)
        if STAGED:
            for i in range(PIECES):
                mine = (stage.to(tl.int64) + shift).to(inp.dtype) + i * capacity
                copy(
                    mine, 0, in_sizes, in_strides, inp, i * apart + done, in_sizes, in_strides, piece, 0, IN_DIMS, BLOCK
                )
        if done == 0:
            members = members_of(SIZE).to(tl.int64)
            if not STAGED:
                tell(row, bases, me, inp.to(tl.int64) - own + members * apart * ITEM, members, SIZE)
            elif SHARED:
                tell(row, bases, me, stage.to(tl.int64) - own + members * 0, members, SIZE)
            else:
                tell(row, bases, me, stage.to(tl.int64) - own + members * capacity * ITEM, members, SIZE)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        if wanted > 0:
            _reduce_to(
                out, done, row, bases, shift, piece, out_sizes, out_strides, OUT_DIMS, OP, SIZE, BLOCK,
                tiles, me, STRIDING
            )  # fmt: skip
        done += capacity
        shift = PIECES * capacity * ITEM - shift
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit
def _reduce_and_push(row, bases, begin, count, like, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce `count` elements from `begin` on, and store them into every member's output (its second word)."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    members = members_of(SIZE)
    shift = begin * item_nbytes(like.dtype)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    heaps = tl.load(bases + members) + shift
    if are_aligned(heaps + told(row, members, SIZE) | heaps + told_second(row, members, SIZE)):
        while at + BLOCK <= count:
            total = _reduced(row, bases, shift, like, at + lanes, None, True, OP, SIZE)
            for i in tl.static_range(SIZE):
                to = (tl.load(bases + i) + told_second(row, i, SIZE) + shift).to(like.dtype)
                tl.store(tl.multiple_of(to, 16) + at + lanes, total)
            at += step
    while at < count:
        mask = at + lanes < count
        total = _reduced(row, bases, shift, like, at + lanes, mask, False, OP, SIZE)
        for i in tl.static_range(SIZE):
            to = (tl.load(bases + i) + told_second(row, i, SIZE) + shift).to(like.dtype)
            tl.store(to + at + lanes, total, mask=mask)
        at += step


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot_direct(
    out, inp, control, bases, me, rank, kind, count, shard, timeout_ns, status,
    SIZE: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the own shard of all inputs, and push the result into all outputs; both are dense and on the heap.

    Args (beside those of `pull_reduce`):
        count: elements of the whole.
        shard: elements of a shard; the last ones may be shorter, or empty.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    tell_kind(row, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    nothing = members_of(SIZE).to(tl.int64) * 0
    tell(row, bases, me, nothing + (inp.to(tl.int64) - own), nothing + (out.to(tl.int64) - own), SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    compare_kinds(row, kind, status, rank, SIZE)
    begin = tl.cast(me, tl.int64) * shard
    _reduce_and_push(row, bases, begin, tl.minimum(count - begin, shard), inp, OP, SIZE, BLOCK)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot_staged(
    out, inp, control, stage, bases, me, rank, kind, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, IN_STAGED: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the own shard in pieces, which the others read from the staging region.

    The region holds a piece of the result, and behind it a piece of the input for each member, if IN_STAGED.  Two
    meetings per piece: the inputs are there, the results are there.

    Args (beside those of `two_shot_direct`):
        capacity: elements of a piece.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE)
    tell_kind(row, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    capacity = tl.cast(capacity, tl.int64)
    begin = tl.cast(me, tl.int64) * shard
    mine = stage.to(inp.dtype, bitcast=True)
    done = capacity * 0
    while done < shard:
        if IN_STAGED:
            for i in range(SIZE):
                first = i * tl.cast(shard, tl.int64) + done
                piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
                copy(
                    mine + (i + 1) * capacity, 0, in_sizes, in_strides, inp, first, in_sizes, in_strides, piece,
                    0, IN_DIMS, BLOCK
                )  # fmt: skip
        if done == 0:
            members = members_of(SIZE).to(tl.int64)
            if IN_STAGED:
                tell(row, bases, me, stage.to(tl.int64) - own + (members + 1) * capacity * ITEM, members, SIZE)
            else:
                tell(row, bases, me, inp.to(tl.int64) - own + members * shard * ITEM, members, SIZE)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        piece = tl.minimum(tl.minimum(count - begin, shard) - done, capacity)
        if IN_STAGED:
            shift = done * 0
        else:
            shift = done * ITEM
        _reduce_to(mine, 0, row, bases, shift, piece, out_sizes, out_strides, 0, OP, SIZE, BLOCK)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            first = member * tl.cast(shard, tl.int64) + done
            piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
            src = (tl.load(bases + member) + (stage.to(tl.int64) - own)).to(inp.dtype)
            copy(out, first, out_sizes, out_strides, src, 0, out_sizes, out_strides, piece, OUT_DIMS, 0, BLOCK)
        done += capacity
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)
