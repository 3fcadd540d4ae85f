"""DeviceContext: the device functions as methods, with rank and heap bases filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris_core.device.context_words import HEADER_WORDS
from iris_example_backend import language
from iris_example_backend.kernels import Pointer

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceContext:
    """What a kernel knows of the world.  The methods' arguments mean what they mean in `language`.

    Attributes:
        rank: the caller.
        world_size: number of ranks.
        heap_bases: address of every rank's heap, as `ctx.get_heap_bases()` has them.

    Example:
        @ex.kernel
        def hello(context, target):
            dev = DeviceContext.initialize(context)
            dev.store(target, 42, (dev.rank + 1) % dev.world_size)

        hello[(1,)](ctx.get_device_context(), target)
    """

    def __init__(self, rank: int, world_size: int, heap_bases: Pointer) -> None:
        self.rank = rank
        self.world_size = world_size
        self.heap_bases = heap_bases

    @classmethod
    def initialize(cls, context: Pointer) -> DeviceContext:
        """Decode the context tensor: rank, world size, then the heap bases."""
        words = context.array
        rank, world_size = int(words[0]), int(words[1])
        return cls(rank, world_size, Pointer(words[HEADER_WORDS : HEADER_WORDS + world_size]))

    def load(self, pointer: Pointer, from_rank: int, mask: Any = None, other: Any = None,
             cache_modifier: str | None = None, volatile: bool = False, hint: Any = None) -> Any:  # fmt: skip
        """Return what lies at `pointer` in the heap of from_rank."""
        return language.load(pointer, self.rank, from_rank, self.heap_bases, mask, other)

    def store(self, pointer: Pointer, value: Any, to_rank: int, mask: Any = None,
              cache_modifier: str | None = None, hint: Any = None) -> None:  # fmt: skip
        """Store `value` at `pointer` in the heap of to_rank."""
        language.store(pointer, value, self.rank, to_rank, self.heap_bases, mask)

    def copy(self, src_ptr: Pointer, dst_ptr: Pointer, from_rank: int, to_rank: int, mask: Any = None,
             other: Any = None, load_cache_modifier: str | None = None,
             store_cache_modifier: str | None = None, hint: Any = None) -> None:  # fmt: skip
        """Copy from from_rank's heap to to_rank's."""
        language.copy(src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other)

    def get(self, from_ptr: Pointer, to_ptr: Pointer, from_rank: int, mask: Any = None, other: Any = None,
            load_cache_modifier: str | None = None, store_cache_modifier: str | None = None,
            hint: Any = None) -> None:  # fmt: skip
        """Copy from from_rank's heap to own memory."""
        language.get(from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, mask, other)

    def put(self, from_ptr: Pointer, to_ptr: Pointer, to_rank: int, mask: Any = None, other: Any = None,
            load_cache_modifier: str | None = None, store_cache_modifier: str | None = None,
            hint: Any = None) -> None:  # fmt: skip
        """Copy from own memory to to_rank's heap."""
        language.put(from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other)

    @staticmethod
    def _atomic(function: Callable[..., Any]) -> Callable[..., Any]:
        def method(
            self: DeviceContext, pointer: Pointer, val: Any, to_rank: int, mask: Any = None,
            sem: str | None = None, scope: str | None = None, hint: Any = None,
        ) -> Any:  # fmt: skip
            return function(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

        method.__doc__ = function.__doc__
        return method

    atomic_add = _atomic(language.atomic_add)
    atomic_sub = _atomic(language.atomic_sub)
    atomic_xchg = _atomic(language.atomic_xchg)
    atomic_xor = _atomic(language.atomic_xor)
    atomic_and = _atomic(language.atomic_and)
    atomic_or = _atomic(language.atomic_or)
    atomic_min = _atomic(language.atomic_min)
    atomic_max = _atomic(language.atomic_max)

    def atomic_cas(self, pointer: Pointer, cmp: Any, val: Any, to_rank: int, sem: str | None = None,
                   scope: str | None = None, hint: Any = None) -> Any:  # fmt: skip
        """Atomically store `val` to to_rank's memory where it is `cmp`; return the old values."""
        return language.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope)

    def signal(self, pointer: Pointer, value: int, to_rank: int, op: str = "set") -> None:
        """Set a flag of to_rank, or add to it, after everything that the caller has stored so far."""
        language.signal(pointer, value, self.rank, to_rank, self.heap_bases, op)

    def put_signal(self, from_ptr: Pointer, to_ptr: Pointer, signal_ptr: Pointer, value: int, to_rank: int,
                   op: str = "set", mask: Any = None) -> None:  # fmt: skip
        """Put, then signal."""
        language.put_signal(from_ptr, to_ptr, signal_ptr, value, self.rank, to_rank, self.heap_bases, op, mask)

    def wait(self, pointer: Pointer, value: Any, cmp: str = "ge") -> Any:
        """Wait until flags of the caller compare with `value` as they should; return them."""
        return language.wait(pointer, value, cmp)

    def wait_any(self, pointer: Pointer, value: Any, cmp: str = "ge") -> int:
        """Wait until one of a block of flags compares with `value` as it should; return which."""
        return language.wait_any(pointer, value, cmp)

    def test(self, pointer: Pointer, value: Any, cmp: str = "ge") -> bool:
        """Return whether flags of the caller compare with `value` now."""
        return language.test(pointer, value, cmp)

    def load_acquire(self, pointer: Pointer) -> Any:
        """Return flags of the caller."""
        return language.load_acquire(pointer)

    def barrier(self, flags: Pointer, rank_start: int = 0, rank_stride: int = 1, group_size: int | None = None) -> None:
        """Wait for all ranks of a group."""
        language.barrier(flags, self.rank, self.world_size, self.heap_bases, rank_start, rank_stride, group_size)
