"""Sizes of mailboxes and launches.  They depend on nothing that may differ between members."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from iris_core.errors import UnsupportedError
from iris_core.types import DeviceType
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

PACKET, LINE = 16, 128  # bytes
_EPOCHS_NBYTES = 4 * WORDS
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
        options: num_warps, on GPUs, and maxnreg where more registers would let programs wait for their turn.
        step: the warps of a program go from peer to peer together.
        nap_ns: nanoseconds to sleep between two looks at packets.
    """

    programs: int
    block: int
    options: Mapping[str, Any]
    step: bool = False
    nap_ns: int = 0


_STEP_NBYTES, _NAP_NBYTES = 64 << 10, 2 << 20


def shape_for(request: CollectiveRequest, packets: int, encoding: str, form: str) -> Shape:
    """Return how to divide a launch in which every member sends so many packets to each.

    One packet for each thread, and few warps for each program.  From 64 KB for a
    member on, it pays to let the warps go from member to member together, and from 2 MB on, polling less often frees
    issue slots for those that push.

    Args:
        request: its config counts, "comm_sms" for programs.
        packets: for one member, in one hop.
        encoding: of the packets.
        form: "one_shot", "two_shot" or "mailbox".
    """
    config = request.options["config"]
    if request.target.type is DeviceType.CPU:
        block = 32 * config["num_warps"] if "num_warps" in config else _CPU_BLOCK
        most = config.get("comm_sms", _CPU_PROGRAMS)
        return Shape(max(1, min(most, -(-packets // block))), block, {})
    warps = config.get("num_warps", _warps_for(packets, encoding, form))
    block = 32 * warps
    most = min(config.get("comm_sms", MAX_PROGRAMS), MAX_PROGRAMS)
    nbytes = packets * PACKET
    return Shape(
        programs=max(1, min(most, -(-packets // block))),
        block=block,
        options={"num_warps": warps} | ({"maxnreg": 64} if form == "two_shot" and encoding == "sentinel" else {}),
        step=form != "one_shot" and nbytes >= _STEP_NBYTES,
        nap_ns=100 if form != "two_shot" and nbytes >= _NAP_NBYTES else 0,
    )


def _warps_for(packets: int, encoding: str, form: str) -> int:
    """Warps of a program."""
    usual = 2
    if form == "two_shot" and encoding == "sentinel":  # about 128 programs, as long as they are small
        wide = _power_of_2(-(-packets // (128 * 32)), 16)
        usual = wide if wide <= 8 else 4
    elif form == "mailbox" and packets * PACKET >= _STEP_NBYTES:
        usual = 4
    return max(usual, _power_of_2(-(-packets // (MAX_PROGRAMS * 32)), 8))


def _power_of_2(number: int, most: int) -> int:
    """The next power of two, up to `most`."""
    return min(most, 1 << max(0, number - 1).bit_length())


def tunings_of(
    request: CollectiveRequest,
    shape_of: Callable[[CollectiveRequest], Any],
    tried: Sequence[dict[str, int]] | None = None,
) -> list[dict[str, int]]:
    """Return an algorithm's own choice ({}) and what to try beside it: configs whose launches differ, at most six.

    Args:
        request: the call.
        shape_of: the launch of a call, comparable.
        tried: configs, without the own choice; None for those of mailboxes.
    """
    if request.target.type is DeviceType.CPU:
        return [{}]
    own = request.options["config"]
    found: dict[Any, dict[str, int]] = {}
    for config in ({}, *(_TRIED if tried is None else tried)):
        if all(own.get(name, value) == value for name, value in config.items()):
            options = {**request.options, "config": {**own, **config}}
            found.setdefault(shape_of(replace(request, options=options)), config)
    return list(found.values())[:6]


_TRIED: tuple[dict[str, int], ...] = (
    {"num_warps": 2},
    {"num_warps": 8},
    {"num_warps": 1},
    {"comm_sms": 132, "num_warps": 8},
    {"comm_sms": 32, "num_warps": 16},
    {"num_warps": 16},
)
"""Four warps and 64 programs are not among them: a config with its default values asks for nothing."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A team's mailbox for one encoding, and how a message goes through it.

    Attributes:
        counters: int32[WORDS], the epochs, and who uses them.
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
    least = 2 * slots * block * PACKET
    whole = 2 * _aligned(slots * packets * PACKET)
    region = team.workspace(f"mailbox {encoding}", max(whole, least), least, _FILL[encoding])
    # Beside it, not within: regions have sizes of powers of two, and so have most messages.
    epochs = team.region(f"epochs of mailbox {encoding} at {region.offset_bytes}", _EPOCHS_NBYTES)
    counters = epochs.tensor[:_EPOCHS_NBYTES].view(torch.int32)
    half = region.nbytes // 2 // LINE * LINE
    most = half // (slots * PACKET)
    if packets <= most:
        return Mailbox(counters, region.offset_bytes, half, packets, 1)
    blocks = most // block
    if blocks == 0:
        raise UnsupportedError(
            f"the mailbox {encoding!r} of ranks {', '.join(map(str, team.members))} has {region.nbytes} bytes, and "
            f"{least} are needed at least: open the context with a larger heap_size"
        )
    pieces = -(-packets // (blocks * block))
    cap = -(-packets // (pieces * block)) * block
    return Mailbox(counters, region.offset_bytes, half, cap, pieces)


def looks_of(programs: int, warps: int) -> int:
    """How many times the threads of a launch look at four counters each so that they see all; a power of two."""
    return _power_of_2(-(-MAX_PROGRAMS // (programs * warps * 32 * 4)), MAX_PROGRAMS)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
