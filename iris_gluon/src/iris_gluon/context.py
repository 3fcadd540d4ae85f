"""IrisDeviceCtx: the device functions for Gluon kernels with rank and heap bases filled in."""

import hashlib
from operator import attrgetter

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_gluon.interpreter  # noqa: F401 - so that kernels with this context run on the CPU, too
from iris_core.device import context_words as _layout
from iris_gluon import bulk
from iris_gluon._compat import aggregate
from iris_triton.context import DeviceMethods
from iris_triton.language import trace as events
from iris_triton.language.address import check_context
from iris_triton.language.trace import DeviceTracing

_HEADER_WORDS = gl.constexpr(_layout.HEADER_WORDS)
_TRACE_WORD = gl.constexpr(_layout.TRACE_WORD)

GluonDeviceTracing = DeviceTracing  #: its name in AMD's Iris; one class serves both languages


@aggregate
class IrisDeviceCtx(DeviceMethods):
    """World of a Gluon kernel (rank, size, heap bases), and the device functions as methods.

    The methods are those of `iris_triton.DeviceContext`, and bulk copies; what they return has the pointers' shape,
    layout and element type.  The class is passed to the kernel as a constexpr; rank and world size are read at run
    time, so one binary serves all ranks.

    Attributes:
        cur_rank, rank: the caller (int32).
        num_ranks, world_size: number of ranks (int32).
        heap_bases: pointer to int64[num_ranks], the address of every rank's heap in this process.
        tracing: records events, if the context was made with tracing; see `iris_triton.language.trace.DeviceTracing`.

    Example:
        @gluon.jit
        def kernel(IrisDeviceCtx: gl.constexpr, context_tensor, data):
            ctx = IrisDeviceCtx.initialize(context_tensor)
            ctx.store(data, 1.0, (ctx.cur_rank + 1) % ctx.num_ranks)

        kernel[(1,)](IrisDeviceCtx, ctx.get_device_context(), data)
    """

    cur_rank: gl.tensor
    num_ranks: gl.tensor
    heap_bases: gl.tensor
    tracing: DeviceTracing

    @staticmethod
    @gluon.jit
    def initialize(context_tensor, tracing: gl.constexpr = False):
        """Decode the context tensor, which `ctx.get_device_context()` returns.

        With `tracing`, record every operation of the context but those on tiles, and what the kernel records itself,
        while the host has tracing on (`ctx.tracing.enable()`).  Without it there is not one instruction more.
        """
        cur_rank = gl.load(context_tensor).to(gl.int32)
        num_ranks = gl.load(context_tensor + 1).to(gl.int32)
        check_context(context_tensor, cur_rank, num_ranks)
        recorder = DeviceTracing(context_tensor + (_HEADER_WORDS + _TRACE_WORD) + num_ranks, cur_rank, tracing)
        return IrisDeviceCtx(cur_rank, num_ranks, context_tensor + _HEADER_WORDS, recorder)

    @gluon.jit
    def put_bulk(self, from_ptr, to_ptr, numel, to_rank, CHUNK_BYTES: gl.constexpr = 16384, STAGES: gl.constexpr = 4):
        """Copy `numel` consecutive elements to to_rank's memory by the copy unit (Hopper and newer)."""
        self._check(to_rank)
        event = self.tracing.begin(events.PUT, to_rank, to_ptr, None, numel)
        bulk.put_bulk(from_ptr, to_ptr, numel, self.rank, to_rank, self.heap_bases, CHUNK_BYTES, STAGES)
        self.tracing.end(event)

    @gluon.jit
    def get_bulk(self, from_ptr, to_ptr, numel, from_rank, CHUNK_BYTES: gl.constexpr = 16384, STAGES: gl.constexpr = 4):
        """Copy `numel` consecutive elements from from_rank's memory by the copy unit (Hopper and newer)."""
        self._check(from_rank)
        event = self.tracing.begin(events.GET, from_rank, from_ptr, None, numel)
        bulk.get_bulk(from_ptr, to_ptr, numel, self.rank, from_rank, self.heap_bases, CHUNK_BYTES, STAGES)
        self.tracing.end(event)


class _CacheKey:
    """The key under which the compiler caches kernels that get the class as an argument: a hash of all its methods."""

    def __get__(self, instance, owner):
        keys = [member.cache_key for member in vars(owner).values() if hasattr(member, "cache_key")]
        return hashlib.sha256("".join(keys).encode()).hexdigest()


IrisDeviceCtx.cache_key = _CacheKey()
IrisDeviceCtx.rank = property(attrgetter("cur_rank"))
IrisDeviceCtx.world_size = property(attrgetter("num_ranks"))
