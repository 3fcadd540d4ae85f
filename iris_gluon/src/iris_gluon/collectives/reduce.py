"""all_reduce in Gluon: one step for small tensors, two for large ones; all members get the same bits.

`one_shot`: every rank stores its input into the landing regions of all, and reduces what has landed.  `two_shot`: each
rank reduces its shard of all inputs and stores the result into all outputs.  Tensors that peers cannot address take
part through landing regions, in rounds of pieces.  Each element is reduced in the group's order.

What is read from landing regions lies in the own memory: nothing but stores goes over the links, except that `two_shot`
reads inputs that peers can address where they are.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.collectives.elements import copy, reduce_to
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.collectives.parts.elements import item_nbytes
from iris_triton.collectives.pull import PER_CALL, RUNTIME

_RUNTIME = (*RUNTIME, "count", "shard")


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def one_shot(
    out, inp, control, landing, bases, me, rank, count, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, OP: gl.constexpr, IN_DIMS: gl.constexpr, IN_WIDE: gl.constexpr, OUT_DIMS: gl.constexpr,
    OUT_WIDE: gl.constexpr, INDEX: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Store the input into every member's landing region, and reduce what lands in the own one.

    Half of the region holds a piece from each member.  The halves take turns: who stores into one has met the others
    after they had reduced what was there.

    Args (beside those of `iris_gluon.collectives.push.push`):
        count: number of elements.
        OP: the reduction's name.
    """
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    members = members_of(SIZE)
    part, parts = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    capacity = gl.cast(capacity, gl.int64)
    place = landing.to(gl.int64) - own + members.to(gl.int64) * 0
    tell(row, bases, me, place, place, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # landing regions are free
    done = count * 0
    half = done
    while done < count:
        piece = gl.minimum(count - done, capacity)
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            there = gl.load(bases + member) + told(row, member, SIZE) + half + me * capacity * ITEM
            copy(
                there.to(inp.dtype), done * 0, in_sizes, in_strides, inp, done, in_sizes, in_strides, piece, part,
                parts, 0, True, IN_DIMS, IN_WIDE, INDEX, BLOCK
            )  # fmt: skip
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        sources = ()
        for i in gl.static_range(SIZE):
            sources = sources + (landing.to(gl.int64) + half + i * capacity * ITEM,)  # noqa: RUF005
        reduce_to(
            (out.to(gl.int64),), done, out_sizes, out_strides, sources, out, piece, part, parts, 1, OUT_DIMS, OUT_WIDE,
            OP, SIZE, INDEX, BLOCK
        )  # fmt: skip
        done += capacity
        half = SIZE * capacity * ITEM - half
    leave(row, epoch, SIZE)


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, control, landing, bases, me, rank, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, OP: gl.constexpr, IN_DIRECT: gl.constexpr, OUT_DIRECT: gl.constexpr, IN_DIMS: gl.constexpr,
    IN_WIDE: gl.constexpr, OUT_DIMS: gl.constexpr, OUT_WIDE: gl.constexpr, INDEX: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Reduce the own shard of all inputs, and store the result into all outputs.

    The landing region has a piece of the own shard from each member, if inputs are not direct; behind them, if outputs
    are not direct, a piece of the result from each member.  Where inputs land, too, a round has two meetings, so all
    know that results have been fetched before the next ones come; else two halves for results take turns.

    Args (beside those of `one_shot`):
        shard: elements of a shard; the last ones may be shorter, or empty.
        capacity: elements of a piece; a shard's, if everything is direct.
        IN_DIRECT, OUT_DIRECT: whether peers can address the input, and the output; the same on all members.
    """
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    RESULTS: gl.constexpr = 0 if IN_DIRECT else SIZE  # pieces before the results
    members = members_of(SIZE)
    part, parts = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    shard = gl.cast(shard, gl.int64)
    capacity = gl.cast(capacity, gl.int64)
    first = landing.to(gl.int64) - own + members.to(gl.int64) * 0
    second = first + RESULTS * capacity * ITEM
    if IN_DIRECT:
        first = inp.to(gl.int64) - own + members.to(gl.int64) * 0
    if OUT_DIRECT:
        second = out.to(gl.int64) - own + members.to(gl.int64) * 0
    tell(row, bases, me, first, second, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # inputs are ready, outputs and landing regions free
    begin = me * shard
    done = count * 0
    half = done
    while done < shard:
        if not IN_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                there = gl.load(bases + member) + told(row, member, SIZE) + me * capacity * ITEM
                copy(
                    there.to(inp.dtype), done * 0, in_sizes, in_strides, inp, at, in_sizes, in_strides, piece, part,
                    parts, 0, True, IN_DIMS, IN_WIDE, INDEX, BLOCK
                )  # fmt: skip
            epoch += 1
            meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        sources = ()
        targets = ()
        for i in gl.static_range(SIZE):
            if IN_DIRECT:
                src = gl.load(bases + i) + told(row, i, SIZE) + (begin + done) * ITEM
            else:
                src = landing.to(gl.int64) + i * capacity * ITEM
            member = (me + 1 + i) % SIZE
            to = gl.load(bases + member) + told_second(row, member, SIZE)
            if OUT_DIRECT:
                to += (begin + done) * ITEM
            else:
                to += half + me * capacity * ITEM
            sources = sources + (src,)  # noqa: RUF005
            targets = targets + (to,)  # noqa: RUF005
        piece = gl.minimum(gl.minimum(count - begin, shard) - done, capacity)
        reduce_to(
            targets,
            done * 0,
            out_sizes,
            out_strides,
            sources,
            inp,
            piece,
            part,
            parts,
            SIZE,
            0,
            True,
            OP,
            SIZE,
            INDEX,
            BLOCK,
        )
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if not OUT_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                here = landing.to(gl.int64) + half + (RESULTS + member) * capacity * ITEM
                copy(
                    out, at, out_sizes, out_strides, here.to(out.dtype), done * 0, out_sizes, out_strides, piece, part,
                    parts, OUT_DIMS, OUT_WIDE, 0, True, INDEX, BLOCK
                )  # fmt: skip
        done += capacity
        if IN_DIRECT:
            half = SIZE * capacity * ITEM - half
    leave(row, epoch, SIZE)
