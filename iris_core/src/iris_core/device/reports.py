"""Reports of the kernels of all ranks, as errors of the host.

Kernels cannot raise.  The first wait that reaches its bound, and the first kernel that finds another rank calling
differently, describe themselves in words that the hosts of all ranks read (`iris_core.device.context_words` has their
layout, `iris_core.device.status` the memory).  Hosts say there, too, which calls they could not launch.  The next call
of each rank that it concerns raises: see `KernelReports.raise_new`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from iris_core.device import context_words
from iris_core.device.context_words import COMPARISONS, Mismatch, Status, Waiting
from iris_core.device.status import BASE, HOST
from iris_core.device.watchdog import LongWait, Watchdog
from iris_core.errors import DeviceError, DeviceTimeoutError
from iris_core.types import DeviceType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from iris_core.device.status import HostFailure, StatusPage
    from iris_core.logs import RankLogger
    from iris_core.types import DeviceTarget

_PARTS = (Status.CODE, Mismatch.CODE)
REFUSED_S = 5.0
"""Seconds after which others no longer expect a rank whose host has refused a call that they may have launched."""
_SYMBOLS = dict(zip(COMPARISONS, ("==", "!=", ">", ">=", "<", "<="), strict=True))


class Report(NamedTuple):
    """A report of a kernel.

    Attributes:
        rank: of the kernel.
        part: the first of the words in which it says it: of `Status`, `Mismatch` or `Waiting`.
        words: the status words of that rank.
        offset_bytes: of the address in question, from the beginning of that rank's heap.
    """

    rank: int
    part: int
    words: Sequence[int]
    offset_bytes: int

    def word(self, field: Status) -> int:
        """Return a word of `Status`, or the same one of `Waiting`."""
        return self.words[self.part + field]

    def wait(self) -> str:
        """Describe the wait."""
        comparison = _SYMBOLS[COMPARISONS[self.word(Status.COMPARISON)]]
        return (
            f"rank {self.word(Status.RANK)}, program {self.word(Status.PROGRAM)}: a wait for the word at "
            f"{self.word(Status.ADDRESS):#x} to be {comparison} {self.word(Status.EXPECTED)}"
        )


class Meaning(NamedTuple):
    """The meaning of a report to the host.

    Attributes:
        members: ranks of the world whose calls it concerns.
        peer: the rank that is waited for, or that calls differently; None if unknown.
        op: the operation; empty if unknown.
        call: the operation with what is known of it, for messages.
        text: sentences for a message, each with a space after it.
    """

    members: tuple[int, ...]
    peer: int | None = None
    op: str = ""
    call: str = ""
    text: str = ""


class KernelReports:
    """The reports of all ranks, as one rank sees them."""

    def __init__(
        self,
        rank: int,
        target: DeviceTarget,
        page: StatusPage,
        heap_base: int,
        is_of_group: Callable[[int], bool],
        timeout_s: float | None,
        watchdog_s: float,
        log: RankLogger,
    ) -> None:
        self._rank, self._target, self._page, self._log = rank, target, page, log
        self._is_of_group = is_of_group
        self._timeout_s, self._watchdog_s = timeout_s, watchdog_s
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int], int] = {}
        self._failed: dict[int, int] = {}  # by team: failed calls of this host, or that it knows of
        self._broken: set[int] = set()  # teams of which this rank has left a call half done
        self._standing: int | None = None  # the team of which this rank has refused a call, and made none since
        self._num_barriers = 0
        self.describers: list[Callable[[Report], Meaning | None]] = []  # say what addresses of the heap are for
        self.alarm = page.words  # the first word changes with every report, of any rank
        self.heard = 0  # the alarm up to which this rank has looked: a call compares, and calls `raise_new`
        self.idle = True  # no kernel of this rank runs, as far as the host knows
        page.words[page.first(rank) + BASE] = heap_base
        words = [0] * context_words.STATUS_WORDS
        self._writes_to_page = True
        try:
            page_address = page.register(target)
            words[context_words.ROW] = page_address + page.first(rank) * page.words.itemsize
            words[context_words.ALARM] = page_address
        except DeviceError as error:
            self._writes_to_page = False
            log.warning(
                f"reports of kernels reach the host at ctx.barrier() only, and long waits are not seen: {error}"
            )
        self.words = torch.tensor(words, dtype=torch.int64, device=target.torch_device)
        self._watchdog: Watchdog | None = None

    @property
    def timeout_ns(self) -> int:
        """The bound as kernels read it; see `iris_core.types.ContextSpec`."""
        if self._timeout_s is not None:
            return max(1, int(self._timeout_s * 1e9))
        return -int(self._watchdog_s * 1e9) if self._writes_to_page else 0

    def watch(self) -> None:
        """Begin to look for long waits, in a thread.  Kernels are going to be launched."""
        self.idle = False
        if self._watchdog is None and self._watchdog_s and self._writes_to_page:
            self._watchdog = Watchdog(self._rank, self._watchdog_s, self._long_wait, self._unheard, self._log)

    # -- what is new --------------------------------------------------------------------------------------------------
    def raise_new(self, offset_bytes: int | None = None) -> None:
        """Raise what concerns this rank and was not raised here before; for a call, before it launches anything.

        `offset_bytes` is that of the control words of the team whose call it is.  While a graph is captured nothing is
        raised: the next call does it.
        """
        if offset_bytes is not None and offset_bytes == self._standing:
            self._page.withdraw(self._rank)
            self._standing = None
        if self._target.type is not DeviceType.CPU and torch.cuda.is_current_stream_capturing():
            return
        error, of_host = self.error(), self._host_error(lambda said, _: said.offset_bytes == offset_bytes)
        if error is None:
            error = of_host
        elif error.__cause__ is None:
            error.__cause__ = of_host
        if error is not None:
            raise error

    def check(self, stream: Any = None) -> None:
        """Raise like `raise_new`, where the work of the device, or of `stream`, is done."""
        self.fetch(stream)
        if self.alarm[0] != self.heard:
            self.raise_new()

    def host_failed(self, offset_bytes: int, error: BaseException, *, is_certain: bool) -> None:
        """Let the other members know that a call of a team has failed on this host."""
        if getattr(error, "rank", None) not in (None, self._rank):
            return  # they know it
        with self._lock:
            number = self._failed[offset_bytes] = self._failed.get(offset_bytes, 0) + 1
            if offset_bytes in self._broken:  # what comes now is a consequence
                return
            if is_certain:
                self._broken.add(offset_bytes)
            text = f"{type(error).__name__}: {error}"
            self._page.say(self._rank, offset_bytes, number, self._num_barriers, text, is_certain=is_certain)
            self._standing = None if is_certain else offset_bytes

    def all_were_here(self) -> None:
        """Take what has failed on hosts so far as known: all ranks have come to a barrier since.

        Collective: every rank calls it after each of these.
        """
        with self._lock:
            self._num_barriers += 1
            self._failed.clear()
            self._broken.clear()
            self._standing = None

    def check_hosts(self, address: int) -> None:
        """Raise what has failed on the host of a member of the team for whose word a kernel of this rank waits."""
        if self.alarm[0] != self.heard:
            words = (0,) * context_words.STATUS_WORDS
            waits = self._explain(Report(self._rank, 0, words, address - self._base(self._rank)))
            if waits is None:
                return
            members, op = waits.members, waits.op
            error = self._host_error(lambda _, meaning: (meaning.members, meaning.op) == (members, op))
            if error is not None:
                raise error

    def _host_error(self, counts: Callable[[HostFailure, Meaning], bool]) -> DeviceError | None:
        """Return the first failure of another member's host that counts, and that this rank has not had."""
        with self._lock:
            found = sorted(self._hosts(), key=lambda each: each[0].at_ns)
            late = time.monotonic_ns() - int(REFUSED_S * 1e9)
            due = [each for each in found if counts(*each) and (each[0].is_certain or each[0].at_ns < late)]
            if self._standing is not None or len(due) < len(found):
                self.heard = 0  # look again at the next call
            for said, _ in due:
                self._seen[said.rank, HOST] = said.stamp
                self._failed[said.offset_bytes] = said.number
        if not due:
            return None
        said, meaning = due[0]
        return DeviceError(_host_text(said), rank=said.rank, op=meaning.op)

    def _hosts(self) -> Iterable[tuple[HostFailure, Meaning]]:
        """Yield failures of other members' hosts that this rank has neither had nor heard of."""
        for rank in range(self._page.world_size):
            said = self._page.said(rank)
            if rank == self._rank or said is None or said.stamp == self._seen.get((rank, HOST)):
                continue
            if said.num_barriers == self._num_barriers and said.number > self._failed.get(said.offset_bytes, 0):
                meaning = self._explain(Report(rank, HOST, (), said.offset_bytes))
                if meaning is not None and self._rank in meaning.members:
                    yield said, meaning

    def fetch(self, stream: Any = None) -> None:
        """Copy to the page what kernels have reported, where they cannot write there.  Waits for the stream."""
        if self._writes_to_page:
            return
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            words = self.words.tolist()
        for part in _PARTS:
            if context_words.code_of(words[part]):
                self._page.write(self._rank, part, words[part : part + context_words.PART_WORDS])

    def error(self) -> DeviceError | None:
        """Return what concerns this rank and was not returned before, as an error; None if nothing."""
        with self._lock:
            heard = self.alarm[0]  # what comes while the reports are read is for the next time
            new = list(self._new())
            for report in new:
                self._seen[report.rank, report.part] = report.words[report.part]
                if report.rank == self._rank:  # later waits can report again
                    self.words[report.part : report.part + context_words.PART_WORDS].zero_()
            self.heard = heard
        return self._as_error(new)

    def _as_error(self, reports: Iterable[Report]) -> DeviceError | None:
        """Return the error that says what concerns this rank; others are its causes."""
        known = [(report, meaning) for report in reports if (meaning := self._meaning(report)) is not None]
        known.sort(key=lambda each: (each[0].part != Mismatch.CODE, each[0].rank != self._rank))
        errors: list[DeviceError] = []
        for report, meaning in known:
            text = "" if report.rank == self._rank else f"rank {report.rank} has reported: "
            text += meaning.text if report.part == Mismatch.CODE else timeout_text(report, meaning)
            kind = DeviceError if report.part == Mismatch.CODE else DeviceTimeoutError
            errors.append(kind(text, rank=report.rank, peer=meaning.peer, op=meaning.op))
        for one, other in pairwise(errors):  # a rank that calls differently may come late, too
            one.__cause__ = other
        return errors[0] if errors else None

    def _new(self) -> Iterable[Report]:
        for rank in range(self._page.world_size):
            for part in _PARTS:
                stamp = self._page.words[self._page.first(rank) + part]
                if stamp and stamp != self._seen.get((rank, part), 0):
                    words = self._page.read(rank, part)
                    if words[part]:
                        address = words[Mismatch.ADDRESS if part == Mismatch.CODE else part + Status.ADDRESS]
                        yield Report(rank, part, words, address - self._base(rank))

    def _base(self, rank: int) -> int:
        return self._page.words[self._page.first(rank) + BASE]

    def _explain(self, report: Report) -> Meaning | None:
        return next((found for each in self.describers if (found := each(report)) is not None), None)

    def _meaning(self, report: Report) -> Meaning | None:
        """Return what a report means to this rank; None if it does not concern it."""
        meaning = self._explain(report)
        if meaning is not None:
            return meaning if self._rank in meaning.members else None
        if report.part == Mismatch.CODE:
            return None  # of a group in which this rank is not
        others = report.rank != self._rank and self._is_of_group(report.offset_bytes)
        return None if others else Meaning((self._rank,))

    # -- the end, and a new beginning ---------------------------------------------------------------------------------
    def forget(self, ranks: Sequence[int], offset_bytes: int) -> None:
        """Take the reports of a team's ranks as seen.

        Collective: these ranks call it, when none of their kernels runs, between two barriers.
        """
        with self._lock:
            for rank in ranks:
                for part in _PARTS:
                    self._seen[rank, part] = self._page.words[self._page.first(rank) + part]
                if (said := self._page.said(rank)) is not None and said.offset_bytes == offset_bytes:
                    self._seen[rank, HOST] = said.stamp
            self.words[: len(_PARTS) * context_words.PART_WORDS].zero_()
            self._failed.pop(offset_bytes, None)
            self._broken.discard(offset_bytes)
            self._standing = None

    def last_error(self, log: RankLogger) -> DeviceError | None:
        """Return the `error` that is known without waiting for the device, where kernels may never end."""
        try:
            if self.idle or self._writes_to_page or torch.cuda.current_stream(self._target.index).query():
                self.fetch()
                return self.error()
        except RuntimeError as e:
            log.debug(f"nothing is known of what kernels have reported: {e}")
        return None

    def close(self) -> None:
        """End the thread; and let go of the page, if the device is idle: else kernels may still write there."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self.describers.clear()
        if self.idle:
            self._page.close()

    # -- for the watchdog ---------------------------------------------------------------------------------------------
    def _long_wait(self) -> LongWait | None:
        """Return the wait of this rank's kernels that takes long; None if there is none."""
        words = self._page.read(self._rank, Waiting.CODE)
        if not words[Waiting.CODE]:
            return None
        address = words[Waiting.ADDRESS] - self._base(self._rank)
        report = Report(self._rank, Waiting.CODE, words, address)
        meaning = self._meaning(report) or Meaning((self._rank,))
        who = "" if meaning.peer is None else f" for rank {meaning.peer}"
        what = f" in {meaning.call}" if meaning.call else " in a kernel"
        with self._lock:
            hosts = "".join(f"{_host_text(said)}. " for said, _ in self._hosts())
        return LongWait(words[Waiting.CODE], who + what, f"{report.wait()}. {meaning.text}{hosts}")

    def _unheard(self) -> str:
        """Return the text of the error that the next call is going to raise; empty if none."""
        if self.alarm[0] == self.heard:
            return ""
        with self._lock:
            error = self._as_error(list(self._new()))
        return "" if error is None else str(error)


def _host_text(said: HostFailure) -> str:
    return f"rank {said.rank} has failed in a call that it does not take part in, or not to the end: {said.text}"


def timeout_text(report: Report, meaning: Meaning) -> str:
    """Say that a wait has reached its bound, with what is known of it."""
    way_out = "ctx.ccl.reset() on all members puts the group back to its beginning. " if meaning.op else ""
    return (
        f"{report.wait()} reached IRIS_DEVICE_TIMEOUT; the last value seen was {report.word(Status.LAST)}. "
        f"{meaning.text}What the kernel computed afterwards is not valid. {way_out}Look for the rank that should have "
        "signalled, or raise IRIS_DEVICE_TIMEOUT."
    )
