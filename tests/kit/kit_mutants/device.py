"""Device functions with one mistake each, in families: every function with the same kind of mistake.

One run of the stack suite sees a whole family, because each of its tests is about one function.  The kinds:

    mute     nothing is done
    near     on the wrong rank
    blind    an argument is ignored
    returns  the wrong value is returned, or the last one is left out
    torn     an atomic that is none
"""

import inspect
import re
import time

import triton
import triton.language as tl
from kernel_text import kernel_of

from iris_core.testing.conformance.stack_jobs import ATOMICS, NAMES, SIGNALS
from iris_triton import interpreter, language
from iris_triton._compat import aggregate
from iris_triton.context import DeviceContext


@triton.jit  # the remote rank first
def load_swapped(
    pointer, from_rank, to_rank, heap_bases, mask=None, other=None, cache_modifier=None, volatile=False, hint=None
):
    return language.load(pointer, to_rank, from_rank, heap_bases, mask, other, cache_modifier, volatile, hint)


@triton.jit  # a value that has to be given
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


_REMOTE = "from_rank, to_rank, heap_bases"


def _written(function):
    """The parameters of a device function as they stand behind `def`."""
    text = str(inspect.signature(function.fn))[1:-1].replace("triton.language.core.", "tl.")
    return re.sub(r"constexpr\[(\w+)\]", r"'\1'", text)


PARAMETERS = {name: _written(getattr(language, name)) for name in NAMES}


def call(name, without=(), **changed):
    """The right call of a function, but for some arguments."""
    names = [re.match(r"\w+", each)[0] for each in PARAMETERS[name].split(", ")]
    return f"language.{name}({', '.join(f'{each}={changed.get(each, each)}' for each in names if each not in without)})"


@triton.jit
def but_last(mask):
    """The mask without its last true lane."""
    lanes = tl.arange(0, mask.shape[0])
    return mask & (lanes < tl.max(tl.where(mask, lanes, 0), axis=0))


@triton.jit
def pause():
    pass


@interpreter.cpu_entry(pause)
def _(program):
    time.sleep(0.0005)  # lets another rank go ahead, however busy the machine is


_OLD = f"old = language.load(pointer, {_REMOTE})\n"
_NEW = {
    "add": "old + val", "sub": "old - val", "xchg": "val", "xor": "old ^ val", "and": "old & val", "or": "old | val",
    "min": "tl.minimum(old, val)", "max": "tl.maximum(old, val)", "cas": "tl.where(old == cmp, val, old)",
}  # fmt: skip
_OPTIONAL = "mask", "other", "op", "cmp", "rank_start", "rank_stride", "group_size"
_TO_OWN = {name: call(name, to_rank="from_rank") for name in ("store", "get", "put", *ATOMICS, "signal")}
_PUT = call("put", ("mask", "other"), to_rank="from_rank")
_RETURN = dict.fromkeys(("load", *ATOMICS, "wait", "wait_any", "test"), "return ")
WRONG = {
    "mute": {
        **dict.fromkeys(NAMES, "pass"), **dict.fromkeys(("load", "load_acquire"), "return tl.load(pointer) * 0"),
        **dict.fromkeys(ATOMICS, f"{_OLD}return old"), "wait": "return tl.load(pointer)", "wait_any": "return 0",
        "test": "return 1",
    },
    "near": {
        **{name: f"{_RETURN.get(name, '')}{text}" for name, text in _TO_OWN.items()},
        "load": f"return {call('load', from_rank='to_rank')}",
        "copy": call("copy", from_rank="to_rank", to_rank="from_rank"),
        "put_signal": f"{_PUT}\n{call('signal', pointer='signal_ptr')}",
    },
    "blind": {
        **{name: f"{_RETURN.get(name, '')}{call(name, _OPTIONAL)}" for name in set(NAMES) - {"load_acquire"}},
        "atomic_cas": f"return {call('atomic_xchg', ('mask',))}",
    },
    "returns": {
        **{name: f"{call(name)}\n{_OLD}return old" for name in ATOMICS},
        "load": f"return {call('load', other=0)}",
        "put": f"if mask is None:\n    {call('put')}\nelse:\n    {call('put', mask='but_last(mask)')}",
        "wait": f"{call('wait')}\nreturn value", "wait_any": f"return {call('wait_any')} + 1",
        "test": f"return {call('test')} == 0",
    },
    "torn": {
        f"atomic_{name}":
            f"{_OLD}pause()\nlanguage.store(pointer, {new}, {_REMOTE}{', mask' * (name != 'cas')})\nreturn old"
        for name, new in _NEW.items()
    },
}  # fmt: skip


_FOUND_IN = {"language": language, "tl": tl, "but_last": but_last, "pause": pause}
FUNCTIONS = {
    kind: {name: kernel_of(triton.jit, PARAMETERS[name], text, **_FOUND_IN) for name, text in texts.items()}
    for kind, texts in WRONG.items()
}
"""The functions that a mistake of each kind can be made in."""


@aggregate
class MuteContext:
    context: tl.tensor

    @triton.constexpr_function
    def __init__(self, context):
        self.context = context

    @staticmethod
    @triton.jit
    def from_tensor(context_tensor, world_size: tl.constexpr, tracing: tl.constexpr = False):
        return MuteContext(context_tensor)


for _names, _text in (
    (("store", "get", "put", "copy", *SIGNALS, "barrier"), "pass"), ((*ATOMICS, "wait"), "return tl.load(pointer)"),
    (("load", "load_acquire", "wait_any"), "return tl.load(pointer) * 0"), (("test",), "return 1"),
):  # fmt: skip
    _method = kernel_of(triton.jit, "self, pointer, a=None, b=None, c=None, d=None, e=None, f=None", _text, tl=tl)
    for _name in _names:
        setattr(MuteContext, _name, _method)

FUNCTIONS |= {
    "swapped-ranks": {"load": load_swapped, "wait": wait_demanding},
    "swapped-method": {"DeviceContext": OtherContext}, "mute-methods": {"DeviceContext": MuteContext},
}  # fmt: skip
FAMILIES = {**{kind: set(names) for kind, names in WRONG.items()}, "mute-methods": set(NAMES)}
"""Which functions, or methods, are wrong."""
FAMILIES["near"].add("barrier")  # its test stores
