"""Kernels that must compile for every GPU target, and what must be in their assembly.

Those that a backend declares call each device function and each method of the context; others follow from them, or call
with orders, scopes and hints.
"""

from dataclasses import replace

import compile_kernels
import compile_tiles
import torch
import triton
import triton.language as tl
from compile_tiles import LOADS, STORES, TELL
from jobs_rma import atomic, per_access, rma

from iris_core.testing.conformance import plugin_jobs
from iris_core.testing.conformance.stack_jobs import ATOMICS, MOVES
from iris_core.types import CompileCase, DeviceTarget, DeviceType, PluginKind
from iris_triton import language
from iris_triton._compat import version
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
    """One signal, wait or put_signal, and a store before it.

    form: of a signal, "set" or "add"; of a wait, "block", "unbounded" or "".
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
    else:
        tl.static_assert(op == "wait", "synchronise knows no such operation")
        if form == "block" or form == "unbounded block":
            each = lanes(W)
        else:
            each = 0
        if form == "unbounded" or form == "unbounded block":
            bound = ()
        else:
            bound = (timeout_ns, status, me)
        tl.store(flags + W + each, invoke(api, context, W, (flags + each, value, "ge", sem, scope), bound, (), ()))


@triton.jit
def measure(out):
    tl.store(out, asm.read_realtime())
    tl.store(out + 1, asm.wait_clock_ns(1))
    tl.store(out + 3, asm.get_cu_id())
    tl.store(out + 4, asm.get_xcc_id())
    asm.wait_stores()


_CUDA_ACQUIRE = r"ld\.acquire\.sys\.global\.b[\s\S]*bar\.sync"
_CUDA_LOOK = r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)\.[\s\S]*bar\.sync"
_HIP_ACQUIRE = r"sc1[\s\S]*buffer_inv sc0 sc1"
_ACQUIRED = {_CUDA: (_CUDA_ACQUIRE,), _HIP: (_HIP_ACQUIRE,)}
_BOUNDED = {_CUDA: (_CUDA_ACQUIRE, "globaltimer"), _HIP: (_HIP_ACQUIRE, "s_memrealtime")}
_LOOKED = {_CUDA: (_CUDA_LOOK,), _HIP: (_HIP_ACQUIRE,)}
_RELEASE_ADD = r"bar\.sync[\s\S]*(atom|red)\.global\.sys\.release\.add\."
_CUDA_ATOMIC = {"atomic_sub": "add", "atomic_xchg": "exch"}
# Where LLVM cannot know that the memory supports an atomic at system scope, it makes a loop around compare-and-swap.
_HIP_ATOMIC = {"atomic_add": "(add|cmpswap)", "atomic_sub": "(add|cmpswap)", "atomic_xchg": "swap"}
_HIP_ORDER = dict.fromkeys(ATOMICS, (r"buffer_wbl2 sc0 sc1[\s\S]*", r"\S* .* sc1[\s\S]*buffer_inv sc0 sc1"))
if version() < (3, 7):  # compiles compare-and-swap at device scope for AMD, whatever the scope
    _HIP_ORDER["atomic_cas"] = "", ""
_STRONGER = {
    "set": {kind: (TELL[kind],) for kind in TELL},
    "add": {_CUDA: (_RELEASE_ADD,), _HIP: (TELL[_HIP].replace("swap", "add"),)},
    "wait": _BOUNDED, "wait_any": {_CUDA: (_CUDA_LOOK, "globaltimer"), _HIP: _BOUNDED[_HIP]},
    "test": _LOOKED, "load_acquire": _LOOKED, "barrier": {kind: (TELL[kind], *_BOUNDED[kind]) for kind in TELL},
} | {
    op: {
        _CUDA: (rf"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.{_CUDA_ATOMIC.get(op, op[7:])}\.",),
        _HIP: (f"global_atomic_{_HIP_ATOMIC.get(op, 'cmpswap')}".join(_HIP_ORDER[op]),),
    }
    for op in ATOMICS
}  # fmt: skip
"""What a declared case of an operation, or of a form of it, must have beside what it says itself."""


def _declared(backend):
    """What a backend declares, also with flags of 32 bits and with other elements for atomics."""
    for case in backend.compile_cases():
        op, form, how = case.name.split("-")
        more = _STRONGER.get(form, _STRONGER.get(op, {}))
        case = replace(case, expect={kind: (*each, *more.get(kind, ())) for kind, each in case.expect.items()})
        yield case
        if op in ATOMICS and (form, how) == ("masked=False", "function"):
            for dtype in (torch.int64, *[torch.float32] * (op in ("atomic_add", "atomic_sub", "atomic_xchg"))):
                yield _retyped(case, dtype, ("cells", "operands", "compares", "found"))
        elif op not in (*ATOMICS, *MOVES) and how == "method":
            yield _retyped(case, torch.int32, ("flag", "flags"))


def _retyped(case, dtype, parameters):
    """The case with elements of another type behind some of its pointers."""
    args = [dtype if name in parameters else each for name, each in zip(case.kernel.arg_names, case.args, strict=False)]
    return replace(case, name=f"{case.name}-{str(dtype)[6:]}", args=tuple(args))


def _case(Context, op, dtype, method, kernel, args, how, expect, name):
    """A case of a device function, or of the context's method that is called alike."""
    what = (None, Context, op) if method else (getattr(language, op), None, op)
    return CompileCase(f"{name}-{'method' if method else 'function'}", kernel, (*what, *args), how, expect=expect)


def _moves(Context):
    for op in MOVES:
        # what is remote: an AMD GPU may reach its own memory by other instructions
        reads, writes = op in ("load", "get", "copy"), op in ("store", "put", "copy")
        expect = {_CUDA: (LOADS[_CUDA], STORES[_CUDA]), _HIP: (LOADS[_HIP],) * reads + (STORES[_HIP],) * writes}
        forms = [(dtype, False, None) for dtype in (torch.int8, torch.bfloat16, torch.int64)]
        forms += [(torch.float32, method, hint) for method in (False, True) for hint in (None, 16)]
        for dtype, method, hint in forms:
            args = dtype, dtype, dtype, torch.int64, torch.int64, 3, _WORLD if method else None, 5, 6, 1 << 20
            how, name = {"masked": True, "BLOCK": 4 * _BLOCK, "hint": hint}, f"{op}-{str(dtype)[6:]}-hint={hint}"
            yield _case(Context, op, dtype, method, rma, args, how, expect, name)


def _synchronise(Context, op, dtype, method, form, sem, scope, expect, name):
    args = (torch.float32, dtype, torch.int64, 3, 5, 7, 10**9, torch.int64)
    how = {"form": form, "sem": sem, "scope": scope, "W": _WORLD, "BLOCK": _BLOCK}
    return _case(Context, op, dtype, method, synchronise, args, how, expect, name)


def _others(Context):
    """Waits without a bound, waits for several flags, and an atomic of a device."""
    for form, expect in (("unbounded", _ACQUIRED), ("block", _BOUNDED)):
        for dtype, method in ((torch.int64, False), (torch.int32, True)):
            name = f"wait-{form}-{str(dtype)[6:]}"
            yield _synchronise(Context, "wait", dtype, method, form, "acquire", "sys", expect, name)
    args = *(torch.int32,) * 3, torch.int64, torch.int64, 3, None, 5, 7
    how = {"masked": False, "sem": "relaxed", "scope": "gpu", "LANES": 32}
    expect = {_CUDA: (r"atom\.global\.gpu\.relaxed\.add\.",), _HIP: (r"global_atomic_add",)}
    yield _case(Context, "atomic_add", None, False, atomic, args, how, expect, "atomic_add-relaxed-gpu")


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
            elif op == "put_signal":
                expect = {kind: (*each, STORES[kind]) for kind, each in expect.items()}
            # a relaxed wait as a function: by the method it is bounded, and would report by an atomic of its own
            method = sem == strong if op == "wait" else scope == "sys"
            how = form if op == "signal" else f"unbounded {form}".strip() if op == "wait" and not method else form
            name = f"{op}-{form}-{sem}-{scope}"
            yield _synchronise(Context, op, torch.int64, method, how, sem, scope, expect, name)


def _without(pattern: str) -> str:
    """A pattern that holds where the other one occurs nowhere."""
    return rf"\A(?![\s\S]*{pattern})"


def language_cases(name, in_language=lambda kernel: kernel):
    """Return the cases of an installed backend's functions and methods; `in_language` makes kernels of its language."""
    backend = plugin_jobs.create(*plugin_jobs.installed(PluginKind.BACKEND, name), DeviceTarget(DeviceType.CPU))
    Context = backend.device_api()["DeviceContext"]
    ours = (case for cases in (_moves, _others, _orders) for case in cases(Context))
    tiles = compile_tiles.compile_cases(Context, in_language)
    return [*_declared(backend), *(replace(case, kernel=in_language(case.kernel)) for case in ours), *tiles]


def kernel_cases():
    """Return the cases of intrinsics, collectives and fused operations, which are there in Triton only."""
    named = {_CUDA: ("globaltimer", "%smid")}
    named[_HIP] = ("s_memrealtime", r"HW_REG_HW_ID", r"HW_REG_XCC_ID", r"s_waitcnt vmcnt\(0\)")
    return [CompileCase("intrinsics", measure, (torch.int64,), expect=named), *compile_kernels.compile_cases()]
