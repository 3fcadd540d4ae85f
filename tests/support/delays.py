"""Ranks that are late at random in the middle of a kernel, while their peers go on as far as they can."""

import contextlib
import random
import time
from unittest import mock

import numpy as np

from iris_triton.interpreter.memory import accesses

QUIET_S, MOST_S = 0.1, 5.0


@contextlib.contextmanager
def late_after_signals(path, rank, num_ranks, share):
    """Stop programs of this CPU rank at random after they have changed a word; those of a few flags one by one.

    One peer then has what it waits for, and goes on, long before the next one, whose data and signal are still to come.
    A late program goes on when no peer has changed a word for a while.  The ranks of one run share the file of `path`,
    which is made here; this `share` of the atomics that change something is followed by a delay.
    """
    with open(path, "ab") as file:  # all make it as long as it has to be
        file.truncate(8 * num_ranks)
    changes = np.memmap(path, np.int64, "r+")
    kept, chance = accesses.native_rmw, random.Random(rank)

    def late(op, addresses, values, element, mask=None, *sem):
        flags = np.flatnonzero(np.ones(addresses.shape, bool) if mask is None else mask)
        if len(flags) > 8 or addresses.ndim != 1 or not values.any():
            return late_once(values, kept(op, addresses, values, element, mask, *sem))
        old = np.zeros_like(values)
        for each in flags:
            alone = np.arange(len(addresses)) == each
            old += late_once(values, kept(op, addresses, values, element, alone, *sem))
        return old

    def late_once(values, old):
        if values.any():  # a look at a word adds 0 to it
            changes[rank] += 1
            if chance.random() < share:
                end, seen, quiet = time.monotonic() + MOST_S, -1, 0.0
                while quiet < QUIET_S and time.monotonic() < end:
                    now = int(changes.sum())
                    quiet = quiet + 0.01 if now == seen else 0.0
                    seen = now
                    time.sleep(0.01)
        return old

    with mock.patch.object(accesses, "native_rmw", late):
        yield
