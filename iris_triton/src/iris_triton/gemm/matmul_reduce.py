"""`push`: matmul_reduce_scatter; `two_shot`: matmul_all_reduce.  Tiles are stored to their owners, which sum them.

Chosen where a table or the model says so.  A member computes its product tile by tile, those of the next member first
and its own last, so that the members do not all send to the same one, and stores each into a slot of the owner's memory
that is this member's alone.  The owner adds up the slots of a tile in the group's order, in float32, adds the bias and
rounds once: results are the same from run to run.
"""

import torch
import triton
import triton.language as tl

from iris_core.dispatch.team import Host
from iris_core.types import FusedRequest
from iris_triton.collectives.parts.barrier import barrier, leave
from iris_triton.gemm.parts import tiles as parts
from iris_triton.gemm.parts.fused import Fused, Plan, arguments_of, bind, programs_for, staged_memory, tiling


@triton.jit
def _slot(slots, bases, me, owner, source, tile, per_owner, BM: tl.constexpr, BN: tl.constexpr):
    """Return a pointer to the slot of a source in the owner's memory."""
    theirs = slots.to(tl.int64) + (tl.load(bases + owner) - tl.load(bases + me))  # what a call returns has no promise
    index = (tl.cast(source, tl.int64) * per_owner + tile) * (BM * BN)
    return tl.multiple_of(theirs.to(slots.dtype), 16) + index


@triton.jit(do_not_specialize=parts.RUNTIME, do_not_specialize_on_alignment=parts.PER_CALL)
def matmul_reduce(
    out, a, b, bias, control, slots, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down, out_right,
    bias_step, tiles_m, tiles_n, per_owner, timeout_ns, status, a_scales, b_scales, a_scale_down, a_scale_right,
    b_scale_down, b_scale_right,
    SIZE: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr,
    XCDS: tl.constexpr, CHUNK: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Sum A @ B over the members.

    Program L % programs computes, and adds up, the tile with number L on every member: so barriers are those of the
    programs of one number.  Peers may be written to; the slots are full; with "two_shot" also: outputs are complete.

    Args (beside those of `iris_triton.gemm.parts.tiles`):
        out: with FORM "two_shot", peers write to it, and its rows are dense and aligned.
        slots: symmetric memory for SIZE * per_owner tiles, of the output's type.
        tiles_m, tiles_n: of one owner's rows with FORM "rows", else of the whole product.
        per_owner: tiles of an owner.
        FORM: "rows": the owner of a tile is the member that gets its rows, and keeps the sum; "tiles": the owners'
            tiles are runs of equal length, and they keep the sum at the tile's own place; "two_shot": the same, and the
            owner stores the sum into the outputs of all.
    """
    shown = out if FORM == "two_shot" else None
    row, epoch = parts.begin_call(control, bases, me, shown, out_down, timeout_ns, status, rank, SIZE)
    program = parts.own_program(0, XCDS, CHUNK)
    programs = tl.num_programs(0)
    if FORM == "rows":
        total = per_owner * SIZE
        rows_each = m // SIZE
    else:
        total = tiles_m * tiles_n
        rows_each = m
    lanes = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]

    mine = (total - program + programs - 1) // programs
    begin = (tl.maximum((me + 1) % SIZE * per_owner - program, 0) + programs - 1) // programs
    for i in range(mine):
        number = program + (begin + i) % mine * programs
        owner = number // per_owner
        down, right = parts.place(number % per_owner if FORM == "rows" else number, tiles_m, tiles_n, GROUP)
        first, end = down * BM, m
        if FORM == "rows":
            first, end = owner * rows_each + down * BM, (owner + 1) * rows_each
        acc = parts.add_product(
            tl.zeros((BM, BN), tl.float32), parts.wide(a, A_ALIGNED), parts.wide(b, B_ALIGNED), first, right * BN, end,
            n, k, a_down, a_right, b_down, b_right, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down,
            b_scale_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES, SCALES,
        )  # fmt: skip
        values = acc.to(slots.dtype.element_ty)
        tl.store(_slot(slots, bases, me, owner, me, number % per_owner, per_owner, BM, BN) + lanes, values)

    epoch += 1
    barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    own = me * per_owner
    last = tl.minimum(own + per_owner, total)
    number = own + (program - own % programs + programs) % programs
    while number < last:
        down, right = parts.place(number - own if FORM == "rows" else number, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for source in range(SIZE):
            slot = _slot(slots, bases, me, me, source, number - own, per_owner, BM, BN)
            acc += tl.load(slot + lanes).to(tl.float32)
        acc = parts.with_bias(acc, bias, down * BM, right * BN, rows_each, n, bias_step, BIAS, BM, BN)
        if FORM == "two_shot":
            parts.store_to_all(row, bases, me, out, acc, down * BM, right * BN, m, n, SIZE, BM, BN)
        else:
            target = parts.wide(out, OUT_ALIGNED)
            parts.store_tile(target, acc, down * BM, right * BN, rows_each, n, out_down, out_right, BM, BN)
        number += programs
    if FORM == "two_shot":
        epoch += 1
        barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


class Reduce(Fused):
    """`push` and `two_shot`."""

    deterministic = True
    exposed = 1 / 4  # of the sums

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        size, dtype = host.team.size, getattr(torch, request.out_dtype)
        form = self.name
        if self.op == "matmul_reduce_scatter":
            form = "rows" if request.options["layout"] == "torch" else "tiles"
        rows = request.m // size if form == "rows" else request.m
        tiles = tiling(request, rows, request.k)
        tiles_m, tiles_n = tiles.tiles(rows, request.n)
        per_owner = tiles_m * tiles_n if form == "rows" else -(-tiles_m * tiles_n // size)
        nbytes = size * per_owner * tiles.block_m * tiles.block_n * dtype.itemsize
        memory, staged, stride = staged_memory(request, host, self.name, nbytes)
        arguments = arguments_of(request, tiles, rows, stride)
        arguments |= {"slots": memory[:nbytes].view(dtype), "per_owner": per_owner, "FORM": form}
        programs = programs_for(request, host, per_owner * size)
        kernel = bind(request, host, matmul_reduce, programs, arguments, tiles.options)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)
