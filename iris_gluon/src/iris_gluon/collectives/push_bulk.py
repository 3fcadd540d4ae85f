"""Push by Hopper's copy unit: as `iris_gluon.collectives.push`, but one thread of a program begins the copies.

Programs of one warp store as fast as programs of sixteen that load and store by themselves (benchmarks/gluon_bulk.py),
and leave registers and issue slots of the multiprocessors to what runs beside them.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.bulk import put_bulk
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.collectives.pull import PER_CALL

_RUNTIME = ("me", "rank", "count", "apart", "timeout_ns", "status")


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_bulk(
    out, inp, control, bases, me, rank, count, apart, timeout_ns, status,
    SIZE: gl.constexpr, UNIT: gl.constexpr, CHUNK_BYTES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copy a part to every member; both tensors are dense, and peers can address the output.

    Args (beside those of `iris_gluon.collectives.push.push`):
        count: elements that go to a member.
        apart: elements between the parts for two members in the input; 0 where all get the same.
        UNIT: programs take whole multiples of so many elements: lines of 128 bytes.
        CHUNK_BYTES, STAGES: see `iris_gluon.bulk.put_bulk`.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    members = members_of(SIZE)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    place = out.to(gl.int64) - own + members.to(gl.int64) * 0
    tell(row, bases, me, place, place, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    programs = gl.num_programs(0)
    each = (count + programs * UNIT - 1) // (programs * UNIT) * UNIT
    begin = gl.minimum(gl.program_id(0) * each, count)
    number = gl.minimum(count - begin, each)
    for i in range(SIZE):
        member = (me + 1 + i) % SIZE
        source = inp + (member * gl.cast(apart, gl.int64) + begin)
        to = own + told(row, member, SIZE) + (me * count + begin) * ITEM  # as if it lay in the own heap
        if (member != me) | (to != source.to(gl.int64)):  # not in place
            put_bulk(source, to.to(out.dtype), number, me, member, bases, CHUNK_BYTES, STAGES)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)
