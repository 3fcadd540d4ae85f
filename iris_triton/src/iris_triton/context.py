"""The device functions with ranks and heap bases filled in: methods of both languages' contexts, and DeviceContext."""
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language import constexpr

from iris_core.device import context_words as _layout
from iris_triton import language
from iris_triton._compat import AggregateMethods, aggregate
from iris_triton.language import trace as events
from iris_triton.language.address import check_context
from iris_triton.language.atomics import _rmw
from iris_triton.language.sync import ACQUIRE, GE, RELEASE, SET, SYS
from iris_triton.language.trace import DeviceTracing
from iris_triton.tiles import moves, reductions
from iris_triton.tiles.protocol import World, await_end
from iris_triton.tiles.views import number_of

_HEADER_WORDS = constexpr(_layout.HEADER_WORDS)
_TIMEOUT_WORD = constexpr(_layout.TIMEOUT_WORD)
_STATUS_WORD = constexpr(_layout.STATUS_WORD)
_TRACE_WORD = constexpr(_layout.TRACE_WORD)


@triton.jit
def check_rank(rank, world_size):
    """Fires on the CPU and, on GPUs, in kernels that are compiled with debug=True; elsewhere it costs nothing."""
    tl.device_assert((rank >= 0) & (rank < world_size), "a rank outside the world is addressed")


class DeviceMethods(AggregateMethods):
    """The methods of every device context, which has `rank`, `world_size`, `heap_bases` and `tracing`."""

    @triton.jit
    def load(
        self, pointer, from_rank, mask=None, other=None, cache_modifier: constexpr = None, volatile: constexpr = False,
        hint: constexpr = None
    ):  # fmt: skip
        """Return what lies at `pointer` in the heap of from_rank."""
        check_rank(from_rank, self.world_size)
        event = self.tracing.begin(events.LOAD, from_rank, pointer, mask)
        value = language.load(
            pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile, hint
        )
        self.tracing.end_after(event, value)
        return value

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, cache_modifier: constexpr = None, hint: constexpr = None):
        """Store `value` at `pointer` in the heap of to_rank."""
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.STORE, to_rank, pointer, mask)
        language.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)
        self.tracing.end(event)

    @triton.jit
    def get(
        self, from_ptr, to_ptr, from_rank, mask=None, other=None, load_cache_modifier: constexpr = None,
        store_cache_modifier: constexpr = None, hint: constexpr = None
    ):  # fmt: skip
        """Copy from from_rank's memory at `from_ptr` to own memory at `to_ptr`."""
        check_rank(from_rank, self.world_size)
        event = self.tracing.begin(events.GET, from_rank, from_ptr, mask)
        language.get(
            from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, mask, other, load_cache_modifier,
            store_cache_modifier, hint
        )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def put(
        self, from_ptr, to_ptr, to_rank, mask=None, other=None, load_cache_modifier: constexpr = None,
        store_cache_modifier: constexpr = None, hint: constexpr = None
    ):  # fmt: skip
        """Copy from own memory at `from_ptr` to to_rank's memory at `to_ptr`."""
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.PUT, to_rank, to_ptr, mask)
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
        check_rank(from_rank, self.world_size)
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.COPY, to_rank, dst_ptr, mask)
        language.copy(
            src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other, load_cache_modifier,
            store_cache_modifier, hint
        )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def _rmw(self, op: constexpr, pointer, val, to_rank, mask, sem: constexpr, scope: constexpr, hint: constexpr):
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.of_atomic(op), to_rank, pointer, mask)
        old = _rmw(op, pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)
        self.tracing.end_after(event, old)
        return old

    @triton.jit
    def atomic_add(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomically add `val` to to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("add", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_sub(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomically subtract `val` from to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("sub", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_cas(
        self, pointer, cmp, val, to_rank, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomically replace to_rank's memory at `pointer` by `val` where it equals `cmp`; returns the old value."""
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.of_atomic("cas"), to_rank, pointer)
        old = language.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint)
        self.tracing.end_after(event, old)
        return old

    @triton.jit
    def atomic_xchg(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomically store `val` to to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("xchg", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_xor(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomic bitwise xor on to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("xor", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_and(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomic bitwise and on to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("and", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_or(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomic bitwise or on to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("or", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_min(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomic minimum on to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("min", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def atomic_max(
        self, pointer, val, to_rank, mask=None, sem: constexpr = None, scope: constexpr = None, hint: constexpr = None
    ):
        """Atomic maximum on to_rank's memory at `pointer`; returns the old value."""
        return self._rmw("max", pointer, val, to_rank, mask, sem, scope, hint)

    @triton.jit
    def signal(self, pointer, value, to_rank, op: constexpr = SET, sem: constexpr = RELEASE, scope: constexpr = SYS):
        """Change a flag of to_rank after everything that this program has stored so far."""
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.SIGNAL, to_rank, pointer)
        language.signal(pointer, value, self.rank, to_rank, self.heap_bases, op, sem, scope)
        self.tracing.end(event)

    @triton.jit
    def _bound(self):
        """How long waits may take, and where they report."""
        words = self.heap_bases + self.world_size
        status = tl.load(words + _STATUS_WORD).to(tl.pointer_type(tl.int64))
        return tl.load(words + _TIMEOUT_WORD), status

    @triton.jit
    def wait(self, pointer, value, cmp: constexpr = GE, sem: constexpr = ACQUIRE, scope: constexpr = SYS):
        """Wait until `flag <cmp> value` holds for all flags at `pointer`; returns the last values seen."""
        timeout_ns, status = self._bound()
        event = self.tracing.begin(events.WAIT, self.rank, pointer)
        seen = language.wait(pointer, value, cmp, sem, scope, timeout_ns, status, self.rank)
        self.tracing.end(event)
        return seen

    @triton.jit
    def wait_any(self, pointer, value, cmp: constexpr = GE, sem: constexpr = ACQUIRE, scope: constexpr = SYS):
        """Wait until `flag <cmp> value` holds for one of the flags at `pointer`; returns which, -1 after the bound."""
        timeout_ns, status = self._bound()
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
        check_rank(to_rank, self.world_size)
        event = self.tracing.begin(events.PUT, to_rank, to_ptr, mask)
        language.put_signal(
            from_ptr, to_ptr, signal_ptr, value, self.rank, to_rank, self.heap_bases, op, mask, other,
            load_cache_modifier, store_cache_modifier, hint, sem, scope
        )  # fmt: skip
        self.tracing.end(event)

    @triton.jit
    def barrier(self, flags, rank_start=0, rank_stride=1, group_size=None, program=0):
        """Wait until every rank of the group has come here; its stores are then visible.  Collective over the group."""
        timeout_ns, status = self._bound()
        event = self.tracing.begin(events.BARRIER, -1, flags)
        language.barrier(
            flags, self.rank, self.world_size, self.heap_bases, rank_start, rank_stride, group_size, program,
            timeout_ns, status
        )  # fmt: skip
        self.tracing.end(event)

    # -- tile-level collectives: docs/tiles.md ------------------------------------------------------------------------
    @triton.jit
    def _world(self):
        return World(self.rank, self.world_size, self.heap_bases)

    @triton.jit
    def all_gather(self, tile, dst_view, dim: constexpr):
        """Store a tile to all ranks, at its place in the caller's part of `dst_view`.

        Complete on all ranks behind a barrier; another one must come before `dst_view` is written again.

        Args:
            tile: `Tile` of the caller's own part.
            dst_view: the whole, symmetric: the ranks' parts below each other (dim 0) or side by side (dim 1).
            dim: 0: part r is rows r * p and following, p = M / world_size rounded up, and the last parts may be
                shorter; 1: so with columns.
        """
        moves.all_gather(tile, dst_view, dim, self._world())

    @triton.jit
    def gather(self, tile, src_view, source_rank, hint: constexpr = None):
        """Return a tile of source_rank's `src_view`; 0 beyond the tensor.

        Args:
            tile: `TileView`.
            src_view: symmetric, complete on source_rank.
            source_rank: rank whose memory is read.
            hint: as in `load`.
        """
        return moves.gather(tile, src_view, source_rank, hint, self._world())

    @triton.jit
    def all_to_all(self, tile, src_view, dst_view, N_per_rank):
        """Fill a tile of the caller's `dst_view`; its columns s * N_per_rank and following come from rank s.

        They are columns rank * N_per_rank and following there.  Reads the other ranks: a barrier must come before, and
        another one before `src_view` is written again.

        Args:
            tile: `TileView` of `dst_view`; may span the parts of several ranks.
            src_view: M x (world_size * N_per_rank), symmetric.
            dst_view: the same shape, the caller's own.
            N_per_rank: columns that each rank sends to each.
        """
        moves.all_to_all(tile, src_view, dst_view, N_per_rank, self._world())

    @triton.jit
    def all_reduce(self, tile, src_view, dst_view, config=None, tile_id=None):
        """Reduce a tile over all ranks by the algorithm that `config` names; "atomic" by default.

        Args:
            tile, src_view, dst_view: as in the method of that algorithm; those that have no `src_view` use it only to
                find the data of a `TileView`.
            config: `AllReduceConfig`.
            tile_id: row of `locks` that belongs to the tile, the same on all ranks; its number by default.
        """
        if config is None:
            reductions.all_reduce_atomic(reductions._with_data(tile, src_view), dst_view, self._world())
        else:
            number = number_of(tile, dst_view) if tile_id is None else tile_id
            reductions.all_reduce(tile, src_view, dst_view, config, number, self._world())

    @triton.jit
    def all_reduce_atomic(self, tile, dst_view):
        """Add a tile to `dst_view` of all ranks by atomics, which round after every addition.

        `dst_view` must be zero before, behind a barrier, and is complete behind a barrier.  Sums of floats may differ
        in their last bits between ranks and from run to run.

        Args:
            tile: `Tile`.
            dst_view: symmetric; float16, bfloat16, or floats and integers of 32 and 64 bits.
        """
        reductions.all_reduce_atomic(tile, dst_view, self._world())

    @triton.jit
    def all_reduce_spinlock(self, tile, dst_view, locks):
        """Add a tile to `dst_view` of all ranks, one rank at a time; otherwise as `all_reduce_atomic`, of any dtype.

        Args:
            tile: `Tile`.
            dst_view: symmetric.
            locks: one word for each tile, see `iris_triton.tiles.make_locks` (variant "spinlock").
        """
        reductions.all_reduce_spinlock(tile, dst_view, locks, number_of(tile, dst_view), self._world())

    @triton.jit
    def all_reduce_one_shot(self, tile, src_view, dst_view, locks):
        """Sum a tile over all ranks; every rank reads all parts.  The result is there on return, the same on all ranks.

        Waits for the other ranks' calls on this tile.  docs/tiles.md says when that can deadlock.

        Args:
            tile: `Tile`, whose data is stored in `src_view`, or `TileView` of data that lies there.
            src_view: symmetric; where the others read this rank's part.  May be `dst_view`.
            dst_view: the result, the caller's own.
            locks: int64, see `iris_triton.tiles.make_locks`.  Or int32, one word for each tile, as in AMD's
                Iris: the kernel stores its part in `src_view` and sets the word to 1 before; see docs/tiles.md.
        """
        reductions.all_reduce_one_shot(tile, src_view, dst_view, locks, number_of(tile, dst_view), self._world())

    @triton.jit
    def all_reduce_two_shot(self, tile, src_view, dst_view, locks, start_tile=None, stride=None):
        """Sum a tile over all ranks; one rank reads all parts and stores the result to all, the same bits.

        Without `start_tile` that is the rank that comes last, so no rank waits for another; with int32 locks, rank
        t % world_size for tile t.  Complete behind a barrier, or when `await_tile` returns.

        Args:
            tile, src_view, locks: as in `all_reduce_one_shot`.
            dst_view: symmetric; the result.
            start_tile, stride: the caller reduces tiles start_tile, start_tile + stride, ... and waits for the others'
                parts of those.  Every tile must be of exactly one rank, for example with (rank, world_size).
        """
        tile_id = number_of(tile, dst_view)
        if start_tile is None:
            reductions.all_reduce_two_shot(tile, src_view, dst_view, locks, tile_id, self._world())
        else:
            reductions.all_reduce_two_shot_by_owner(
                tile, src_view, dst_view, locks, tile_id, start_tile, stride, self._world()
            )

    @triton.jit
    def all_reduce_ring(self, tile, src_view, dst_view, locks):
        """Sum a tile over all ranks, from rank to rank; the result is there on return, the same on all ranks.

        Waits as `all_reduce_one_shot` does.

        Args:
            tile: as in `all_reduce_one_shot`.
            locks: int64, see `iris_triton.tiles.make_locks`.
            src_view: symmetric; overwritten.  Sums of 16-bit floats are float32 and travel in halves, in `src_view` and
                `dst_view`, which must then have 16 bits both, and not be the same; or one of them is float32.
            dst_view: symmetric; the result.
        """
        reductions.all_reduce_ring(tile, src_view, dst_view, locks, number_of(tile, dst_view), self._world())

    @triton.jit
    def reduce_scatter(self, tile, src_view, dst_view, locks):
        """Sum a tile over all ranks; only its owner's `dst_view` gets the result.

        Of T tiles, counted row by row, rank r owns T // world_size from r * (T // world_size) on; the last rank also
        those that are left.  The rank that comes last reduces, so no rank waits for another; with int32 locks, the
        owner.  Complete behind a barrier, or on the owner when `await_tile` returns there.

        Args:
            tile, src_view, locks: as in `all_reduce_one_shot`.
            dst_view: symmetric, of the shape of the whole.
        """
        reductions.reduce_scatter(tile, src_view, dst_view, locks, number_of(tile, dst_view), self._world())

    @triton.jit
    def await_tile(self, tile, dst_view, locks):
        """Wait until the last call on a tile that used these locks is over on all ranks.

        Then its result is in `dst_view`, and no rank reads the caller's `src_view` any more.

        Args:
            tile: `Tile` or `TileView`.
            dst_view, locks: those of the call; int64, not of "spinlock".
        """
        await_end(locks, number_of(tile, dst_view), self._world())


@aggregate
class DeviceContext(DeviceMethods):
    """The world as a kernel knows it, and the device functions as methods.

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

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases, tracing):
        self.rank = rank if isinstance(rank, tl.tensor) else tl.constexpr(rank)
        self.world_size = tl.constexpr(world_size)
        self.heap_bases = heap_bases
        self.tracing = tracing

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

        Args:
            context_tensor: what `ctx.get_device_context()` returns.
            world_size: number of ranks.
            tracing: see `initialize`.
        """
        rank = tl.load(context_tensor).to(tl.int32)
        return DeviceContext.initialize(context_tensor, rank, world_size, tracing)
