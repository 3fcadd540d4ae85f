"""The context tensor, in which the host describes the world to kernels.

One versioned layout of int64 words.  Words 0 and 1 and the heap bases stand where kernels of AMD's Iris
expect them; what follows the bases is ours.

    word            meaning
    0               rank
    1               world_size
    2 .. 2+W-1      heap bases: address of every rank's heap in this process
    2+W             CONTEXT_MAGIC | layout version
    3+W             bound of device-side waits in nanoseconds; 0 means unbounded; negative: each time that its
                    absolute value has passed, a wait describes itself in the status words, and goes on
    4+W             address of the status words (int64[STATUS_WORDS] in this rank's own memory), 0 if none
    5+W ..          tracing words, TRACE_WORDS of them, all 0 when tracing is off
    then, where kernels reach other nodes (`iris_core.types.Network`), NETWORK_WORDS of them:
                    the device communicator, the heap's window, and the address that stands for the heap of every
                    rank on another node

Status words lie in the memory of the device.  They have three parts of eight words: `Status`, `Mismatch`, and another
`Status` at WAITING; the first kernel that reports something claims the first word of a part.  Its report goes into the
same part of the row at the address in ROW, which is memory of the host that all ranks can read, or, where that is 0,
into the status words themselves.  The first word of a part is written last: `stamp`.  The stamp of a `Status` or a
`Mismatch` goes to the address in ALARM, too, unless that is 0.
"""

from __future__ import annotations

import enum

from iris_core.types import ContextSpec

CONTEXT_LAYOUT = 1
"""Version of this layout; exchanged between ranks and checked by kernels' host side."""

CONTEXT_MAGIC = 0x49524953_0000
"""Marks a context tensor ("IRIS" shifted left by 16 bits); the low 16 bits hold the layout version."""

HEADER_WORDS = 2
MAGIC_WORD, TIMEOUT_WORD, STATUS_WORD, TRACE_WORD = 0, 1, 2, 3
"""Offsets of the words after the heap bases, counted from word 2 + world_size."""

TRACE_WORDS = 17
NETWORK_WORD, NETWORK_WORDS = TRACE_WORD + TRACE_WORDS, 3


class Status(enum.IntEnum):
    """Status words in which a wait says that it has reached its bound."""

    CODE = 0  # 0: no report; else see `stamp`
    RANK = 1
    PROGRAM = 2  # linear program id
    ADDRESS = 3
    EXPECTED = 4
    LAST = 5  # last value seen
    COMPARISON = 6  # index into COMPARISONS
    SENDER = 7  # whose data it is: 1 + number in the team, or how many places before the caller, negative; 0: unknown


class Mismatch(enum.IntEnum):
    """Status words that say how another member of a team calls differently."""

    CODE = 8  # 0: no report; else see `stamp`, with a MismatchCode
    RANK = 9
    PEER = 10  # the other one's number in the team
    ADDRESS = 11  # of a word of the team
    OURS = 12
    THEIRS = 13
    OUR_KIND = 14
    THEIR_KIND = 15


WAITING = 16
"""Word at which the part begins in which a wait without a bound says that it takes long; it has the words of `Status`.

It does so whenever the time has passed again, so it has ended when it has not for longer than that.
"""


class MismatchCode(enum.IntEnum):
    """The difference between two calls."""

    KIND = 1  # the call
    SPLITS = 2  # the elements that go from one member to another
    MESSAGE = 3  # what is sent, and what is received
    OVERLAP = 4  # nothing: two launches of this rank run at the same time
    # nothing: PEER is a sequence of flash_decode with THEIRS keys and room for OURS; with OUR_KIND, a token of experts
    LENGTH = 5
    FAR = 6  # nothing: PEER is on another node; the words from OURS on hold the kernel's name, 32 bytes; no address


KIND_BITS = 15
"""Bits of a call's number; in a Mismatch, those above are the byte of the heap where the output lies, or 0."""

ROW, ALARM, NOWHERE = 24, 25, 26
"""Status words that hold addresses; 0 for none.  NOWHERE stands for the heaps of all ranks on other nodes."""

STATUS_WORDS = 32
STATUS_WAIT_TIMEOUT = 1
COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")

PART_WORDS = 8
CLAIMED = 1
"""First word of a part that is claimed, and not complete yet."""

STAMP_CLOCK, STAMP_RANK, STAMP_PART = 16, 5, 3
"""Where the fields of a stamp begin, in bits, above the code: the clock in nanoseconds, the rank, and the part."""


def stamp(clock_ns: int, rank: int, part: int, code: int) -> int:
    """Return the first word of a part when it is complete; no two reports have the same.

    Of the device's clock the lowest 48 bits count, of the rank 10.  `part` is the word at which the part begins, and
    `code` says what is reported, from 1 to 7: STATUS_WAIT_TIMEOUT, or a MismatchCode.
    """
    value = clock_ns << STAMP_CLOCK | (rank & 1023) << STAMP_RANK | part // PART_WORDS << STAMP_PART | code
    return (value & (1 << 64) - 1) - (value << 1 & 1 << 64)  # as int64


def code_of(word: int) -> int:
    """Return the code of a part's first word, 0 if it is not complete."""
    return word & 7 if word >> STAMP_CLOCK else 0


def encode(spec: ContextSpec) -> list[int]:
    """Return the words of a context tensor; ValueError if the spec contradicts itself."""
    if len(spec.heap_bases) != spec.world_size or not 0 <= spec.rank < spec.world_size:
        raise ValueError(
            f"context of rank {spec.rank} in a world of {spec.world_size} with {len(spec.heap_bases)} heap bases"
        )
    if len(spec.trace) not in (0, TRACE_WORDS):
        raise ValueError(f"a context tensor has {TRACE_WORDS} tracing words, not {len(spec.trace)}")
    if len(spec.network) not in (0, NETWORK_WORDS):
        raise ValueError(f"a context tensor has {NETWORK_WORDS} words of a network, not {len(spec.network)}")
    trace = spec.trace or (0,) * TRACE_WORDS
    tail = [CONTEXT_MAGIC | CONTEXT_LAYOUT, spec.timeout_ns, spec.status_ptr, *trace, *spec.network]
    return [spec.rank, spec.world_size, *spec.heap_bases, *tail]
