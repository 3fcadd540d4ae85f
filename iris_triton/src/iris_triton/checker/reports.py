"""Findings: reports as text and JSON, the errors that carry them, and ranges that are declared benign."""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from iris_core.errors import DeviceError
from iris_triton.checker.strands import HOST
from iris_triton.interpreter.errors import OutOfBoundsError
from iris_triton.interpreter.memory import accesses

RACE, COUNTER, UNINITIALISED, FREED, BOUNDS, WRAPPED, UNDEFINED = (
    "race", "counter", "uninitialised", "freed", "bounds", "wrapped", "undefined"
)  # fmt: skip

REASONS = {  # why a signal that was seen orders nothing, by the keys of `changes.Words`
    "plain": "is a plain store, which hands nothing over: use signal or an atomic with sem='release'",
    "relaxed": "is relaxed, so it hands nothing over: use sem='release'",
    "scope": "uses scope gpu or cta, and the peer needs {scope}",
    "not acquired": "is seen by {reader}, which does not acquire: use wait, or sem='acquire'",
    "scope of the wait": "is seen by {reader}, whose scope does not reach the sender: it needs {scope}",
    "early": "was seen by {reader}, which may end without it: an earlier value, or other senders, satisfy it, too",
    "other": "was seen by {reader}, but comes before the {kind}",
}

_TEXTS = {
    RACE: "data race on {where}: {other} is not ordered before {access}",
    COUNTER: "race for a counter, {where}: {access} is not ordered after {other} and can end it",
    UNINITIALISED: "uninitialised read of {where}: {access} reads what was not written since the allocation",
    FREED: "freed memory: {access} uses {where}, and that tensor was freed",
    BOUNDS: "out of bounds: {access} goes to {where}, which has none there",
    WRAPPED: "wrapped offset: {access} goes to {where}, by an offset that does not fit int32",
    UNDEFINED: "undefined value: {access} uses lanes that the mask of {other} has left out, which has no `other`",
}

MIXED = (  # what is wrong with atomics that are not ordered
    "Atomics are atomic to each other only with one width, with one type where they add or exchange, and with scopes "
    "that reach both: scope='sys' between ranks."
)

TOO_WIDE = "The program has an atomic of more than {} lanes, which is taken for data here: signal and wait with fewer."

OVERTAKEN = "In this run it was {} that ended it. Give each sender a counter of its own, or order the two."
"""What is wrong with a wait for additions that ended by luck."""


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a report.

    Attributes:
        what: "load", "store", "atomic_add (release, sys)", an operation of torch, ...
        file, line: where, in the user's code where there is some.
        function: the kernel or device function of that line.
        rank, program: who; `program` is the linear index in the launch, None for the host.
    """

    what: str
    file: str
    line: int
    function: str
    rank: int
    program: int | None

    def __str__(self) -> str:
        who = "the host" if self.program is None else f"program {self.program}"
        where = f"{os.path.basename(self.file)}:{self.line} in {self.function}"
        return f"the {self.what} at {where} by {who} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding.

    Attributes:
        kind: "race", "counter", "uninitialised", "freed", "bounds", "wrapped" or "undefined".
        access: what was found at fault last.
        other: the access that it is in conflict with; for "undefined" the load, if it is known; None for other kinds.
        rank: whose heap the bytes lie on.
        block: the tensor there, as the call that made it; empty if none is known.  For "bounds" and "wrapped" the
            argument.
        first, last: offsets of the first and the last byte, from the beginning of the block or argument.
        missing: what would order the two, or what to do.
        seed: of the schedule in which it was found, or the name of its order; None where none was chosen.
    """

    kind: str
    access: Access
    other: Access | None
    rank: int
    block: str
    first: int
    last: int
    missing: str
    seed: int | str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for reports of the same two lines."""
        sides = [each and (each.what, each.file, each.line) for each in (self.access, self.other)]
        return self.kind, *sorted(sides, key=repr)

    def __str__(self) -> str:
        where = f"bytes {self.first} to {self.last} of {self.block or 'the heap'} on rank {self.rank}"
        text = _TEXTS[self.kind].format(where=where, access=self.access, other=self.other or "a load")
        return f"{text}.{f' {self.missing}' if self.missing else ''}"

    def as_json(self) -> str:
        """Return the report as one line of JSON: the fields of this class, and its text."""
        return json.dumps({**asdict(self), "text": str(self)})

    @classmethod
    def from_json(cls, line: str) -> Report:
        """Make a report of a line that `as_json` has made."""
        fields = json.loads(line)
        del fields["text"]
        sides = {name: fields[name] and Access(**fields[name]) for name in ("access", "other")}
        return cls(**{**fields, **sides})


class CheckError(DeviceError):
    """The checker has found a mistake; nothing was read or written by the access that it names.

    Attributes:
        report: the finding; None on a rank that only learns of it.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


class DataRaceError(CheckError):
    """Two accesses, of which at least one writes, touch the same bytes, and nothing orders them."""


class UninitialisedReadError(CheckError):
    """Bytes of the heap are read, or lanes of a masked load used, that were never written."""


class FreedMemoryError(CheckError):
    """A tensor is used whose block was freed."""


class BeyondTensorError(CheckError, OutOfBoundsError):
    """A kernel leaves a tensor, the view that it was given, or gets there by an offset of int32 that has wrapped."""


ERRORS: dict[str, type[CheckError]] = {
    RACE: DataRaceError,
    COUNTER: DataRaceError,
    UNINITIALISED: UninitialisedReadError,
    FREED: FreedMemoryError,
    BOUNDS: BeyondTensorError,
    WRAPPED: BeyondTensorError,
    UNDEFINED: UninitialisedReadError,
}


@dataclass(slots=True)
class BenignRange:
    """A range of addresses whose races are declared benign; `count` says how many were found."""

    start: int
    nbytes: int
    reason: str
    count: int = 0

    def as_json(self, rank: int) -> str:
        """Return a line for the report of a rank, which says how many races there were."""
        fields = {"reason": self.reason, "nbytes": self.nbytes, "races": self.count, "rank": rank}
        return json.dumps({"kind": "benign", **fields})


benign_ranges: list[BenignRange] = []  # what this process has declared, in the order of the calls


def benign_race(tensor: torch.Tensor, reason: str) -> BenignRange:
    """Declare that races on a tensor of the heap are meant, on every rank's copy of it.

    Every rank that accesses it calls this.  It holds until the context closes; without the checker nothing looks at it.

    Args:
        tensor: a tensor on the symmetric heap that is dense, such as a counter for statistics.
        reason: why a race does no harm; it is listed with the reports.

    Returns:
        The range, whose `count` says how many races were found there.

    Raises:
        ValueError: the tensor has gaps or no elements, or there is no reason.

    Example:
        iris.benign_race(progress, "shown to the user only")
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes or not tensor.is_contiguous():
        raise ValueError("benign_race takes a contiguous tensor with at least one element")
    if not reason.strip():
        raise ValueError("benign_race needs a reason: why does a race on this tensor do no harm?")
    found = BenignRange(tensor.data_ptr(), nbytes, reason)
    if accesses.watcher is not None:  # else it would stay, and a checked context may have these addresses later
        benign_ranges.append(found)
    return found


class Steps:
    """The last accesses of this rank, and where its findings were made among them: rows for a picture."""

    KEPT = 1 << 15

    def __init__(self) -> None:
        self._rows: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=self.KEPT)

    def access(self, program: int, site: int, rank: int, first: int, last: int) -> None:
        """Note an access: by whom, from which line, to which bytes of whose heap."""
        self._rows.append((time.monotonic_ns(), program, site, rank, first, last))

    def finding(self, report: Report) -> None:
        """Note a finding; the access that it is about was noted last."""
        self._rows.append((time.monotonic_ns(), report))

    def as_json(self, rank: int, describe: Callable[[int], dict[str, Any]]) -> str:
        """Return all of it as one line of JSON; `describe` says what a number of a line stands for."""
        rows: list[dict[str, Any]] = []
        for at, *row in self._rows:
            if len(row) == 1:
                rows.append({"ns": at, "finding": json.loads(row[0].as_json())})
            else:
                program, site, owner, first, last = row
                who = None if program == HOST else program
                rows.append({"ns": at, "program": who, **describe(site), "owner": owner, "first": first, "last": last})
        return json.dumps({"kind": "timeline", "rank": rank, "rows": rows})
