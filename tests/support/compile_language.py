"""Kernels that must compile for every GPU target, and what must be in their assembly.

Each device function is called through the functional API and as a method of the context.
"""

import dataclasses

import compile_kernels
import compile_tiles
import torch
import triton
import triton.language as tl
from compile_tiles import LOADS, STORES, TELL
from jobs_rma import atomic, per_access, rma

from iris_core.types import CompileCase, DeviceType
from iris_triton import language
from iris_triton._compat import version
from iris_triton.context import DeviceContext
from iris_triton.language import asm
from iris_triton.language.blocks import lanes
from iris_triton.testing.languages import invoke

_BLOCK = 1024
_WORLD = 8
_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP


@triton.jit
def synchronise(
    function: tl.constexpr, Context: tl.constexpr, op: tl.constexpr, x, flags, context, me, peer, value, timeout_ns,
    status, form: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One signal, wait, put_signal or barrier; data is stored before and loaded behind it.

    form: of a signal, "set" or "add"; of a wait, "block", "unbounded" or ""; of a barrier "group" or "".
    """
    api: tl.constexpr = (function, Context, op)
    i = lanes(BLOCK, per_access(x.dtype.element_ty))
    ranks = (me, peer, context + 2)
    if op == "signal":
        if form == "set":
            language.store(x + i, value.to(x.dtype.element_ty), me, peer, context + 2)
        invoke(api, context, W, (flags, value), ranks, (peer,), (form, sem, scope))
    elif op == "put_signal":
        data = (x + i, x + BLOCK + i, flags, value)
        invoke(api, context, W, data, ranks, (peer,), ("set", None, None, None, None, None, sem, scope))
    elif op == "wait" or op == "wait_any":
        if form == "block" or form == "unbounded block":
            each = lanes(W)
        else:
            each = 0
        if form == "unbounded" or form == "unbounded block":
            bound = ()
        else:
            bound = (timeout_ns, status, me)
        seen = invoke(api, context, W, (flags + each, value, "ge", sem, scope), bound, (), ())
        if op == "wait_any":
            tl.store(flags + W, seen)
        else:
            tl.store(flags + W + each, seen)
    elif op == "test":
        tl.store(flags + W, invoke(api, context, W, (flags, value), (), (), ()))
    elif op == "load_acquire":  # each thread has flags of its own, of which the compiler tells no other
        tl.store(flags + BLOCK + i, invoke(api, context, W, (flags + i,), (), (), ()))
    elif form == "group":
        invoke(api, context, W, (flags,), (me, W, context + 2), (), (1, 2, 3, tl.program_id(0)))
    else:
        tl.static_assert(op == "barrier", "synchronise knows no such operation")
        invoke(api, context, W, (flags,), (me, W, context + 2, 0, 1, W, 0, timeout_ns, status), (), ())


@triton.jit
def measure(out):
    tl.store(out, asm.read_realtime())
    tl.store(out + 1, asm.wait_clock_ns(1))
    tl.store(out + 3, asm.get_cu_id())
    tl.store(out + 4, asm.get_xcc_id())
    asm.wait_stores()


_CUDA_RELEASE_ADD = r"bar\.sync[\s\S]*(atom|red)\.global\.sys\.release\.add\."
_CUDA_ACQUIRE = r"ld\.acquire\.sys\.global\.b[\s\S]*bar\.sync"
_CUDA_LOOK = r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)\.[\s\S]*bar\.sync"
_HIP_ACQUIRE = r"sc1[\s\S]*buffer_inv sc0 sc1"
_CUDA_ATOMIC = {
    "add": "add", "sub": "add", "cas": "cas", "xchg": "exch", "xor": "xor", "and": "and", "or": "or", "min": "min",
    "max": "max",
}  # fmt: skip
# Where LLVM cannot know that the memory supports an atomic at system scope, it makes a loop around compare-and-swap.
_HIP_ATOMIC = {"add": "(add|cmpswap)", "sub": "(add|cmpswap)", "cas": "cmpswap", "xchg": "swap"}
_HIP_SYSTEM = (r"buffer_wbl2 sc0 sc1[\s\S]*", r"\S* .* sc1[\s\S]*buffer_inv sc0 sc1")
# Triton 3.6 compiles compare-and-swap at device scope for AMD, whatever the scope.
_HIP_CAS = ("", "") if version() < (3, 7) else _HIP_SYSTEM


def _case(Context, op, dtype, method, kernel, args, how, expect, name=None):
    """A case of a device function, or of the context's method that is called alike."""
    what = (None, Context, op) if method else (getattr(language, op), None, op)
    name = f"{name or f'{op}-{str(dtype)[6:]}'}-{'method' if method else 'function'}"
    return CompileCase(name, kernel, (*what, *args), how, expect=expect)


def _moves(Context):
    for op in ("load", "store", "get", "put", "copy"):
        # what is remote: an AMD GPU may reach its own memory by other instructions
        reads, writes = op in ("load", "get", "copy"), op in ("store", "put", "copy")
        expect = {_CUDA: (LOADS[_CUDA], STORES[_CUDA]), _HIP: (LOADS[_HIP],) * reads + (STORES[_HIP],) * writes}
        forms = [(dtype, False, None) for dtype in (torch.int8, torch.bfloat16, torch.int64)]
        forms += [(torch.float32, method, hint) for method in (False, True) for hint in (None, 16)]
        for dtype, method, hint in forms:
            args = dtype, dtype, dtype, torch.int64, torch.int64, 3, _WORLD if method else None, 5, 6, 1 << 20
            how, name = {"masked": True, "BLOCK": 4 * _BLOCK, "hint": hint}, f"{op}-{str(dtype)[6:]}-hint={hint}"
            yield _case(Context, op, dtype, method, rma, args, how, expect, name)


def _atomics(Context):
    for short, ptx in _CUDA_ATOMIC.items():
        op = f"atomic_{short}"
        system = _HIP_CAS if short == "cas" else _HIP_SYSTEM
        expect = {
            _CUDA: (rf"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.{ptx}\.",),
            _HIP: (f"global_atomic_{_HIP_ATOMIC.get(short, 'cmpswap')}".join(system),),
        }
        forms = [(torch.int32, False), (torch.int32, True), (torch.int64, False)]
        forms += [(torch.float32, False)] * (short in ("add", "sub", "xchg"))
        for dtype, method in forms:
            yield _atomic(Context, op, dtype, method, expect)
    expect = {_CUDA: (r"atom\.global\.gpu\.relaxed\.add\.",), _HIP: (r"global_atomic_add",)}
    yield _atomic(Context, "atomic_add", torch.int32, False, expect, "relaxed", "gpu", "atomic_add-relaxed-gpu")


def _atomic(Context, op, dtype, method, expect, sem=None, scope=None, name=None):
    args = dtype, dtype, dtype, torch.int64, torch.int64, 3, _WORLD if method else None, 5, 7
    how = {"masked": False, "sem": sem, "scope": scope, "LANES": 32}
    return _case(Context, op, dtype, method, atomic, args, how, expect, name)


def _synchronise(Context, op, dtype, method, form, sem, scope, expect, name=None):
    args = (torch.float32, dtype, torch.int64, 3, 5, 7, 10**9, torch.int64)
    how = {"form": form, "sem": sem, "scope": scope, "W": _WORLD, "BLOCK": _BLOCK}
    return _case(Context, op, dtype, method, synchronise, args, how, expect, name)


def _synchronisation(Context):
    acquire = {_CUDA: (_CUDA_ACQUIRE,), _HIP: (_HIP_ACQUIRE,)}
    bounded = {_CUDA: (_CUDA_ACQUIRE, "globaltimer"), _HIP: (_HIP_ACQUIRE, "s_memrealtime")}
    release = {kind: (TELL[kind],) for kind in TELL}
    expectations = {
        ("signal", "set"): release,
        ("signal", "add"): {_CUDA: (_CUDA_RELEASE_ADD,), _HIP: (TELL[_HIP].replace("swap", "add"),)},
        ("wait", ""): bounded,
        ("wait", "unbounded"): acquire,
        ("wait", "block"): bounded,
        ("wait_any", "block"): {_CUDA: (_CUDA_LOOK, "globaltimer"), _HIP: bounded[_HIP]},
        ("test", ""): {_CUDA: (_CUDA_LOOK,), _HIP: (_HIP_ACQUIRE,)},
        ("load_acquire", ""): {_CUDA: (_CUDA_LOOK,), _HIP: (_HIP_ACQUIRE,)},
        ("put_signal", ""): {kind: (STORES[kind], *release[kind]) for kind in release},
        ("barrier", ""): {kind: (*release[kind], *bounded[kind]) for kind in release},
        ("barrier", "group"): {kind: (*release[kind], *acquire[kind]) for kind in release},
    }
    for (op, form), expect in expectations.items():
        sem = "release" if "signal" in op else "acquire"
        for dtype, method in ((torch.int64, False), (torch.int32, True)):
            name = f"{op}-{form}-{str(dtype)[6:]}"
            yield _synchronise(Context, op, dtype, method, form, sem, "sys", expect, name)


def _orders(Context):
    """Every sem and scope of signal, wait and put_signal; what they do not ask for must not be there."""
    for op, form in (("signal", "set"), ("signal", "add"), ("put_signal", ""), ("wait", ""), ("wait", "block")):
        strong, verb, fence = ("acquire", "ld", "buffer_inv") if op == "wait" else ("release", "st", "buffer_wbl2")
        for sem, scope in ((strong, "gpu"), ("relaxed", "gpu"), ("relaxed", "sys")):
            if form == "add":
                access = rf"(atom|red)\.global\.{scope}\.{sem}\.add\."
            else:
                access = rf"{verb}\.{sem}\.{scope}\.global\.b"
            if sem == "relaxed":
                expect = {_CUDA: (access, _without(rf"\.{strong}\.")), _HIP: (_without(fence),)}
            elif form == "block":  # of a larger scope, see iris_triton.language.flags
                expect = {_CUDA: (access, _without(rf"\.{strong}\.sys\.")), _HIP: (_HIP_ACQUIRE,)}
            else:
                expect = {
                    _CUDA: (access, _without(rf"\.{strong}\.sys\.")),
                    _HIP: (f"{fence} sc1", _without(f"{fence} sc0 sc1")),
                }
            if op == "wait":  # nor does a wait release, not even to report
                expect[_CUDA] += (_without(r"\.release\."),)
            # a relaxed wait as a function: by the method it is bounded, and would report by an atomic of its own
            method = sem == strong if op == "wait" else scope == "sys"
            how = form if op == "signal" else f"unbounded {form}".strip() if op == "wait" and not method else form
            name = f"{op}-{form}-{sem}-{scope}"
            yield _synchronise(Context, op, torch.int64, method, how, sem, scope, expect, name)


def _without(pattern: str) -> str:
    """A pattern that holds where the other one occurs nowhere."""
    return rf"\A(?![\s\S]*{pattern})"


def language_cases(Context=DeviceContext, in_language=lambda kernel: kernel):
    """Return the cases of the device functions, and of a context's methods, whose kernels serve both languages."""
    for cases in (_moves, _atomics, _synchronisation, _orders):
        for case in cases(Context):
            yield dataclasses.replace(case, kernel=in_language(case.kernel))


def compile_cases():
    """Return cases for every device function in representative element types, intrinsics, tiles and collectives."""
    named = {_CUDA: ("globaltimer", "%smid")}
    named[_HIP] = ("s_memrealtime", r"HW_REG_HW_ID", r"HW_REG_XCC_ID", r"s_waitcnt vmcnt\(0\)")
    intrinsics = CompileCase("intrinsics", measure, (torch.int64,), expect=named)
    return [*language_cases(), *compile_tiles.compile_cases(), intrinsics, *compile_kernels.compile_cases()]
