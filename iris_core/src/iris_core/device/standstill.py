"""Whether the kernels of all ranks wait for words that none of them will ever change.

Each rank has a row in memory that all of them reach: how often something has moved there, and how many rounds of polls
have found nothing since.  A rank writes its row only while all its programs wait, so a rank that computes, or whose
host is in Python, is never counted.

Let a rank look twice, see nobody move, and two more rounds of each rank.  Each of these ranks has polled all its words
once after the first look, in vain, while nobody stored; so none of them will move unless another one does first.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_NBYTES = 16

_ROUNDS = (1 << 32) - 1


class Standstill:
    """The rows, as one rank sees them.

    Args:
        rows: address of each rank's row in this process: moves and rounds in one word, and the moves of that rank when
            another one has found out that all stand still.
        rank: this rank.
    """

    def __init__(self, rows: Sequence[int], rank: int) -> None:
        self._rows = [(ctypes.c_uint64 * 2).from_address(row) for row in rows]
        self._own = self._rows[rank]
        self._first: list[int] | None = None

    def report(self, quiet: bool) -> bool:
        """Say that programs of this rank have polled all their words, and return whether all ranks stand still.

        Args:
            quiet: whether nothing has changed since the last report; not at the first one of a launch.
        """
        own = self._own
        moves = own[0] >> 32
        if not quiet:
            own[0] = moves + 1 << 32
            self._first = None
            return False
        own[0] += 1
        if moves and own[1] == moves:
            return True
        now = [row[0] for row in self._rows]
        if self._first is None or any(a >> 32 != b >> 32 for a, b in zip(self._first, now, strict=True)):
            self._first = now
        elif all((b & _ROUNDS) >= (a & _ROUNDS) + 2 for a, b in zip(self._first, now, strict=True)):
            for row, word in zip(self._rows, now, strict=True):
                row[1] = word >> 32
            return True
        return False
