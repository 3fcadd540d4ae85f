"""Packets: 16 bytes that travel with the proof of their own arrival, stored where the receiver polls its own memory.

    "ll"        two words of data, each beside a word with the epoch: 2 x the bytes.  Needs no more of the memory than
                that 8 bytes arrive together.
    "ll128"     lines of eight packets: 15 x 8 bytes of data, then the epoch, twice: 1.067 x the bytes.  Needs that the
                128 bytes of a line, stored by eight neighbouring threads at once, arrive together.  No instruction set
                promises it (`iris_triton.collectives.packets.fabric`).
    "sentinel"  four words of data, none of which is EMPTY: 1 x the bytes.  Only for floats, where EMPTY is a NaN and
                the sender has others; the reader writes EMPTY again, so that the place can be used once more.

On NVIDIA each function is inline assembly.  Elsewhere, and in the CPU executor, it is written with Triton's atomics,
which let other programs of the executor run.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from iris_triton.collectives.packets.assembly import (
    clear_assembly,
    load_assembly,
    poll_assembly,
    push_assembly,
    run_assembly,
    store_assembly,
)
from iris_triton.language.asm import wait_stores
from iris_triton.language.flags import POLLS_PER_CLOCK, TIMED_OUT, WAITING, look_at_clock, report_wait

PACKET_NBYTES = tl.constexpr(16)
LINE_PACKETS = tl.constexpr(8)
LINE_DATA_NBYTES = tl.constexpr(120)

EMPTY = tl.constexpr(-1)
"""A word that has not arrived, of a sentinel packet: two NaNs of 16 bits, or one of 32."""

_OTHER_NAN = tl.constexpr(0x7FFFFFFF)


@triton.constexpr_function
def data_words(encoding):
    """Words of data in a packet."""
    return 2 if encoding == "ll" else 4


@triton.constexpr_function
def alignment(encoding):
    """Bytes to which addresses and lengths must be aligned for data to be loaded and stored as vectors."""
    return 16 if encoding == "sentinel" else 8


@triton.jit
def spot(packet, ENC: tl.constexpr):
    """Where the data of packets belongs, in bytes, and whether a packet has its line's flags (int32)."""
    if ENC == "ll128":
        place = packet & 7
        return (packet >> 3).to(tl.int64) * 120 + place * 16, (place == 7).to(tl.int32)
    elif ENC == "ll":
        return packet.to(tl.int64) * 8, packet * 0
    else:
        return packet.to(tl.int64) * 16, packet * 0


@triton.jit
def encode(words, epoch, flags, ENC: tl.constexpr):
    """Make four raw words of a packet's data: 2 ("ll") or 4 blocks of words, and the epoch (scalar)."""
    if ENC == "ll":
        return words[0], words[0] * 0 + epoch, words[1], words[1] * 0 + epoch
    elif ENC == "ll128":
        return words[0], words[1], tl.where(flags != 0, epoch, words[2]), tl.where(flags != 0, epoch, words[3])
    else:
        return _full(words[0]), _full(words[1]), _full(words[2]), _full(words[3])


@triton.jit
def _full(word):
    """The word, or another NaN in place of EMPTY."""
    return tl.where(word == EMPTY, _OTHER_NAN, word)


@triton.jit
def decode(raw, number: tl.constexpr, ENC: tl.constexpr):
    """Take the data out of `number` packets: 2 or 4 blocks for each."""
    if ENC == "ll":
        words = (raw[0], raw[2])
        for i in tl.static_range(1, number):
            words = words + (raw[4 * i], raw[4 * i + 2])  # noqa: RUF005 - the compiler knows no star
        return words
    else:
        return raw


# -- data -------------------------------------------------------------------------------------------------------------
@triton.constexpr_function
def _form(encoding):
    return {"sentinel": "v4", "ll128": "v2", "ll": "first"}[encoding]


@triton.jit
def _joined(low, high):
    """Two words as one of 64 bits."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _at(address):
    """An address as a pointer to 64-bit words."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def load_vectors(address, first, second, ENC: tl.constexpr):
    """Load the data of packets: four words, 0 where it is not loaded.

    Args:
        address: block of addresses (int64), aligned to `alignment`.
        first, second: which halves (int32).
        ENC: the encoding that the data is for.
    """
    if is_cuda():
        return run_assembly(load_assembly(_form(ENC)), (address, first, second), 4, 1, 2)
    else:
        low = tl.load(_at(address), mask=first != 0, other=0)
        high = tl.load(_at(address + 8), mask=(second != 0) & (ENC != "ll"), other=0)
        return low.to(tl.int32), (low >> 32).to(tl.int32), high.to(tl.int32), (high >> 32).to(tl.int32)


@triton.jit
def store_vectors(address, words, first, second, ENC: tl.constexpr):
    """Store the data of packets; as `load_vectors`, with 2 (ll) or 4 blocks of words."""
    last: tl.constexpr = data_words(ENC) - 2
    if is_cuda():
        operands = address, words[0], words[1], words[last], words[last + 1], first, second
        run_assembly(store_assembly(_form(ENC)), operands, 1, 1, 6)
    else:
        tl.store(_at(address), _joined(words[0], words[1]), mask=first != 0)
        tl.store(_at(address + 8), _joined(words[last], words[last + 1]), mask=(second != 0) & (ENC != "ll"))


# -- mailboxes --------------------------------------------------------------------------------------------------------
@triton.jit
def push(address, raw, mask, flags, ENC: tl.constexpr):
    """Store packets of four raw words into a mailbox in any rank's memory, where `mask` (int32) holds."""
    if is_cuda():
        run_assembly(push_assembly(ENC), (address, raw[0], raw[1], raw[2], raw[3], mask), 1, 1, 5)
    elif ENC == "ll128":  # nothing but the flags says that the rest is there
        early = (mask != 0) & (flags == 0)
        late = (mask != 0) & (flags != 0)
        tl.atomic_xchg(_at(address), _joined(raw[0], raw[1]), mask=mask != 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(_at(address + 8), _joined(raw[2], raw[3]), mask=early, sem="relaxed", scope="sys")
        wait_stores()
        tl.debug_barrier()
        tl.atomic_xchg(_at(address + 8), _joined(raw[2], raw[3]), mask=late, sem="release", scope="sys")
    else:
        tl.atomic_xchg(_at(address), _joined(raw[0], raw[1]), mask=mask != 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(_at(address + 8), _joined(raw[2], raw[3]), mask=mask != 0, sem="relaxed", scope="sys")


@triton.jit
def clear(address, stride, mask, N: tl.constexpr):
    """Write EMPTY into N sentinel packets, `stride` bytes apart, that have been read."""
    if is_cuda():
        run_assembly(clear_assembly(N, EMPTY), (address, stride, mask), 1, 2, 1)
    else:
        nothing = address * 0 + EMPTY
        for i in tl.static_range(N):
            tl.store(_at(address + i * stride), nothing, mask=mask != 0)
            tl.store(_at(address + i * stride + 8), nothing, mask=mask != 0)


@triton.jit
def poll(
    address, stride, epoch, mask, flags, timeout_ns, status, rank,
    N: tl.constexpr, ENC: tl.constexpr, NAP_NS: tl.constexpr, SENDER: tl.constexpr = 0, BACKWARDS: tl.constexpr = False
):  # fmt: skip
    """Wait for N packets; returns 4 * N blocks of words.

    A wait that gives up returns what was there, and reports in the status words
    (`iris_core.device.context_words.Status`).

    Args:
        address: block of addresses in own memory, of the first packet of each thread.
        stride: bytes from one packet to the next (scalar).
        epoch: what they carry (scalar).
        mask: which packets are awaited (int32).
        flags: see `spot`.
        timeout_ns, status, rank: see `iris_triton.language.flags.await_flag`.
        N: number of packets.
        ENC: the encoding.
        NAP_NS: nanoseconds to sleep between two looks.
        SENDER: number in the team of the member that sends the first one; the others follow in order.
        BACKWARDS: it is SENDER + 1 places before this rank, and the next one before it.
    """
    if is_cuda():
        text: tl.constexpr = poll_assembly(N, ENC, NAP_NS, EMPTY, SENDER, BACKWARDS)
        longs = address, tl.cast(stride, tl.int64), tl.cast(timeout_ns, tl.int64), tl.cast(status, tl.int64)
        return run_assembly(text, longs + (epoch, mask, flags, tl.cast(rank, tl.int32)), 4 * N, 4, 4)  # noqa: RUF005
    else:
        for i in tl.static_range(N):
            sender: tl.constexpr = -(SENDER + i + 1) if BACKWARDS else SENDER + i + 1
            _await(address + i * stride, epoch, mask, flags, timeout_ns, status, rank, ENC, sender)
        if ENC == "ll128":
            tl.debug_barrier()
        raw = _read(address, mask)
        for i in tl.static_range(1, N):
            raw = raw + _read(address + i * stride, mask)
        return raw


@triton.jit
def _read(address, mask):
    low = tl.load(_at(address), mask=mask != 0, other=0)
    high = tl.load(_at(address + 8), mask=mask != 0, other=0)
    return low.to(tl.int32), (low >> 32).to(tl.int32), high.to(tl.int32), (high >> 32).to(tl.int32)


@triton.jit
def _word_is_missing(word, epoch, ENC: tl.constexpr):
    """Whether a 64-bit word, half of a packet, has not arrived."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    if ENC == "sentinel":
        return (low == EMPTY) | (high == EMPTY)
    else:
        return high != epoch


@triton.jit
def _look(address, epoch, mask, flags, ENC: tl.constexpr):
    """Which packets of a block are missing, and a word of each that says so."""
    wanted = mask != 0
    if ENC == "ll128":
        wanted = wanted & (flags != 0)
    high = tl.atomic_add(_at(address + 8), address * 0, mask=wanted, sem="acquire", scope="sys")
    missing = wanted & _word_is_missing(high, epoch, ENC)
    word = high
    if ENC != "ll128":
        low = tl.atomic_add(_at(address), address * 0, mask=wanted, sem="acquire", scope="sys")
        first = wanted & _word_is_missing(low, epoch, ENC)
        missing = missing | first
        word = tl.where(first, low, high)
    return missing, word


@triton.jit
def _number_missing(address, epoch, mask, flags, ENC: tl.constexpr):
    missing, _ = _look(address, epoch, mask, flags, ENC)
    return tl.sum(missing.to(tl.int32), axis=0)


@triton.jit
def _report(address, epoch, mask, flags, status, rank, ENC: tl.constexpr, PART: tl.constexpr, SENDER: tl.constexpr):
    """Describe one packet that is missing; see `iris_triton.language.flags.report_wait`."""
    missing, word = _look(address, epoch, mask, flags, ENC)
    if ENC == "sentinel":
        seen = tl.where(missing, EMPTY, 0)
        report_wait(status, rank, address, seen * 0 + EMPTY, seen, "ne", PART, SENDER)
    else:
        seen = tl.where(missing, (word >> 32).to(tl.int32), epoch)
        report_wait(status, rank, address, seen * 0 + epoch, seen, "eq", PART, SENDER)


@triton.jit
def _await(address, epoch, mask, flags, timeout_ns, status, rank, ENC: tl.constexpr, SENDER: tl.constexpr):
    """Wait for one packet of each thread."""
    status = tl.cast(status, tl.int64)
    polls = 0
    late = polls != 0
    start = tl.cast(0, tl.int64)
    while (_number_missing(address, epoch, mask, flags, ENC) > 0) & ~late:
        polls += 1
        if timeout_ns != 0:  # noqa: SIM102 - decided at compile time where it is a constexpr
            if polls % POLLS_PER_CLOCK == 0:
                late, start = look_at_clock(start, timeout_ns, status)
    if late:
        if timeout_ns > 0:
            _report(address, epoch, mask, flags, status, rank, ENC, TIMED_OUT, SENDER)
        else:
            while _number_missing(address, epoch, mask, flags, ENC) > 0:
                if late:
                    _report(address, epoch, mask, flags, status, rank, ENC, WAITING, SENDER)
                    start = tl.cast(0, tl.int64)
                late, start = look_at_clock(start, timeout_ns, status)
