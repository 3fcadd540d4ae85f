"""`mailbox`: send and recv, the only algorithm for both.  A message waits in the receiver's memory for its recv.

Every rank has an inbox for each other one.  A message is divided among all PARTS of it, whatever its size, so both
sides know where it is without knowing each other.  A part holds two pieces, which the sender fills in turn: up to two
pieces of each part are sent before anyone receives.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.device.context_words import MismatchCode
from iris_core.dispatch.team import ELEMENT_TYPES, Team
from iris_core.errors import UnsupportedError
from iris_core.types import CollectiveRequest, DeviceType
from iris_triton.collectives.parts.barrier import elsewhere, publish, take
from iris_triton.collectives.parts.collective import RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import as_words, copy_part
from iris_triton.collectives.parts.sizes import blocks_for, carrier_of, layout_of
from iris_triton.language.flags import await_flag, report_difference
from iris_triton.launcher import BoundKernel

# Words of a rank, for each peer and part.  The counters only grow, so a captured send can be replayed.
ARRIVED = tl.constexpr(0)  # pieces that the peer has put into the inbox here (the peer counts)
TAKEN = tl.constexpr(1)  # pieces that the peer has taken out of its own inbox (the peer counts)
SENT = tl.constexpr(2)  # pieces that this rank has sent to the peer, for `take`
RECEIVED = tl.constexpr(3)  # pieces that this rank has received from the peer, likewise
HEADERS = tl.constexpr(4)  # of both places, two words each (the peer writes): elements of the whole message; their
# type and, above 16 bits, how many pieces of the message follow in this part
WORDS = 8

_WORDS = tl.constexpr(WORDS)
_KIND_BITS = tl.constexpr(16)
_MESSAGE = tl.constexpr(int(MismatchCode.MESSAGE))


@triton.jit
def _share(count, part, PARTS: tl.constexpr):
    """Return (begin, end) of the elements of a part."""
    count = tl.cast(count, tl.int64)
    each = (count + PARTS - 1) // PARTS
    each = (each + 15) // 16 * 16  # so that shares begin at multiples of 16 bytes if the tensor does
    begin = tl.minimum(part * each, count)
    return begin, tl.minimum(begin + each, count)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("tensor",))
def move(
    tensor, words, boxes, bases, me, peer, apart, count, element, piece, timeout_ns, status, sizes, strides,
    SENDS: tl.constexpr, PARTS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy a tensor into the inbox of a peer, or out of the inbox for a peer.

    Programs may be fewer than parts, and fewer on one side than on the other: all take parts in ascending order, so the
    lowest one that is not done is always being worked on by both.  A message of another number of elements, or another
    type of them, is taken out, and the tensor stays as it is.

    Args:
        words, boxes: this rank's words (int64), and its inboxes.
        me, peer: ranks of the world.
        apart: bytes of an inbox's part.
        count, element: number of elements; number of their type.
        piece: elements of a piece; two fit into a part.
        sizes, strides: of the tensor, DIMS of them; none if it is dense.
        PARTS: parts of an inbox, the same on both sides; at least the number of programs.
    """
    tensor = as_words(tensor)
    COUNTER: tl.constexpr = SENT if SENDS else RECEIVED
    AWAITED: tl.constexpr = TAKEN if SENDS else ARRIVED
    SAID: tl.constexpr = ARRIVED if SENDS else TAKEN
    AHEAD: tl.constexpr = -1 if SENDS else 1
    distance = tl.load(bases + peer) - tl.load(bases + me)
    for part in range(tl.program_id(0), PARTS, tl.num_programs(0)):
        mine = words + (peer * PARTS + part) * _WORDS
        theirs = elsewhere(words + (me * PARTS + part) * _WORDS, distance)
        if SENDS:
            box = elsewhere(boxes + (tl.cast(me, tl.int64) * PARTS + part) * apart, distance)
        else:
            box = boxes + (tl.cast(peer, tl.int64) * PARTS + part) * apart
        box = box.to(tensor.dtype, bitcast=True)
        number = take(mine + COUNTER, me, status, me)
        at, end = _share(count, part, PARTS)
        one = at * 0 + 1
        left = one
        if SENDS:
            left = tl.maximum((end - at + piece - 1) // piece, 1)
        while left > 0:
            await_flag(
                mine + AWAITED, number + AHEAD, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), me
            )
            place = number % 2
            size = tl.minimum(end - at, piece)
            if SENDS:
                left -= 1
                copy_part(box, place * piece, tensor, at, sizes, strides, size, one * 0, one, 0, DIMS, BLOCK)
                tl.store(theirs + HEADERS + 2 * place, count)
                tl.store(theirs + HEADERS + 2 * place + 1, element + (left << _KIND_BITS))
            else:
                sent = tl.load(mine + HEADERS + 2 * place)
                header = tl.load(mine + HEADERS + 2 * place + 1)
                left = header >> _KIND_BITS
                kind = header & ((1 << _KIND_BITS) - 1)
                if (sent == count) & (kind == element):
                    copy_part(tensor, at, box, place * piece, sizes, strides, size, one * 0, one, DIMS, 0, BLOCK)
                else:
                    report_difference(status, me, mine.to(tl.int64), peer, count, sent, element, kind, _MESSAGE)
            number += 1
            publish(theirs + SAID, number, "sys")
            at += piece
        tl.store(mine + COUNTER, number)


_GPU_PARTS = 16


class Mail(KernelCollective):
    """send or recv through the receiver's inbox."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: once over a link, and once within a device."""
        return self.model(request, barriers=1, moved=request.nbytes, copied=request.nbytes)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel; both sides compute the same division of an inbox without communication."""
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        stride = request.options["in_stride" if self.op == "send" else "out_stride"]
        layout = layout_of(*carrier.extend(request.shape, stride))
        count = math.prod(request.shape) * carrier.parts
        parts = 1 if request.target.type is DeviceType.CPU else _GPU_PARTS
        words_nbytes = team.size * parts * WORDS * 8
        apart = (team.mail.nbytes - words_nbytes) // (team.size * parts) // 32 * 32
        if apart < 2 * item:
            raise UnsupportedError(
                f"{self.op}: the heap's system area has no room for inboxes of {team.size} ranks; open the context "
                "with a larger IRIS_SYSTEM_SIZE"
            )
        blocks = blocks_for(request, team, count, item, reduces=False)
        arguments: dict[str, Any] = {
            "words": team.mail.tensor[:words_nbytes].view(torch.int64),
            "boxes": team.mail.tensor[words_nbytes:],
            "bases": team.bases,
            "me": team.rank,
            "peer": request.options["peer"],
            "apart": apart,
            "count": count,
            "element": ELEMENT_TYPES.index(request.dtype),
            "piece": apart // 2 // item,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "sizes": layout.sizes,
            "strides": layout.strides,
            "SENDS": self.op == "send",
            "PARTS": parts,
            "DIMS": layout.num_dims,
            "BLOCK": blocks.block,
        }
        grid = min(parts, request.options["config"].get("comm_sms", parts))
        return Plan((BoundKernel(move, grid, arguments, ("tensor",), team.device, blocks.options),), carrier)

    def launch(self, plan: Any, out: Any, inp: Any, stream: Any = None) -> None:
        tensor = inp if out is None else out
        (kernel,) = plan.kernels
        kernel(stream, tensor if kernel.again else plan.carrier.view(tensor))
