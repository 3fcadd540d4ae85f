"""Device functions with one mistake each, in families: every function with the same kind of mistake.

One run of the stack suite sees a whole family, because each of its tests is about one function.  The kinds:

    mute     nothing is done
    near     on the wrong rank
    blind    an argument is ignored
    returns  the wrong value is returned, or the last one is left out
    torn     an atomic that is none
"""

import time

import triton
import triton.language as tl

from iris_core.testing.conformance.stack_jobs import ATOMICS, MOVES, NAMES, OPERATIONS, SIGNALS
from iris_triton import interpreter, language
from iris_triton._compat import aggregate
from iris_triton.context import DeviceContext


# -- called otherwise -------------------------------------------------------------------------------------------------
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


# -- each function, with a mistake of each kind ------------------------------------------------------------------------
def load(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(pointer, to_rank, from_rank, heap_bases, mask=None, other=None):
        if kind == "mute":
            return tl.load(pointer) * 0
        elif kind == "near":
            return language.load(pointer, to_rank, to_rank, heap_bases, mask, other)
        elif kind == "blind":
            return language.load(pointer, to_rank, from_rank, heap_bases)
        else:
            return language.load(pointer, to_rank, from_rank, heap_bases, mask, 0)

    return wrong


def store(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(pointer, value, from_rank, to_rank, heap_bases, mask=None):
        if kind == "near":
            tl.store(pointer, value, mask=mask)
        elif kind == "blind":
            language.store(pointer, value, from_rank, to_rank, heap_bases)

    return wrong


@triton.jit
def _but_last(mask):
    """The mask without its last true lane."""
    lanes = tl.arange(0, mask.shape[0])
    return mask & (lanes < tl.max(tl.where(mask, lanes, 0), axis=0))


def move(name, kind):
    op, kind = getattr(language, name), tl.constexpr(kind)

    @triton.jit
    def wrong(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None):
        if kind == "near":
            op(from_ptr, to_ptr, from_rank, from_rank, heap_bases, mask, other)
        elif kind == "blind" or (kind == "returns" and mask is None):
            op(from_ptr, to_ptr, from_rank, to_rank, heap_bases)
        elif kind == "returns":
            op(from_ptr, to_ptr, from_rank, to_rank, heap_bases, _but_last(mask), other)

    return wrong


def copy(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None):
        if kind == "near":
            language.copy(src_ptr, dst_ptr, to_rank, from_rank, cur_rank, heap_bases, mask, other)
        elif kind == "blind":
            language.copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases)

    return wrong


@triton.jit
def pause():
    pass


@interpreter.cpu_entry(pause)
def _(program):
    time.sleep(0.0005)  # lets another rank go ahead, however busy the machine is


def atomic(name, kind):
    op, kind, name = getattr(language, name), tl.constexpr(kind), tl.constexpr(name)

    @triton.jit
    def wrong(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
    ):
        if kind == "near":
            return op(pointer, val, from_rank, from_rank, heap_bases, mask, sem, scope)
        elif kind == "blind":
            return op(pointer, val, from_rank, to_rank, heap_bases, None, sem, scope)
        elif kind == "returns":
            op(pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope)
        old = language.load(pointer, from_rank, to_rank, heap_bases)
        if kind == "torn":
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

    return wrong


def cas(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
        if kind == "near":
            return language.atomic_cas(pointer, cmp, val, from_rank, from_rank, heap_bases, sem, scope)
        elif kind == "blind":
            return language.atomic_xchg(pointer, val, from_rank, to_rank, heap_bases, None, sem, scope)
        elif kind == "returns":
            language.atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem, scope)
        old = language.load(pointer, from_rank, to_rank, heap_bases)
        if kind == "torn":
            pause()
            language.store(pointer, tl.where(old == cmp, val, old), from_rank, to_rank, heap_bases)
        return old

    return wrong


def signal(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(pointer, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
        if kind == "near":
            language.signal(pointer, value, from_rank, from_rank, heap_bases, op)
        elif kind == "blind":
            language.signal(pointer, value, from_rank, to_rank, heap_bases)

    return wrong


def put_signal(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases, op: tl.constexpr = "set"):
        if kind == "near":
            language.put(from_ptr, to_ptr, from_rank, from_rank, heap_bases)
            language.signal(signal_ptr, value, from_rank, to_rank, heap_bases, op)
        elif kind == "blind":
            language.put_signal(from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases)

    return wrong


def waiting(name, kind):
    """wait, which says what it has compared with, and wait_any, which counts from 1."""
    op, kind, is_any = getattr(language, name), tl.constexpr(kind), tl.constexpr(name == "wait_any")

    @triton.jit
    def wrong(pointer, value, cmp: tl.constexpr = "ge", timeout_ns=0):
        if kind == "mute":
            return 0 if is_any else tl.load(pointer)
        elif kind == "blind":
            return op(pointer, value, timeout_ns=timeout_ns)
        else:
            found = op(pointer, value, cmp, timeout_ns=timeout_ns)
            return found + 1 if is_any else value

    return wrong


def test(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(pointer, value, cmp: tl.constexpr = "ge"):
        if kind == "mute":
            return 1
        elif kind == "blind":
            return language.test(pointer, value)
        else:
            return language.test(pointer, value, cmp) == 0

    return wrong


def load_acquire(name, kind):
    @triton.jit
    def wrong(pointer):
        return tl.load(pointer) * 0

    return wrong


def barrier(name, kind):
    kind = tl.constexpr(kind)

    @triton.jit
    def wrong(flags, rank, world_size, heap_bases, rank_start=0, rank_stride=1, group_size=None, timeout_ns=0):
        if kind == "blind":
            language.barrier(flags, rank, world_size, heap_bases, timeout_ns=timeout_ns)

    return wrong


_WRONG = {
    "load": load, "store": store, "get": move, "put": move, "copy": copy, **dict.fromkeys(OPERATIONS, atomic),
    "atomic_cas": cas, "signal": signal, "put_signal": put_signal, "wait": waiting, "wait_any": waiting, "test": test,
    "load_acquire": load_acquire, "barrier": barrier,
}  # fmt: skip


def functions(kind):
    """The functions that a mistake of this kind can be made in."""
    names = {
        "mute": NAMES,
        "near": (*MOVES, *ATOMICS, *SIGNALS),
        "blind": set(NAMES) - {"load_acquire"},
        "returns": ("load", "put", *ATOMICS, "wait", "wait_any", "test"),
        "torn": ATOMICS,
    }[kind]
    return {name: _WRONG[name](name, kind) for name in names}


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
def _nothing(self, pointer, a=None, b=None, c=None, d=None, e=None, f=None):
    pass


@triton.jit
def _here(self, pointer, a=None, b=None, c=None, d=None, e=None, f=None):
    return tl.load(pointer)


@triton.jit
def _zero(self, pointer, a=None, b=None, c=None, d=None):
    return tl.load(pointer) * 0


@triton.jit
def _one(self, pointer, a=None, b=None):
    return 1


for _names, _method in (
    (("store", "get", "put", "copy", *SIGNALS, "barrier"), _nothing), ((*ATOMICS, "wait"), _here),
    (("load", "load_acquire", "wait_any"), _zero), (("test",), _one),
):  # fmt: skip
    for _name in _names:
        setattr(MuteContext, _name, _method)

FAMILIES = {
    **{kind: set(functions(kind)) for kind in ("mute", "near", "blind", "returns", "torn")},
    "mute-methods": set(NAMES),
}
"""Which functions, or methods, are wrong."""
FAMILIES["near"].add("barrier")  # its test stores
