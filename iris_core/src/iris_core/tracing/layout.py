"""Where kernels write events: one buffer for each column, and the words of the context tensor that name them.

The tracing words of a context tensor (`iris_core.device.context_words`):

    0       1 if tracing is on
    1       events that the buffers hold
    2       address of the counter of events (int32)
    3       address of the counter of operations (int32)
    4 ..    address of each column's buffer, in the order of COLUMNS
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from iris_core.device.context_words import TRACE_WORDS


class TraceEvent(enum.IntEnum):
    """Types of events.  Any other number is the user's; `Tracing.name_event` gives it a name."""

    LOAD = 0
    STORE = 1
    GET = 2
    PUT = 3
    COPY = 4
    ATOMIC_ADD = 5
    ATOMIC_SUB = 6
    ATOMIC_CAS = 7
    ATOMIC_XCHG = 8
    ATOMIC_XOR = 9
    ATOMIC_AND = 10
    ATOMIC_OR = 11
    ATOMIC_MIN = 12
    ATOMIC_MAX = 13
    FETCH = 1024
    COMPUTE = 2048
    REDUCE = 2049
    WAIT = 3072
    BARRIER = 3073
    SIGNAL = 3074


EVENT_NAMES = {int(event): event.name.lower() for event in TraceEvent}
"""Names by number."""


class Column(NamedTuple):
    """One column of the table of events: its name in files, and 32 or 64 bits, signed."""

    name: str
    bits: int


_WIDE = ("timestamp", "address", "duration_cycles")
_NAMES = (
    *("event_id", "pid", "pid_m", "pid_n", "cur_rank", "target_rank", "xcc_id", "cu_id"),
    *(*_WIDE, "op_index", "payload_size"),
)
COLUMNS = tuple(Column(name, 64 if name in _WIDE else 32) for name in _NAMES)
"""In the order of the words.  Times are ticks of the device's constant clock; a duration of -1 stands for none."""

ENABLED_WORD, CAPACITY_WORD, COUNTER_WORD, OP_INDEX_WORD, COLUMNS_WORD = 0, 1, 2, 3, 4
NO_DURATION = -1

assert COLUMNS_WORD + len(COLUMNS) == TRACE_WORDS
