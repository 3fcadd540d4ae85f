"""A thread that warns of kernels which wait for long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.logs import RankLogger

_LONGEST_SLEEP_S = 5.0


class LongWait(NamedTuple):
    """A wait of a kernel."""

    stamp: int  # another one whenever the wait, or another one of the rank, says that it goes on
    what: str  # for whom and in which operation, for a sentence
    details: str  # where exactly


class Watchdog:
    """Logs each long wait when it is seen, then at growing intervals, and when it has ended.

    `look` returns the wait that was the last to last for `after_s`, or None, and `unheard` the text of an error that
    the next call of this rank raises.
    """

    def __init__(
        self,
        rank: int,
        after_s: float,
        look: Callable[[], LongWait | None],
        unheard: Callable[[], str],
        log: RankLogger,
    ) -> None:
        self._rank, self._after_s, self._look, self._unheard, self._log = rank, after_s, look, unheard, log
        self._known: LongWait | None = None
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
        found, now = self._look(), time.monotonic()
        if found is not None and (self._known is None or found.stamp != self._known.stamp):
            if not self._waits:
                self._since, self._due, self._waits = now - self._after_s, 0.0, True
            self._known, self._seen = found, now
        known, waited = self._known, self._seen - self._since
        if known is None or not self._waits:
            return
        if now - self._seen > 2 * self._after_s:
            self._waits = False
            self._log.warning(f"rank {self._rank} no longer waits{known.what}, as it did for {waited:.0f} s at least")
        elif waited >= self._due:
            self._due = 2 * waited
            self._log.warning(
                f"rank {self._rank} has waited{known.what} for {waited:.0f} s; {known.details}"
                "IRIS_DEVICE_TIMEOUT=10 ends such waits with an error; see docs/debugging.md"
            )

    def _look_for_errors(self) -> None:
        """Log an error that has not been raised between two looks: a program that replays graphs makes no calls."""
        text = self._unheard()
        self._looks = self._looks + 1 if text == self._pending else 0
        self._pending = text
        if text and self._looks == 1:
            self._log.error(f"the next call raises: {text}")

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
