"""Packets: 16 bytes with their own arrival flag, stored where the receiver polls its own memory.

    "ll"        two words of data, each beside a word with the epoch: 2 x the bytes.  Needs no more of the memory than
                that 8 bytes arrive together.
    "ll128"     lines of eight packets: 15 x 8 bytes of data, then the epoch, twice: 1.067 x the bytes.  Needs that the
                128 bytes of a line, stored by eight neighbouring threads at once, arrive together.  No instruction set
                promises it (`iris_triton.collectives.packets.fabric`).
    "sentinel"  four words of data, none of which is EMPTY: 1 x the bytes.  Only for floats, where EMPTY is a NaN and
                the sender has others; the reader writes EMPTY again, so that the place can be used once more.

They are inline assembly for NVIDIA; tests/ccl_fast/emulation.py has the same for the CPU executor.
"""

import triton
import triton.language as tl

from iris_triton.collectives.packets.assembly import clear_assembly, poll_assembly, push_assembly, run_assembly

EMPTY = tl.constexpr(-1)  # a word that has not arrived, of a sentinel packet: two NaNs of 16 bits, or one of 32
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)


@triton.constexpr_function
def data_words(encoding):
    """Return the number of data words in a packet."""
    return 2 if encoding == "ll" else 4


@triton.constexpr_function
def alignment(encoding):
    """Return the alignment in bytes of addresses and lengths for vector loads and stores."""
    return 16 if encoding == "sentinel" else 8


@triton.jit
def spot(packet, ENC: tl.constexpr):
    """Return the byte offset of the data of packets, and whether a packet has its line's flags (int32)."""
    if ENC == "ll128":
        place = packet & 7
        return (packet >> 3).to(tl.int64) * 120 + place * 16, (place == 7).to(tl.int32)
    elif ENC == "ll":
        return packet.to(tl.int64) * 8, packet * 0
    else:
        return packet.to(tl.int64) * 16, packet * 0


@triton.jit
def encode(words, epoch, flags, ENC: tl.constexpr):
    """Encode a packet as four raw words, from 2 ("ll") or 4 blocks of data words and the epoch (scalar)."""
    if ENC == "ll":
        return words[0], words[0] * 0 + epoch, words[1], words[1] * 0 + epoch
    elif ENC == "ll128":
        return words[0], words[1], tl.where(flags != 0, epoch, words[2]), tl.where(flags != 0, epoch, words[3])
    else:
        return _full(words[0]), _full(words[1]), _full(words[2]), _full(words[3])


@triton.jit
def _full(word):
    """Return the word, or another NaN in place of EMPTY."""
    return tl.where(word == EMPTY, _OTHER_NAN, word)


@triton.jit
def decode(raw, number: tl.constexpr, ENC: tl.constexpr):
    """Decode the data of `number` packets: 2 or 4 blocks for each."""
    if ENC == "ll":
        words = ()
        for i in tl.static_range(number):
            words = words + (raw[4 * i], raw[4 * i + 2])  # noqa: RUF005 - the compiler knows no star
        return words
    else:
        return raw


@triton.jit
def packet_of(words, k: tl.constexpr, W: tl.constexpr):
    """Return the W words of packet k of several: what `decode` and `poll` return."""
    if W == 4:
        return words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
    else:
        return words[2 * k], words[2 * k + 1]


@triton.jit
def push(address, raw, mask, flags, ENC: tl.constexpr):
    """Store packets of four raw words into a mailbox in any rank's memory, where `mask` (int32) holds."""
    run_assembly(push_assembly(ENC), (address, raw[0], raw[1], raw[2], raw[3], mask), 1, 1, 5)


@triton.jit
def clear(address, stride, mask, N: tl.constexpr):
    """Write EMPTY into N sentinel packets, `stride` bytes apart, that have been read."""
    run_assembly(clear_assembly(N, EMPTY), (address, stride, mask), 1, 2, 1)


@triton.jit
def poll(
    address, stride, epoch, mask, flags, timeout_ns, status, rank,
    N: tl.constexpr, ENC: tl.constexpr, NAP_NS: tl.constexpr, SENDER: tl.constexpr = 0, BACKWARDS: tl.constexpr = False
):  # fmt: skip
    """Wait for N packets; returns 4 * N blocks of words.

    A wait that gives up returns what was there, and reports in the status words.

    Args:
        address, stride: block of addresses in own memory, of each thread's first packet; bytes from one to the next.
        epoch: what they carry (scalar).
        mask, flags: which packets are awaited (int32); see `spot`.
        timeout_ns, status, rank: see `iris_triton.language.flags.await_flag`.
        NAP_NS: nanoseconds to sleep between two looks.
        SENDER: number in the team of the member that sends the first one; the others follow in order.
        BACKWARDS: it is SENDER + 1 places before this rank, and the next one before it.
    """
    text: tl.constexpr = poll_assembly(N, ENC, NAP_NS, EMPTY, SENDER, BACKWARDS)
    longs = address, tl.cast(stride, tl.int64), tl.cast(timeout_ns, tl.int64), tl.cast(status, tl.int64)
    return run_assembly(text, longs + (epoch, mask, flags, tl.cast(rank, tl.int32)), 4 * N, 4, 4)  # noqa: RUF005
