"""`one_shot`: all_reduce; `pull`: reduce and reduce_scatter.  Every rank reads all inputs and reduces its part.

Chosen for reduce, for reduce_scatter in the layout "tiles" (there named `two_shot`), else where a table or the model
says so.  Reduced in the group's order, so all members get the same bits.  Direct and staged as in `pull`.
"""

import math

import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest
from iris_triton.collectives.parts.barrier import barrier, compare_kinds, enter, last_barrier, members_of, send
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import copy, item_nbytes, reduce_to
from iris_triton.collectives.parts.sizes import USED_CONFIG, blocks_for, item_of, pieces


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def pull_reduce(
    out, inp, control, stage, bases, me, rank, kind, count, wanted, apart, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    tiles,
    SIZE: tl.constexpr, OP: tl.constexpr, STAGED: tl.constexpr, SHARED: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, STRIDING: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce a part of all members' inputs.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        count, wanted: elements of a part; the same on a rank that gets one, 0 on others.
        apart: elements between two members' parts in an input; 0 where all get the same.
        tiles, STRIDING: which elements this rank gets, see `_owner`; None for all.
        SHARED: whether `apart` is 0.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    PIECES: tl.constexpr = 1 if SHARED else SIZE
    row, epoch = enter(control, bases, me, kind, SIZE)
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
                copy(mine, 0, inp, i * apart + done, in_sizes, in_strides, piece, 0, IN_DIMS, BLOCK)
        if done == 0:
            members = members_of(SIZE).to(tl.int64)
            origin, step = (stage, 0 if SHARED else capacity) if STAGED else (inp, apart)
            send(row, bases, me, origin.to(tl.int64) - own + members * step * ITEM, members, SIZE)
        epoch += 1
        barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        if wanted > 0:
            reduce_to(
                out, done, row, bases, shift, piece, out_sizes, out_strides, OUT_DIMS, OP, SIZE, BLOCK,
                tiles, me, STRIDING
            )  # fmt: skip
        done += capacity
        shift = PIECES * capacity * ITEM - shift
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class PullReduce(KernelCollective):
    """all_reduce in one step, reduce, or reduce_scatter."""

    deterministic = True

    def __init__(self, op: str, name: str, layout: str = "torch") -> None:
        super().__init__(op, name, (layout,))
        if layout == "tiles":  # that of AMD's Iris: each member gets some tiles of the result
            self.uses = (*USED_CONFIG, "swizzle_size", "all_reduce_distribution")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two barriers; every input comes over the links to the ranks that reduce it."""
        part = request.nbytes // request.group_size if self.op == "reduce_scatter" else request.nbytes
        staged = not self._is_direct(request)
        moved = part * (request.group_size - 1)
        return self.model(request, barriers=2, moved=moved, copied=request.nbytes * staged)

    def _is_direct(self, request: CollectiveRequest) -> bool:
        # In place, a rank would overwrite what others still read.  Members need not know of each other that they do.
        may_overwrite = request.options["in_place"] or request.options.get("anywhere", False)
        return request.direct_in and not (self.op == "all_reduce" and may_overwrite)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        op, carrier = self.reduction(request)
        options, item = request.options, item_of(request)
        scatters = self.op == "reduce_scatter" and options["layout"] == "torch"
        count = math.prod(request.shape) // (team.size if scatters else 1)
        direct = self._is_direct(request)
        blocks = blocks_for(request, team, count, item, reduces=True)
        arguments = self.arguments(request, team)
        arguments |= pieces(team, count, item, team.size if scatters else 1, needed=not direct)
        arguments |= {
            "OP": op,
            "count": count,
            "wanted": count if self.op != "reduce" or options["root"] == team.rank else 0,
            "apart": count if scatters else 0,
            "STAGED": not direct,
            "SHARED": not scatters,
            "tiles": _tiles(request) if options["layout"] == "tiles" else None,
            "STRIDING": options["config"].get("all_reduce_distribution") == 0,
        }
        return self.bind(pull_reduce, team, blocks, arguments, carrier)


def _tiles(request: CollectiveRequest) -> tuple[int, ...]:
    config = request.options["config"]
    rows, columns = request.shape
    height, width = config.get("block_size_m", 32), config.get("block_size_n", 64)
    return columns, height, width, -(-rows // height), -(-columns // width), config.get("swizzle_size", 4)
