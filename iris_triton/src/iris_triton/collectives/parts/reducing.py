"""Reducing blocks of all members in the group's order, and what the host's side of all reductions has in common."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import members_of, told
from iris_triton.collectives.parts.elements import are_aligned, combine, finished, item_nbytes, strided, widened
from iris_triton.collectives.parts.portable import Portable
from iris_triton.collectives.parts.sizes import Carrier

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest


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


_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
"""Reductions of bool, as those of bytes that are 0 or 1."""


class Reduction(Portable):
    """What all reductions have in common."""

    @staticmethod
    def reduction(request: CollectiveRequest) -> tuple[str, Carrier | None]:
        """Return the reduction's name for the kernel, and as what it takes the elements."""
        op = request.options["reduction"]
        if request.dtype == "bool":
            return _BOOL[op], Carrier(torch.uint8)
        return op, None

    @staticmethod
    def common(request: CollectiveRequest, team: Team, op: str) -> dict[str, Any]:
        """Arguments that all kernels take."""
        return {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "SIZE": team.size,
            "OP": op,
        }
