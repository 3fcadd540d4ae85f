"""Reports of plugins to `iris doctor`: findings on this machine, results of a self-test.  Imports nothing heavy."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"  # worth knowing; Iris works
    BROKEN = "broken"  # something that is installed or present does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry of the report."""

    subject: str  #: what was examined, in a few words
    verdict: Verdict  #: what it means
    text: str  #: what was found, and the way out where there is something to mend; may have several lines
    #: the same for programs: what JSON can hold, under keys that do not change
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairCheck:
    """How one operation of one rank on one peer's memory went in a self-test."""

    op: str  #: the operation: "write", "read", "atomic_add", "signal", or another short name
    rank: int  #: the rank that did it
    peer: int  #: the rank whose memory it was; `rank` itself for a test of its own memory
    problem: str = ""  #: what went wrong, to be read after the operation's name ("lost 3 of 1000 additions"); or empty

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problem

    def __str__(self) -> str:
        return f"rank {self.rank} -> rank {self.peer}: {self.op} {self.problem or 'ok'}"
