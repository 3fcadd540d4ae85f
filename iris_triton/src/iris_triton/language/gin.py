"""Puts, gets and signals to the heaps of ranks on other nodes, by NCCL's device functions (GIN).

The methods `put`, `get`, `put_signal`, `signal` and `flush` of device contexts come here in kernels that are launched
with `ctx.launch_options()`, which links NCCL's bitcode and the shim beside this module (nccl/MAJOR_MINOR.ll).  In all
other kernels `linked()` is false when they are compiled, and nothing of this is in them.  `lsa_pointer` is for kernels
that use NCCL's windows themselves.

What a put has started goes on by itself.  It has arrived when a signal that was sent to the same rank after it, by the
same program or after a barrier with it, is seen there; its source may be changed after `flush`.  All threads of the
program take part in a call: none may be in a branch that others do not take.

    network     pointer to the words of the network in the context tensor (`iris_core.device.context_words`).
    peer        rank of the world, on another node.
    offsets     in bytes from the beginning of the heap (int64).
"""

import pathlib
import struct
from typing import Any

import triton
import triton.language as tl

from iris_core.device import context_words as _layout
from iris_core.errors import UnsupportedError
from iris_triton._compat import builtin, core, linked_libraries
from iris_triton.interpreter.entries import cpu_entry, cpu_entry_at
from iris_triton.language.flags import report_difference
from iris_triton.language.sync import gather_stores

SHIM, FUNCTIONS = "a_iris_nccl_", "b_nccl_device"  # the shim (and NCCL's version), NCCL's bitcode: linked in this order
_I32, _I64 = core.dtype("int32"), core.dtype("int64")
_NO_WORD = tl.constexpr(-1)
_OLD = tl.constexpr(
    "to get from other nodes, and to add to words of their heaps, NCCL 2.30 has no way: install nvidia-nccl-cu13>=2.32"
)

_SHIMS = pathlib.Path(__file__).with_name("nccl")


def libraries(network: Any) -> dict[str, str]:
    """Return what kernels that reach other nodes are linked with, by name; the paths are empty where it is emulated.

    Raises:
        UnsupportedError: there is no shim for this version of NCCL (`iris_core.types.Network.version`).
    """
    name = "_".join(map(str, network.version))
    if not network.bitcode:
        return {SHIM + name: ""}
    shim = _SHIMS / f"{name}.ll"
    if not shim.exists():
        known = ", ".join(sorted(path.stem.replace("_", ".") for path in _SHIMS.glob("*.ll")))
        raise UnsupportedError(
            f"kernels reach other nodes with NCCL {known}, whose device functions are known; this is "
            f"{'.'.join(map(str, network.version))}: install nvidia-nccl-cu13 of one of these"
        )
    return {SHIM + name: str(shim), FUNCTIONS: network.bitcode}


# -- what is linked ---------------------------------------------------------------------------------------------------
@builtin
def linked(_semantic=None):
    """Whether the kernel is launched with NCCL's functions; a constexpr."""
    return core.constexpr(any(name.startswith(SHIM) for name in linked_libraries(_semantic.builder)))


@builtin
def _has_word_signals(_semantic=None):
    names = linked_libraries(_semantic.builder)
    versions = [tuple(map(int, name.removeprefix(SHIM).split("_"))) for name in names if name.startswith(SHIM)]
    return core.constexpr(bool(versions) and versions[0] >= (2, 32))


def _function(symbol, result, *types):
    """Return a function of the shim: called by every thread, with numbers that are the same in all."""

    @builtin
    def call(*args, _semantic=None):
        values = [_semantic.cast(_semantic.to_tensor(arg), type_) for arg, type_ in zip(args, types, strict=True)]
        return core.extern_elementwise("", "", values, {types: (symbol, result)}, is_pure=False, _semantic=_semantic)

    return call


_gin_put = _function("iris_gin_put", _I32, _I64, _I64, _I32, _I64, _I64, _I64, _I64, _I64)
_gin_signal = _function("iris_gin_signal", _I32, _I64, _I64, _I32, _I64, _I64)
_gin_get = _function("iris_gin_get", _I32, _I64, _I64, _I32, _I64, _I64, _I64)
_gin_flush = _function("iris_gin_flush", _I32, _I64)
_lsa_pointer = _function("iris_lsa_pointer", _I64, _I64, _I64, _I32)


# -- ranks that are not reached ---------------------------------------------------------------------------------------
_STATUS, _NOWHERE = tl.constexpr(_layout.STATUS_WORD), tl.constexpr(_layout.NOWHERE)
_FAR = tl.constexpr(int(_layout.MismatchCode.FAR))


@builtin
def _is_checked(_semantic=None):
    """Whether the kernel is compiled with debug=True; a constexpr."""
    return core.constexpr(bool(_semantic.builder.options.debug))


@builtin
def _kernel_name(_semantic=None, _generator=None):
    """Return the first 32 bytes of the kernel's name, as four numbers."""
    name = _generator.module.get_entry_func_name().encode()
    return tuple(map(core.constexpr, struct.unpack("<4q", name[:32].ljust(32, b"\0"))))


@triton.jit
def check_near(rank, peer, mask, heap_bases, world_size):
    """Report an access to the heap of a rank on another node, which fails; on GPUs with debug=True, else free.

    Args:
        rank, peer: the caller; the rank whose heap is accessed, or a block of them.
        mask: of the access, or None.
        heap_bases, world_size: those of the context tensor.
    """
    if _is_checked():
        status_word = tl.load(heap_bases + world_size + _STATUS)
        if status_word != 0:
            nowhere = tl.load(status_word.to(tl.pointer_type(tl.int64)) + _NOWHERE)
            far = tl.where(tl.load(heap_bases + peer) == nowhere, peer, -1)
            if mask is not None:
                far = tl.where(tl.cast(mask, tl.int1), far, -1)
            if far.type.is_block():
                far = tl.max(far)
            if far >= 0:
                name = _kernel_name()
                report_difference(status_word, rank, 0, far, name[0], name[1], name[2], name[3], _FAR)


@cpu_entry(check_near)
def _named_by_translation(program, rank, peer, mask, heap_bases, world_size):
    """Do nothing: the CPU executor names the access, with its line."""


# -- bytes and words of the heap --------------------------------------------------------------------------------------
@triton.jit
def put_bytes(network, peer, to_offset, from_offset, nbytes):
    """Start a copy of `nbytes` of this rank's heap to the peer's."""
    gather_stores()
    _gin_put(tl.load(network), tl.load(network + 1), peer, to_offset, from_offset, nbytes, _NO_WORD, 0)


@triton.jit
def put_bytes_signal(network, peer, to_offset, from_offset, nbytes, word, value):
    """`put_bytes`, then `add_to_word`, in one request."""
    tl.static_assert(_has_word_signals(), _OLD)
    gather_stores()
    _gin_put(tl.load(network), tl.load(network + 1), peer, to_offset, from_offset, nbytes, word, value)


@triton.jit
def add_to_word(network, peer, word, value):
    """Add `value` (int64) to the peer's 8 aligned bytes at the offset `word`, once all earlier puts have arrived."""
    tl.static_assert(_has_word_signals(), _OLD)
    gather_stores()
    _gin_signal(tl.load(network), tl.load(network + 1), peer, word, value)


@triton.jit
def get_bytes(network, peer, from_offset, to_offset, nbytes):
    """Start a copy of `nbytes` of the peer's heap to this rank's, where it is after `flush`."""
    tl.static_assert(_has_word_signals(), _OLD)
    gather_stores()
    _gin_get(tl.load(network), tl.load(network + 1), peer, from_offset, to_offset, nbytes)


@triton.jit
def flush(network):
    """Wait until the sources of this program's puts may be changed, and what it gets is there.

    Says nothing of what has arrived at others.
    """
    _gin_flush(tl.load(network))


@triton.jit
def lsa_pointer(window, offset, member):
    """Return the address (int64) of an offset of a window of NCCL's on a rank of the own node; not on the CPU.

    Args:
        window: the window (int64); that of the heap is `tl.load(network + 1)`.
        offset: in bytes.
        member: number of the rank in NCCL's LSA team.
    """
    return _lsa_pointer(window, offset, member)


for _each in (put_bytes, put_bytes_signal, add_to_word, get_bytes, flush, lsa_pointer):
    cpu_entry_at(_each, "iris_triton.interpreter.memory.network:run", _each.__name__)


# -- blocks of pointers -----------------------------------------------------------------------------------------------
@triton.constexpr_function
def _itemsize(element_type):
    return max(8, element_type.primitive_bitwidth) // 8


@triton.jit
def _check_run(pointer, mask, itemsize: tl.constexpr, heap_bases, rank, what: tl.constexpr):
    """Check on the CPU that what a mask leaves of a block lies on the heap, one element after the other."""


cpu_entry_at(_check_run, "iris_triton.interpreter.memory.network:check_run")


@triton.jit
def _run(pointer, mask, itemsize: tl.constexpr):
    """Return the lowest address in a block of pointers, of those that the mask leaves, and how many bytes there are."""
    first = tl.cast(pointer, tl.int64)
    last, count = first, first * 0 + 1
    if mask is not None:
        taken = tl.cast(mask, tl.int1)
        first, last = tl.where(taken, first, 0x7FFFFFFFFFFFFFFF), tl.where(taken, first, 0)
        count = tl.where(taken, count, 0)
    if pointer.type.is_block():
        first, last, count = tl.min(first), tl.max(last), tl.sum(count)
    is_run = (count == 0) | (last - first == (count - 1) * itemsize)
    tl.device_assert(is_run, "what is put to or got from another node must be one run of memory")
    return first, count * itemsize


@triton.jit
def _extent(from_ptr, to_ptr, rank, heap_bases, mask):
    """Return the offsets of the target and of the source, and how many bytes are copied."""
    tl.static_assert(_has_word_signals(), _OLD)
    tl.static_assert(
        from_ptr.dtype == to_ptr.dtype, "to and from other nodes bytes are copied: give pointers of one type"
    )
    itemsize: tl.constexpr = _itemsize(to_ptr.dtype.element_ty)
    _check_run(from_ptr, mask, itemsize, heap_bases, rank, "source")
    _check_run(to_ptr, mask, itemsize, heap_bases, rank, "target")
    base = tl.load(heap_bases + rank)
    source, nbytes = _run(from_ptr, mask, itemsize)
    target, _ = _run(to_ptr, mask, itemsize)
    return target - base, source - base, nbytes


@triton.jit
def put(from_ptr, to_ptr, rank, to_rank, heap_bases, network, mask):
    """Put a block, a run of memory on the heap here and there, to a rank on another node.

    Args:
        from_ptr, to_ptr: pointers of one type, or blocks of them, into the heap of `rank`, the caller.
        to_rank, heap_bases, network: rank on another node, int64[world_size], see above.
        mask: which elements; what is left is one run.
    """
    target, source, nbytes = _extent(from_ptr, to_ptr, rank, heap_bases, mask)
    if nbytes > 0:
        put_bytes(network, to_rank, target, source, nbytes)


@triton.jit
def get(from_ptr, to_ptr, rank, from_rank, heap_bases, network, mask):
    """Get a block of a rank on another node, a run of memory on the heap here and there, and wait for it.

    The arguments are those of `put`; the source is on `from_rank`.
    """
    target, source, nbytes = _extent(from_ptr, to_ptr, rank, heap_bases, mask)
    if nbytes > 0:
        get_bytes(network, from_rank, source, target, nbytes)
        flush(network)


@triton.constexpr_function
def is_addition(element_type, op):
    """Whether a signal can go to another node: it adds to a flag of 64 bits."""
    return op == "add" and element_type.is_int() and element_type.primitive_bitwidth == 64


@triton.jit
def word_of(pointer, rank, heap_bases):
    """Return the offset of a flag on the heap."""
    _check_run(pointer, None, 8, heap_bases, rank, "signal")
    return tl.cast(pointer, tl.int64) - tl.load(heap_bases + rank)


@triton.jit
def signal(pointer, value, rank, to_rank, heap_bases, network):
    """Add `value` to a flag of a rank on another node, once all earlier puts to it have arrived."""
    add_to_word(network, to_rank, word_of(pointer, rank, heap_bases), tl.cast(value, tl.int64))


@triton.jit
def put_signal(from_ptr, to_ptr, signal_ptr, value, rank, to_rank, heap_bases, network, mask):
    """`put`, then `signal`."""
    target, source, nbytes = _extent(from_ptr, to_ptr, rank, heap_bases, mask)
    word, addition = word_of(signal_ptr, rank, heap_bases), tl.cast(value, tl.int64)
    if nbytes > 0:
        put_bytes_signal(network, to_rank, target, source, nbytes, word, addition)
    else:
        add_to_word(network, to_rank, word, addition)
