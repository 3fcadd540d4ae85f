"""Device side of tracing: kernels write events into the buffers that `ctx.tracing.enable()` has made.

The functions serve Triton and Gluon.  An event takes one atomic add, one more for a remote operation, and a store for
each of its columns, all by one thread; it is dropped, and counted, where the buffers are full.
"""

import time

import numpy as np
import triton
import triton.language as tl

from iris_core.tracing import layout as _layout
from iris_triton._compat import aggregate
from iris_triton.interpreter.entries import cpu_entry
from iris_triton.language.asm import get_cu_id, get_xcc_id, read_realtime, ticks_after

_CAPACITY, _COUNTER = tl.constexpr(_layout.CAPACITY_WORD), tl.constexpr(_layout.COUNTER_WORD)
_OP_INDEX, _COLUMNS = tl.constexpr(_layout.OP_INDEX_WORD), tl.constexpr(_layout.COLUMNS_WORD)
_NO_DURATION = tl.constexpr(_layout.NO_DURATION)
_NO_EVENT = tl.constexpr(-1)
_INT32_MAX = tl.constexpr(2**31 - 1)
_COLUMNS_BY_NAME = {each.name: (place, each.bits) for place, each in enumerate(_layout.COLUMNS)}
_FIRST_OTHER = tl.constexpr(int(_layout.TraceEvent.FETCH))  # below are the remote operations

LOAD, STORE, GET, PUT, COPY, WAIT, BARRIER, SIGNAL = (
    tl.constexpr(int(_layout.TraceEvent[name]))
    for name in ("LOAD", "STORE", "GET", "PUT", "COPY", "WAIT", "BARRIER", "SIGNAL")
)


@aggregate
class TraceEvent:
    """Numbers of the events of `iris_core.tracing.layout.TraceEvent`, for kernels: `TraceEvent().put`."""

    __annotations__ = {event.name.lower(): tl.constexpr for event in _layout.TraceEvent}

    @triton.constexpr_function
    def __init__(self):
        for event in _layout.TraceEvent:
            setattr(self, event.name.lower(), tl.constexpr(int(event)))


@triton.constexpr_function
def of_atomic(op):
    """Return the number of the event of an atomic operation ("add", "cas", ...)."""
    return int(_layout.TraceEvent["ATOMIC_" + op.upper()])


@triton.constexpr_function
def _place(name):
    return _COLUMNS_BY_NAME[name][0]


@triton.constexpr_function
def _type(name):
    return tl.pointer_type(tl.int64 if _COLUMNS_BY_NAME[name][1] == 64 else tl.int32)


@triton.jit
def _put(words, name: tl.constexpr, index, value, kept):
    column = tl.load(words + _COLUMNS + _place(name)).to(_type(name))
    tl.store(column + index, tl.cast(value, column.dtype.element_ty), mask=kept)


@triton.jit
def _least(block):
    for _ in tl.static_range(len(block.shape)):
        block = tl.min(block, axis=0)
    return block


@triton.jit
def _count(block):
    block = tl.cast(block, tl.int32)
    for _ in tl.static_range(len(block.shape)):
        block = tl.sum(block, axis=0)
    return block


@triton.constexpr_function
def _nbytes(address, masked):
    """Bytes of what a pointer or a block of them addresses; of one element if there is a mask, 0 for a number."""
    scalar = address.type.scalar
    if not scalar.is_ptr():
        return 0
    item = max(1, scalar.element_ty.primitive_bitwidth // 8)
    return item if masked else item * address.numel.value


@triton.jit
def begin_event(words, rank, event_id: tl.constexpr, target_rank, address, pid_m, pid_n, mask=None, numel=None):
    """`DeviceTracing.record_event_start`, for which `words` are the tracing words of the context tensor.

    `numel` is a number of elements from `address`, a scalar pointer, on, instead of a block and a mask.
    """
    # masked instead of branched: nothing below 0 or beyond the room is touched, and off is room for nothing
    on = tl.load(words) != 0
    room = tl.load(words + _CAPACITY)
    counter = tl.load(words + _COUNTER).to(tl.pointer_type(tl.int32))
    index = tl.atomic_add(counter, 1, mask=on, sem="relaxed", scope="gpu")
    kept = on & (index >= 0) & (index < room)
    operations = tl.load(words + _OP_INDEX).to(tl.pointer_type(tl.int32))
    if event_id < _FIRST_OTHER:
        operation = tl.atomic_add(operations, 1, mask=on, sem="relaxed", scope="gpu")
    else:
        operation = tl.load(operations, mask=on, other=0)
    where = tl.core.to_tensor(address)
    at = tl.cast(where, tl.int64)
    payload: tl.constexpr = _nbytes(where, mask is not None)
    if numel is not None:
        nbytes = tl.cast(numel, tl.int64) * payload
        _put(words, "payload_size", index, tl.minimum(nbytes, _INT32_MAX), kept)
    elif mask is None:
        _put(words, "payload_size", index, payload, kept)
    else:
        _put(words, "payload_size", index, _count(mask & (at == at)) * payload, kept)  # spread over the block
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    _put(words, "event_id", index, event_id, kept)
    _put(words, "pid", index, program, kept)
    _put(words, "pid_m", index, pid_m, kept)
    _put(words, "pid_n", index, pid_n, kept)
    _put(words, "cur_rank", index, rank, kept)
    _put(words, "target_rank", index, target_rank, kept)
    _put(words, "xcc_id", index, get_xcc_id(), kept)
    _put(words, "cu_id", index, get_cu_id(), kept)
    _put(words, "address", index, _least(at), kept)
    _put(words, "duration_cycles", index, _NO_DURATION, kept)
    _put(words, "op_index", index, operation, kept)
    now = read_realtime()
    _put(words, "timestamp", index, now, kept)
    return tl.where(kept, index, _NO_EVENT), now


@triton.jit
def _bits_of(value):
    """Something of 32 bits that needs the value."""
    if value.dtype.is_floating():
        return value.to(tl.float32).to(tl.int32, bitcast=True)
    elif value.dtype.is_ptr():
        return value.to(tl.int64).to(tl.int32)
    else:
        return value.to(tl.int32)


@triton.jit
def _ticks_after(value):
    """Return the constant clock, read by every thread when its elements of a value are there: the latest of them."""
    ticks = ticks_after(_bits_of(value))
    for _ in tl.static_range(len(ticks.shape)):
        ticks = tl.max(ticks, axis=0)
    return ticks


cpu_entry(_ticks_after)(lambda program, value: np.int64(time.monotonic_ns()))


@aggregate
class DeviceTracing:
    """Tracing in a kernel: `ctx.tracing` of both languages' contexts."""

    words: tl.tensor  #: pointer to the tracing words of the context tensor
    rank: tl.tensor  #: the caller
    #: whether the kernel was compiled with tracing (constexpr).  Without it nothing here leaves an instruction; with
    #: it, events are recorded while the host has tracing on.
    enabled: tl.constexpr

    @triton.jit
    def record_event_start(self, event_id: tl.constexpr, target_rank, address, pid_m, pid_n, mask=None, numel=None):
        """Record that something begins; returns the handle for `record_event_end`.

        Args:
            event_id: a number of TraceEvent (`TraceEvent().compute`), or one of your own, which
                `ctx.tracing.name_event` on the host gives a name (constexpr).
            target_rank: rank whose memory is accessed; this rank where there is none.
            address: pointer, block of pointers (the lowest one is recorded) or number.
            pid_m, pid_n: two numbers of your own, usually a tile's place.
            mask: which elements of the block are accessed; gives the size of the payload.
            numel: number of elements from a pointer on that are, instead of a block and a mask.
        """
        if self.enabled:
            return begin_event(self.words, self.rank, event_id, target_rank, address, pid_m, pid_n, mask, numel)
        else:
            return _NO_EVENT, 0

    @triton.jit
    def record_event_end(self, handle):
        """Record that it has ended, now.  Without this call it is shown as a moment."""
        if self.enabled:
            _put(self.words, "duration_cycles", handle[0], read_realtime() - handle[1], handle[0] >= 0)

    end = record_event_end  # of an operation that was issued, or is over

    @triton.jit
    def begin(self, event_id: tl.constexpr, target_rank, address, mask=None, numel=None):
        """`record_event_start` of an operation of the context; the two numbers are those of the program."""
        pid_m, pid_n = tl.program_id(0), tl.program_id(1)
        return self.record_event_start(event_id, target_rank, address, pid_m, pid_n, mask, numel)

    @triton.jit
    def end_after(self, handle, value):
        """Record the end of the operation, which is over when what it returned is there."""
        if self.enabled:
            _put(self.words, "duration_cycles", handle[0], _ticks_after(value) - handle[1], handle[0] >= 0)
