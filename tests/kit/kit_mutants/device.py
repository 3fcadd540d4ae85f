"""Device functions with one mistake each.

At the end are families of them: every function with the same kind of mistake.  One run of the stack suite sees a whole
family, because each of its tests is about one function.
"""

import time

import triton
import triton.language as tl

from iris_core.testing.conformance.device_functions import ATOMICS, LOOKS, NAMES, OPERATIONS
from iris_triton import interpreter, language
from iris_triton._compat import aggregate
from iris_triton.context import DeviceContext


@triton.jit
def _but_last(mask):
    """The mask without its last true lane."""
    lanes = tl.arange(0, mask.shape[0])
    return mask & (lanes < tl.max(tl.where(mask, lanes, 0), axis=0))


@triton.jit
def short_put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    if mask is None:
        language.put(from_ptr, to_ptr, from_rank, to_rank, heap_bases)
    else:
        language.put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, _but_last(mask), other)


@triton.jit
def local_store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    tl.store(pointer, value, mask=mask)


@triton.jit
def load_swapped(
    pointer, from_rank, to_rank, heap_bases, mask=None, other=None, cache_modifier=None, volatile=False, hint=None
):
    return language.load(pointer, to_rank, from_rank, heap_bases, mask, other, cache_modifier, volatile, hint)


@triton.jit
def wait_demanding(pointer, value, cmp: tl.constexpr, timeout_ns):
    return language.wait(pointer, value, cmp, timeout_ns=timeout_ns)


@triton.jit
def store_swapped(self, value, pointer, to_rank, mask=None, cache_modifier=None, hint=None):
    self.store(pointer, value, to_rank, mask, cache_modifier, hint)


class OtherContext:
    """DeviceContext with value and pointer of store exchanged."""

    store = store_swapped


for _name in set(language.__all__) - {"store"}:
    setattr(OtherContext, _name, getattr(DeviceContext, _name))


# -- nothing is done --------------------------------------------------------------------------------------------------
@triton.jit
def mute_load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None):
    return tl.load(pointer) * 0


@triton.jit
def mute_store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    pass


@triton.jit
def mute_move(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    pass


@triton.jit
def mute_copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None):
    pass


@triton.jit
def mute_atomic(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    return language.load(pointer, from_rank, to_rank, heap_bases)


@triton.jit
def mute_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    return language.load(pointer, from_rank, to_rank, heap_bases)


@triton.jit
def mute_signal(pointer, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    pass


@triton.jit
def mute_put_signal(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    pass


@triton.jit
def mute_wait(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    return tl.load(pointer)


@triton.jit
def mute_wait_any(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    return 0


@triton.jit
def mute_test(pointer, value, cmp: tl.constexpr = "ge"):
    return 1


@triton.jit
def mute_load_acquire(pointer):
    return tl.load(pointer) * 0


@triton.jit
def mute_barrier(flags, rank, world_size, heap_bases, rank_start=0, rank_stride=1, group_size=None, timeout_ns=0):
    pass


MUTE = {
    "load": mute_load,
    "store": mute_store,
    "get": mute_move,
    "put": mute_move,
    "copy": mute_copy,
    **dict.fromkeys(OPERATIONS, mute_atomic),
    "atomic_cas": mute_cas,
    "signal": mute_signal,
    "put_signal": mute_put_signal,
    "wait": mute_wait,
    "wait_any": mute_wait_any,
    "test": mute_test,
    "load_acquire": mute_load_acquire,
    "barrier": mute_barrier,
}


# -- on the wrong rank ------------------------------------------------------------------------------------------------
@triton.jit
def near_load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None):
    return language.load(pointer, to_rank, to_rank, heap_bases, mask, other)


@triton.jit
def near_get(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    language.get(from_ptr, to_ptr, from_rank, from_rank, heap_bases, mask, other)


@triton.jit
def near_put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    language.put(from_ptr, to_ptr, from_rank, from_rank, heap_bases, mask, other)


@triton.jit
def swapped_copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None):
    language.copy(src_ptr, dst_ptr, to_rank, from_rank, cur_rank, heap_bases, mask, other)


def near_atomic(op):
    @triton.jit
    def atomic(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
    ):
        return op(pointer, val, from_rank, from_rank, heap_bases, mask, sem, scope)

    return atomic


@triton.jit
def near_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    return language.atomic_cas(pointer, cmp, val, from_rank, from_rank, heap_bases, sem, scope)


@triton.jit
def near_signal(pointer, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    language.signal(pointer, value, from_rank, from_rank, heap_bases, op)


@triton.jit
def near_put_signal(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    language.put(from_ptr, to_ptr, from_rank, from_rank, heap_bases)
    language.signal(signal_ptr, value, from_rank, to_rank, heap_bases, op)


NEAR = {
    "load": near_load,
    "store": local_store,
    "get": near_get,
    "put": near_put,
    "copy": swapped_copy,
    **{name: near_atomic(getattr(language, name)) for name in OPERATIONS},
    "atomic_cas": near_cas,
    "signal": near_signal,
    "put_signal": near_put_signal,
}


# -- an argument is ignored -------------------------------------------------------------------------------------------
@triton.jit
def blind_load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None):
    return language.load(pointer, to_rank, from_rank, heap_bases)


@triton.jit
def blind_store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    language.store(pointer, value, from_rank, to_rank, heap_bases)


@triton.jit
def blind_get(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    language.get(from_ptr, to_ptr, from_rank, to_rank, heap_bases)


@triton.jit
def blind_put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
    language.put(from_ptr, to_ptr, from_rank, to_rank, heap_bases)


@triton.jit
def blind_copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None):
    language.copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases)


def blind_atomic(op):
    @triton.jit
    def atomic(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
    ):
        return op(pointer, val, from_rank, to_rank, heap_bases, None, sem, scope)

    return atomic


@triton.jit
def blind_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    return language.atomic_xchg(pointer, val, from_rank, to_rank, heap_bases, None, sem, scope)


@triton.jit
def blind_signal(pointer, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    language.signal(pointer, value, from_rank, to_rank, heap_bases)


@triton.jit
def blind_put_signal(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
    language.put_signal(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases)


@triton.jit
def blind_wait(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    return language.wait(pointer, value, timeout_ns=timeout_ns)


@triton.jit
def blind_wait_any(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    return language.wait_any(pointer, value, timeout_ns=timeout_ns)


@triton.jit
def blind_test(pointer, value, cmp: tl.constexpr = "ge"):
    return language.test(pointer, value)


@triton.jit
def blind_barrier(flags, rank, world_size, heap_bases, rank_start=0, rank_stride=1, group_size=None, timeout_ns=0):
    language.barrier(flags, rank, world_size, heap_bases, timeout_ns=timeout_ns)


BLIND = {
    "load": blind_load,
    "store": blind_store,
    "get": blind_get,
    "put": blind_put,
    "copy": blind_copy,
    **{name: blind_atomic(getattr(language, name)) for name in OPERATIONS},
    "atomic_cas": blind_cas,
    "signal": blind_signal,
    "put_signal": blind_put_signal,
    "wait": blind_wait,
    "wait_any": blind_wait_any,
    "test": blind_test,
    "barrier": blind_barrier,
}


# -- the wrong value is returned, or the last one is left out ---------------------------------------------------------
@triton.jit
def zero_load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None):
    return language.load(pointer, to_rank, from_rank, heap_bases, mask, 0)


def new_atomic(op):
    @triton.jit
    def atomic(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
    ):
        op(pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope)
        return language.load(pointer, from_rank, to_rank, heap_bases)

    return atomic


@triton.jit
def new_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    language.atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem, scope)
    return language.load(pointer, from_rank, to_rank, heap_bases)


@triton.jit
def expected_wait(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    """Returns what it was told to compare with."""
    language.wait(pointer, value, cmp, timeout_ns=timeout_ns)
    return value


@triton.jit
def counted_wait_any(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
    """Counts from 1."""
    return language.wait_any(pointer, value, cmp, timeout_ns=timeout_ns) + 1


@triton.jit
def negated_test(pointer, value, cmp: tl.constexpr = "ge"):
    return language.test(pointer, value, cmp) == 0


RETURNS = {
    "load": zero_load,
    "put": short_put,
    **{name: new_atomic(getattr(language, name)) for name in OPERATIONS},
    "atomic_cas": new_cas,
    "wait": expected_wait,
    "wait_any": counted_wait_any,
    "test": negated_test,
}


# -- atomics that are none --------------------------------------------------------------------------------------------
@triton.jit
def pause():
    pass


@interpreter.cpu_entry(pause)
def _(program):
    time.sleep(0.0005)  # lets another rank go ahead, however busy the machine is


def torn_atomic(name):
    name = tl.constexpr(name)

    @triton.jit
    def atomic(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
    ):
        old = language.load(pointer, from_rank, to_rank, heap_bases)
        pause()
        if name == "atomic_add":
            new = old + val
        elif name == "atomic_sub":
            new = old - val
        elif name == "atomic_xchg":
            new = val
        elif name == "atomic_xor":
            new = old ^ val
        elif name == "atomic_and":
            new = old & val
        elif name == "atomic_or":
            new = old | val
        elif name == "atomic_min":
            new = tl.minimum(old, val)
        else:
            new = tl.maximum(old, val)
        language.store(pointer, new, from_rank, to_rank, heap_bases, mask)
        return old

    return atomic


@triton.jit
def torn_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    old = language.load(pointer, from_rank, to_rank, heap_bases)
    pause()
    language.store(pointer, tl.where(old == cmp, val, old), from_rank, to_rank, heap_bases)
    return old


TORN = {**{name: torn_atomic(name) for name in OPERATIONS}, "atomic_cas": torn_cas}


# -- methods ----------------------------------------------------------------------------------------------------------
@aggregate
class MuteContext:
    """A DeviceContext whose methods do nothing."""

    context: tl.tensor

    @triton.constexpr_function
    def __init__(self, context):
        self.context = context

    @staticmethod
    @triton.jit
    def from_tensor(context_tensor, world_size: tl.constexpr, tracing: tl.constexpr = False):
        return MuteContext(context_tensor)

    @triton.jit
    def load(self, pointer, from_rank, mask=None, other=None):
        return tl.load(pointer) * 0

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None):
        pass

    @triton.jit
    def get(self, from_ptr, to_ptr, from_rank, mask=None, other=None):
        pass

    @triton.jit
    def put(self, from_ptr, to_ptr, to_rank, mask=None, other=None):
        pass

    @triton.jit
    def copy(self, src_ptr, dst_ptr, from_rank, to_rank, mask=None, other=None):
        pass

    @triton.jit
    def atomic_cas(self, pointer, cmp, val, to_rank, sem: tl.constexpr = None, scope: tl.constexpr = None):
        return tl.load(pointer)

    @triton.jit
    def signal(self, pointer, value, to_rank, op: tl.constexpr = "set"):
        pass

    @triton.jit
    def put_signal(self, from_ptr, to_ptr, signal_ptr, value, to_rank, op: tl.constexpr = "set"):
        pass

    @triton.jit
    def wait(self, pointer, value, cmp: tl.constexpr = "ge"):
        return tl.load(pointer)

    @triton.jit
    def wait_any(self, pointer, value, cmp: tl.constexpr = "ge"):
        return 0

    @triton.jit
    def test(self, pointer, value, cmp: tl.constexpr = "ge"):
        return 1

    @triton.jit
    def load_acquire(self, pointer):
        return tl.load(pointer) * 0

    @triton.jit
    def barrier(self, flags, rank_start=0, rank_stride=1, group_size=None):
        pass


@triton.jit
def _mute_method(self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None):
    return tl.load(pointer)


for _name in OPERATIONS:
    setattr(MuteContext, _name, _mute_method)

FAMILIES = {
    "mute": set(NAMES),
    "near": set(NAMES) - {"wait", *LOOKS},  # the test of barrier stores
    "blind": set(NAMES) - {"load_acquire"},
    "returns": {"load", "put", "wait", "wait_any", "test", *ATOMICS},
    "torn": set(ATOMICS),
    "mute-methods": set(NAMES),
}
"""Which functions, or methods, are wrong."""
