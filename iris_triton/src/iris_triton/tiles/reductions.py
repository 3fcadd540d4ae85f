"""Tile-level reductions: all_reduce in five algorithms, and reduce_scatter.  The methods of the contexts describe them.

What the algorithms have in common, and why nothing that a rank still reads is overwritten:

- The caller's part lies in its own `src_view`; the others read it there.  It is stored when the call before on this
  tile is over, that is, when all ranks have read the last part (`protocol.begin`).
- A result is stored to another rank's `dst_view` only after that rank has arrived at this call, so what reads the last
  result on that rank's stream has run before.
- A result is stored when all parts of the tile have been read, so that `src_view` and `dst_view` may be the same.

Sums go in rank order (in a ring: in the order of the ring), in float32 for floats of 16 and 8 bits, and are rounded
once.

The element type of `locks` decides, when the kernel is compiled, by which protocol one_shot, two_shot and
reduce_scatter synchronise: int64 by counted calls, int32 by flags that the kernel raises itself (`protocol`).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton._compat import aggregate
from iris_triton.collectives.parts.elements import as_words, widened
from iris_triton.language.address import translate
from iris_triton.language.atomics import atomic_add, atomic_xchg
from iris_triton.language.flags import await_flag, is_counter
from iris_triton.language.memory import load, store
from iris_triton.language.sync import gather_stores, signal
from iris_triton.tiles.locks import VARIANTS
from iris_triton.tiles.protocol import ALL_READ, AT_RETURN, ONE_READS, await_raised, begin
from iris_triton.tiles.views import Tile


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
    """Which algorithm `all_reduce` uses, and its words.

    Attributes:
        variant_code: 0 or "atomic", 1 or "ring", 2 or "one_shot", 3 or "two_shot", 4 or "spinlock" (constexpr).
        locks_ptr: `locks` as in the method of that algorithm; may be left out for "atomic".

    Example:
        ctx.all_reduce(tile, src_view, dst_view, config=AllReduceConfig("two_shot", locks))
    """

    variant_code: tl.constexpr
    locks_ptr: tl.tensor | tl.constexpr

    @triton.constexpr_function
    def __init__(self, variant_code, locks_ptr=None):
        self.variant_code = tl.constexpr(_variant_code(variant_code))
        self.locks_ptr = locks_ptr if isinstance(locks_ptr, tl.tensor) else tl.constexpr(locks_ptr)


# -- parts and results ------------------------------------------------------------------------------------------------
@triton.jit
def _sum(tile, src_view, world):
    """The sum of all ranks' parts, in rank order; the next part is on its way while one is added."""
    ptr, mask = src_view.tile_ptr(tile)
    acc = widened(load(ptr, world.rank, 0, world.heap_bases, mask))
    ahead = load(ptr, world.rank, 1 % world.size, world.heap_bases, mask)
    for rank in range(2, world.size):
        part = ahead
        ahead = load(ptr, world.rank, rank, world.heap_bases, mask)
        acc += widened(part)
    if world.size > 1:
        acc += widened(ahead)
    return acc


@triton.jit
def _store_to_all(tile, dst_view, value, world):
    """Store a result to every rank, the next one first."""
    ptr, mask = dst_view.tile_ptr(tile)
    result = value.to(dst_view.ptr.dtype.element_ty)
    for step in range(world.size):
        peer = (world.rank + 1 + step) % world.size
        store(ptr, result, world.rank, peer, world.heap_bases, mask)


@triton.jit
def _store_own(tile, dst_view, value):
    ptr, mask = dst_view.tile_ptr(tile)
    tl.store(ptr, value.to(dst_view.ptr.dtype.element_ty), mask=mask)


@triton.constexpr_function
def _raised_by_kernel(locks):
    """Whether the kernel raises flags itself, as in AMD's Iris."""
    element = locks.dtype.element_ty
    if element not in (tl.int32, tl.int64):
        raise ValueError(
            f"locks have {element}: they must be int64, from iris_triton.tiles.make_locks, or int32, a flag for each "
            "tile that the kernel raises itself as in AMD's Iris (docs/tiles.md)"
        )
    return element == tl.int32


@triton.jit
def _owner(tile, dst_view, tile_id, world):
    """The rank that gets a tile in reduce_scatter: all have a block of them, the last one also what is left over."""
    share = dst_view.number_of_tiles(tile.block_m, tile.block_n) // world.size
    return tl.where(share == 0, world.size - 1, tl.minimum(tile_id // tl.maximum(share, 1), world.size - 1))


# -- algorithms -------------------------------------------------------------------------------------------------------
@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, locks, tile_id, world):
    """Every rank reduces all parts."""
    if _raised_by_kernel(locks):
        await_raised(locks, tile_id, world)
        _store_own(tile, dst_view, _sum(tile, src_view, world))
    else:
        row = begin(locks, tile_id, world, ALL_READ)
        tile.publish(src_view)
        gather_stores()
        row.tell_all(row.arrived(world.rank))
        row.wait_all(row.arrived(0))
        acc = _sum(tile, src_view, world)
        if tl.cast(src_view.ptr, tl.int64) == tl.cast(dst_view.ptr, tl.int64):
            gather_stores()
            row.tell_all(row.passed(world.rank))
            row.wait_all(row.passed(0))
            _store_own(tile, dst_view, acc)
        else:
            _store_own(tile, dst_view, acc)
            gather_stores()
            row.tell_all(row.passed(world.rank))
        row.end()


@triton.jit
def all_reduce_two_shot(tile, src_view, dst_view, locks, tile_id, world):
    """The rank that comes last reduces all parts and stores the result to all; of raised flags, rank tile_id % size."""
    if _raised_by_kernel(locks):
        all_reduce_two_shot_by_owner(
            tile, src_view, dst_view, locks, tile_id, tl.cast(world.rank, tl.int32), world.size, world
        )
    else:
        row = begin(locks, tile_id, world, ONE_READS)
        tile.publish(src_view)
        gather_stores()
        if row.is_last(tile_id % world.size):
            _store_to_all(tile, dst_view, _sum(tile, src_view, world), world)
            gather_stores()
            row.tell_all(row.done())
        row.end()


@triton.jit
def all_reduce_two_shot_by_owner(tile, src_view, dst_view, locks, tile_id, start_tile, stride, world):
    """The rank for which tile_id is one of start_tile, start_tile + stride, ... reduces and stores to all."""
    own = (tile_id >= start_tile) & ((tile_id - start_tile) % stride == 0)
    if _raised_by_kernel(locks):
        if own:
            await_raised(locks, tile_id, world)
            _store_to_all(tile, dst_view, _sum(tile, src_view, world), world)
    else:
        row = begin(locks, tile_id, world, ONE_READS)
        tile.publish(src_view)
        gather_stores()
        row.tell_all(row.arrived(world.rank))
        if own:
            row.wait_all(row.arrived(0))
            _store_to_all(tile, dst_view, _sum(tile, src_view, world), world)
            gather_stores()
            row.tell_all(row.done())
        row.end()


@triton.jit
def reduce_scatter(tile, src_view, dst_view, locks, tile_id, world):
    """The rank that comes last, of raised flags the owner, reduces all parts and stores the result to the owner."""
    owner = _owner(tile, dst_view, tile_id, world)
    if _raised_by_kernel(locks):
        if owner == world.rank:
            await_raised(locks, tile_id, world)
            _store_own(tile, dst_view, _sum(tile, src_view, world))
    else:
        row = begin(locks, tile_id, world, ONE_READS)
        tile.publish(src_view)
        gather_stores()
        if row.is_last(owner):
            acc = _sum(tile, src_view, world)
            ptr, mask = dst_view.tile_ptr(tile)
            store(ptr, acc.to(dst_view.ptr.dtype.element_ty), world.rank, owner, world.heap_bases, mask)
            gather_stores()
            row.tell_all(row.done())
        row.end()


# -- ring -------------------------------------------------------------------------------------------------------------
@triton.constexpr_function
def _carrier(part, sums, result):
    """Where sums are kept on their way, without being rounded."""
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
    """Store a sum in own memory, where the next rank reads it."""
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
def _sum_of(tile, src_view, dst_view, rank, sums: tl.constexpr, world):
    """Load the sum that a rank has kept."""
    src, mask = src_view.tile_ptr(tile)
    dst, _ = dst_view.tile_ptr(tile)
    carrier: tl.constexpr = _carrier(src_view.ptr.dtype.element_ty, sums, dst_view.ptr.dtype.element_ty)
    if carrier == "src":
        return load(src, world.rank, rank, world.heap_bases, mask)
    elif carrier == "dst":
        return load(dst, world.rank, rank, world.heap_bases, mask)
    else:
        high = load(as_words(src), world.rank, rank, world.heap_bases, mask).to(tl.int32)
        low = load(as_words(dst), world.rank, rank, world.heap_bases, mask).to(tl.int32)
        return ((high << 16) | (low & 0xFFFF)).to(sums, bitcast=True)


@triton.jit
def all_reduce_ring(tile, src_view, dst_view, locks, tile_id, world):
    """The sum goes once around the ring, then the result does; tile t begins at rank t % world_size."""
    row = begin(locks, tile_id, world, AT_RETURN)
    size = world.size
    position = (world.rank + size - tile_id % size) % size
    before = (world.rank + size - 1) % size
    after = (world.rank + 1) % size
    acc = widened(tile.partial(src_view))
    if position > 0:
        row.wait(row.arrived(before))
        acc = _sum_of(tile, src_view, dst_view, before, acc.dtype, world) + acc
    result = acc.to(dst_view.ptr.dtype.element_ty)
    ptr, mask = dst_view.tile_ptr(tile)
    if position < size - 1:
        _keep_sum(tile, src_view, dst_view, acc)
        gather_stores()
        row.tell(row.arrived(world.rank), after)
        row.wait(row.passed(before))
        result = tl.load(ptr, mask=mask)
    else:
        tl.store(ptr, result, mask=mask)
    if (size > 1) & (position != size - 2):  # the one behind that position has made the result
        store(ptr, result, world.rank, after, world.heap_bases, mask)
        gather_stores()
        row.tell(row.passed(world.rank), after)
    row.end()


# -- without parts in memory ------------------------------------------------------------------------------------------
@triton.constexpr_function
def _can_add(element):
    """Whether memory can add elements of a type by itself."""
    bits = element.primitive_bitwidth
    return element.is_fp16() or element.is_bf16() or (bits in (32, 64) and (element.is_floating() or element.is_int()))


@triton.jit
def all_reduce_atomic(tile, dst_view, world):
    """Add a tile to `dst_view` of all ranks."""
    tl.static_assert(
        _can_add(dst_view.ptr.dtype.element_ty),
        "all_reduce_atomic adds float16, bfloat16, and floats and integers of 32 and 64 bits",
    )
    ptr, mask = dst_view.tile_ptr(tile)
    value = tile.partial(dst_view)
    for step in range(world.size):
        peer = (world.rank + 1 + step) % world.size
        atomic_add(ptr, value, world.rank, peer, world.heap_bases, mask, "relaxed", "sys")


@triton.jit
def _lock(lock, peer, world):
    """Take a rank's lock; returns whether that was possible in time."""
    one = tl.cast(1, lock.dtype.element_ty)
    there = translate(lock, world.rank, peer, world.heap_bases)
    timeout_ns, status = world.bound()
    held = atomic_xchg(lock, one, world.rank, peer, world.heap_bases, sem="acquire", scope="sys") != 0
    late = held & False
    while held & ~late:
        seen = await_flag(there, one - 1, "eq", "relaxed", "sys", timeout_ns, status, world.rank)
        late = seen != 0
        if not late:
            held = atomic_xchg(lock, one, world.rank, peer, world.heap_bases, sem="acquire", scope="sys") != 0
    return ~held


@triton.jit
def all_reduce_spinlock(tile, dst_view, locks, tile_id, world):
    """Add a tile to `dst_view` of all ranks, one rank at a time."""
    tl.static_assert(is_counter(locks.dtype.element_ty), "locks must be int32 or int64, a word for each tile")
    lock = locks + tl.cast(tile_id, tl.int64)
    ptr, mask = dst_view.tile_ptr(tile)
    part = widened(tile.partial(dst_view))
    for step in range(world.size):
        peer = (world.rank + 1 + step) % world.size
        if _lock(lock, peer, world):
            acc = widened(load(ptr, world.rank, peer, world.heap_bases, mask)) + part
            store(ptr, acc.to(dst_view.ptr.dtype.element_ty), world.rank, peer, world.heap_bases, mask)
            signal(lock, 0, world.rank, peer, world.heap_bases)


# -- by configuration -------------------------------------------------------------------------------------------------
@triton.jit
def all_reduce(tile, src_view, dst_view, config, tile_id, world):
    """The algorithm that `config` names."""
    tl.static_assert(
        config.variant_code == 0 or config.locks_ptr is not None, "AllReduceConfig: all variants but atomic need locks"
    )
    if config.variant_code == 0:
        all_reduce_atomic(_with_data(tile, src_view), dst_view, world)
    elif config.variant_code == 1:
        all_reduce_ring(tile, src_view, dst_view, config.locks_ptr, tile_id, world)
    elif config.variant_code == 2:
        all_reduce_one_shot(tile, src_view, dst_view, config.locks_ptr, tile_id, world)
    elif config.variant_code == 3:
        all_reduce_two_shot(tile, src_view, dst_view, config.locks_ptr, tile_id, world)
    else:
        all_reduce_spinlock(_with_data(tile, src_view), dst_view, config.locks_ptr, tile_id, world)


@triton.jit
def _with_data(tile, src_view):
    return Tile(tile.pid_m, tile.pid_n, tile.block_m, tile.block_n, tile.partial(src_view))
