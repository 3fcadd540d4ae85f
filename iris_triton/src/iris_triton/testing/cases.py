"""Kernels that must compile for every GPU target, and what must be in their assembly.

Each device function is called through the functional API and as a method of the context.
"""
# mypy: ignore-errors

import dataclasses

import torch
import triton
import triton.language as tl

from iris_core.types import CompileCase, DeviceType
from iris_triton import language
from iris_triton._compat import version
from iris_triton.context import DeviceContext
from iris_triton.language import asm
from iris_triton.language.blocks import lanes
from iris_triton.testing import collective_cases, gemm_cases, tile_cases
from iris_triton.testing.languages import in_gluon, open_context, per_access

Context = DeviceContext
"""The context of the kernels below; `gluon_cases` puts another one in its place."""
_BLOCK = 1024
_WORLD = 8
_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP


@triton.jit
def move(
    op: tl.constexpr, method: tl.constexpr, x, y, context, me, peer, n, W: tl.constexpr, BLOCK: tl.constexpr,
    hint: tl.constexpr
):  # fmt: skip
    """One remote load, store, get, put or copy of a masked block."""
    i = tl.program_id(0) * BLOCK + lanes(BLOCK, per_access(x.dtype.element_ty))
    mask = i < n
    if method:
        ctx = open_context(tl.constexpr(Context), context, W)
        if op == "load":
            tl.store(y + i, ctx.load(x + i, peer, mask=mask, hint=hint), mask=mask)
        elif op == "store":
            ctx.store(y + i, tl.load(x + i, mask=mask), peer, mask=mask, hint=hint)
        elif op == "copy":
            ctx.copy(x + i, y + i, peer, (peer + 1) % W, mask=mask, hint=hint)
        else:
            getattr(Context, op)(ctx, x + i, y + i, peer, mask=mask, hint=hint)
    else:
        bases = context + 2
        if op == "load":
            tl.store(y + i, language.load(x + i, me, peer, bases, mask=mask, hint=hint), mask=mask)
        elif op == "store":
            language.store(y + i, tl.load(x + i, mask=mask), me, peer, bases, mask=mask, hint=hint)
        elif op == "copy":
            language.copy(x + i, y + i, peer, (peer + 1) % W, me, bases, mask=mask, hint=hint)
        else:
            getattr(language, op)(x + i, y + i, me, peer, bases, mask=mask, hint=hint)


@triton.jit
def atomic(
    op: tl.constexpr, method: tl.constexpr, x, out, context, me, peer, value, W: tl.constexpr, sem: tl.constexpr,
    scope: tl.constexpr
):  # fmt: skip
    """One atomic on a peer's word; the old value is kept."""
    if method:
        ctx = open_context(tl.constexpr(Context), context, W)
        if op == "atomic_cas":
            old = ctx.atomic_cas(x, 0, value, peer, sem=sem, scope=scope)
        else:
            old = getattr(Context, op)(ctx, x, value, peer, sem=sem, scope=scope)
    else:
        bases = context + 2
        if op == "atomic_cas":
            old = language.atomic_cas(x, 0, value, me, peer, bases, sem=sem, scope=scope)
        else:
            old = getattr(language, op)(x, value, me, peer, bases, sem=sem, scope=scope)
    tl.store(out, old)


@triton.jit
def synchronise(
    op: tl.constexpr, method: tl.constexpr, x, flags, context, me, peer, value, timeout_ns, status, W: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """One signal, wait, put_signal or barrier; data is stored before and loaded behind it."""
    i = lanes(BLOCK, per_access(x.dtype.element_ty))
    bases = context + 2
    ctx = open_context(tl.constexpr(Context), context, W)
    if op == "signal":
        ctx.store(x + i, value.to(x.dtype.element_ty), peer)
        if method:
            ctx.signal(flags, value, peer)
        else:
            language.signal(flags, value, me, peer, bases)
    elif op == "signal_add":
        if method:
            ctx.signal(flags, value, peer, op="add")
        else:
            language.signal(flags, value, me, peer, bases, op="add")
    elif op == "wait":
        if method:
            seen = ctx.wait(flags, value)
        else:
            seen = language.wait(flags, value, timeout_ns=timeout_ns, status=status, rank=me)
        tl.store(flags + W, seen)
    elif op == "wait_unbounded":
        tl.store(flags + W, language.wait(flags, value, cmp="eq"))
    elif op == "wait_block":
        if method:
            seen = ctx.wait(flags + lanes(W), value)
        else:
            seen = language.wait(flags + lanes(W), value, timeout_ns=timeout_ns, status=status, rank=me)
        tl.store(flags + W + lanes(W), seen)
    elif op == "wait_any":
        if method:
            place = ctx.wait_any(flags + lanes(W), value)
        else:
            place = language.wait_any(flags + lanes(W), value, timeout_ns=timeout_ns, status=status, rank=me)
        tl.store(flags + W, place)
    elif op == "test":
        if method:
            holds = ctx.test(flags, value)
        else:
            holds = language.test(flags, value)
        tl.store(flags + W, holds)
    elif op == "load_acquire":  # each thread has flags of its own, of which the compiler tells no other
        if method:
            seen = ctx.load_acquire(flags + i)
        else:
            seen = language.load_acquire(flags + i)
        tl.store(flags + BLOCK + i, seen)
    elif op == "put_signal":
        if method:
            ctx.put_signal(x + i, x + BLOCK + i, flags, value, peer)
        else:
            language.put_signal(x + i, x + BLOCK + i, flags, value, me, peer, bases)
    elif op == "barrier":
        if method:
            ctx.barrier(flags)
        else:
            language.barrier(flags, me, W, bases, timeout_ns=timeout_ns, status=status)
    else:
        tl.static_assert(op == "barrier_group", "synchronise knows no such operation")
        if method:
            ctx.barrier(flags, 1, 2, 3, program=tl.program_id(0))
        else:
            language.barrier(flags, me, W, bases, 1, 2, 3, tl.program_id(0))


@triton.jit
def order(
    op: tl.constexpr, method: tl.constexpr, x, flags, context, me, peer, value, sem: tl.constexpr,
    scope: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One signal, wait or put_signal with an order and a scope."""
    i = lanes(BLOCK, per_access(x.dtype.element_ty))
    ctx = open_context(tl.constexpr(Context), context, W)
    bases = context + 2
    if op == "signal" or op == "signal_add":
        how: tl.constexpr = "set" if op == "signal" else "add"
        if method:
            ctx.signal(flags, value, peer, how, sem, scope)
        else:
            language.signal(flags, value, me, peer, bases, how, sem, scope)
    elif op == "put_signal":
        if method:
            ctx.put_signal(x + i, x + BLOCK + i, flags, value, peer, sem=sem, scope=scope)
        else:
            language.put_signal(x + i, x + BLOCK + i, flags, value, me, peer, bases, sem=sem, scope=scope)
    else:
        if op == "wait":
            each = 0
        else:
            tl.static_assert(op == "wait_block", "order knows no such operation")
            each = lanes(W)
        if method:
            seen = ctx.wait(flags + each, value, "ge", sem, scope)
        else:
            seen = language.wait(flags + each, value, "ge", sem, scope)
        tl.store(flags + W + each, seen)


@triton.jit
def initialize(x, context, rank: tl.constexpr, W: tl.constexpr):
    """The form of AMD's Iris: the rank is a constexpr."""
    ctx = DeviceContext.initialize(context, rank, W)
    ctx.store(x + tl.arange(0, 1024), 1.0, (ctx.rank + 1) % ctx.world_size)


@triton.jit
def measure(out):
    """Every intrinsic."""
    tl.store(out, asm.clock_ns())
    tl.store(out + 1, asm.uniform_clock_ns())
    tl.store(out + 2, asm.read_realtime())
    tl.store(out + 3, asm.get_cu_id())
    tl.store(out + 4, asm.get_xcc_id())
    asm.wait_stores()


_VECTOR_LOAD = {_CUDA: r"ld\.global\.v[24]\.b(32|64)", _HIP: r"global_load_dwordx4"}
_VECTOR_STORE = {_CUDA: r"st\.global\.v[24]\.b(32|64)", _HIP: r"global_store_dwordx4"}
_CUDA_RELEASE = r"bar\.sync[\s\S]*st\.release\.sys\.global\.b"
_CUDA_RELEASE_ADD = r"bar\.sync[\s\S]*(atom|red)\.global\.sys\.release\.add\."
_HIP_RELEASE = r"s_waitcnt vmcnt\(0\)[\s\S]*s_barrier[\s\S]*buffer_wbl2 sc0 sc1[\s\S]*global_atomic_{}"
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


def _form(op: str, dtype: object, method: bool) -> str:
    return f"{op}-{str(dtype)[6:]}-{'method' if method else 'function'}"


def _moves() -> list[CompileCase]:
    cases = []
    for op in ("load", "store", "get", "put", "copy"):
        # what is remote: an AMD GPU may reach its own memory by other instructions
        reads, writes = op in ("load", "get", "copy"), op in ("store", "put", "copy")
        expect = {
            _CUDA: (_VECTOR_LOAD[_CUDA], _VECTOR_STORE[_CUDA]),
            _HIP: (_VECTOR_LOAD[_HIP],) * reads + (_VECTOR_STORE[_HIP],) * writes,
        }
        forms = [(dtype, False, None) for dtype in (torch.int8, torch.bfloat16, torch.int64)]
        forms += [(torch.float32, method, hint) for method in (False, True) for hint in (None, 16)]
        for dtype, method, hint in forms:
            args = (op, method, dtype, dtype, torch.int64, 3, 5, 1 << 20)
            sizes = {"W": _WORLD, "BLOCK": 4 * _BLOCK, "hint": hint}
            cases.append(CompileCase(f"{_form(op, dtype, method)}-hint={hint}", move, args, sizes, expect=expect))
    return cases


def _atomics() -> list[CompileCase]:
    cases = []
    for op in _CUDA_ATOMIC:
        expect = {
            _CUDA: (rf"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.{_CUDA_ATOMIC[op]}\.",),
            _HIP: (f"global_atomic_{_HIP_ATOMIC.get(op, 'cmpswap')}".join(_HIP_CAS if op == "cas" else _HIP_SYSTEM),),
        }
        forms = [(torch.int32, False), (torch.int32, True), (torch.int64, False)]
        forms += [(torch.float32, False)] * (op in ("add", "sub", "xchg"))
        for dtype, method in forms:
            args = (f"atomic_{op}", method, dtype, dtype, torch.int64, 3, 5, 7)
            how = {"W": _WORLD, "sem": None, "scope": None}
            cases.append(CompileCase(_form(f"atomic_{op}", dtype, method), atomic, args, how, expect=expect))
    args = ("atomic_add", False, torch.int32, torch.int32, torch.int64, 3, 5, 7)
    expect = {_CUDA: (r"atom\.global\.gpu\.relaxed\.add\.",), _HIP: (r"global_atomic_add",)}
    how = {"W": _WORLD, "sem": "relaxed", "scope": "gpu"}
    return [*cases, CompileCase("atomic_add-relaxed-gpu", atomic, args, how, expect=expect)]


def _synchronisation() -> list[CompileCase]:
    acquire = {_CUDA: (_CUDA_ACQUIRE,), _HIP: (_HIP_ACQUIRE,)}
    bounded = {_CUDA: (_CUDA_ACQUIRE, "globaltimer"), _HIP: (_HIP_ACQUIRE, "s_memrealtime")}
    release = {_CUDA: (_CUDA_RELEASE,), _HIP: (_HIP_RELEASE.format("swap"),)}
    expectations = {
        "signal": release,
        "signal_add": {_CUDA: (_CUDA_RELEASE_ADD,), _HIP: (_HIP_RELEASE.format("add"),)},
        "wait": bounded,
        "wait_unbounded": acquire,
        "wait_block": bounded,
        "wait_any": {_CUDA: (_CUDA_LOOK, "globaltimer"), _HIP: bounded[_HIP]},
        "test": {_CUDA: (_CUDA_LOOK,), _HIP: (_HIP_ACQUIRE,)},
        "load_acquire": {_CUDA: (_CUDA_LOOK,), _HIP: (_HIP_ACQUIRE,)},
        "put_signal": {kind: (_VECTOR_STORE[kind], *release[kind]) for kind in release},
        "barrier": {kind: (*release[kind], *bounded[kind]) for kind in release},
        "barrier_group": {kind: (*release[kind], *acquire[kind]) for kind in release},
    }
    cases = []
    for op, expect in expectations.items():
        for dtype, method in ((torch.int64, False), (torch.int32, True)):
            args = (op, method, torch.float32, dtype, torch.int64, 3, 5, 7, 10**9, torch.int64)
            sizes = {"W": _WORLD, "BLOCK": _BLOCK}
            cases.append(CompileCase(_form(op, dtype, method), synchronise, args, sizes, expect=expect))
    return cases


def _orders() -> list[CompileCase]:
    """Every sem and scope of signal, wait and put_signal; what they do not ask for must not be there."""
    cases = []
    for op in ("signal", "signal_add", "put_signal", "wait", "wait_block"):
        strong, verb, fence = ("acquire", "ld", "buffer_inv") if "wait" in op else ("release", "st", "buffer_wbl2")
        for sem, scope in ((strong, "gpu"), ("relaxed", "gpu"), ("relaxed", "sys")):
            if op == "signal_add":
                access = rf"(atom|red)\.global\.{scope}\.{sem}\.add\."
            else:
                access = rf"{verb}\.{sem}\.{scope}\.global\.b"
            if sem == "relaxed":
                expect = {_CUDA: (access, _without(rf"\.{strong}\.")), _HIP: (_without(fence),)}
            elif op == "wait_block":  # of a larger scope, see iris_triton.language.flags
                expect = {_CUDA: (access, _without(rf"\.{strong}\.sys\.")), _HIP: (_HIP_ACQUIRE,)}
            else:
                expect = {
                    _CUDA: (access, _without(rf"\.{strong}\.sys\.")),
                    _HIP: (f"{fence} sc1", _without(f"{fence} sc0 sc1")),
                }
            if "wait" in op:  # nor does a wait release, not even to report
                expect[_CUDA] += (_without(r"\.release\."),)
            # a relaxed wait as a function: by the method it is bounded, and would report by an atomic of its own
            method = sem == strong if strong == "acquire" else scope == "sys"
            name = f"{op}-{sem}-{scope}-{'method' if method else 'function'}"
            args = (op, method, torch.float32, torch.int64, torch.int64, 3, 5, 7, sem, scope)
            cases.append(CompileCase(name, order, args, {"W": _WORLD, "BLOCK": _BLOCK}, expect=expect))
    return cases


def _without(pattern: str) -> str:
    """A pattern that holds where the other one occurs nowhere."""
    return rf"\A(?![\s\S]*{pattern})"


def shared_cases() -> list[CompileCase]:
    """Return the cases whose kernels are written for both languages."""
    return _moves() + _atomics() + _synchronisation() + _orders() + tile_cases.compile_cases()


def gluon_cases(Context, default_layout) -> list[CompileCase]:
    """Return the shared cases in Gluon, with its context and what makes layouts for tiles."""
    kernels = {case.kernel for case in shared_cases()}
    compiled = {kernel: in_gluon(kernel, Context=Context, default_layout=default_layout) for kernel in kernels}
    return [dataclasses.replace(case, kernel=compiled[case.kernel]) for case in shared_cases()]


def compile_cases() -> list[CompileCase]:
    """Return cases for every device function in representative element types, intrinsics, tiles and collectives."""
    others = [
        CompileCase(
            name="initialize",
            kernel=initialize,
            args=(torch.float32, torch.int64),
            kwargs={"rank": 3, "W": _WORLD},
            expect={kind: (_VECTOR_STORE[kind],) for kind in (_CUDA, _HIP)},
        ),
        CompileCase(
            name="intrinsics",
            kernel=measure,
            args=(torch.int64,),
            expect={
                _CUDA: ("globaltimer", "%smid"),
                _HIP: ("s_memrealtime", r"HW_REG_HW_ID", r"HW_REG_XCC_ID", r"s_waitcnt vmcnt\(0\)"),
            },
        ),
    ]
    return shared_cases() + others + collective_cases.compile_cases() + gemm_cases.compile_cases()
