"""Reports of all ranks, as errors of the host.

Kernels cannot raise.  The first wait that reaches its bound, and the first kernel that finds another rank calling
differently, describe themselves on a page that the hosts of all ranks read (`iris_core.device.status`).  The next call
of each rank that it concerns raises.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from iris_core.device import context_words
from iris_core.device.context_words import COMPARISONS, WAITING, Mismatch, MismatchCode, Status, code_of
from iris_core.device.status import BASE, StatusPage
from iris_core.errors import DeviceError, DeviceTimeoutError
from iris_core.heap.heap import SymmetricHeap
from iris_core.logs import RankLogger, rank_logger
from iris_core.types import DeviceTarget, DeviceType

_PARTS = (Status.CODE, Mismatch.CODE)
_LONGEST_SLEEP_S = 5.0
_LEAVE_S = 10.0  # the watchdog's last look
_SYMBOLS = dict(zip(COMPARISONS, ("==", "!=", ">", ">=", "<", "<="), strict=True))


class Report(NamedTuple):
    """A report of a kernel."""

    rank: int  # of the kernel
    part: int  # the first of the words in which it says it: of `Status` or `Mismatch`, or WAITING
    words: Sequence[int]  # the status words of that rank
    offset_bytes: int  # of the address in question, from the beginning of that rank's heap

    def word(self, field: Status) -> int:
        """Return a word of `Status`, or the same one at WAITING."""
        return self.words[self.part + field]

    def wait(self) -> str:
        """Describe the wait."""
        comparison = _SYMBOLS[COMPARISONS[self.word(Status.COMPARISON)]]
        return (
            f"rank {self.word(Status.RANK)}, program {self.word(Status.PROGRAM)}: a wait for the word at "
            f"{self.word(Status.ADDRESS):#x} to be {comparison} {self.word(Status.EXPECTED)}"
        )


class Meaning(NamedTuple):
    """The meaning of a report to the host."""

    members: tuple[int, ...]  # ranks of the world whose calls it concerns
    peer: int | None = None  # the rank that is waited for, or that calls differently; None if unknown
    op: str = ""  # the operation; empty if unknown
    call: str = ""  # the operation with what is known of it, for messages
    text: str = ""  # sentences for a message, each with a space after it


class LongWait(NamedTuple):
    """A wait of a kernel."""

    stamp: int  # another one whenever the wait, or another one of the rank, says that it goes on
    what: str  # for whom and in which operation, for a sentence
    details: str  # where exactly


class Watchdog:
    """Logs each wait that lasts for `after_s` when it is seen, then at growing intervals, and when it has ended."""

    def __init__(self, rank: int, after_s: float, reports: KernelReports, log: RankLogger) -> None:
        self._rank, self._after_s, self._reports, self._log = rank, after_s, reports, log
        self._known = LongWait(0, "", "")
        self._since = self._due = self._seen = 0.0
        self._waits = False
        self._pending, self._looks = "", 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="iris-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(min(_LONGEST_SLEEP_S, self._after_s / 4)):
            self._look_for_waits()
            self._look_for_errors()

    def _look_for_waits(self) -> None:
        found, now = self._reports.long_wait(), time.monotonic()
        if found is not None and found.stamp != self._known.stamp:
            if not self._waits:
                self._since, self._due, self._waits = now - self._after_s, 0.0, True
            self._known, self._seen = found, now
        waited = self._seen - self._since
        if self._waits and now - self._seen > 2 * self._after_s:
            self._waits = False
            what = f"{self._known.what}, as it did for {waited:.0f} s at least"
            self._log.warning(f"rank {self._rank} no longer waits{what}")
        elif self._waits and waited >= self._due:
            self._due = 2 * waited
            self._log.warning(
                f"rank {self._rank} has waited{self._known.what} for {waited:.0f} s; {self._known.details}"
                "IRIS_DEVICE_TIMEOUT=10 ends such waits with an error; see docs/debugging.md"
            )

    def _look_for_errors(self) -> None:
        """Log an error that has not been raised between two looks: a program that replays graphs makes no calls."""
        text = self._reports.unheard()
        self._looks = self._looks + 1 if text == self._pending else 0
        self._pending = text
        if text and self._looks == 1:
            self._log.error(f"the next call raises: {text}")

    def close(self) -> bool:
        """End the thread; return whether it has ended: not if it is this one, where a dropped context is collected."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)  # it may wait for what this thread holds while it collects
        return not self._thread.is_alive()


class KernelReports:
    """The reports of all ranks, as one rank sees them."""

    def __init__(
        self, target: DeviceTarget, page: StatusPage, heap: SymmetricHeap, timeout_s: float | None, watchdog_s: float
    ) -> None:
        rank = self._rank = heap.rank
        self._page, self._heap, self._log = page, heap, rank_logger(rank, len(heap.heap_bases))
        self._on_gpu = target.type is not DeviceType.CPU
        self._watchdog_s = watchdog_s
        # the bound as kernels read it; see `iris_core.types.ContextSpec`
        self.timeout_ns = int(-watchdog_s * 1e9) if timeout_s is None else max(1, int(timeout_s * 1e9))
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int], int] = {}
        self.describers: list[Callable[[Report], Meaning | None]] = []  # say what addresses of the heap are for
        self.alarm = page.words  # the first word changes with every report, of any rank
        self.heard = 0  # the alarm up to which this rank has looked: a call compares, and calls `raise_new`
        self.idle = True  # no kernel of this rank runs, as far as the host knows
        page.words[page.first(rank) + BASE] = heap.heap_bases[rank]
        words = [0] * context_words.STATUS_WORDS
        words[context_words.ALARM] = page.register(target)
        far = (ranks[0] for ranks in heap.nodes if rank not in ranks)
        words[context_words.NOWHERE] = next((heap.heap_bases[peer] for peer in far), 0)
        words[context_words.ROW] = words[context_words.ALARM] + page.first(rank) * page.words.itemsize
        self.words = torch.tensor(words, dtype=torch.int64, device=target.torch_device)
        self._watchdog: Watchdog | None = None

    def watch(self) -> None:
        """Begin to look for long waits, in a thread.  Kernels are going to be launched."""
        self.idle = False
        if self._watchdog is None and self._watchdog_s:
            self._watchdog = Watchdog(self._rank, self._watchdog_s, self, self._log)

    # -- what is new --------------------------------------------------------------------------------------------------
    def raise_new(self) -> None:
        """Raise the reports that concern this rank and were not raised before; for a call, before it launches anything.

        While a graph is captured nothing is raised: the next call does it.
        """
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return
        if (error := self.error()) is not None:
            raise error

    def error(self, *, at_end: bool = False) -> DeviceError | None:
        """Return the reports that concern this rank and were not returned before, as an error; None if there are none.

        Later waits of this rank can report again, but not `at_end`, where the device may be broken.
        """
        with self._lock:
            heard = self.alarm[0]  # what comes while the reports are read is for the next time
            new = list(self._new())
            for report in new:
                self._seen[report.rank, report.part] = report.words[report.part]
                if report.rank == self._rank and not at_end:
                    self.words[report.part : report.part + context_words.PART_WORDS].zero_()
            self.heard = heard
        return self._as_error(new)

    def _new(self) -> Iterable[Report]:
        for rank in range(self._page.world_size):
            for part in _PARTS:
                stamp = self._page.words[self._page.first(rank) + part]
                if stamp and stamp != self._seen.get((rank, part), 0):
                    words = self._page.read(rank, part)
                    if words[part]:
                        address = words[Mismatch.ADDRESS if part == Mismatch.CODE else part + Status.ADDRESS]
                        yield Report(rank, part, words, address - self._base(rank))

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

    def _base(self, rank: int) -> int:
        return self._page.words[self._page.first(rank) + BASE]

    def _meaning(self, report: Report) -> Meaning | None:
        """Return the meaning of a report to this rank; None if it does not concern it."""
        meaning = next((found for each in self.describers if (found := each(report)) is not None), None)
        if meaning is not None:
            return meaning if self._rank in meaning.members else None
        if report.part == Mismatch.CODE:
            code, rank, nth, _, room, seen, kind = report.words[Mismatch.CODE : Mismatch.OUR_KIND + 1]
            if code_of(code) != MismatchCode.LENGTH:  # or it is of a group in which this rank is not
                return self._far(rank, report) if code_of(code) == MismatchCode.FAR and rank == self._rank else None
            op = "experts" if kind else "flash_decode"
            what = f"sequence {nth} has {seen} keys on rank {rank}, where there is room for {room}"
            if kind:
                what = f"token {nth} of rank {rank} names an expert of rank {seen} twice"
            text = f"{op}: {what}. It was computed with what there is room for; no member's result is valid."
            return Meaning((self._rank,), op=op, text=text)
        others = report.rank != self._rank and self._heap.is_of_group(report.offset_bytes)
        return None if others else Meaning((self._rank,), text=self._place(report.offset_bytes))

    def _far(self, rank: int, report: Report) -> Meaning:
        """Say which kernel has accessed the memory of a rank on another node."""
        peer, name = report.words[Mismatch.PEER], struct.pack("<4q", *report.words[Mismatch.OURS :][:4])
        node = next(node for node, ranks in enumerate(self._heap.nodes) if peer in ranks)
        text = (
            f"kernel {name.rstrip(bytes(1)).decode(errors='replace')}: rank {peer} is on node {node}, and kernels of "
            f"rank {rank} cannot access its memory. The GPU stops such a kernel, and this process needs a new start. "
            "Kernels reach the memory of ctx.node_ranks; between nodes use ctx.ccl."
        )
        return Meaning((rank,), peer=peer, text=text)

    def _place(self, offset_bytes: int) -> str:
        """Say in which tensor of the heap, which every rank has there, a word lies."""
        for block in self._heap.live_blocks():
            if 0 <= (byte := offset_bytes - block.offset_bytes) < block.nbytes:
                return f"The word is byte {byte} of {block.label}. "
        return ""

    # -- the end, and a new beginning ---------------------------------------------------------------------------------
    def forget(self, ranks: Sequence[int]) -> None:
        """Take the reports of a team's ranks as seen.

        Collective: these ranks call it, when none of their kernels runs, between two barriers.
        """
        with self._lock:
            for rank in ranks:
                for part in _PARTS:
                    self._seen[rank, part] = self._page.words[self._page.first(rank) + part]
            self.words[: len(_PARTS) * context_words.PART_WORDS].zero_()

    def close(self) -> None:
        """End the thread; close the page if nothing reads it and the device, which may write, is idle."""
        quiet = self._watchdog is None or self._watchdog.close()
        self._watchdog = None
        self.describers.clear()
        if self.idle and quiet:
            self._page.close()

    # -- for the watchdog ---------------------------------------------------------------------------------------------
    def long_wait(self) -> LongWait | None:
        """Return the wait of this rank's kernels that takes long; None if there is none."""
        words = self._page.read(self._rank, WAITING)
        if not words[WAITING]:
            return None
        address = words[WAITING + Status.ADDRESS] - self._base(self._rank)
        report = Report(self._rank, WAITING, words, address)
        meaning = self._meaning(report) or Meaning((self._rank,))
        who = "" if meaning.peer is None else f" for rank {meaning.peer}"
        what = f" in {meaning.call}" if meaning.call else " in a kernel"
        return LongWait(words[WAITING], who + what, f"{report.wait()}. {meaning.text}")

    def unheard(self) -> str:
        """Return the text of the error that the next call is going to raise; empty if none."""
        if self.alarm[0] == self.heard:
            return ""
        with self._lock:
            error = self._as_error(list(self._new()))
        return "" if error is None else str(error)


def timeout_text(report: Report, meaning: Meaning) -> str:
    """Say that a wait has reached its bound, with what is known of it."""
    way_out = "ctx.ccl.reset() on all members puts the group back to its beginning. " if meaning.op else ""
    return (
        f"{report.wait()} reached IRIS_DEVICE_TIMEOUT; the last value seen was {report.word(Status.LAST)}. "
        f"{meaning.text}What the kernel computed afterwards is not valid. {way_out}Look for the rank that should have "
        "signalled, or raise IRIS_DEVICE_TIMEOUT."
    )
