"""Synchronisation of calls on a tile: arrivals of ranks, and when its memory may be reused.

Every tile has a row of words in `locks`, a symmetric int64 tensor that was zero at the start.  For W ranks:

    words 0 .. W - 1        `arrived`: stamp of the call for which each rank's part is ready
    words W .. 2 W - 1      `passed`: stamp of the call in which each rank has read its peers' parts; in a ring, the
                            word of the previous rank: it has stored the result here
    word 2 W                `mine`: stamp of this rank's last call
    word 2 W + 1            `count`: ranks that have arrived, on the tile's home; 0 between calls
    word 2 W + 2            `done`: stamp of the last call whose result is stored, by the one rank that reduces

A stamp is 8 times the number of the call plus its kind.  All ranks make the same calls on a tile, so they have the same
stamps; stamps only grow, so nothing is reset, a launch can be repeated, and a captured one replayed.  Before a call
accesses anything, it waits for the end of the previous call, whose kind determines the words to wait for.

`locks` of int32 follow the protocol of AMD's Iris instead (docs/tiles.md): a word for each tile, on all ranks.
"""

import triton
import triton.language as tl

from iris_core.device import context_words as _layout
from iris_triton._compat import aggregate
from iris_triton.language.address import translate
from iris_triton.language.atomics import atomic_add
from iris_triton.language.flags import await_flag, await_flags, lanes_for, set_flag
from iris_triton.language.sync import await_members, gather_stores, tell_members
from iris_triton.tiles.locks import FIXED_WORDS

# Kinds of calls, by what ends them.
ONE_READS = tl.constexpr(1)  # `done` is set by the rank that has read all parts: two-shot, reduce_scatter
ALL_READ = tl.constexpr(2)  # every rank has set its `passed` word: one-shot
AT_RETURN = tl.constexpr(3)  # nothing is under way any more when the call returns: ring

_KINDS, _KIND_MASK = tl.constexpr(8), tl.constexpr(7)
_FIXED_WORDS = tl.constexpr(FIXED_WORDS)
_MEMBERS = tl.constexpr(32)  # ranks whose flags are awaited at a time, at least
_TIMEOUT_WORD, _STATUS_WORD = tl.constexpr(_layout.TIMEOUT_WORD), tl.constexpr(_layout.STATUS_WORD)


@triton.jit
def wait_bound(heap_bases, world_size):
    """Return the bound of waits (nanoseconds, int64) and the address of the status words (int64)."""
    words = heap_bases + world_size
    return tl.load(words + _TIMEOUT_WORD), tl.load(words + _STATUS_WORD)


@aggregate
class Row:
    """The words of one tile, in the caller's memory, the stamp of the current call, and the caller and its world."""

    words: tl.tensor
    stamp: tl.tensor
    rank: tl.tensor | tl.constexpr
    size: tl.tensor | tl.constexpr
    heap_bases: tl.tensor

    @triton.jit
    def arrived(self, rank):
        return self.words + rank

    @triton.jit
    def passed(self, rank):
        return self.words + self.size + rank

    @triton.jit
    def done(self):
        return self.words + 2 * self.size + 2

    @triton.jit
    def publish(self, word, rank):
        """Set one word of a rank to the stamp, after all earlier loads and stores of this program."""
        gather_stores()
        target = translate(word, self.rank, rank, self.heap_bases)
        set_flag(target, self.stamp, "release", "sys")

    @triton.jit
    def publish_to_all(self, word):
        """Set the same word of every rank to the stamp; see `publish`."""
        gather_stores()
        tell_members(word, 0, self.stamp, self.rank, 0, 1, self.size, self.heap_bases)

    @triton.jit
    def wait(self, word):
        timeout_ns, status = wait_bound(self.heap_bases, self.size)
        await_flag(word, self.stamp, "reached", "acquire", "sys", timeout_ns, status, self.rank)

    @triton.jit
    def wait_all(self, words):
        """Wait until one word for each rank has reached the stamp."""
        timeout_ns, status = wait_bound(self.heap_bases, self.size)
        await_members(words, self.stamp, self.rank, 0, 1, self.size, timeout_ns, status)

    @triton.jit
    def is_last(self, home):
        """Arrive at the tile's home, as `publish` does; return whether all peers have arrived, whose parts are visible.

        No rank waits here.  The last rank resets the count to 0.  No rank is a call ahead: it begins the next call
        when `done` of this one is set, which the last rank does after resetting the count.
        """
        gather_stores()
        count = self.words + 2 * self.size + 1
        before = atomic_add(count, 1, self.rank, home, self.heap_bases, sem="acq_rel", scope="sys")
        last = before == self.size - 1
        if last:
            target = translate(count, self.rank, home, self.heap_bases)
            set_flag(target, tl.cast(0, count.dtype.element_ty), "relaxed", "sys")
        return last

    @triton.jit
    def end(self):
        """Store the stamp for the next call on this tile."""
        tl.store(self.words + 2 * self.size, self.stamp)
        tl.debug_barrier()  # before the next call reads it


@triton.jit
def await_raised(locks, tile_id, ctx):
    """Wait until all ranks have set their int32 flag of a tile; then their parts are visible."""
    word = locks + tl.cast(tile_id, tl.int64)
    timeout_ns, status = wait_bound(ctx.heap_bases, ctx.world_size)
    one = tl.cast(1, tl.int32)
    lane = lanes_for(_MEMBERS)
    for first in range(0, ctx.world_size, lane.shape[0]):
        member = first + lane  # those beyond the world repeat a rank
        flags = translate(word, ctx.rank, member % ctx.world_size, ctx.heap_bases)
        await_flags(flags, one, member < ctx.world_size, "ge", "acquire", "sys", timeout_ns, status, ctx.rank)


@triton.jit
def await_end(locks, tile_id, ctx):
    """Wait until the last call on a tile is over: all parts are read, the result is here; return its `Row`."""
    tl.static_assert(locks.dtype.element_ty == tl.int64, "locks must be int64: see iris_triton.tiles.make_locks")
    words = locks + tl.cast(tile_id, tl.int64) * (2 * ctx.world_size + _FIXED_WORDS)
    row = Row(words, tl.load(words + 2 * ctx.world_size), ctx.rank, ctx.world_size, ctx.heap_bases)
    kind = row.stamp & _KIND_MASK
    if kind == ONE_READS:
        row.wait(row.done())
    elif kind == ALL_READ:
        row.wait_all(row.passed(0))
    return row


@triton.jit
def begin(locks, tile_id, ctx, KIND: tl.constexpr):
    """Begin a call on a tile after the previous one has completed; return its `Row`."""
    last = await_end(locks, tile_id, ctx)
    stamp = last.stamp - (last.stamp & _KIND_MASK) + _KINDS + KIND
    return Row(last.words, stamp, ctx.rank, ctx.world_size, ctx.heap_bases)
