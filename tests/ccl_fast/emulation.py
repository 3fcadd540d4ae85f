"""Packets on the CPU: what stands there for the assembly, and contexts whose backend offers the algorithms.

It is written with Triton's atomics, which let other programs of the executor run, and is the same protocol.
"""
# mypy: ignore-errors

import contextlib
from unittest import mock

import triton
import triton.language as tl
from jobs_common import environment

from iris_core.device.context_words import MismatchCode
from iris_core.types import DeviceType
from iris_triton import collectives
from iris_triton.checker import benign_race
from iris_triton.collectives.packets import arithmetic, mailbox, packet
from iris_triton.collectives.parts.barrier import report_overlap
from iris_triton.gemm.packet_norm import PacketNorm
from iris_triton.gemm.packet_product import PacketProduct
from iris_triton.interpreter.entries import cpu_entry
from iris_triton.language.flags import report_difference, spin

_EMPTY, _NOWHERE = packet.EMPTY, tl.constexpr(2**63 - 1)
_MEMBERS, _ENDED = tl.constexpr(mailbox.MAX_MEMBERS), tl.constexpr(mailbox.MAX_PROGRAMS)
_CLAIMED, _KINDS = tl.constexpr(2 * mailbox.MAX_PROGRAMS), tl.constexpr(2 * mailbox.MAX_PROGRAMS + 4)
_KIND = tl.constexpr(int(MismatchCode.KIND))


@triton.jit
def _word(address, k: tl.constexpr):
    return (address + 4 * k).to(tl.pointer_type(tl.int32))


@cpu_entry(packet.push)
@triton.jit
def push(address, raw, mask, flags, ENC: tl.constexpr):
    early, late = (mask != 0) & (flags == 0), (mask != 0) & (flags != 0)
    SEM: tl.constexpr = "release" if ENC == "sentinel" else "relaxed"
    for k in tl.static_range(4):  # words that say by themselves that they are there, or of which others say so
        if not (ENC == "ll" and k % 2 == 1):
            now = early if ENC == "ll128" and k == 3 else mask != 0
            tl.atomic_xchg(_word(address, k), raw[k], mask=now, sem=SEM, scope="sys")
    if ENC != "sentinel":
        tl.debug_barrier()
        for k in tl.static_range(4):
            if k == 3 or (k == 1 and ENC == "ll"):
                now = late if ENC == "ll128" else mask != 0
                tl.atomic_xchg(_word(address, k), raw[k], mask=now, sem="release", scope="sys")


@cpu_entry(packet.clear)
@triton.jit
def clear(address, stride, mask, N: tl.constexpr):
    nothing = (address * 0 + _EMPTY).to(tl.int32)
    for i in tl.static_range(N):
        for k in tl.static_range(4):
            tl.store(_word(address + i * stride, k), nothing, mask=mask != 0)


@cpu_entry(packet.poll)
@triton.jit
def poll(
    address, stride, epoch, mask, flags, timeout_ns, status, rank,
    N: tl.constexpr, ENC: tl.constexpr, NAP_NS: tl.constexpr, SENDER: tl.constexpr = 0, BACKWARDS: tl.constexpr = False
):  # fmt: skip
    wanted = mask != 0
    if ENC == "ll128":
        wanted = wanted & (flags != 0)
    first = tl.min(tl.where(wanted, address, _NOWHERE), axis=0)
    if first != _NOWHERE:
        where = tl.where(wanted, address, first).to(tl.pointer_type(tl.int32))
        for i in tl.static_range(N):
            sender: tl.constexpr = -(SENDER + i + 1) if BACKWARDS else SENDER + i + 1
            _await(where + i * stride // 4, epoch, timeout_ns, tl.cast(status, tl.int64), rank, ENC, sender)
    tl.debug_barrier()
    raw = ()
    for i in tl.static_range(4 * N):
        word = (address + (i // 4 * stride + i % 4 * 4)).to(tl.pointer_type(tl.int32))
        raw = raw + (tl.load(word, mask=mask != 0, other=0),)  # noqa: RUF005 - the compiler knows no star
    return raw


@triton.jit
def _await(where, epoch, timeout_ns, status, rank, ENC: tl.constexpr, SENDER: tl.constexpr):
    """Wait for the words of a block of packets that tell whether they are there."""
    for k in tl.static_range(4):
        if ENC == "sentinel":
            spin(where + k, tl.cast(_EMPTY, tl.int32), "ne", "acquire", "sys", timeout_ns, status, rank, False, SENDER)
        elif k == 3 or (k == 1 and ENC == "ll"):
            spin(where + k, epoch, "eq", "acquire", "sys", timeout_ns, status, rank, False, SENDER)


@cpu_entry(arithmetic._two_halves)
@triton.jit
def two_halves(low, high, DT: tl.constexpr):
    return arithmetic._placed(low, 0, DT) | arithmetic._placed(high, 1, DT)


@cpu_entry(mailbox.look)
@triton.jit
def look(counters, count, me, N: tl.constexpr, LOOKS: tl.constexpr):
    epoch = tl.load(counters + tl.program_id(0), volatile=True)
    ended = tl.load(counters + _ENDED + tl.arange(0, _ENDED))
    slot = tl.arange(0, 2 * _MEMBERS)
    kinds = (counters + _KINDS).to(tl.pointer_type(tl.int64))
    said = tl.load(kinds + slot, mask=slot % _MEMBERS < N, other=0)
    theirs = (said & 0x7FFFFFFF).to(tl.int32)
    ours = tl.load(counters + _KINDS + 2 * (slot // _MEMBERS * _MEMBERS + me))
    differ = ((said >> 32).to(tl.int32) == epoch) & (theirs != ours) & (theirs != 0) & (ours != 0)
    which = tl.max(tl.where(differ, slot + 1, 0), axis=0)
    alone = tl.min(((ended == epoch) | (ended == epoch + count)).to(tl.int32), axis=0)
    return epoch, 2 * which + (1 - alone)


@cpu_entry(mailbox._claim)
@triton.jit
def claim(found, counters, epoch, count, me, status, rank):
    claimed = epoch
    if tl.program_id(0) == 0:
        claimed = tl.atomic_add(counters + _CLAIMED, count, sem="relaxed", scope="gpu")
        if found > 1:
            slot = found // 2 - 1
            theirs = tl.load(counters + _KINDS + 2 * slot)
            ours = tl.load(counters + _KINDS + 2 * (slot // _MEMBERS * _MEMBERS + me))
            address = counters.to(tl.int64)
            report_difference(status, rank, address, slot % _MEMBERS, 0, 0, ours, theirs, _KIND)
    return tl.where(found % 2 == 0, claimed, ~epoch)


@cpu_entry(mailbox.confirm)
@triton.jit
def confirm(counters, claimed, epoch, me, status, rank):
    report_overlap((claimed != epoch).to(tl.int32), status, rank, counters.to(tl.int64), me)


class Mailbox(mailbox.Mailbox):
    """A mailbox of which `look` reads, to report mistakes, what others store at the same time."""

    def __init__(self, counters, *where):
        super().__init__(counters, *where)
        benign_race(counters[_ENDED.value :], "a word says of which epoch it is: an older one reports nothing")


mailbox.Mailbox = Mailbox


def emulated():
    """The algorithms of packets, which serve ranks on CPUs if they are named."""
    found = collectives.fast_collectives()
    for each in found:
        each.devices, each.measured_only = (DeviceType.CPU,), True
    return found


@contextlib.contextmanager
def emulation(**variables):
    """Let contexts on CPUs offer the algorithms of packets; `variables` are of the environment."""
    ours = collectives.collectives

    def offered(*, packets=True):
        return ours(packets=True) if packets else [*ours(packets=False), *emulated()]

    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(**variables))
        stack.enter_context(mock.patch.object(collectives, "collectives", offered))
        for kind in (PacketNorm, PacketProduct):
            stack.enter_context(mock.patch.object(kind, "devices", tuple(DeviceType)))
        yield
