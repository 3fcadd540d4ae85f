"""The device functions with ranks and heap bases filled in: methods of both languages' contexts, and DeviceContext."""

import numpy as np
import triton
import triton.language as tl
from triton.language import constexpr

from iris_core.device import context_words as _layout
from iris_triton import language
from iris_triton._compat import aggregate
from iris_triton.interpreter.entries import cpu_entry
from iris_triton.language import gin
from iris_triton.language import trace as events
from iris_triton.language.address import check_context
from iris_triton.language.atomics import _rmw
from iris_triton.language.sync import ACQUIRE, GE, RELEASE, SET, SYS
from iris_triton.language.trace import DeviceTracing
from iris_triton.tiles.protocol import wait_bound
from iris_triton.tiles.reductions import Reductions

_HEADER_WORDS, _TRACE_WORD = constexpr(_layout.HEADER_WORDS), constexpr(_layout.TRACE_WORD)
_NETWORK_WORD, _FAR_BASE = constexpr(_layout.NETWORK_WORD), constexpr(2)


@triton.jit
def check_rank(rank, world_size):
    """Assert a valid rank on the CPU and, on GPUs, in kernels compiled with debug=True; free elsewhere."""
    tl.device_assert((rank >= 0) & (rank < world_size), "a rank outside the world is addressed: add % world_size")


@cpu_entry(check_rank)
def _refuse_rank(program, rank, world_size):
    ranks = np.asarray(rank)  # of each element, or one
    if (wrong := ranks[(ranks < 0) | (ranks >= world_size)]).size:
        raise AssertionError(f"rank {wrong[0]} is addressed in a world of {world_size}: add % world_size")


def _atomic(op):
    OP = constexpr(op)

    def atomic(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        self._check(to_rank, mask)
        event = self.tracing.begin(events.of_atomic(OP), to_rank, pointer, mask)
        old = _rmw(OP, pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)
        self.tracing.end_after(event, old)
        return old

    atomic.__name__, atomic.__qualname__ = f"atomic_{op}", f"DeviceMethods.atomic_{op}"
    atomic.__doc__ = getattr(language, f"atomic_{op}").__doc__.splitlines()[0]
    return triton.jit(atomic)


class DeviceMethods(Reductions):
    """The methods of every device context, which has `rank`, `world_size`, `heap_bases` and `tracing`.

    Those on tiles come from `iris_triton.tiles` (docs/tiles.md).
    """

    @triton.jit
    def load(
        self, pointer, from_rank, mask=None, other=None, cache_modifier: constexpr = None, volatile: constexpr = False,
        hint: constexpr = None
    ):  # fmt: skip
        """Return what lies at `pointer` in the heap of from_rank."""
        self._check(from_rank, mask)
        event = self.tracing.begin(events.LOAD, from_rank, pointer, mask)
        value = language.load(
            pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile, hint
        )
        self.tracing.end_after(event, value)
        return value

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, cache_modifier: constexpr = None, hint: constexpr = None):
        """Store `value` at `pointer` in the heap of to_rank."""
        self._check(to_rank, mask)
        event = self.tracing.begin(events.STORE, to_rank, pointer, mask)
        language.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)
        self.tracing.end(event)

    @triton.jit
    def get(
        self, from_ptr, to_ptr, from_rank, mask=None, other=None, load_cache_modifier: constexpr = None,
        store_cache_modifier: constexpr = None, hint: constexpr = None
    ):  # fmt: skip
        """Copy from from_rank's memory at `from_ptr` to own memory at `to_ptr`; from other nodes see `gin`."""
        event = self.tracing.begin(events.GET, from_rank, from_ptr, mask)
        if gin.linked() and self._is_far(from_rank):
            gin.get(from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, self._network(), mask)
        else:
            self._check(from_rank, mask)
            language.get(
                from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, mask, other, load_cache_modifier,
                store_cache_modifier, hint
            )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def _check(self, peer, mask=None):
        """Check the rank of a peer whose heap is addressed; on GPUs in kernels compiled with debug=True."""
        check_rank(peer, self.world_size)
        gin.check_near(self.rank, peer, mask, self.heap_bases, self.world_size)

    @triton.jit
    def _network(self):
        """Return the pointer to the words of the network."""
        return self.heap_bases + (self.world_size + _NETWORK_WORD)

    @triton.jit
    def _is_far(self, rank):
        """Whether a rank is on another node; in kernels with a network only."""
        check_rank(rank, self.world_size)
        return tl.load(self.heap_bases + rank) == tl.load(self._network() + _FAR_BASE)

    @triton.jit
    def put(
        self, from_ptr, to_ptr, to_rank, mask=None, other=None, load_cache_modifier: constexpr = None,
        store_cache_modifier: constexpr = None, hint: constexpr = None
    ):  # fmt: skip
        """Copy from own memory at `from_ptr` to to_rank's memory at `to_ptr`; to other nodes see `gin`."""
        event = self.tracing.begin(events.PUT, to_rank, to_ptr, mask)
        if gin.linked() and self._is_far(to_rank):
            gin.put(from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, self._network(), mask)
        else:
            self._check(to_rank, mask)
            language.put(
                from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other, load_cache_modifier,
                store_cache_modifier, hint
            )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def copy(
        self, src_ptr, dst_ptr, from_rank, to_rank, mask=None, other=None, load_cache_modifier: constexpr = None,
        store_cache_modifier: constexpr = None, hint: constexpr = None
    ):  # fmt: skip
        """Copy from from_rank's memory at `src_ptr` to to_rank's memory at `dst_ptr`; both are own addresses."""
        self._check(from_rank, mask)
        self._check(to_rank, mask)
        event = self.tracing.begin(events.COPY, to_rank, dst_ptr, mask)
        language.copy(
            src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other, load_cache_modifier,
            store_cache_modifier, hint
        )  # fmt: skip
        self.tracing.end(event)

    atomic_add, atomic_sub, atomic_xchg, atomic_xor, atomic_and, atomic_or, atomic_min, atomic_max = map(
        _atomic, ("add", "sub", "xchg", "xor", "and", "or", "min", "max")
    )

    @triton.jit
    def atomic_cas(
        self, pointer, cmp, val, to_rank, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomically replace to_rank's memory at `pointer` by `val` where it equals `cmp`; returns the old value."""
        self._check(to_rank)
        event = self.tracing.begin(events.of_atomic("cas"), to_rank, pointer)
        old = language.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint)
        self.tracing.end_after(event, old)
        return old

    @triton.jit
    def signal(self, pointer, value, to_rank, op: constexpr = SET, sem: constexpr = RELEASE, scope: constexpr = SYS):
        """Update a flag of to_rank after all earlier stores of this program."""
        event = self.tracing.begin(events.SIGNAL, to_rank, pointer)
        if gin.linked() and gin.is_addition(pointer.dtype.element_ty, op) and self._is_far(to_rank):
            gin.signal(pointer, value, self.rank, to_rank, self.heap_bases, self._network())
        else:
            self._check(to_rank)
            language.signal(pointer, value, self.rank, to_rank, self.heap_bases, op, sem, scope)
        self.tracing.end(event)

    @triton.jit
    def wait(self, pointer, value, cmp: constexpr = GE, sem: constexpr = ACQUIRE, scope: constexpr = SYS):
        """Wait until `flag <cmp> value` holds for all flags at `pointer`; returns the last values seen."""
        timeout_ns, status = wait_bound(self.heap_bases, self.world_size)
        event = self.tracing.begin(events.WAIT, self.rank, pointer)
        seen = language.wait(pointer, value, cmp, sem, scope, timeout_ns, status, self.rank)
        self.tracing.end(event)
        return seen

    @triton.jit
    def wait_any(self, pointer, value, cmp: constexpr = GE, sem: constexpr = ACQUIRE, scope: constexpr = SYS):
        """Wait until `flag <cmp> value` holds for one of the flags at `pointer`; returns which, -1 after the bound."""
        timeout_ns, status = wait_bound(self.heap_bases, self.world_size)
        event = self.tracing.begin(events.WAIT, self.rank, pointer)
        place = language.wait_any(pointer, value, cmp, sem, scope, timeout_ns, status, self.rank)
        self.tracing.end(event)
        return place

    @triton.jit
    def test(self, pointer, value, cmp: constexpr = GE, sem: constexpr = ACQUIRE, scope: constexpr = SYS):
        """Return whether `flag <cmp> value` holds now for all flags at `pointer`."""
        return language.test(pointer, value, cmp, sem, scope)

    @triton.jit
    def load_acquire(self, pointer, scope: constexpr = SYS):
        """Return the flags at `pointer`; what was stored before their signals is visible then."""
        return language.load_acquire(pointer, scope)

    @triton.jit
    def put_signal(
        self, from_ptr, to_ptr, signal_ptr, value, to_rank, op: constexpr = SET, mask=None, other=None,
        load_cache_modifier: constexpr = None, store_cache_modifier: constexpr = None, hint: constexpr = None,
        sem: constexpr = RELEASE, scope: constexpr = SYS
    ):  # fmt: skip
        """Copy from own memory to to_rank's memory, then signal."""
        event = self.tracing.begin(events.PUT, to_rank, to_ptr, mask)
        if gin.linked() and gin.is_addition(signal_ptr.dtype.element_ty, op) and self._is_far(to_rank):
            gin.put_signal(
                from_ptr, to_ptr, signal_ptr, value, self.rank, to_rank, self.heap_bases, self._network(), mask
            )
        else:
            self._check(to_rank, mask)
            language.put_signal(
                from_ptr, to_ptr, signal_ptr, value, self.rank, to_rank, self.heap_bases, op, mask, other,
                load_cache_modifier, store_cache_modifier, hint, sem, scope
            )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def flush(self):
        """Wait until the sources of this program's puts to other nodes may be changed; else there is nothing to do."""
        if gin.linked():
            gin.flush(self._network())

    @triton.jit
    def barrier(self, flags, rank_start=0, rank_stride=1, group_size=None, program=0):
        """Wait until every rank of the group has arrived; its stores are then visible.  Collective over the group."""
        timeout_ns, status = wait_bound(self.heap_bases, self.world_size)
        event = self.tracing.begin(events.BARRIER, -1, flags)
        language.barrier(
            flags, self.rank, self.world_size, self.heap_bases, rank_start, rank_stride, group_size, program,
            timeout_ns, status
        )  # fmt: skip
        self.tracing.end(event)


@aggregate
class DeviceContext(DeviceMethods):
    """World of a kernel (rank, size, heap bases), and the device functions as methods.

    The caller's rank is filled in; every other parameter means what it means in `iris_triton.language`.  The waits
    are bounded by IRIS_DEVICE_TIMEOUT and report to the host when the bound is reached.

    Attributes:
        rank: the caller; a constexpr, or a run-time value if the context was made from one.
        world_size: number of ranks (constexpr).
        heap_bases: pointer to int64[world_size], the address of every rank's heap in this process.
        tracing: records events, if the context was made with tracing; see `iris_triton.language.trace.DeviceTracing`.

    Arguments that the methods share:
        pointer, from_ptr, to_ptr, src_ptr, dst_ptr: pointer, or block of pointers of any shape, into the caller's heap;
            the access goes to the same offsets of the other rank's.  The own side, `to_ptr` of `get` and `from_ptr` of
            `put` and `put_signal`, may lie anywhere.  Flags are less free: `signal` and `put_signal` change one,
            `wait`, `test` and `load_acquire` take one or a block with one dimension, and `wait_any` such a block.
        from_rank, to_rank: rank whose memory is read or changed, an int32 or a constexpr.  One outside of the world
            fires an assertion on the CPU and, on GPUs, in kernels that are compiled with debug=True.
        value, val: scalar or block; converted to the pointers' element type.
        mask: which elements are accessed.
        other: what the others are; undefined without it.
        sem, scope, cache_modifier, volatile, hint: as in `iris_triton.language`.

    What is returned has the pointers' shape and element type.

    Example:
        @triton.jit
        def kernel(data, context_tensor, rank: tl.constexpr, world_size: tl.constexpr):
            ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
            ctx.store(data, 1.0, (rank + 1) % world_size)
    """

    rank: tl.constexpr | tl.tensor
    world_size: tl.constexpr
    heap_bases: tl.tensor
    tracing: DeviceTracing

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size: tl.constexpr, tracing: tl.constexpr = False):
        """Decode the context tensor.

        Args:
            context_tensor: what `ctx.get_device_context()` returns.
            rank: the caller.  As a constexpr it makes one binary per rank; see `from_tensor`.
            world_size: number of ranks.  The CPU checks both, and the tensor, against the open contexts.
            tracing: record every operation of the context but those on tiles, and what the kernel records itself,
                while the host has tracing on (`ctx.tracing.enable()`).  Without it there is not one instruction more.
        """
        check_context(context_tensor, rank, world_size)
        words = context_tensor + (_HEADER_WORDS + _TRACE_WORD + world_size)
        recorder = DeviceTracing(words, tl.core.to_tensor(rank), tracing)
        return DeviceContext(rank, world_size, context_tensor + _HEADER_WORDS, recorder)

    @staticmethod
    @triton.jit
    def from_tensor(context_tensor, world_size: tl.constexpr, tracing: tl.constexpr = False):
        """Decode the context tensor and read the rank from it at run time, so that one binary serves all ranks.

        The arguments are those of `initialize`.
        """
        rank = tl.load(context_tensor).to(tl.int32)
        return DeviceContext.initialize(context_tensor, rank, world_size, tracing)
