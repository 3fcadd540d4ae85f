"""DeviceContext: the device functions with rank and heap bases filled in."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_core import device_context as _layout
from iris_triton import language
from iris_triton._compat import aggregate
from iris_triton.sync import ACQUIRE, GE, RELEASE, SET, SYS

_HEADER_WORDS = tl.constexpr(_layout.HEADER_WORDS)
_TIMEOUT_WORD = tl.constexpr(_layout.TIMEOUT_WORD)
_STATUS_WORD = tl.constexpr(_layout.STATUS_WORD)


@triton.jit
def _check_rank(rank, world_size: tl.constexpr):
    """Fires on the CPU and, on GPUs, in kernels that are compiled with debug=True; elsewhere it costs nothing."""
    tl.device_assert((rank >= 0) & (rank < world_size), "a rank outside the world is addressed")


@aggregate
class DeviceContext:
    """What a kernel knows of the world, and the device functions as methods.

    The caller's rank is filled in; every other parameter means what it means in `iris_triton.language`.  The waits
    are bounded by IRIS_DEVICE_TIMEOUT and report to the host when the bound is reached.

    Attributes:
        rank: the caller; a constexpr, or a run-time value if the context was made from one.
        world_size: number of ranks (constexpr).
        heap_bases: pointer to int64[world_size], the address of every rank's heap in this process.
        tracing: whether device tracing is on (constexpr).

    Example:
        @triton.jit
        def kernel(data, context_tensor, rank: tl.constexpr, world_size: tl.constexpr):
            ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
            ctx.store(data, 1.0, (rank + 1) % world_size)
    """

    rank: tl.constexpr | tl.tensor
    world_size: tl.constexpr
    heap_bases: tl.tensor
    tracing: tl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases, tracing):
        self.rank = rank if isinstance(rank, tl.tensor) else tl.constexpr(rank)
        self.world_size = tl.constexpr(world_size)
        self.heap_bases = heap_bases
        self.tracing = tl.constexpr(tracing)

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size: tl.constexpr, tracing: tl.constexpr = False):
        """Decode the context tensor.

        Args:
            context_tensor: what `ctx.get_device_context()` returns.
            rank: the caller.  As a constexpr it makes one binary per rank; see `from_tensor`.
            world_size: number of ranks.
            tracing: must be False in this version.
        """
        tl.static_assert(not tracing, "this version of iris-triton has no device tracing: leave tracing=False")
        return DeviceContext(rank, world_size, context_tensor + _HEADER_WORDS, tracing)

    @staticmethod
    @triton.jit
    def from_tensor(context_tensor, world_size: tl.constexpr):
        """Decode the context tensor and read the rank from it at run time, so that one binary serves all ranks.

        Args:
            context_tensor: what `ctx.get_device_context()` returns.
            world_size: number of ranks.
        """
        rank = tl.load(context_tensor).to(tl.int32)
        return DeviceContext(rank, world_size, context_tensor + _HEADER_WORDS, False)

    @triton.jit
    def load(
        self,
        pointer,
        from_rank,
        mask=None,
        other=None,
        cache_modifier: tl.constexpr = None,
        volatile: tl.constexpr = False,
        hint: tl.constexpr = None,
    ):
        """Return what lies at `pointer` in the heap of from_rank."""
        _check_rank(from_rank, self.world_size)
        return language.load(
            pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile, hint
        )

    @triton.jit
    def store(
        self,
        pointer,
        value,
        to_rank,
        mask=None,
        cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Store `value` at `pointer` in the heap of to_rank."""
        _check_rank(to_rank, self.world_size)
        language.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)

    @triton.jit
    def get(
        self,
        from_ptr,
        to_ptr,
        from_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from from_rank's memory at `from_ptr` to own memory at `to_ptr`."""
        _check_rank(from_rank, self.world_size)
        language.get(
            from_ptr,
            to_ptr,
            self.rank,
            from_rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def put(
        self,
        from_ptr,
        to_ptr,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from own memory at `from_ptr` to to_rank's memory at `to_ptr`."""
        _check_rank(to_rank, self.world_size)
        language.put(
            from_ptr,
            to_ptr,
            self.rank,
            to_rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def copy(
        self,
        src_ptr,
        dst_ptr,
        from_rank,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from from_rank's memory at `src_ptr` to to_rank's memory at `dst_ptr`; both are own addresses."""
        _check_rank(from_rank, self.world_size)
        _check_rank(to_rank, self.world_size)
        language.copy(
            src_ptr,
            dst_ptr,
            from_rank,
            to_rank,
            self.rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def atomic_add(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomically add `val` to to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_add(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_sub(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomically subtract `val` from to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_sub(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_cas(
        self,
        pointer,
        cmp,
        val,
        to_rank,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomically replace to_rank's memory at `pointer` by `val` where it equals `cmp`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint)

    @triton.jit
    def atomic_xchg(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomically store `val` to to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_xchg(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_xor(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomic bitwise xor on to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_xor(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_and(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomic bitwise and on to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_and(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_or(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomic bitwise or on to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_or(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_min(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomic minimum on to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_min(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_max(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Atomic maximum on to_rank's memory at `pointer`; returns the old value."""
        _check_rank(to_rank, self.world_size)
        return language.atomic_max(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def signal(
        self,
        pointer,
        value,
        to_rank,
        op: tl.constexpr = SET,
        sem: tl.constexpr = RELEASE,
        scope: tl.constexpr = SYS,
    ):
        """Change a flag of to_rank after everything that this program has stored so far."""
        _check_rank(to_rank, self.world_size)
        language.signal(pointer, value, self.rank, to_rank, self.heap_bases, op, sem, scope)

    @triton.jit
    def wait(
        self,
        pointer,
        value,
        cmp: tl.constexpr = GE,
        sem: tl.constexpr = ACQUIRE,
        scope: tl.constexpr = SYS,
    ):
        """Wait until `flag <cmp> value` holds for all flags at `pointer`; returns the last values seen."""
        words = self.heap_bases + self.world_size
        timeout_ns = tl.load(words + _TIMEOUT_WORD)
        status = tl.load(words + _STATUS_WORD).to(tl.pointer_type(tl.int64))
        return language.wait(pointer, value, cmp, sem, scope, timeout_ns, status, self.rank)

    @triton.jit
    def put_signal(
        self,
        from_ptr,
        to_ptr,
        signal_ptr,
        value,
        to_rank,
        op: tl.constexpr = SET,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
        sem: tl.constexpr = RELEASE,
        scope: tl.constexpr = SYS,
    ):
        """Copy from own memory to to_rank's memory, then signal."""
        _check_rank(to_rank, self.world_size)
        language.put_signal(
            from_ptr,
            to_ptr,
            signal_ptr,
            value,
            self.rank,
            to_rank,
            self.heap_bases,
            op,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
            sem,
            scope,
        )

    @triton.jit
    def barrier(self, flags, rank_start=0, rank_stride=1, group_size=None, program=0):
        """Wait until every rank of the group has come here; its stores are then visible.  Collective over the group."""
        words = self.heap_bases + self.world_size
        timeout_ns = tl.load(words + _TIMEOUT_WORD)
        status = tl.load(words + _STATUS_WORD).to(tl.pointer_type(tl.int64))
        language.barrier(
            flags,
            self.rank,
            self.world_size,
            self.heap_bases,
            rank_start,
            rank_stride,
            group_size,
            program,
            timeout_ns,
            status,
        )
