"""Where the ranks of a host are in their exchanges: for messages, and to find those that wait for each other for ever.

Every rank has a page of shared memory that its peers can read.  Before each exchange it notes there which one that is,
and how many of each group of ranks it has come to; afterwards nothing, because an exchange that all its members have
come to is over.  A rank that has waited for a while reads the pages of the others.

Ranks are stuck for certain if each waits for one that is stuck: in an exchange to which that other one has not come,
which waits itself in another one.  No rank of such a set can be the first to leave.  This holds however old what was
read is, because a rank that has come to an exchange had said so before.  It does not hold where a second thread could
come instead, so a rank in which another one makes exchanges, or might, is not counted.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import struct
import threading
import zlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

from iris_core.agreement import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FIRST_LOOK_S = 0.5
"""How long a rank waits before it looks for the others the first time."""

NEXT_LOOK_S = 0.25
"""How long it waits before it looks again; what it finds has to be there twice."""

_NBYTES = 4 << 20  # almost all of it is never touched
_WORD = 8
_LOOKED, _NUM_SLOTS, _NUM_MEMBERS, _TOKEN = 128, 129, 130, 131  # words of 64 bits
_RECORD = struct.Struct("<4q256s")
_VERDICT = 4096  # bytes: length, checksum, a pickle
_SLOTS = 256 << 10
_SLOT_WORDS = 8  # calls, how many of them were given up, where the members are, how many, checksum
_MEMBERS = 1 << 20

_WAITING, _FAILED = 1, 2


class Address(NamedTuple):
    """What peers need to read a page."""

    pid: int
    fd: int
    token: int


class Record(NamedTuple):
    """The exchange that a rank went to last.

    Attributes:
        number: how many it has gone to.
        state: whether it has left it with an error.
        slot: which group's.
        call: which one of that group.
        place: the function that was called, and where.
    """

    number: int
    state: int
    slot: int
    call: int
    place: str


class Verdict(NamedTuple):
    """Ranks that are stuck.

    Attributes:
        text: where each of them is.
        numbers: per rank, the number of its record.
        exchanges: that they have given up: members and call.
    """

    text: str
    numbers: dict[int, int]
    exchanges: list[tuple[tuple[int, ...], int]]


class _Page:
    """One rank's page, as its owner or a peer has it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.members: list[tuple[int, ...]] = []
        self.slots: dict[tuple[int, ...], int] = {}

    def record(self) -> Record | None:
        """What its owner did last; None if that is nothing."""
        for _ in range(10):
            raw = self.memory[: _RECORD.size + _WORD]
            body = raw[: _RECORD.size]
            if zlib.crc32(body) == int.from_bytes(raw[_RECORD.size :], "little"):
                number, state, slot, call, place = _RECORD.unpack(body)
                return Record(number, state, slot, call, place.rstrip(b"\0").decode(errors="replace"))
        return None  # it is writing, over and over, or never did

    def calls(self, members: tuple[int, ...]) -> int:
        """How many exchanges of a group its owner has come to."""
        slot = self._slot(members)
        return 0 if slot is None else self.words[slot]

    def given_up(self, members: tuple[int, ...]) -> int:
        """The last exchange of a group that its owner has given up; 0 if none."""
        slot = self._slot(members)
        return 0 if slot is None else self.words[slot + 1]

    def members_of(self, slot: int) -> tuple[int, ...]:
        """Whose exchanges a slot counts; nobody's if that cannot be read yet."""
        self._read_slots()
        return self.members[slot] if slot < len(self.members) else ()

    def verdict(self) -> Verdict | None:
        """What its owner has found."""
        length, checksum = self.words[_VERDICT // _WORD], self.words[_VERDICT // _WORD + 1]
        begin = _VERDICT + 2 * _WORD
        body = self.memory[begin : begin + length]
        if not length or zlib.crc32(body) != checksum:
            return None
        return Verdict(*pickle.loads(body))

    def tell(self, verdict: Verdict) -> None:
        """Let peers read what was found.  Only its owner does that."""
        text = verdict.text
        room = _SLOTS - _VERDICT - 2 * _WORD
        while len(body := pickle.dumps(tuple(verdict._replace(text=text)))) > room and text:
            text = text[: len(text) // 2]
        if len(body) > room:
            return  # of more ranks than one host has: the others find it for themselves
        begin = _VERDICT + 2 * _WORD
        self.words[_VERDICT // _WORD] = 0
        self.memory[begin : begin + len(body)] = body
        self.words[_VERDICT // _WORD + 1] = zlib.crc32(body)
        self.words[_VERDICT // _WORD] = len(body)

    def add_slot(self, members: tuple[int, ...]) -> int | None:
        """Count the exchanges of a group from now on; None if there is no room.  Only its owner does that."""
        used, begin = self.words[_NUM_SLOTS], self.words[_NUM_MEMBERS]
        slot = _SLOTS + used * _SLOT_WORDS * _WORD
        at = _MEMBERS + begin
        raw = array("i", members).tobytes()
        if slot + _SLOT_WORDS * _WORD > _MEMBERS or at + len(raw) > _NBYTES:
            return None
        self.memory[at : at + len(raw)] = raw
        first = slot // _WORD
        self.words[first + 2], self.words[first + 3], self.words[first + 4] = at, len(raw), zlib.crc32(raw)
        self.words[_NUM_MEMBERS] = begin + len(raw)
        self.words[_NUM_SLOTS] = used + 1
        return used

    def _slot(self, members: tuple[int, ...]) -> int | None:
        """Number of the first word of a group's slot."""
        if members not in self.slots:
            self._read_slots()
        slot = self.slots.get(members)
        return None if slot is None else _SLOTS // _WORD + slot * _SLOT_WORDS

    def _read_slots(self) -> None:
        while len(self.members) < self.words[_NUM_SLOTS]:
            first = _SLOTS // _WORD + len(self.members) * _SLOT_WORDS
            at, nbytes, checksum = self.words[first + 2 : first + 5].tolist()
            raw = self.memory[at : at + nbytes]
            if not raw or zlib.crc32(raw) != checksum:
                return  # its owner has only just made it
            members = tuple(array("i", raw))
            self.slots[members] = len(self.members)
            self.members.append(members)


class Whereabouts:
    """This rank's page, and those of its peers.

    Args:
        rank: this rank in the world of the context, like all ranks here.

    Raises:
        OSError: there is no memory to share.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        if not hasattr(os, "memfd_create"):  # Python was built for an old C library
            raise OSError("this Python has no os.memfd_create")
        self._fd = os.memfd_create("iris-whereabouts")
        try:
            os.ftruncate(self._fd, _NBYTES)
            self._own = _Page(mmap.mmap(self._fd, _NBYTES))
        except BaseException:
            self.close()
            raise
        self._own.words[_TOKEN] = secrets.randbits(62)
        self._pages: dict[int, _Page] = {rank: self._own}
        self._number = 0
        self._thread = threading.get_ident()
        self._several_threads = False
        self._before: dict[int, int] = {}
        self.address = Address(os.getpid(), self._fd, self._own.words[_TOKEN])

    def connect(self, addresses: Sequence[Address]) -> bool:
        """Open the pages of all peers, who are on this host; whether that worked."""
        try:
            for rank, (pid, fd, token) in enumerate(addresses):
                if rank != self._rank:
                    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
                        page = _Page(mmap.mmap(file.fileno(), _NBYTES, prot=mmap.PROT_READ))
                    if page.words[_TOKEN] != token:
                        return False
                    self._pages[rank] = page
        except (OSError, ValueError):  # not allowed to, or it is something else
            return False
        return True

    def close(self) -> None:
        """Close the descriptor, when all peers have opened the page or never will."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- this rank ----------------------------------------------------------------------------------------------------
    def slot(self, members: tuple[int, ...]) -> int | None:
        """The place where this rank counts the exchanges of a group; None if there is no room for it."""
        if self._own._slot(members) is None and self._own.add_slot(members) is None:
            return None
        self._own._slot(members)
        return self._own.slots[members]

    def enter(self, slot: int, call: int, place: bytes) -> None:
        """Note that this rank comes to an exchange now."""
        self.arrive(slot, call)
        self._number += 1
        if threading.get_ident() != self._thread:
            self._several_threads = True
        self._write(_WAITING, slot, call, place)

    def arrive(self, slot: int, call: int) -> None:
        """Note that this rank comes to the next part of an exchange."""
        self._own.words[_SLOTS // _WORD + slot * _SLOT_WORDS] = call

    def fail(self) -> None:
        """Note that this rank leaves its exchange with an error."""
        raw = self._own.memory[: _RECORD.size]
        _, _, slot, call, place = _RECORD.unpack(raw)
        self._write(_FAILED, slot, call, place)

    def give_up(self, members: tuple[int, ...], call: int) -> None:
        """Note that this rank counts as having come to an exchange, but takes no part in it."""
        slot = self.slot(members)
        if slot is not None:
            first = _SLOTS // _WORD + slot * _SLOT_WORDS
            self._own.words[first + 1] = max(self._own.words[first + 1], call)
            self._own.words[first] = max(self._own.words[first], call)

    def _write(self, state: int, slot: int, call: int, place: bytes) -> None:
        body = _RECORD.pack(self._number, state, slot, call, place)
        self._own.memory[: _RECORD.size + _WORD] = body + zlib.crc32(body).to_bytes(_WORD, "little")

    # -- the others ---------------------------------------------------------------------------------------------------
    def calls(self, rank: int, members: tuple[int, ...]) -> int:
        """How many exchanges of a group a rank has come to."""
        return self._pages[rank].calls(members)

    def missing(self, members: tuple[int, ...], call: int) -> list[int]:
        """The members that have not come to an exchange."""
        return [rank for rank in members if self._pages[rank].calls(members) < call]

    def gave_up(self, members: tuple[int, ...], call: int) -> list[int]:
        """The members that have given up an exchange."""
        return [rank for rank in members if self._pages[rank].given_up(members) >= call]

    def verdicts_of(self, ranks: Iterable[int]) -> list[Verdict]:
        """What ranks have found about the exchange that this rank is in."""
        found = [verdict for rank in ranks if (verdict := self._pages[rank].verdict()) is not None]
        return [verdict for verdict in found if verdict.numbers.get(self._rank) == self._number]

    def describe_verdict(self, rank: int) -> str:
        """Say what a rank has found."""
        verdict = self._pages[rank].verdict()
        return "" if verdict is None else verdict.text

    def tell(self, verdict: Verdict) -> None:
        """Let the peers know what was found."""
        self._own.tell(verdict)

    def describe(self, rank: int) -> str:
        """Say in a sentence without a full stop where a rank is."""
        page = self._pages[rank]
        record = page.record()
        if record is None:
            return f"rank {rank} has not taken part in any exchange between hosts yet"
        if record.state == _FAILED:
            return f"rank {rank} has left {record.place}, with an error"
        members = page.members_of(record.slot)
        if self._missing_for(rank, record):
            return f"rank {rank} waits in {record.place}, among {name_ranks(members)}"
        return f"rank {rank} is in no exchange between hosts: its last one, {record.place}, is finished"

    def look(self) -> Verdict | None:
        """Look for ranks that wait for each other, for the second time or later in this exchange; None if all is well.

        This rank waits when it calls this.
        """
        alone = not self._several_threads and not any(
            not thread.daemon and thread.ident != self._thread for thread in threading.enumerate()
        )
        self._own.words[_LOOKED] = self._number if alone else 0
        for known in self.verdicts_of(rank for rank in self._pages if rank != self._rank):
            return known
        stuck = self._stuck()
        now = {rank: record.number for rank, record in stuck.items()}
        before, self._before = self._before, now
        if self._rank not in stuck or before != now:
            return None
        return self._verdict(stuck)

    def _verdict(self, stuck: Mapping[int, Record]) -> Verdict:
        exchanges = {self._exchange(rank, record) for rank, record in stuck.items()}
        return Verdict(
            "".join(f"\n  {self.describe(rank)}" for rank in sorted(stuck)),
            {rank: record.number for rank, record in stuck.items()},
            sorted(exchanges),
        )

    def _stuck(self) -> dict[int, Record]:
        """The ranks that wait for each other; see above."""
        waiting: dict[int, Record] = {}
        for rank, page in self._pages.items():
            record = page.record()
            if record is not None and record.state == _WAITING and page.words[_LOOKED] == record.number:
                waiting[rank] = record
        missing = {rank: self._missing_for(rank, record) for rank, record in waiting.items()}
        waiting = {rank: record for rank, record in waiting.items() if self._pages[rank].record() == record}
        while free := [rank for rank in waiting if not any(other in waiting for other in missing[rank])]:
            for rank in free:
                del waiting[rank]
        return waiting

    def _missing_for(self, rank: int, record: Record) -> list[int]:
        """The ranks for which a rank waits."""
        members, call = self._exchange(rank, record)
        return [other for other in self.missing(members, call) if other != rank]

    def _exchange(self, rank: int, record: Record) -> tuple[tuple[int, ...], int]:
        return self._pages[rank].members_of(record.slot), record.call
