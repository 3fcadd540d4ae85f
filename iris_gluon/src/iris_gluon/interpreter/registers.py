"""Instructions whose operands are registers: which ones exist, where the compiler says so only in its last passes."""

from __future__ import annotations

from typing import Any

from iris_gluon import _compat
from iris_gluon.interpreter.hopper.wgmma import SUMS
from iris_gluon.interpreter.inference import linear_layout
from iris_gluon.interpreter.program import num_warps, warp_size
from iris_triton.interpreter.frontend.values import element_nbytes
from iris_triton.interpreter.source import here

_layouts = _compat.layouts

_MMA_V2 = SUMS | {"fp64": ("fp64",)}
"""Operands of mma.sync, and the sums that it makes of them; see PTX, mma."""

_HALF, _FULL, _DOUBLE = ((32, 32, 8), (16, 16, 16)), ((32, 32, 2), (16, 16, 4)), ((16, 16, 4),)
_BYTES = ((32, 32, 16), (16, 16, 32))
_MFMA: dict[int, dict[str, tuple[tuple[int, int, int], ...]]] = {
    1: {"fp16": _HALF, "bf16": ((32, 32, 4), (16, 16, 8)), "fp32": _FULL, "int8": _HALF},
    2: {"fp16": _HALF, "bf16": (*_HALF, (32, 32, 4), (16, 16, 8)), "fp32": _FULL, "int8": _HALF, "fp64": _DOUBLE},
    3: {
        "fp16": _HALF, "bf16": _HALF, "fp32": (*_FULL, (32, 32, 4), (16, 16, 8)), "int8": _BYTES, "fp64": _DOUBLE,
        "fp8e4b8": _BYTES, "fp8e5b16": _BYTES,
    },
    4: {
        "fp16": (*_HALF, *_BYTES), "bf16": (*_HALF, *_BYTES), "fp32": _FULL, "fp64": _DOUBLE,
        "int8": (*_BYTES, (32, 32, 32), (16, 16, 64)), "fp8e4nv": (*_BYTES, (32, 32, 64), (16, 16, 128)),
        "fp8e5": (*_BYTES, (32, 32, 64), (16, 16, 128)),
    },
}  # fmt: skip
"""Instructions of the CDNA generations by type of operands: the manuals of the MI100, MI200, MI300 and MI350."""

_SMALL = 4
_MIN_COPY_NBYTES = 4


def check_mma_v2(a: Any, b: Any, acc: Any) -> None:
    """Refuse what mma.sync cannot multiply (ValueError); what `mma_v2` itself checks is left to it."""
    layout = acc.type.layout
    if not isinstance(layout, _layouts.NVMMADistributedLayout) or list(layout.version) != [2, 0]:
        return
    where = f"{here()}: mma_v2"
    sums = _MMA_V2.get(str(a.dtype))
    if sums is None:
        raise ValueError(f"{where}: there is no instruction for operands of type {a.dtype}")
    if str(acc.dtype) not in sums:
        raise ValueError(f"{where}: the accumulator for {a.dtype} must be {' or '.join(sums)}, not {acc.dtype}")
    if len(layout.instr_shape) != 2:
        raise ValueError(f"{where}: instr_shape must be [16, 8], not {list(layout.instr_shape)}")
    bits = a.dtype.primitive_bitwidth
    for operand in (a, b):
        width = getattr(operand.type.layout, "k_width", None)
        if width is not None and (width * bits % 32 or (bits == 64 and width != 1)):
            wanted = "1" if bits >= 32 else f"a multiple of {32 // bits}"
            raise ValueError(f"{where}: k_width of operands of type {a.dtype} must be {wanted}, not {width}")
    depth = 32 if bits == 8 else 16
    if int(a.shape[1]) < depth:
        raise ValueError(f"{where}: the inner dimension must be at least {depth} for {a.dtype}, not {int(a.shape[1])}")


def check_mfma(a: Any, b: Any, acc: Any) -> None:
    """Refuse `instr_shape` of the accumulator's layout that AMD has no instruction for, with operands of this type."""
    layout: Any = getattr(acc.type, "layout", None)
    if type(layout).__name__ != "AMDMFMALayout":
        raise ValueError(f"{here()}: mfma: the accumulator must have an AMDMFMALayout, not {layout}")
    shape = tuple(int(n) for n in layout.instr_shape)
    known = _MFMA.get(int(layout.version))
    if known is None or _SMALL in shape[:2] or len(shape) != 3:
        return
    exist = known.get(str(a.dtype), ())
    if shape not in exist:
        those = ", ".join(str(list(each)) for each in exist) or "none"
        raise ValueError(
            f"{here()}: mfma: version {layout.version} has no instruction {list(shape)} for operands of type "
            f"{a.dtype}; instr_shape may be: {those}"
        )


def check_group_copy(pointer: Any) -> None:
    """Refuse copies of less than 4 bytes per thread, which cp.async does not do.

    A thread can copy at once what lies together in its registers and in memory.  Here the addresses are known, so this
    is the most that the compiler may find out.
    """
    layout = getattr(pointer.type, "layout", None)
    if not isinstance(layout, _compat.DistributedLayout):
        return  # the semantic layer says so
    if isinstance(layout, _compat.AutoLayouts):
        raise ValueError(f"{here()}: an asynchronous copy needs pointers with a layout, not {layout}")
    nbytes = element_nbytes(pointer.dtype.element_ty)
    if nbytes >= _MIN_COPY_NBYTES:
        return
    addresses = pointer.handle.data
    linear = linear_layout(layout, tuple(int(n) for n in addresses.shape), num_warps=num_warps(), warp_size=warp_size())
    first = int(addresses[(0,) * addresses.ndim])
    together = 1
    for basis in linear.reg_bases:
        if int(addresses[tuple(basis)]) - first != together * nbytes:
            break
        together *= 2
    if together * nbytes < _MIN_COPY_NBYTES or first % _MIN_COPY_NBYTES:
        raise ValueError(
            f"{here()}: cp.async does not support transfers smaller than {_MIN_COPY_NBYTES} bytes: a thread has "
            f"{together} neighbouring elements of {nbytes} bytes, the first at {first:#x}; give the pointers a layout "
            f"with {_MIN_COPY_NBYTES // nbytes} or more elements per thread, and an aligned start"
        )
