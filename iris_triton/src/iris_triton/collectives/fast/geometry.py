"""Sizes of mailboxes and launches.  They depend on nothing that may differ between members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from iris_core.errors import UnsupportedError
from iris_core.types import DeviceType
from iris_triton.collectives.fast.mailbox import MAX_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from iris_core.ccl.team import Region, Team
    from iris_core.types import CollectiveRequest

PACKET, LINE = 16, 128  # bytes
_HEADER = 4 * MAX_PROGRAMS
_FILL = {"ll": 0, "ll128": 0, "sentinel": 0xFF}  # every byte of sentinel's EMPTY
_CPU_BLOCK, _CPU_PROGRAMS = 256, 4

DATA_RATIO = {"ll": 2.0, "ll128": 128 / 120, "sentinel": 1.0}
"""Bytes on the wire for a byte of data, by encoding."""


def packets_for(nbytes: int, encoding: str) -> int:
    """Return how many packets carry so many bytes; in "ll128", those of whole lines."""
    if encoding == "ll128":
        return -(-nbytes // 120) * 8
    return -(-nbytes // (8 if encoding == "ll" else PACKET))


@dataclass(frozen=True, slots=True)
class Shape:
    """How a launch is divided.

    Attributes:
        programs: number of programs.
        block: packets that a program handles at a time.
        options: num_warps, on GPUs.
        step: the warps of a program go from peer to peer together.
    """

    programs: int
    block: int
    options: Mapping[str, Any]
    step: bool


def shape_for(request: CollectiveRequest, packets: int, encoding: str) -> Shape:
    """Return how to divide a launch in which every member sends so many packets to each.

    One packet for each thread and few warps for each program were measured as the best; from 64 KB for a peer on, it
    pays to let the warps go from peer to peer together.
    """
    config = request.options["config"]
    if request.target.type is DeviceType.CPU:
        block = 32 * config["num_warps"] if "num_warps" in config else _CPU_BLOCK
        most = config.get("comm_sms", _CPU_PROGRAMS)
        return Shape(max(1, min(most, -(-packets // block))), block, {}, step=False)
    large = packets * PACKET >= 64 << 10
    if encoding == "sentinel" and request.op == "all_reduce":  # about 128 programs
        warps = _clamped_power_of_2(-(-packets // (128 * 32)), 8)
    else:
        warps = 4 if large else 2
    warps = config.get("num_warps", warps)
    block = 32 * warps
    most = min(config.get("comm_sms", MAX_PROGRAMS), MAX_PROGRAMS)
    return Shape(max(1, min(most, -(-packets // block))), block, {"num_warps": warps}, step=large)


def _clamped_power_of_2(number: int, most: int) -> int:
    return min(most, 1 << max(0, number - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A team's mailbox for one encoding, and how a message goes through it.

    Attributes:
        counters: int32[MAX_PROGRAMS], the epoch.
        offset_bytes: where the first half begins, from the beginning of each member's heap.
        half_nbytes: size of a half.
        cap: packets of a piece, for one member and one hop.
        pieces: number of pieces.
    """

    counters: torch.Tensor
    offset_bytes: int
    half_nbytes: int
    cap: int
    pieces: int


def mailbox_for(team: Team, encoding: str, packets: int, slots: int, block: int) -> Mailbox:
    """Return the mailbox, made or enlarged if it has to be.

    Collective: every member comes here with the same arguments.

    Args:
        team: whose.
        encoding: all operations of one encoding share a mailbox.
        packets: that a member sends to each, in one hop.
        slots: how many members send so much, in all hops together.
        block: packets that a program handles at a time; pieces are of whole blocks.

    Raises:
        UnsupportedError: there is no room for a mailbox in which a message can go in pieces.
    """
    least = _HEADER + 2 * slots * block * PACKET
    whole = _HEADER + 2 * _aligned(slots * packets * PACKET)
    region = team.workspace(f"mailbox {encoding}", max(whole, least), least, _FILL[encoding])
    half = (region.nbytes - _HEADER) // 2 // LINE * LINE
    most = half // (slots * PACKET)
    if packets <= most:
        return _mailbox(region, half, packets, 1)
    blocks = most // block
    if blocks == 0:
        raise UnsupportedError(
            f"the mailbox {encoding!r} of ranks {', '.join(map(str, team.members))} has {region.nbytes} bytes, and "
            f"{least} are needed at least: raise IRIS_SYSTEM_SIZE, or for the whole world IRIS_CCL_WORKSPACE"
        )
    pieces = -(-packets // (blocks * block))
    cap = -(-packets // (pieces * block)) * block
    return _mailbox(region, half, cap, pieces)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _mailbox(region: Region, half: int, cap: int, pieces: int) -> Mailbox:
    counters = region.tensor[:_HEADER].view(torch.int32)
    return Mailbox(counters, region.offset_bytes + _HEADER, half, cap, pieces)
