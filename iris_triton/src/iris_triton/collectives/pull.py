"""`pull`: all_gather, all_to_all, broadcast, gather and scatter.  Every rank reads what it needs from its peers.

Chosen for broadcast, gather and scatter, for split sizes, and for all_gather and all_to_all where a table or the model
says so.  An input that peers can address is read in place: barrier, read, barrier.  Any other input is staged in rounds
of pieces, which the peers read after a barrier; with double buffering, one barrier per round is enough.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.device.context_words import MismatchCode
from iris_core.dispatch.team import Team, lasting
from iris_core.types import CollectiveRequest
from iris_triton.collectives.parts import barrier as sync
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import as_words, copy, item_nbytes
from iris_triton.collectives.parts.sizes import blocks_for, carrier_of, pieces
from iris_triton.language.flags import lanes_for, report_difference

_PARTS = ("in_step", "given", "out_step", "taken", "giver")
_SIZES, _ROOMS = ("gives", "takes"), ("row_items", "in_rows", "out_rows")
_NUMBER_BITS = tl.constexpr(48)
_SPLITS = tl.constexpr(int(MismatchCode.SPLITS))


@triton.jit
def _for_member(table, member, in_step, given, SIZE: tl.constexpr):
    """Return (begin in the input, number of elements) of the part for a member."""
    if table is not None:
        return tl.load(table + member), tl.load(table + SIZE + member)
    else:
        begin = tl.cast(member, tl.int64) * in_step
        return begin, begin * 0 + given


@triton.jit
def _from_member(table, member, out_step, taken, giver, SIZE: tl.constexpr):
    """Return (begin in the output, number of elements) of the part from a member."""
    if table is not None:
        return tl.load(table + 2 * SIZE + member), tl.load(table + 3 * SIZE + member)
    else:
        begin = tl.cast(member, tl.int64) * out_step
        return begin, begin * 0 + tl.where((giver < 0) | (member == giver), taken, 0)


@triton.jit
def _that_fit(asked, room):
    """Return (begin, number) of consecutive parts of members, each cut to where there is room (blocks)."""
    begin = tl.cumsum(asked, 0) - asked
    return begin, tl.maximum(tl.minimum(asked, room - begin), 0)


@triton.jit
def _of_member(begins, numbers, member, SIZE: tl.constexpr):
    """Return (begin, number) of a member, from blocks over members."""
    is_it = lanes_for(SIZE) == member
    return tl.sum(tl.where(is_it, begins, 0), axis=0), tl.sum(tl.where(is_it, numbers, 0), axis=0)


@triton.jit
def _compare_numbers(row, expected, said, status, rank, SIZE: tl.constexpr, ROWS: tl.constexpr = 0):
    """Report a member whose number of elements for this rank is not the expected one (blocks over members).

    ROWS: 1 for rows that it is to get, `expected` those that there are; 2 for rows of all, and of the output.
    """
    if tl.program_id(0) == 0:
        peer = sync.differing(expected, said, row, SIZE)
        if peer >= 0:
            ours, theirs = _of_member(expected, said, peer, SIZE)
            report_difference(status, rank, row.to(tl.int64), peer, ours, theirs, ROWS, 0, _SPLITS)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=(*PER_CALL, *_SIZES))
def pull(
    out, inp, control, stage, table, bases, me, rank, kind, in_step, given, out_step, taken, giver, capacity,
    timeout_ns, status, in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, SOURCE: tl.constexpr, SHARED: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    BLOCK: tl.constexpr, gives=None, takes=None, row_items=None, in_rows=None, out_rows=None
):  # fmt: skip
    """Read this rank's parts from the members.

    A rank publishes the number of elements to each member, and the ID of the call signature; the member compares both
    with what it expects.  Each rank treats its own input as SOURCE says; all make as many rounds as the longest needs.

    Args:
        control, stage: the team's control region (int64), and its staging region.
        table: int64[4 * SIZE] if parts differ, else None: for each member, begin and number of the elements sent to
            it in the input, then begin and number of those received from it in the output.
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        kind: ID of the call signature; the same on all members.
        in_step, given: stride in elements between two members' parts of the input, and the size of a part.
        out_step, taken: likewise for the members' parts of the output.
        giver: the only member that sends; -1 if all do.
        capacity: elements of a piece; half of the staging region holds one for each member, or one for all if SHARED.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides: of the input, IN_DIMS of them; none if it is dense.  Likewise for the output.
        SOURCE: "direct" if the input is dense and on the heap, "staged" if not, "none" if the rank has none.
        SHARED: whether all members get the same from a rank.
        BLOCK: elements that a program moves at a time.
        gives, takes: int64[SIZE] where no host knows the sizes, instead of a table: rows for each member, and, written,
            rows from each.
        row_items, in_rows, out_rows: then: elements of a row, and rows of the tensors.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    PIECES: tl.constexpr = 1 if SHARED else SIZE
    members = sync.members_of(SIZE)
    row = sync.row_of(control, SIZE)
    epoch = sync.last_epoch(row, SIZE)
    own = tl.load(bases + me)
    staging = stage.to(tl.int64) - own  # the same in every heap
    capacity = tl.cast(capacity, tl.int64)
    kind = tl.cast(kind, tl.int64)
    if gives is not None:
        lanes = lanes_for(SIZE)
        asked = tl.load(gives + lanes, mask=lanes < SIZE, other=0)  # may be anything, and no sum overflows
        some = tl.minimum(tl.maximum(asked, 0), in_rows + 1) * row_items
        in_begins, in_numbers = _that_fit(some, tl.cast(in_rows, tl.int64) * row_items)
    done = capacity * 0
    longest = done + 1
    half = done
    while done < longest:
        if SOURCE == "staged":
            for i in range(PIECES):
                if gives is not None:
                    begin, number = _of_member(in_begins, in_numbers, i, SIZE)
                else:
                    begin, number = _for_member(table, i, in_step, given, SIZE)
                mine = (own + staging + half).to(inp.dtype) + i * capacity
                piece = tl.minimum(number - done, capacity)
                copy(mine, 0, inp, begin + done, in_sizes, in_strides, piece, 0, IN_DIMS, BLOCK)
        if done == 0:
            if gives is not None:
                begin, number = in_begins, in_numbers
            else:
                begin, number = _for_member(table, members, in_step, given, SIZE)
            place = tl.zeros_like(number)
            if SOURCE == "direct":
                place += inp.to(tl.int64) - own + begin * ITEM
            elif SOURCE == "staged":  # no place, but how much there is
                place += -1 - tl.max(number, axis=0)
            sync.send(row, bases, me, place, number | (kind << _NUMBER_BITS), SIZE)
            sync.enter(control, bases, me, kind, SIZE)  # at the beginning, it would take more registers
        epoch += 1
        sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            longest = tl.max(-1 - sync.sent(row, members, SIZE), axis=0)
            said = sync.sent_second(row, members, SIZE)
            sync.compare_kinds(row, kind, status, rank, SIZE)
            if table is not None:
                begin, number = _from_member(table, members, out_step, taken, giver, SIZE)
                _compare_numbers(row, number, said & ((1 << _NUMBER_BITS) - 1), status, rank, SIZE)
        if gives is not None:
            words = sync.sent_second(row, members, SIZE)
            is_one = (lanes < SIZE) & (words >> _NUMBER_BITS == kind)
            come = tl.where(is_one, words & ((1 << _NUMBER_BITS) - 1), 0)
            out_begins, out_numbers = _that_fit(come, tl.cast(out_rows, tl.int64) * row_items)
            if done == 0:
                needed = tl.where(out_numbers < come, tl.sum(come, 0) // row_items, out_rows)
                _compare_numbers(row, out_rows, needed, status, rank, SIZE, 2)
                _compare_numbers(row, in_numbers // row_items, asked, status, rank, SIZE, 1)
                tl.store(takes + lanes, out_numbers // row_items, mask=(lanes < SIZE) & (tl.program_id(0) == 0))
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            if gives is not None:
                begin, number = _of_member(out_begins, out_numbers, member, SIZE)
            else:
                begin, number = _from_member(table, member, out_step, taken, giver, SIZE)
            said = sync.sent_second(row, member, SIZE)
            number = tl.minimum(number, said & ((1 << _NUMBER_BITS) - 1))  # never more than the member has
            number = tl.where(said >> _NUMBER_BITS == kind, number, 0)  # and nothing of another call
            place = sync.sent(row, member, SIZE)
            if place < 0:
                place = staging + half
                if not SHARED:
                    place += me * capacity * ITEM
                begin += done
                number = tl.minimum(number - done, capacity)
            elif done > 0:
                number = done * 0
            address = tl.load(bases + member) + place
            if member == me:  # in place it lies there already, and others may be reading it
                number = tl.where(address == out.to(tl.int64) + begin * ITEM, number * 0, number)
            src = address.to(inp.dtype)
            copy(out, begin, src, 0, out_sizes, out_strides, number, OUT_DIMS, 0, BLOCK)
        done += capacity
        half = PIECES * capacity * ITEM - half
    sync.last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


MOVES = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")  # operations that pulling serves
_SHARED = ("all_gather", "broadcast", "gather")  # a rank has the same for every member that gets something


class Pull(KernelCollective):
    """One operation by pulling."""

    uneven = device_splits = True

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two barriers, and the bytes received over the links."""
        staged = not self._all_direct(request)
        return self.model(request, barriers=2, moved=received_nbytes(request), copied=request.nbytes * staged)

    @staticmethod
    def _all_direct(request: CollectiveRequest) -> bool:
        """Return whether it is certain that no member has to stage its input."""
        if request.op in ("broadcast", "scatter") or request.options["uneven"]:
            return False  # each rank, or the root, knows for itself only
        return request.direct_in and request.options["layout"] == "torch"

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        table, chunk, parts, sizes = None, None, (0, 0, 0, 0, -1), _SIZES * ("device_splits" in request.options)
        if sizes:
            rows = math.prod(request.shape[1:]) * carrier.parts, request.shape[0], request.options["out_shape"][0]
        elif request.options["uneven"]:
            row, pinned = math.prod(request.shape[1:]) * carrier.parts, team.device != "cpu"
            given, taken = ([row * n for n in request.options[f"{side}_splits"]] for side in ("in", "out"))
            numbers = [*begins(given), *given, *begins(taken), *taken]
            on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned)
            table = lasting(lambda: on_host.to(team.device, non_blocking=True))  # without waiting for the device
        else:
            parts, chunk = _parts(request, carrier.parts)
        shared = request.op in _SHARED
        source = "none"
        if _has_input(request) and math.prod(request.shape) > 0:  # an empty tensor has no address
            source = "direct" if request.direct_in and request.options["layout"] == "torch" else "staged"
        blocks = blocks_for(request, team, None if chunk is None else chunk * team.size, item, reduces=False)
        arguments = self.arguments(request, team, carrier)
        arguments |= pieces(team, chunk, item, 1 if shared else team.size, needed=not self._all_direct(request))
        arguments |= dict(zip(_PARTS, parts, strict=True)) | {"table": table, "SOURCE": source, "SHARED": shared}
        arguments |= dict(zip(_ROOMS, rows, strict=True)) if sizes else dict.fromkeys((*_SIZES, *_ROOMS))
        return self.bind(pull, team, blocks, arguments, carrier, table, more=sizes)

    def launch(self, plan: Any, out: Any, inp: Any, stream: Any = None, takes: Any = None) -> None:
        """Launch; of a call whose sizes the devices know these two are the tensors of them, in place of a stream."""
        if takes is None:
            super().launch(plan, out, inp, stream)
        else:
            plan.kernels[0](None, plan.carrier.view(out), plan.carrier.view(inp), stream, takes)


def _has_input(request: CollectiveRequest) -> bool:
    return request.op not in ("broadcast", "scatter") or request.rank == request.options["root"]


def _parts(request: CollectiveRequest, each: int) -> tuple[tuple[int, int, int, int, int], int]:
    """Return the arguments `_PARTS`, and the elements of a part; `each` are one of torch's."""
    total, root = math.prod(request.shape) * each, request.options.get("root")
    is_root = request.rank == root
    if request.op == "all_to_all":
        chunk = total // request.group_size
        return (chunk, chunk, chunk, chunk, -1), chunk
    if request.op in ("all_gather", "gather"):
        return (0, total, total, total * (is_root or root is None), -1), total
    assert root is not None
    if request.op == "scatter":
        chunk = total // request.group_size if is_root else total
        return (chunk, chunk * is_root, 0, chunk, root), chunk
    return (0, total * is_root, 0, total, root), total


def begins(numbers: Sequence[int]) -> list[int]:
    """Return where each of several consecutive parts begins."""
    return [0, *itertools.accumulate(numbers)][:-1]


def received_nbytes(request: CollectiveRequest) -> int:
    """Return the most bytes that one rank receives from its peers; the same on all members."""
    size = request.group_size
    if request.op in ("all_gather", "gather"):
        return request.nbytes * (size - 1)
    if request.op == "all_to_all":
        return request.nbytes * (size - 1) // size
    part = request.nbytes // size if request.op == "scatter" and _has_input(request) else request.nbytes
    return part * (size - 1)  # all of it leaves the root
