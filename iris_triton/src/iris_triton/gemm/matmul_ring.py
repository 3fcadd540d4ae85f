"""`ring`: matmul_all_reduce.  A tile's partial sum goes from member to member, and each adds its own product.

Chosen by name, or where a table says so.  The last member, the tile's owner, adds the bias and rounds, and the result
goes round once more.  A member computes its product before it waits for the sum that it is added to.  Everybody talks
to its neighbours only.

The tile with number L of an owner is handled by program L % programs on every member: so only the programs of one
number exchange messages.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_core.providers.model import moving_s
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.barrier import at_member, last_epoch, leave, meet, publish, row_of
from iris_triton.collectives.ring import ring_steps
from iris_triton.gemm.matmul_accumulate import AllReduce
from iris_triton.gemm.parts.fused import Plan, peer_memory, programs_for
from iris_triton.gemm.parts.shapes import USED_CONFIG
from iris_triton.gemm.parts.tiles import (
    PER_CALL,
    RUNTIME,
    add_product,
    dense_tile,
    own_program,
    place,
    store_tile,
    wide,
    with_bias,
)
from iris_triton.language.flags import await_flag

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest

RING_WORDS = 3
"""Words of a program in a ring: messages that have come in, that the next one has taken, and that were sent in all."""

_ARRIVED, _TAKEN, _NUMBER, _RING_WORDS = (tl.constexpr(n) for n in (0, 1, 2, RING_WORDS))


@triton.jit
def _send(value, number, box, mine, theirs, slots, timeout_ns, status, rank, BM: tl.constexpr, BN: tl.constexpr):
    """Put a tile into the next member's mailbox.

    Args:
        value: the tile, of elements no wider than float32.
        number: messages that were sent before.
        box: that member's mailbox: `slots` slots for a tile of float32.
        mine, theirs: the words of this program here, and there.
        slots: of a mailbox.
    """
    await_flag(mine + _TAKEN, number + 1 - slots, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * (BM * BN)).to(tl.pointer_type(value.dtype), bitcast=True)
    tl.store(tl.multiple_of(slot, 16) + dense_tile(BM, BN), value)
    publish(theirs + _ARRIVED, number + 1, "sys")


@triton.jit
def _receive(like, number, box, mine, theirs, slots, timeout_ns, status, rank, BM: tl.constexpr, BN: tl.constexpr):
    """Take a tile of elements of the type to which `like` points out of the own mailbox.

    Args:
        number: messages that were taken before.
        theirs: the words of this program at the member before.
        others: as in `_send`.
    """
    await_flag(mine + _ARRIVED, number + 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * (BM * BN)).to(like.dtype, bitcast=True)
    value = tl.load(tl.multiple_of(slot, 16) + dense_tile(BM, BN))
    publish(theirs + _TAKEN, number + 1, "sys")
    return value


@triton.jit
def _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column, rows of the product) of an owner's tile; no rows at all if the last owners have fewer tiles.

    Such a tile goes round like the others, so that everybody sends as many messages as it gets, in every ring.
    """
    number = owner * per_owner + tile
    total = tiles_m * tiles_n
    down, right = place(tl.minimum(number, total - 1), tiles_m, tiles_n, GROUP)
    return down, right, tl.where(number < total, m, 0)


@triton.jit(do_not_specialize=(*RUNTIME, "slots", "rings"), do_not_specialize_on_alignment=PER_CALL)
def matmul_ring(
    out, a, b, bias, control, mail, words, steps, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down,
    out_right, bias_step, tiles_m, tiles_n, per_owner, slots, rings, timeout_ns, status,
    SIZE: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Add up A @ B over the members, round a ring.

    One meeting, at the beginning: nobody writes to a mailbox whose memory serves another call.  When a launch is over,
    all messages to this member have been taken.

    Args (beside those of `iris_triton.gemm.matmul_reduce.matmul_reduce`):
        mail: symmetric memory: for each program `slots` slots for a tile of float32.
        words: RING_WORDS words for each program (int64) that only grow.
        steps: int64[rings], how many members further each ring's next neighbour is.
        slots: of a mailbox.
        rings: how many; program p belongs to ring p % rings.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    program = own_program(0, XCDS, CHUNK)
    step = tl.load(steps + program % rings).to(tl.int32)
    mine = words + program * _RING_WORDS
    before = at_member(mine, bases, me, (me + SIZE - step) % SIZE)
    after = at_member(mine, bases, me, (me + step) % SIZE)
    box = mail + tl.cast(program, tl.int64) * slots * (BM * BN)
    next_box = at_member(box, bases, me, (me + step) % SIZE)
    sent = tl.load(mine + _NUMBER)  # what is received next is always the one with the number of the last one sent
    for tile in range(program, per_owner, tl.num_programs(0)):
        for i in range(SIZE):  # the sum of a tile begins behind its owner, and ends there
            owner = (me + (i + 1) * (SIZE - step)) % SIZE
            down, right, rows = _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP)
            acc = add_product(
                tl.zeros((BM, BN), tl.float32), wide(a, A_ALIGNED), wide(b, B_ALIGNED), down * BM, right * BN,
                rows, n, tl.where(rows > 0, k, 0), a_down, a_right, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION,
                A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            if i > 0:
                acc += _receive(box, sent - 1, box, mine, before, slots, timeout_ns, status, rank, BM, BN)
            if i < SIZE - 1:
                _send(acc, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
            else:
                acc = with_bias(acc, bias, down * BM, right * BN, rows, n, bias_step, BIAS, BM, BN)
                result = acc.to(out.dtype.element_ty)
                store_tile(wide(out, OUT_ALIGNED), result, down * BM, right * BN, rows, n, out_down, out_right, BM, BN)
                _send(result, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
            sent += 1
        for i in range(1, SIZE):
            owner = (me + i * (SIZE - step)) % SIZE
            down, right, rows = _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP)
            result = _receive(out, sent - 1, box, mine, before, slots, timeout_ns, status, rank, BM, BN)
            store_tile(wide(out, OUT_ALIGNED), result, down * BM, right * BN, rows, n, out_down, out_right, BM, BN)
            if i < SIZE - 1:
                _send(result, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
                sent += 1
    tl.store(mine + _NUMBER, sent)
    leave(row, epoch, SIZE)


_SLOTS = 2
"""Of a mailbox: one is filled while the other one is read."""


class Ring(AllReduce):
    """matmul_all_reduce round a ring, or `all_reduce_num_rings` of them."""

    uses = (*USED_CONFIG, "all_reduce_num_rings")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options["config"]
        rings, programs = config.get("all_reduce_num_rings", 1), config.get("num_sms")
        if answer and programs is not None and programs < rings:
            return Availability.no(f"all_reduce_num_rings={rings} need as many programs, and num_sms={programs}")
        return answer

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: sums are float32 on their way; the first and the last message of a round are not hidden."""
        item: int = getattr(torch, request.out_dtype).itemsize
        size = request.group_size
        moved = moving_s(request) / 2 * (4 / item + 1)
        return self.model(request, meetings=1 + 2 * (size - 1), moving=moved, seen=1 / 2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the mailboxes, bind the kernel.  Collective."""
        tiles = self._tiles(request)
        team, rings = host.team, request.options["config"].get("all_reduce_num_rings", 1)
        arguments = self._arguments(request, host, tiles)
        # with fewer tiles than rings, some have nothing to do
        programs = programs_for(request, host, max(rings, arguments["per_owner"]), meeting=True)
        if request.target.type is DeviceType.CPU:
            programs = max(programs, min(rings, team.max_programs))
        if programs < rings:
            raise UnsupportedError(f"{self.op}: {rings} rings need as many programs, and there can be {programs}")
        need = programs * _SLOTS * tiles.block_m * tiles.block_n * 4
        memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
        words = team.region("ops ring words", RING_WORDS * 8 * team.max_programs)
        arguments |= {
            "mail": memory.view(torch.float32),
            "words": words.tensor.view(torch.int64),
            "steps": torch.tensor(ring_steps(team.size, rings), dtype=torch.int64, device=team.device),
            "slots": _SLOTS,
            "rings": rings,
            "out_down": request.out_stride[0],
            "out_right": request.out_stride[1],
            "OUT_ALIGNED": request.aligned[2],
        }
        kernel = self.bind(request, host, matmul_ring, programs, arguments, tiles.options)
        return Plan(kernel, aux_buffer=memory, locks=words.tensor)
