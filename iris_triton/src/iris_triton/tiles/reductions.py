"""Tile-level reductions: all_reduce in five algorithms, and reduce_scatter, as methods of the contexts.

What the algorithms have in common, and why nothing that a rank still reads is overwritten:

- The caller's part lies in its own `src_view`; the others read it there.  It is stored when the call before on this
  tile is over, that is, when all ranks have read the last part (`protocol.begin`).
- A result is stored to another rank's `dst_view` only after that rank has arrived at this call, so what reads the last
  result on that rank's stream has run before.
- A result is stored when all parts of the tile have been read, so that `src_view` and `dst_view` may be the same.

Sums go in rank order (in a ring: in the order of the ring), in the wider type of the two views, at least float32 for
floats, and are rounded once.
"""

import triton
import triton.language as tl

from iris_triton._compat import aggregate
from iris_triton.collectives.parts.elements import as_words, wide_type, widened
from iris_triton.language.address import translate
from iris_triton.language.atomics import atomic_add, atomic_xchg
from iris_triton.language.flags import await_flag, is_counter
from iris_triton.language.memory import load, store
from iris_triton.language.sync import signal
from iris_triton.tiles.locks import VARIANTS
from iris_triton.tiles.moves import Moves, store_to_all
from iris_triton.tiles.protocol import ALL_READ, AT_RETURN, ONE_READS, await_end, await_raised, begin, wait_bound
from iris_triton.tiles.views import Tile, number_of


@triton.constexpr_function
def _variant_code(variant):
    names = VARIANTS  # under a name of its own: the compiler refuses methods of global objects
    variant = getattr(variant, "value", variant)
    if variant in names:
        return names.index(variant)
    if not isinstance(variant, int) or not 0 <= variant < len(names):
        raise ValueError(f"unknown variant {variant!r} of all_reduce: 0 to {len(names) - 1}, or {', '.join(names)}")
    return variant


@aggregate
class AllReduceConfig:
    """Algorithm of `all_reduce`, and its locks.

    Example:
        ctx.all_reduce(tile, src_view, dst_view, config=AllReduceConfig("two_shot", locks))
    """

    #: 0 or "atomic", 1 or "ring", 2 or "one_shot", 3 or "two_shot", 4 or "spinlock" (constexpr)
    variant_code: tl.constexpr
    locks_ptr: tl.tensor | tl.constexpr  #: `locks` as in the method of that algorithm; may be left out for "atomic"

    @triton.constexpr_function
    def __init__(self, variant_code, locks_ptr=None):
        self.variant_code = tl.constexpr(_variant_code(variant_code))
        self.locks_ptr = locks_ptr if isinstance(locks_ptr, tl.tensor) else tl.constexpr(locks_ptr)


@triton.constexpr_function
def _sums(part, result):
    """Return the type of sums: that of the wider one, if it holds parts; of floats with less than 32 bits float32."""
    part, result = wide_type(part), wide_type(result)
    widths = [each.primitive_bitwidth + each.is_floating() for each in (part, result)]
    return result if widths[0] < widths[1] and (result.is_floating() or not part.is_floating()) else part


@triton.jit
def _sum(tile, src_view, dst_view, ctx):
    """Return the sum of all ranks' parts, in rank order; the next part is prefetched while one is added."""
    ptr, mask = src_view.tile_ptr(tile)
    sums: tl.constexpr = _sums(src_view.ptr.dtype.element_ty, dst_view.ptr.dtype.element_ty)
    acc = load(ptr, ctx.rank, 0, ctx.heap_bases, mask).to(sums)
    ahead = load(ptr, ctx.rank, 1 % ctx.world_size, ctx.heap_bases, mask)
    for rank in range(2, ctx.world_size):
        part = ahead
        ahead = load(ptr, ctx.rank, rank, ctx.heap_bases, mask)
        acc += part.to(sums)
    if ctx.world_size > 1:
        acc += ahead.to(sums)
    return acc


@triton.jit
def _store_to_all(tile, dst_view, value, ctx):
    ptr, mask = dst_view.tile_ptr(tile)
    store_to_all(ptr, value.to(dst_view.ptr.dtype.element_ty), mask, ctx)


@triton.jit
def _store_own(tile, dst_view, value):
    ptr, mask = dst_view.tile_ptr(tile)
    tl.store(ptr, value.to(dst_view.ptr.dtype.element_ty), mask=mask)


@triton.constexpr_function
def _raised_by_kernel(locks):
    """Return whether the kernel sets flags itself, as in AMD's Iris."""
    element = locks.dtype.element_ty
    if element not in (tl.int32, tl.int64):
        raise ValueError(
            f"locks have {element}: they must be int64, from iris_triton.tiles.make_locks, or int32, a flag for each "
            "tile that the kernel raises itself as in AMD's Iris (docs/tiles.md)"
        )
    return element == tl.int32


@triton.jit
def _owner(tile, dst_view, tile_id, ctx):
    """Return the owner of a tile in reduce_scatter: ranks own equal blocks, the last rank also the remainder."""
    share = dst_view.number_of_tiles(tile.block_m, tile.block_n) // ctx.world_size
    return tl.where(share == 0, ctx.world_size - 1, tl.minimum(tile_id // tl.maximum(share, 1), ctx.world_size - 1))


@triton.jit
def _reduce_by_owner(tile, src_view, dst_view, locks, number, start_tile, stride, ctx):
    """Reduce and store to all on the rank whose tiles start_tile, start_tile + stride, ... include this one."""
    own = (number >= start_tile) & ((number - start_tile) % stride == 0)
    if _raised_by_kernel(locks):
        if own:
            await_raised(locks, number, ctx)
            _store_to_all(tile, dst_view, _sum(tile, src_view, dst_view, ctx), ctx)
    else:
        row = begin(locks, number, ctx, ONE_READS)
        tile.publish(src_view)
        row.publish_to_all(row.arrived(ctx.rank))
        if own:
            row.wait_all(row.arrived(0))
            _store_to_all(tile, dst_view, _sum(tile, src_view, dst_view, ctx), ctx)
            row.publish_to_all(row.done())
        row.end()


@triton.constexpr_function
def _carrier(part, sums, result):
    """Return the view that stores partial sums without rounding: "src", "dst" or "both"."""
    if sums == part:
        return "src"
    if sums == result:
        return "dst"
    if sums.primitive_bitwidth == 32 and part.primitive_bitwidth == result.primitive_bitwidth == 16:
        return "both"
    raise ValueError(
        f"all_reduce_ring passes sums of {sums} on through its views, of {part} and {result}: one of them must have "
        "that type, or both must have 16 bits"
    )


@triton.jit
def _keep_sum(tile, src_view, dst_view, acc):
    """Store a partial sum in local memory, where the next rank reads it."""
    src, mask = src_view.tile_ptr(tile)
    dst, _ = dst_view.tile_ptr(tile)
    carrier: tl.constexpr = _carrier(src_view.ptr.dtype.element_ty, acc.dtype, dst_view.ptr.dtype.element_ty)
    if carrier == "src":
        tl.store(src, acc, mask=mask)
    elif carrier == "dst":
        tl.store(dst, acc, mask=mask)
    else:
        tl.device_assert(
            tl.cast(src_view.ptr, tl.int64) != tl.cast(dst_view.ptr, tl.int64),
            "all_reduce_ring of 16-bit elements needs src_view and dst_view in different memory",
        )
        bits = acc.to(tl.int32, bitcast=True)
        tl.store(as_words(src), (bits >> 16).to(tl.int16), mask=mask)
        tl.store(as_words(dst), bits.to(tl.int16), mask=mask)


@triton.jit
def _sum_of(tile, src_view, dst_view, rank, sums: tl.constexpr, ctx):
    src, mask = src_view.tile_ptr(tile)
    dst, _ = dst_view.tile_ptr(tile)
    carrier: tl.constexpr = _carrier(src_view.ptr.dtype.element_ty, sums, dst_view.ptr.dtype.element_ty)
    if carrier == "src":
        return load(src, ctx.rank, rank, ctx.heap_bases, mask)
    elif carrier == "dst":
        return load(dst, ctx.rank, rank, ctx.heap_bases, mask)
    else:
        high = load(as_words(src), ctx.rank, rank, ctx.heap_bases, mask).to(tl.int32)
        low = load(as_words(dst), ctx.rank, rank, ctx.heap_bases, mask).to(tl.int32)
        return ((high << 16) | (low & 0xFFFF)).to(sums, bitcast=True)


@triton.constexpr_function
def _can_add(element):
    bits = element.primitive_bitwidth
    return element.is_fp16() or element.is_bf16() or (bits in (32, 64) and (element.is_floating() or element.is_int()))


@triton.jit
def _lock(lock, peer, ctx):
    """Acquire a rank's lock; return whether it was acquired within the bound."""
    one = tl.cast(1, lock.dtype.element_ty)
    there = translate(lock, ctx.rank, peer, ctx.heap_bases)
    timeout_ns, status = wait_bound(ctx.heap_bases, ctx.world_size)
    held = atomic_xchg(lock, one, ctx.rank, peer, ctx.heap_bases, sem="acquire", scope="sys") != 0
    late = held & False
    while held & ~late:
        seen = await_flag(there, one - 1, "eq", "relaxed", "sys", timeout_ns, status, ctx.rank)
        late = seen != 0
        if not late:
            held = atomic_xchg(lock, one, ctx.rank, peer, ctx.heap_bases, sem="acquire", scope="sys") != 0
    return ~held


@triton.jit
def _with_data(tile, src_view):
    return Tile(tile.pid_m, tile.pid_n, tile.block_m, tile.block_n, tile.partial(src_view))


class Reductions(Moves):
    """Methods of every device context that reduce tiles, beside those that move them."""

    @triton.jit
    def all_reduce(self, tile, src_view, dst_view, config=None, tile_id=None):
        """Reduce a tile over all ranks by the algorithm that `config` names; "atomic" by default.

        Args:
            tile, src_view, dst_view: as in the method of that algorithm; those that have no `src_view` use it only to
                find the data of a `TileView`.
            config: `AllReduceConfig`.
            tile_id: as in `all_reduce_one_shot`.
        """
        if config is None:
            self.all_reduce_atomic(_with_data(tile, src_view), dst_view)
        else:
            locks = config.locks_ptr
            tl.static_assert(
                config.variant_code == 0 or locks is not None, "AllReduceConfig: all variants but atomic need locks"
            )
            if config.variant_code == 0:
                self.all_reduce_atomic(_with_data(tile, src_view), dst_view)
            elif config.variant_code == 1:
                self.all_reduce_ring(tile, src_view, dst_view, locks, tile_id)
            elif config.variant_code == 2:
                self.all_reduce_one_shot(tile, src_view, dst_view, locks, tile_id)
            elif config.variant_code == 3:
                self.all_reduce_two_shot(tile, src_view, dst_view, locks, None, None, tile_id)
            else:
                self.all_reduce_spinlock(_with_data(tile, src_view), dst_view, locks, tile_id)

    @triton.jit
    def all_reduce_atomic(self, tile, dst_view):
        """Add a tile to `dst_view` of all ranks by atomics, which round after every addition.

        `dst_view` must be zero on all ranks (barrier) before the call, and is complete after a barrier.  Sums of floats
        may differ in their last bits between ranks and from run to run.

        Args:
            tile: `Tile`.
            dst_view: symmetric; float16, bfloat16, or floats and integers of 32 and 64 bits.
        """
        tl.static_assert(
            _can_add(dst_view.ptr.dtype.element_ty),
            "all_reduce_atomic adds float16, bfloat16, and floats and integers of 32 and 64 bits",
        )
        ptr, mask = dst_view.tile_ptr(tile)
        value = tile.partial(dst_view)
        for step in range(self.world_size):
            peer = (self.rank + 1 + step) % self.world_size
            atomic_add(ptr, value, self.rank, peer, self.heap_bases, mask, "relaxed", "sys")

    @triton.jit
    def all_reduce_spinlock(self, tile, dst_view, locks, tile_id=None):
        """Add a tile to `dst_view` of all ranks, one rank at a time; otherwise as `all_reduce_atomic`, of any dtype.

        Args:
            tile: `Tile`.
            dst_view: symmetric.
            locks: one word for each tile, see `iris_triton.tiles.make_locks` (variant "spinlock").
            tile_id: as in `all_reduce_one_shot`.
        """
        tl.static_assert(is_counter(locks.dtype.element_ty), "locks must be int32 or int64, a word for each tile")
        lock = locks + tl.cast(number_of(tile, dst_view, tile_id), tl.int64)
        ptr, mask = dst_view.tile_ptr(tile)
        part = widened(tile.partial(dst_view))
        for step in range(self.world_size):
            peer = (self.rank + 1 + step) % self.world_size
            if _lock(lock, peer, self):
                acc = widened(load(ptr, self.rank, peer, self.heap_bases, mask)) + part
                store(ptr, acc.to(dst_view.ptr.dtype.element_ty), self.rank, peer, self.heap_bases, mask)
                signal(lock, 0, self.rank, peer, self.heap_bases)

    @triton.jit
    def all_reduce_one_shot(self, tile, src_view, dst_view, locks, tile_id=None):
        """Sum a tile over all ranks; every rank reads all parts.  The result is there on return, the same on all ranks.

        Waits for the other ranks' calls on this tile.  docs/tiles.md says when that can deadlock.

        Args:
            tile: `Tile`, whose data is stored in `src_view`, or `TileView` of data that lies there.
            src_view: symmetric; where the others read this rank's part.  May be `dst_view`.
            dst_view: the result, the caller's own.
            locks: int64, see `iris_triton.tiles.make_locks`.  Or int32, one word for each tile, as in AMD's
                Iris: the kernel stores its part in `src_view` and sets the word to 1 before; see docs/tiles.md.
            tile_id: row of `locks` that belongs to the tile, the same on all ranks; its number by default.
        """
        number = number_of(tile, dst_view, tile_id)
        if _raised_by_kernel(locks):
            await_raised(locks, number, self)
            _store_own(tile, dst_view, _sum(tile, src_view, dst_view, self))
        else:
            row = begin(locks, number, self, ALL_READ)
            tile.publish(src_view)
            row.publish_to_all(row.arrived(self.rank))
            row.wait_all(row.arrived(0))
            acc = _sum(tile, src_view, dst_view, self)
            if tl.cast(src_view.ptr, tl.int64) == tl.cast(dst_view.ptr, tl.int64):
                row.publish_to_all(row.passed(self.rank))
                row.wait_all(row.passed(0))
                _store_own(tile, dst_view, acc)
            else:
                _store_own(tile, dst_view, acc)
                row.publish_to_all(row.passed(self.rank))
            row.end()

    @triton.jit
    def all_reduce_two_shot(self, tile, src_view, dst_view, locks, start_tile=None, stride=None, tile_id=None):
        """Sum a tile over all ranks; one rank reads all parts and stores the result to all, the same bits.

        Without `start_tile` the last rank to arrive reduces, so no rank waits for another; with int32 locks, rank
        t % world_size reduces tile t.  Complete after a barrier, or when `await_tile` returns.

        Args:
            tile, src_view, locks, tile_id: as in `all_reduce_one_shot`.
            dst_view: symmetric; the result.
            start_tile, stride: the caller reduces tiles start_tile, start_tile + stride, ... and waits for its peers'
                parts of those.  Every tile must belong to exactly one rank, for example with (rank, world_size).
        """
        number = number_of(tile, dst_view, tile_id)
        if start_tile is not None:
            _reduce_by_owner(tile, src_view, dst_view, locks, number, start_tile, stride, self)
        elif _raised_by_kernel(locks):
            first = tl.cast(self.rank, tl.int32)
            _reduce_by_owner(tile, src_view, dst_view, locks, number, first, self.world_size, self)
        else:
            row = begin(locks, number, self, ONE_READS)
            tile.publish(src_view)
            if row.is_last(number % self.world_size):
                _store_to_all(tile, dst_view, _sum(tile, src_view, dst_view, self), self)
                row.publish_to_all(row.done())
            row.end()

    @triton.jit
    def all_reduce_ring(self, tile, src_view, dst_view, locks, tile_id=None):
        """Sum a tile over all ranks, from rank to rank; the result is there on return, the same on all ranks.

        Waits as `all_reduce_one_shot` does.

        Args:
            tile, tile_id: as in `all_reduce_one_shot`.
            locks: int64, see `iris_triton.tiles.make_locks`.
            src_view: symmetric; overwritten.  Sums of 16-bit floats are float32 and travel in halves, in `src_view` and
                `dst_view`, which must then have 16 bits both, and not be the same; or one of them is float32.
            dst_view: symmetric; the result.
        """
        number = number_of(tile, dst_view, tile_id)
        row = begin(locks, number, self, AT_RETURN)
        size = self.world_size
        position = (self.rank + size - number % size) % size
        before = (self.rank + size - 1) % size
        after = (self.rank + 1) % size
        acc = tile.partial(src_view).to(_sums(src_view.ptr.dtype.element_ty, dst_view.ptr.dtype.element_ty))
        if position > 0:
            row.wait(row.arrived(before))
            acc = _sum_of(tile, src_view, dst_view, before, acc.dtype, self) + acc
        result = acc.to(dst_view.ptr.dtype.element_ty)
        ptr, mask = dst_view.tile_ptr(tile)
        if position < size - 1:
            _keep_sum(tile, src_view, dst_view, acc)
            row.publish(row.arrived(self.rank), after)
            row.wait(row.passed(before))
            result = tl.load(ptr, mask=mask)
        else:
            tl.store(ptr, result, mask=mask)
        if (size > 1) & (position != size - 2):  # the next position has computed the result
            store(ptr, result, self.rank, after, self.heap_bases, mask)
            row.publish(row.passed(self.rank), after)
        row.end()

    @triton.jit
    def reduce_scatter(self, tile, src_view, dst_view, locks):
        """Sum a tile over all ranks; only its owner's `dst_view` gets the result.

        Of T tiles, counted row by row, rank r owns T // world_size from r * (T // world_size) on; the last rank also
        owns the remainder.  The last rank to arrive reduces, so no rank waits for another; with int32 locks, the
        owner.  Complete after a barrier, or on the owner when `await_tile` returns there.

        Args:
            tile, src_view, locks: as in `all_reduce_one_shot`.
            dst_view: symmetric, of the shape of the whole.
        """
        number = number_of(tile, dst_view)
        owner = _owner(tile, dst_view, number, self)
        if _raised_by_kernel(locks):
            if owner == self.rank:
                await_raised(locks, number, self)
                _store_own(tile, dst_view, _sum(tile, src_view, dst_view, self))
        else:
            row = begin(locks, number, self, ONE_READS)
            tile.publish(src_view)
            if row.is_last(owner):
                acc = _sum(tile, src_view, dst_view, self)
                ptr, mask = dst_view.tile_ptr(tile)
                store(ptr, acc.to(dst_view.ptr.dtype.element_ty), self.rank, owner, self.heap_bases, mask)
                row.publish_to_all(row.done())
            row.end()

    @triton.jit
    def await_tile(self, tile, dst_view, locks):
        """Wait until the last call on a tile that used these locks is over on all ranks.

        Then its result is in `dst_view`, and no rank reads the caller's `src_view` any more.

        Args:
            tile: `Tile` or `TileView`.
            dst_view, locks: those of the call; int64, not of "spinlock".
        """
        await_end(locks, number_of(tile, dst_view), self)
