"""The context tensor: how the host tells kernels about the world.

One versioned layout of int64 words.  Words 0 and 1 and the heap bases stand where kernels of the reference system
expect them; what follows the bases is ours.

    word            meaning
    0               rank
    1               world_size
    2 .. 2+W-1      heap bases: address of every rank's heap in this process
    2+W             CONTEXT_MAGIC | layout version
    3+W             bound of device-side waits in nanoseconds; 0 means unbounded
    4+W             address of the status words (int64[STATUS_WORDS] in this rank's own memory), 0 if none
    5+W ..          tracing words, TRACE_WORDS of them, all 0 when tracing is off

Status words: the first wait that times out claims word 0 and describes itself in those behind it; the first kernel that
finds that another rank calls differently claims word 8, and so on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris_core.errors import DeviceTimeoutError, IrisError, RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTEXT_LAYOUT = 1
"""Version of this layout; exchanged between ranks and checked by kernels' host side."""

CONTEXT_MAGIC = 0x49524953_0000
"""Marks a context tensor ("IRIS" shifted left by 16 bits); the low 16 bits hold the layout version."""

HEADER_WORDS = 2
MAGIC_WORD, TIMEOUT_WORD, STATUS_WORD, TRACE_WORD = 0, 1, 2, 3
"""Offsets of the words behind the heap bases, counted from word 2 + world_size."""

TRACE_WORDS = 17


class Status(enum.IntEnum):
    """Layout of the status words."""

    CODE = 0  # 0: no report; 1: a wait timed out
    RANK = 1
    PROGRAM = 2  # linear program id
    ADDRESS = 3
    EXPECTED = 4
    LAST = 5  # last value seen
    COMPARISON = 6  # index into COMPARISONS
    SENDER = 7  # whose data it is: 1 + number in the team, or how many places before the caller, negative; 0: unknown


class Mismatch(enum.IntEnum):
    """Layout of the status words that say how another member of a team calls differently."""

    CODE = 8  # 0: no report; else a MismatchCode
    RANK = 9
    PEER = 10  # the other one's number in the team
    ADDRESS = 11  # of a word of the team
    OURS = 12
    THEIRS = 13
    OUR_KIND = 14
    THEIR_KIND = 15


class MismatchCode(enum.IntEnum):
    """What is different."""

    KIND = 1  # the call
    SPLITS = 2  # the elements that go from one member to another
    MESSAGE = 3  # what is sent, and what is received
    OVERLAP = 4  # nothing: two launches of this rank run at the same time


STATUS_WORDS = 16
STATUS_OK, STATUS_WAIT_TIMEOUT = 0, 1
COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_SYMBOLS = dict(zip(COMPARISONS, ("==", "!=", ">", ">=", "<", "<="), strict=True))


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """What a context tensor says.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        heap_bases: address of every rank's heap in this process.
        timeout_ns: bound of device-side waits in nanoseconds; 0 means unbounded.
        status_ptr: address of the status words, 0 if none.
        device: torch device string of the tensor.
        trace: the tracing words; empty means tracing is off.
    """

    rank: int
    world_size: int
    heap_bases: tuple[int, ...]
    timeout_ns: int = 0
    status_ptr: int = 0
    device: str = "cpu"
    trace: tuple[int, ...] = ()


def encode(spec: ContextSpec) -> list[int]:
    """Return the words of a context tensor.

    Raises:
        ValueError: the spec contradicts itself.
    """
    if len(spec.heap_bases) != spec.world_size or not 0 <= spec.rank < spec.world_size:
        raise ValueError(
            f"context of rank {spec.rank} in a world of {spec.world_size} with {len(spec.heap_bases)} heap bases"
        )
    if len(spec.trace) not in (0, TRACE_WORDS):
        raise ValueError(f"a context tensor has {TRACE_WORDS} tracing words, not {len(spec.trace)}")
    trace = spec.trace or (0,) * TRACE_WORDS
    tail = [CONTEXT_MAGIC | CONTEXT_LAYOUT, spec.timeout_ns, spec.status_ptr, *trace]
    return [spec.rank, spec.world_size, *spec.heap_bases, *tail]


def decode(words: Sequence[int], device: str = "cpu") -> ContextSpec:
    """Read a context tensor's words back.

    Raises:
        IrisError: the words are no context tensor.
        RankMismatchError: they have another version of the layout.
    """
    if len(words) < HEADER_WORDS or not 0 <= words[0] < words[1]:
        raise IrisError("not a context tensor: pass what ctx.get_device_context() returns")
    world = int(words[1])
    tail = [int(w) for w in words[HEADER_WORDS + world :]]
    if len(tail) != TRACE_WORD + TRACE_WORDS or tail[MAGIC_WORD] & ~0xFFFF != CONTEXT_MAGIC:
        raise IrisError("not a context tensor: pass what ctx.get_device_context() returns")
    if tail[MAGIC_WORD] & 0xFFFF != CONTEXT_LAYOUT:
        raise RankMismatchError(
            f"context tensor has layout {tail[MAGIC_WORD] & 0xFFFF}, this installation reads {CONTEXT_LAYOUT}: "
            "install the same version of iris-core and of the backend"
        )
    trace = tuple(tail[TRACE_WORD:])
    return ContextSpec(
        rank=int(words[0]),
        world_size=world,
        heap_bases=tuple(int(w) for w in words[HEADER_WORDS : HEADER_WORDS + world]),
        timeout_ns=tail[TIMEOUT_WORD],
        status_ptr=tail[STATUS_WORD],
        device=device,
        trace=trace if any(trace) else (),
    )


def status_error(
    words: Sequence[int], describe: Callable[[int, int], str] = lambda address, sender: ""
) -> DeviceTimeoutError | None:
    """Turn the status words into an error, or None if no wait has timed out.

    Args:
        words: the status words.
        describe: says of an address, and of what is known of the sender, what lies there, as a sentence; nothing if it
            does not know.
    """
    if words[Status.CODE] == STATUS_OK:
        return None
    comparison = _SYMBOLS[COMPARISONS[words[Status.COMPARISON]]]
    return DeviceTimeoutError(
        f"rank {words[Status.RANK]}, program {words[Status.PROGRAM]}: a wait for the word at "
        f"{words[Status.ADDRESS]:#x} to be {comparison} {words[Status.EXPECTED]} reached IRIS_DEVICE_TIMEOUT; "
        f"the last value seen was {words[Status.LAST]}. {describe(words[Status.ADDRESS], words[Status.SENDER])}"
        "What the kernel computed afterwards is not valid. Look for the rank that should have signalled, or raise "
        "IRIS_DEVICE_TIMEOUT."
    )
