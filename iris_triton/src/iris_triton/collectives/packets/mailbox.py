"""Mailboxes: the epochs of their launches, and on the host the division of messages into pieces.

The epoch is counted in device memory, by a counter for each program: whatever the grid of a call, all of them advance.
What packets carry is `mark_of` the epoch.  Words of a mailbox (int32), in its region of epochs:

    0 ..            epoch of each program, which wraps around
    ENDED ..        the same, stored when the program waits no more
    CLAIMED         the same, of the first program, counted atomically
    KINDS ..        of each member's last two launches: the number of its kind, and the epoch after it (int64)

Launches of one mailbox follow each other on every member, and are the same ones in the same order.  `look` and
`advance` see whether that is so.  Nothing waits for what they load: it comes with the epoch, or while packets are on
their way.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.errors import UnsupportedError
from iris_triton.collectives.packets.assembly import claim_assembly, confirm_assembly, look_assembly, run_assembly

MAX_PROGRAMS = 1024  # counters of a mailbox: no launch has more programs
MAX_MEMBERS = 8  # members whose packets a thread holds in registers
WORDS = 2 * MAX_PROGRAMS + 4 + 4 * MAX_MEMBERS  # words of 32 bits of a mailbox beside its packets
_MEMBERS = tl.constexpr(MAX_MEMBERS)
_ENDED = tl.constexpr(MAX_PROGRAMS)
_CLAIMED = tl.constexpr(2 * MAX_PROGRAMS)
_KINDS = tl.constexpr(2 * MAX_PROGRAMS + 4)


@triton.jit
def mark_of(epoch):
    """Return the mark of an epoch's packets: never 0, as in empty places; two epochs share one, in different halves."""
    return epoch | 1


@triton.jit
def look(counters, count, me, N: tl.constexpr, LOOKS: tl.constexpr):
    """Return the epoch at which this program's launch begins, and what `advance` reports.

    Every program of the launch before has ended at this epoch, and those of this one may have ended, too: whichever has
    done neither belongs to a launch that runs at the same time.  All programs together look at all; so an overlap is
    seen where any of an earlier launch still runs when those of this one begin.

    `count` are the epochs of this launch; the other arguments are those of `exchange`.
    """
    text: tl.constexpr = look_assembly(LOOKS, _ENDED, _KINDS, N)
    return run_assembly(text, (counters.to(tl.int64), tl.cast(count, tl.int32), me), 2, 1, 2)


@triton.jit
def _claim(found, counters, epoch, count, me, status, rank):
    """Claim the epoch, and report what `look` has found; see `claim_assembly`."""
    address, status = counters.to(tl.int64), tl.cast(status, tl.int64)
    operands = address, status, found, epoch, tl.cast(count, tl.int32), tl.cast(rank, tl.int32), me
    return run_assembly(claim_assembly(_CLAIMED, _KINDS), operands, 1, 2, 5)


@triton.jit
def advance(found, counters, epoch, count, kind, peers, me, status, rank, N: tl.constexpr):
    """Advance the epoch, in program 0 also the epochs of unused programs; return what `confirm` reports.

    Reports if another member's previous launch had another call signature than this rank's.  Calls that differ in
    their tensors only have the same signature.  Two launches that begin together have the same epoch, which only one
    of their first programs can claim.

    `found` and `epoch` are from `look`, `count` are the epochs of this launch; the others are those of `exchange`.
    """
    program = tl.program_id(0)
    tl.debug_barrier()  # every warp has read the counter for itself
    tl.store(counters + program, epoch + count)
    if program == 0:
        after = epoch + count
        own = after.to(tl.int64) << 32 | tl.cast(kind, tl.int64)
        for k in tl.static_range(N):
            there = (peers[k] + ((counters + _KINDS).to(tl.int64) - peers[N - 1])).to(tl.pointer_type(tl.int64))
            tl.store(there + ((after & 1) * _MEMBERS + me), own)
        idle = tl.arange(0, _ENDED)
        mask = idle >= tl.num_programs(0)
        tl.store(counters + idle, idle * 0 + (epoch + count), mask=mask)
        tl.store(counters + _ENDED + idle, idle * 0 + (epoch + count), mask=mask)
    return _claim(found, counters, epoch, count, me, status, rank)


@triton.jit
def confirm(counters, claimed, epoch, me, status, rank):
    """Report at the end of a launch if `claimed`, from `advance`, says that another launch overlapped."""
    operands = counters.to(tl.int64), tl.cast(status, tl.int64), claimed, epoch, tl.cast(rank, tl.int32), me
    run_assembly(confirm_assembly(), operands, 1, 2, 4)


@triton.jit
def end(counters, epoch):
    """Mark this program as done with waiting; `epoch` is the one at which the next launch begins.

    A plain store, as an atomic would delay the end of the kernel.
    """
    tl.debug_barrier()
    tl.store(counters + _ENDED + tl.program_id(0), epoch)


@triton.jit
def pick(peers, i, N: tl.constexpr):
    """Return element i of a tuple of numbers, without a table in memory."""
    found = peers[0]
    for k in tl.static_range(1, N):
        found = tl.where(i == k, peers[k], found)
    return found


# -- sizes, which depend on nothing that may differ between members ---------------------------------------------------
PACKET, LINE = 16, 128  # bytes
_FILL = {"ll": 0, "ll128": 0, "sentinel": 0xFF}  # every byte of sentinel's EMPTY


def packets_for(nbytes: int, encoding: str) -> int:
    """Return the number of packets that carry `nbytes`; in "ll128", those of whole lines."""
    if encoding == "ll128":
        return -(-nbytes // 120) * 8
    return -(-nbytes // (8 if encoding == "ll" else PACKET))


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A team's mailbox for one encoding, and the pieces of a message."""

    counters: torch.Tensor  # int32[WORDS], the epochs, and who uses them
    offset_bytes: int  # where the first half begins, from the beginning of each member's heap
    half_nbytes: int
    cap: int  # packets of a piece, for one member and one hop
    pieces: int

    def arguments(self, team: Team, programs: int, warps: int) -> dict[str, Any]:
        """Return what all kernels of packets take, for a launch of `programs`; see `exchange`.

        LOOKS: how often a thread looks at four counters each until all threads have seen all; a power of two.
        """
        return {
            "counters": self.counters,
            "peers": tuple(team.base_ptrs[(team.rank + 1 + i) % team.size] for i in range(team.size)),
            "me": team.rank,
            "rank": team.world_rank,
            "cap": self.cap,
            "box": self.offset_bytes,
            "half": self.half_nbytes,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "N": team.size,
            "LOOKS": triton.next_power_of_2(-(-MAX_PROGRAMS // (programs * warps * 32 * 4))),
        }


def mailbox_for(team: Team, encoding: str, packets: int, slots: int, block: int | None = None) -> Mailbox:
    """Return the mailbox of an encoding, which all operations share; create or enlarge it.  Collective, alike on all.

    A member sends `packets` to each peer in one hop, and `slots` members do, summed over the hops; pieces are multiples
    of `block`; without one, there is one piece.  An UnsupportedError says that there is no space for a mailbox that
    holds one, in the heap, or in IRIS_CCL_WORKSPACE for all in one.
    """
    whole = 2 * -(-slots * packets * PACKET // LINE) * LINE
    least = 2 * slots * block * PACKET if block else whole
    if not block and whole > team.limit_nbytes:
        raise UnsupportedError(f"a mailbox of {whole} bytes would exceed IRIS_CCL_WORKSPACE, {team.limit_nbytes}")
    region = team.workspace(f"mailbox {encoding}", max(whole, least), least, _FILL[encoding])
    # Beside it, not within: regions have sizes of powers of two, and so have most messages.
    epochs = team.region(f"epochs of mailbox {encoding} at {region.offset_bytes}", 4 * WORDS)
    counters = epochs.tensor[: 4 * WORDS].view(torch.int32)
    half = region.nbytes // 2 // LINE * LINE
    most, cap, pieces = half // (slots * PACKET), packets, 1
    if block and packets > most:
        blocks = most // block
        pieces = -(-packets // (blocks * block))
        cap = -(-packets // (pieces * block)) * block
    return Mailbox(counters, region.offset_bytes, half, cap, pieces)
